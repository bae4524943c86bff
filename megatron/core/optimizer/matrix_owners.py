"""The assignment of matrices to ranks, where several ranks have the same ones and each computes the results of some.

Pure integers.

work 6 5 4 3 2, two ranks      turn 0       turn 1       turn 2
rank 0 (6, 3, 2)               matrix 0     matrix 3     matrix 4
rank 1 (5, 4)                  matrix 1     matrix 2
"""

from functools import lru_cache
from heapq import heapreplace


@lru_cache(maxsize=16)
def owners_by_turn(work: tuple[int, ...], ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return turns of (matrix, its owner's position): in each turn an owner has one matrix at most.

    work: of each matrix, in any unit. The largest work left goes to the rank with the least so far; no rank has more
    than 4/3 of the best division's largest (Graham 1969).
    """
    matrices_of: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    largest_first = sorted(range(len(work)), key=lambda matrix: -work[matrix])
    for matrix in largest_first:
        load, rank = loads[0]
        matrices_of[rank].append(matrix)
        heapreplace(loads, (load + work[matrix], rank))

    turns = []
    for turn in range(max(len(matrices) for matrices in matrices_of)):
        turns.append(tuple((matrices[turn], rank) for rank, matrices in enumerate(matrices_of) if turn < len(matrices)))
    return tuple(turns)
