"""Which rank finds a result for which tensor, where several ranks hold the same tensors. Pure integers.

work 6 5 4 3 2, two ranks      turn 0       turn 1       turn 2
rank 0 (6, 3, 2)               tensor 0     tensor 3     tensor 4
rank 1 (5, 4)                  tensor 1     tensor 2
"""

from functools import lru_cache
from heapq import heapreplace


@lru_cache(maxsize=16)
def turns_of(work: tuple[int, ...], ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Turns of (tensor, its owner's position): in each an owner has one tensor at most. work: of each tensor, in any unit.

    The largest work left goes to the rank with the least so far; no rank has more than 4/3 of the best division's largest
    (Graham 1969).
    """
    held: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for tensor in sorted(range(len(work)), key=lambda tensor: -work[tensor]):
        load, rank = loads[0]
        held[rank].append(tensor)
        heapreplace(loads, (load + work[tensor], rank))
    return tuple(
        tuple((mine[turn], rank) for rank, mine in enumerate(held) if turn < len(mine))
        for turn in range(max(map(len, held)))
    )
