"""What attention is given of context parallelism, and the table behind `--cp-comm-type`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.config import ConfigError
from megatron.core.grid import ALONE, Axis
from megatron.core.open_table import Table
from megatron.core.random import AttentionDropout
from megatron.core.sequence_rows import chunks_of
from megatron.core.transformer.context_parallel.block_kernels import FlashBlocks, TiledBlocks, flash_refuses
from megatron.core.transformer.context_parallel.merged import Gathered, Ring, Travel, attention_over_blocks, in_order
from megatron.core.transformer.context_parallel.ulysses import my_rows, whole_sequences
from megatron.core.transformer.masks import Mask, Window
from megatron.core.transformer.scoring import Scoring


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share each sample, and how their attention communicates: names of METHODS, one, or one for each layer."""

    axis: Axis = ALONE
    types: tuple[str, ...] = ("p2p",)
    longest: int | None = None  # tokens of the longest sample; None: not known

    def check(self, length: int) -> None:
        """Raises ValueError if samples of `length` tokens cannot be: a rank was given all tokens instead of its own."""
        if self.axis.size > 1 and self.longest is not None and length > self.longest:
            raise ValueError(
                f"the model was given {length // self.axis.size} tokens of each sample on each of {self.axis.size} "
                f"context-parallel ranks, and a sample has {self.longest}; cut the batch in "
                "forward_step by get_batch_on_this_cp_rank(batch)"
            )

    def method_of(self, layer: int) -> "Method | None":
        """layer: its number in the whole model. None: no other rank has a part of its samples."""
        return None if self.axis.size == 1 else METHODS[self.types[layer if len(self.types) > 1 else 0]]


@dataclass(frozen=True)
class SharedAttention:
    """One attention: q [s / c, b, n, d]; k, v [s / c, b, groups, d], of my rows.

    mask: as the kernels take it. A tensor has my rows, and the columns of the whole sample, as the numbers of `Documents` are.
    kernel(q, k, v, mask): the attention of whole samples. backend: its name in KERNELS.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    dropout: AttentionDropout
    backend: str
    kernel: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
    scoring: Scoring | None = None  # of all of this tensor-parallel rank's heads; None: a plain softmax


@dataclass(frozen=True)
class Method:
    """One way for the ranks of an axis to compute the attention of a sample that they share; all ways give the same numbers.

    attend(work, axis) -> [s / c, b, n, d]; every rank of the axis must call.
    divides_heads: a rank computes its share of the heads.
    """

    attend: Callable[[SharedAttention, Axis], Tensor]
    divides_heads: bool = False


def over_blocks(travel: Callable[[Axis], Travel], work: SharedAttention, axis: Axis) -> Tensor:
    """Each rank computes its own rows, block by block of the keys that come to it."""
    mine = chunks_of(axis.rank, axis.size)
    size = len(work.q) // len(mine)
    plain = work.mask is None and work.scoring is None and not work.dropout.is_active and flash_refuses(work.q) is None
    if work.backend not in (*_BY_FLASH, *_BY_TILES):
        raise ConfigError(
            f"--attention-backend {work.backend} computes whole samples, and --cp-comm-type p2p and all_gather need parts of "
            f"them: give --cp-comm-type a2a, or one of the backends {', '.join((*_BY_FLASH, *_BY_TILES))}"
        )
    if plain and work.backend in _BY_FLASH:
        kernel = FlashBlocks(mine, size)
    else:
        kernel = TiledBlocks(mine, size, work.mask, work.dropout, None if work.scoring is None else work.scoring.cap)
    sinks = None if work.scoring is None else work.scoring.sinks
    return attention_over_blocks(work.q, work.k, work.v, travel(axis), kernel, sinks)


_BY_FLASH, _BY_TILES = ("auto", "fused", "flash"), ("tiled", "tiled-eager", "unfused", "local")  # of KERNELS


def over_heads(work: SharedAttention, axis: Axis) -> Tensor:
    """Each rank computes whole samples of its share of the heads. Key and value heads that several need are sent to each."""
    heads, groups = work.q.shape[2], work.k.shape[2]
    if heads % axis.size:
        raise ConfigError(
            f"--cp-comm-type a2a deals {heads} attention heads of a tensor-parallel rank out to {axis.size} context-parallel "
            "ranks; use a --context-parallel-size that divides them, or --cp-comm-type p2p or all_gather"
        )
    again = math.lcm(groups, axis.size) // groups
    pair = (x if again == 1 else x.repeat_interleave(again, dim=2) for x in (work.k, work.v))
    whole = (whole_sequences(x, axis) for x in (work.q, *pair))
    return my_rows(work.kernel(*whole, _of_whole_samples(work.mask, axis)), axis)


def _of_whole_samples(mask: Mask, axis: Axis) -> Mask:
    """The mask with all rows of a tensor."""
    if isinstance(mask, Window):
        return replace(mask, within=_of_whole_samples(mask.within, axis))
    if not isinstance(mask, Tensor):
        return mask
    rows = comm.all_gather(mask.movedim(-2, 0).to(torch.uint8), axis)
    return in_order(rows, axis.size).movedim(0, -2).bool()


METHODS: Table[Method] = Table(
    "METHODS",
    Method,
    {
        "p2p": Method(partial(over_blocks, Ring)),
        "all_gather": Method(partial(over_blocks, Gathered)),
        "a2a": Method(over_heads, divides_heads=True),
    },
)
