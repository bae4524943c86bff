"""Which elements of a rank's state are offloaded, and the slices in which they are updated. Pure.

a rank's shard of a buffer, in runs  [ bucket 0 ][ bucket 1 ]
offloaded by the fraction            [ offloaded   | on device ]    cut where a parameter starts
updated in slices of SLICE elements  [   |   |   | ]
"""

from collections.abc import Sequence

SLICE = 1 << 20  # elements per update: 4 MiB of each state, which hides the latency of a transfer
SLICES_IN_FLIGHT = 3  # slices in flight: one is read, one updated, one written


Runs = list[tuple[int, int]]  # start and stop of each run of elements


def cut_by_fraction(owned: Sequence[tuple[int, int]], starts: Sequence[int], fraction: float) -> tuple[Runs, Runs]:
    """Divide the runs of elements that a rank owns into (offloaded runs, runs on the device).

    At least `fraction` of the elements is offloaded, cut at one of `starts`, where parameters begin. Parameters start
    at aligned offsets: a cut elsewhere would change the vectorized update's remainder, and so its last bits.
    """
    minimum = fraction * sum(stop - start for start, stop in owned)
    end = max((stop for _, stop in owned), default=0)
    for cut in [*starts, end]:
        offloaded = [(start, min(stop, cut)) for start, stop in owned if start < cut]
        if sum(stop - start for start, stop in offloaded) >= minimum:
            on_device = [(max(start, cut), stop) for start, stop in owned if stop > cut]
            return offloaded, on_device
    return list(owned), []


def cut_in_slices(start: int, stop: int, length: int = SLICE) -> Runs:
    """Cut the run start:stop into parts of `length` elements; the last may be shorter."""
    return [(begin, min(begin + length, stop)) for begin in range(start, stop, length)]
