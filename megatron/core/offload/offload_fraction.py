"""The elements of a rank's state that are offloaded, and the slices in which they are updated. Pure.

a rank's shard of a buffer, in runs  [ bucket 0 ][ bucket 1 ]
offloaded by the fraction            [ offloaded   |  kept  ]    cut where a parameter starts
updated in slices of SLICE elements  [   |   |   | ]
"""

from collections.abc import Sequence

SLICE = 1 << 20  # elements per update: 4 MiB of each state, which hides the latency of a transfer
AHEAD = 3  # slices in flight: one is read, one updated, one written


def cut_by_fraction(
    held: Sequence[tuple[int, int]], starts: Sequence[int], fraction: float
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(offloaded, kept) runs of the held elements: at least `fraction`, cut at one of `starts`, where parameters begin.

    Parameters start at aligned offsets. A cut elsewhere would change the vectorized update's remainder, and so its last
    bits.
    """
    wanted, end = fraction * sum(stop - start for start, stop in held), max((stop for _, stop in held), default=0)
    for cut in [*starts, end]:
        before = [(start, min(stop, cut)) for start, stop in held if start < cut]
        if sum(stop - start for start, stop in before) >= wanted:
            return before, [(max(start, cut), stop) for start, stop in held if stop > cut]
    return list(held), []


def cut_in_slices(start: int, stop: int, length: int = SLICE) -> list[tuple[int, int]]:
    """start .. stop in parts of `length` elements; the last may be shorter."""
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]
