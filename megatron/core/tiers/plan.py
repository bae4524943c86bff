"""Which elements of a rank's state live in which tier, and in which slices they are updated. Pure.

    a rank's part of a buffer, in runs   [ bucket 0's part ][ bucket 1's part ]
    offloaded, by the fraction           [ in the tier         |  kept        ]    cut where a parameter starts
    updated in slices of SLICE elements  [    |    |    |    | ]

Tiers are "device", "host" and "file"; which of them is used is for the settings to say.
"""

from collections.abc import Sequence

SLICE = 1 << 20  # elements updated at once: 4 MiB of each kind, which hides what starting a transfer costs
AHEAD = 3  # slices in memory at a time: one being read, one updated, one written


def cut_by_fraction(
    held: Sequence[tuple[int, int]], starts: Sequence[int], fraction: float
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(offloaded, kept) runs: of the elements held, at least this fraction, up to one of `starts`, where parameters begin.

    A parameter's start, and not its end: an update is computed in vectors of up to ALIGN elements, and has other bits for the
    rest that fills none.
    """
    wanted, end = fraction * sum(stop - start for start, stop in held), max((stop for _, stop in held), default=0)
    for cut in [*starts, end]:
        before = [(start, min(stop, cut)) for start, stop in held if start < cut]
        if sum(stop - start for start, stop in before) >= wanted:
            return before, [(max(start, cut), stop) for start, stop in held if stop > cut]
    return list(held), []


def cut_in_slices(start: int, stop: int, length: int = SLICE) -> list[tuple[int, int]]:
    """start .. stop in parts of `length` elements, the last perhaps shorter."""
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]
