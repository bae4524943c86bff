"""A stage map gives the pipeline rank of each stage; a stage is consecutive layers of the model. Pure integers.

Two ways to place p * v stages on p ranks (torch.distributed.pipelining calls them the styles "loop" and "v"):

    p = 2, v = 2        loop                    a V
    rank 0              stages 0, 2             stages 0, 3     first and last stage on one rank
    rank 1              stages 1, 3             stages 1, 2
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageMap:
    """The pipeline rank of each stage: `ranks[stage]`."""

    ranks: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last stage, which computes the loss. The first is 0."""
        return len(self.ranks) - 1

    @property
    def rank_of_first(self) -> int:
        return self.ranks[0]

    @property
    def rank_of_last(self) -> int:
        return self.ranks[-1]

    @property
    def chunks(self) -> int:
        """Model chunks per rank."""
        return len(self.of_rank(self.ranks[0]))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, ascending; entry k is the rank's chunk k."""
        return tuple(stage for stage, home in enumerate(self.ranks) if home == rank)

    def chunk_of(self, stage: int) -> int:
        """Return the chunk number of a stage on its rank."""
        return self.ranks[:stage].count(self.ranks[stage])

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of ranks that exchange tensors, each once. Consecutive stages on one rank exchange nothing."""
        pairs = set()
        for rank, next_rank in zip(self.ranks, self.ranks[1:]):
            if rank != next_rank:
                pairs.add((min(rank, next_rank), max(rank, next_rank)))
        return sorted(pairs)


def loop(p: int, v: int = 1) -> StageMap:
    """Place the stages in turn: chunk 0 of every rank, then chunk 1 of every rank, and so on."""
    return StageMap(tuple(range(p)) * v)


def v_shape(p: int) -> StageMap:
    """Place two stages per rank in a V: 0 to p - 1 going up the ranks, p to 2p - 1 coming back."""
    return StageMap((*range(p), *reversed(range(p))))
