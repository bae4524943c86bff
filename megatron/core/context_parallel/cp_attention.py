"""What attention is given of context parallelism, and the table behind `--cp-comm-type`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry import Table
from megatron.core.context_parallel.block_attention import FlashBlocks, TiledBlocks, flash_refuses
from megatron.core.context_parallel.ring_attention import Gathered, Ring, Travel, attention_over_blocks, in_order
from megatron.core.context_parallel.ulysses import my_rows, whole_sequences
from megatron.core.ops.attention.kernels import SOFTMAX, attention_function
from megatron.core.ops.attention.masks import Biased, Mask, Window
from megatron.core.ops.attention.softcap_and_sinks import Scoring
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.parallel.sequence_shard import chunks_of


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share each sample, and how their attention communicates: names of METHODS, one, or one for each
    layer."""

    axis: Axis = ALONE
    types: tuple[str, ...] = ("p2p",)
    longest: int | None = None  # tokens of the longest sample; None: not known
    heads: Axis = ALONE  # with a2a+p2p the axis is ring x heads
    ring: Axis = ALONE

    def check(self, length: int) -> None:
        """Raises ValueError if samples of `length` tokens cannot be: a rank was given all tokens instead of its own."""
        if self.axis.size > 1 and self.longest is not None and length > self.longest:
            raise ValueError(
                f"the model was given {length // self.axis.size} tokens of each sample on each of {self.axis.size} "
                f"context-parallel ranks, and a sample has {self.longest}; cut the batch in "
                "forward_step by get_batch_on_this_cp_rank(batch)"
            )

    def method_of(self, layer: int) -> "Method | None":
        """layer: its number in the whole model; attentions that are numbered behind all layers begin again. None: no
        other rank
        has a part of its samples."""
        return None if self.axis.size == 1 else METHODS[self.types[layer % len(self.types)]]


@dataclass(frozen=True)
class SharedAttention:
    """One attention: q [s / c, b, n, d]; k, v [s / c, b, groups, d], of my rows; with a tensor for a mask, keys and
    values of
    another sequence too.

    mask: as the kernels take it. A tensor, or the bias of `Biased`, has my rows, or one for all of them, and the columns
    of the
    whole sample, as the numbers of `Documents` are.
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

    attend(work, cp) -> [s / c, b, n, d]; every rank of cp.axis must call.
    deals_over(cp): the axis over whose ranks the heads are dealt out.
    """

    attend: Callable[[SharedAttention, ContextParallel], Tensor]
    deals_over: Callable[[ContextParallel], Axis] = lambda cp: ALONE


def over_blocks(travel: Callable[[Axis], Travel], work: SharedAttention, axis: Axis) -> Tensor:
    """Each rank computes its own rows, block by block of the keys that come to it."""
    mine = chunks_of(axis.rank, axis.size)
    size, key_size = len(work.q) // len(mine), len(work.k) // len(mine)
    mask, bias = (work.mask.within, work.mask.bias) if isinstance(work.mask, Biased) else (work.mask, None)
    plain = work.mask is None and work.scoring is None and not work.dropout.is_active and flash_refuses(work.q) is None
    if work.backend not in (*_BY_FLASH, *_BY_TILES):
        raise ConfigError(
            f"--attention-backend {work.backend} computes whole samples, and --cp-comm-type p2p and all_gather need parts of "
            f"them: give --cp-comm-type a2a, or one of the backends {', '.join((*_BY_FLASH, *_BY_TILES))}"
        )
    if (function := attention_function(work.backend)) != SOFTMAX:
        raise ConfigError(
            f"--attention-backend {work.backend} computes {function!r}, and --cp-comm-type p2p and all_gather compute {SOFTMAX}: "
            "give --cp-comm-type a2a"
        )
    if plain and work.backend in _BY_FLASH:
        kernel = FlashBlocks(mine, size)
    else:
        cap = None if work.scoring is None else work.scoring.cap
        kernel = TiledBlocks(mine, size, mask, work.dropout, cap, key_size)
    sinks = None if work.scoring is None else work.scoring.sinks
    return attention_over_blocks(work.q, work.k, work.v, travel(axis), kernel, sinks, bias)


_BY_FLASH, _BY_TILES = ("auto", "fused", "flash"), ("tiled", "tiled-eager", "unfused", "local")  # of KERNELS


def over_heads(work: SharedAttention, axis: Axis) -> Tensor:
    """Each rank computes whole samples of its share of the heads."""
    whole = _dealt_out(work, axis)
    return my_rows(work.kernel(whole.q, whole.k, whole.v, whole.mask), axis)


def over_heads_and_blocks(work: SharedAttention, cp: ContextParallel) -> Tensor:
    """Neighbours deal their heads out, and each then has the rows of all of them: chunks o and 2 r - 1 - o of 2 r, of a
    ring of
    r groups, since the chunks of neighbours lie side by side (arXiv:2405.07719)."""
    return my_rows(over_blocks(Ring, _dealt_out(work, cp.heads), cp.ring), cp.heads)


def _dealt_out(work: SharedAttention, axis: Axis) -> SharedAttention:
    """This rank's share of the heads, with the rows of all ranks of the axis. Key and value heads that several need are
    sent to
    each."""
    heads, groups = work.q.shape[2], work.k.shape[2]
    if heads % axis.size:
        raise ConfigError(
            f"--cp-comm-type a2a and a2a+p2p deal {heads} attention heads of a tensor-parallel rank out to {axis.size} "
            "context-parallel ranks; use a --context-parallel-size that divides them, or --cp-comm-type p2p or all_gather"
        )
    again = math.lcm(groups, axis.size) // groups
    pair = (x if again == 1 else x.repeat_interleave(again, dim=2) for x in (work.k, work.v))
    whole = {name: whole_sequences(x, axis) for name, x in zip("qkv", (work.q, *pair))}
    scoring = work.scoring
    if scoring is not None and scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.chunk(axis.size)[axis.rank])
    return replace(work, **whole, mask=_with_all_rows(work.mask, axis), scoring=scoring)


def _with_all_rows(mask: Mask, axis: Axis) -> Mask:
    """The mask with the rows of all ranks of the axis, where it has rows; of a bias, those of my share of the heads."""
    if isinstance(mask, Window):
        return replace(mask, within=_with_all_rows(mask.within, axis))
    if isinstance(mask, Biased):
        per_row = whole_sequences(mask.bias.permute(1, 2, 0).unsqueeze(-1), axis)  # [rows, s, my share of the heads, 1]
        return Biased(per_row.squeeze(-1).permute(2, 0, 1), _with_all_rows(mask.within, axis))
    if not isinstance(mask, Tensor) or mask.shape[-2] == 1:
        return mask
    rows = collectives.all_gather(mask.movedim(-2, 0).to(torch.uint8), axis)
    return in_order(rows.chunk(axis.size)).movedim(0, -2).bool()


METHODS: Table[Method] = Table(
    "METHODS",
    Method,
    {
        "p2p": Method(lambda work, cp: over_blocks(Ring, work, cp.axis)),
        "all_gather": Method(lambda work, cp: over_blocks(Gathered, work, cp.axis)),
        "a2a": Method(lambda work, cp: over_heads(work, cp.axis), deals_over=lambda cp: cp.axis),
        "a2a+p2p": Method(over_heads_and_blocks, deals_over=lambda cp: cp.heads),
    },
)
