"""The rows of each sample that a rank holds under context and sequence parallelism. Pure integers.

Context parallelism cuts a sample into 2 c chunks, and rank r holds chunks r and 2 c - 1 - r: under a causal mask every
rank then has the same work (Llama 3, arXiv:2407.21783, section 3.3.2). Sequence parallelism divides these rows between
layers once more.

    c = 4:      rank 0: 0 7      rank 1: 1 6      rank 2: 2 5      rank 3: 3 4

A sample of 16 rows on 2 context-parallel ranks (chunks of 4 rows), whose rows 2 tensor-parallel ranks divide:

    chunk               0 0 0 0   1 1 1 1   2 2  2  2    3  3  3  3
    row                 0 1 2 3   4 5 6 7   8 9 10 11   12 13 14 15
    cp rank 0           0 0 0 0                          0  0  0  0      inside layers: ranges (0, 4) and (12, 16)
    cp rank 1                     1 1 1 1   1 1  1  1                    inside layers: range (4, 12)
    cp rank 0, sp 0     0 0 0 0                                          between layers: range (0, 4)
    cp rank 0, sp 1                                      0  0  0  0      between layers: range (12, 16)
    cp rank 1, sp 0               1 1 1 1                                between layers: range (4, 8)
    cp rank 1, sp 1                         1 1  1  1                    between layers: range (8, 12)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.rank_grid import ALONE, Axis

Range = tuple[int, int]  # [start, stop)


def chunks_of(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the chunks of a context-parallel rank, ascending. Without context parallelism the sample is one chunk."""
    return (0,) if ranks == 1 else (rank, 2 * ranks - 1 - rank)


@dataclass(frozen=True)
class SequenceShard:
    """The rows of a sample that this rank holds.

    cp: context-parallel ranks. sp: ranks that divide the rows between layers.
    """

    cp: Axis = ALONE
    sp: Axis = ALONE

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The axes whose ranks have the other rows of the same samples."""
        return self.sp, self.cp

    @property
    def chunks(self) -> tuple[int, ...]:
        return chunks_of(self.cp.rank, self.cp.size)

    @property
    def within_layers(self) -> "SequenceShard":
        """The shard inside a layer, where sequence parallelism has gathered the rows of its ranks."""
        return replace(self, sp=ALONE)

    def local_length(self, length: int) -> int:
        """Return how many rows of a sample of `length` this rank holds.

        Raises ConfigError if the ranks do not divide them evenly.
        """
        parts = len(self.chunks) * self.cp.size
        if length % parts or length // self.cp.size % self.sp.size:
            divided = f" and {length // self.cp.size} of {self.sp.size}" if self.sp.size > 1 else ""
            raise ConfigError(
                f"a sequence has {length} tokens; it must have a multiple of {parts}, 2 chunks for each of "
                f"{self.cp.size} context-parallel ranks{divided}; change --seq-length or --context-parallel-size"
            )
        return length // self.cp.size // self.sp.size

    def global_length(self, local_length: int) -> int:
        """Return the length of a sample of which every rank holds `local_length` rows."""
        return local_length * self.sp.size * self.cp.size

    def ranges(self, local_length: int) -> list[Range]:
        """Return the ranges of the sample that this rank's `local_length` rows are, in this rank's order."""
        chunk_size = local_length * self.sp.size // len(self.chunks)
        # this rank's rows, counted among the rows inside a layer, which are the chunks one behind the other
        first = self.sp.rank * local_length
        stop = first + local_length
        ranges: list[Range] = []
        for index, chunk in enumerate(self.chunks):
            chunk_first = max(first, index * chunk_size)
            chunk_stop = min(stop, (index + 1) * chunk_size)
            if chunk_first < chunk_stop:
                shift = (chunk - index) * chunk_size  # from the rows inside a layer to the rows of the sample
                ranges.append((chunk_first + shift, chunk_stop + shift))
        return join_adjacent_ranges(ranges)


def join_adjacent_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges of which each begins where the one before ends: (0, 4) (4, 8) (12, 16) -> (0, 8) (12, 16)."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
