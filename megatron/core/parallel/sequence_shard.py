"""The rows of each sample that a rank holds under context and sequence parallelism. Pure integers.

Context parallelism cuts a sample into 2 c chunks, and rank r holds chunks r and 2 c - 1 - r: under a causal mask every
rank then
has the same work (Llama 3, arXiv:2407.21783, section 3.3.2). Sequence parallelism divides these rows between layers once
more.

    c = 4:      rank 0: 0 7      rank 1: 1 6      rank 2: 2 5      rank 3: 3 4
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.grid import ALONE, Axis

Range = tuple[int, int]  # [start, stop)


def chunks_of(rank: int, ranks: int) -> tuple[int, ...]:
    """The chunks of a context-parallel rank, ascending. Without context parallelism the sample is one chunk."""
    return (0,) if ranks == 1 else (rank, 2 * ranks - 1 - rank)


@dataclass(frozen=True)
class SequenceRows:
    """The rows that this rank holds. cp: context-parallel ranks. sp: ranks that divide the rows between layers."""

    cp: Axis = ALONE
    sp: Axis = ALONE

    @property
    def chunks(self) -> tuple[int, ...]:
        return chunks_of(self.cp.rank, self.cp.size)

    @property
    def within_layers(self) -> "SequenceRows":
        """The rows that this rank holds inside a layer, where sequence parallelism has gathered them."""
        return replace(self, sp=ALONE)

    def held_of(self, length: int) -> int:
        """How many rows of a sample of `length` this rank holds. Raises ConfigError if they cannot be dealt out evenly."""
        parts = len(self.chunks) * self.cp.size
        if length % parts or length // self.cp.size % self.sp.size:
            divided = f" and {length // self.cp.size} of {self.sp.size}" if self.sp.size > 1 else ""
            raise ConfigError(
                f"a sequence of {length} tokens: it must be a multiple of {parts}, 2 chunks for each of {self.cp.size} "
                f"context-parallel ranks{divided}; change --seq-length or --context-parallel-size"
            )
        return length // self.cp.size // self.sp.size

    def length_of(self, held: int) -> int:
        """The length of a sample of which every rank holds `held` rows."""
        return held * self.sp.size * self.cp.size

    def ranges(self, held: int) -> list[Range]:
        """Where the `held` rows of this rank lie in the sample, in the order in which it holds them."""
        size = held * self.sp.size // len(self.chunks)  # of a chunk
        mine = self.sp.rank * held, (self.sp.rank + 1) * held  # of the rows inside a layer
        found: list[Range] = []
        for place, chunk in enumerate(self.chunks):
            start, stop = max(mine[0], place * size), min(mine[1], (place + 1) * size)
            if start < stop:
                found.append(((chunk - place) * size + start, (chunk - place) * size + stop))
        return joined_ranges(found)


def joined_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Ranges of which each begins where the one before ends become one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found
