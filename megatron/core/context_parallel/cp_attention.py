"""Attention of samples that ranks share, and METHODS, the table behind `--cp-comm-type`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.context_parallel.block_attention import FlashBlocks, TiledBlocks, flash_refuses
from megatron.core.context_parallel.ring_and_allgather_attention import (
    Gathered,
    KVCommStrategy,
    Ring,
    attention_over_blocks,
    zigzag_to_sample_order,
)
from megatron.core.context_parallel.ulysses import heads_to_rows, rows_to_heads
from megatron.core.ops.attention.document_and_window_masks import Mask, MaskWithBias, Window
from megatron.core.ops.attention.kernels import SOFTMAX, attention_function
from megatron.core.ops.attention.softcap_and_sinks import SoftmaxOptions
from megatron.core.ops.layout_invariant_dropout import AttentionDropout
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import chunks_of


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share each sample, and how their attention communicates.

    types: one name of METHODS, or one for each layer.
    """

    axis: Axis = ALONE
    types: tuple[str, ...] = ("p2p",)
    longest: int | None = None  # tokens of the longest sample; None: not known
    heads: Axis = ALONE  # with a2a+p2p the axis is ring x heads
    ring: Axis = ALONE

    def check(self, length: int) -> None:
        """Raise ValueError if samples of `length` tokens are too long: one of several ranks was given all tokens, not its own."""
        if self.longest is not None and length > self.longest:
            raise ValueError(
                f"each of {self.axis.size} context-parallel ranks was given {length // self.axis.size} tokens of "
                f"each sample, but a complete sample has only {self.longest}: the batch is not sharded; in "
                "forward_step, shard it with get_batch_on_this_cp_rank(batch)"
            )

    def method_of(self, layer: int) -> "Method | None":
        """Return the method of a layer's attention; None: no other rank has a part of its samples.

        layer: its number in the model. Attentions that are numbered behind all layers start over with the types.
        """
        return None if self.axis.size == 1 else METHODS[self.types[layer % len(self.types)]]


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one attention on this rank. With a tensor for a mask, keys and values may be of another sequence.

    mask: as the kernels take it. A tensor, or the bias of `MaskWithBias`, has this rank's rows, or one for all of them,
    and the columns of the full sample: bool [.., s / c or 1, s], bias [n, s / c, s]. `Documents` have numbers [b, s].
    kernel(q, k, v, mask): the attention of full samples, [s, b, heads, d]. backend: its name in KERNELS.
    """

    q: Tensor  # [s / c, b, n, d]
    k: Tensor  # [s / c, b, groups, d]
    v: Tensor  # [s / c, b, groups, d]
    mask: Mask
    dropout: AttentionDropout
    backend: str
    kernel: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
    softmax_options: SoftmaxOptions | None = None  # of all heads of this tensor-parallel rank; None: a plain softmax


@dataclass(frozen=True)
class Method:
    """A way for the ranks of an axis to compute the attention of samples that they share.

    All methods give the same numbers.

    attend(inputs, cp) -> [s / c, b, n, d]; every rank of cp.axis must call.
    head_axis(cp): the axis over which the heads are split.
    """

    attend: Callable[[AttentionInputs, ContextParallel], Tensor]
    head_axis: Callable[[ContextParallel], Axis] = lambda cp: ALONE


# ---------------------------------------------------------------- ring attention and gathered keys


def blockwise_attention(make_transfer: Callable[[Axis], KVCommStrategy], inputs: AttentionInputs, axis: Axis) -> Tensor:
    """Compute the attention of this rank's rows, block by block of the keys that come: -> [s / c, b, n, d].

    make_transfer: the way in which keys come. Every rank of the axis must call. Raises ConfigError for a backend that
    has no block-wise form, or computes another function.
    """
    if inputs.backend not in (*_BY_FLASH, *_BY_TILES):
        raise ConfigError(
            f"--attention-backend {inputs.backend} attends over complete samples, but --cp-comm-type p2p and "
            "all_gather give it parts of a sample; give --cp-comm-type a2a, or one of the backends "
            f"{', '.join((*_BY_FLASH, *_BY_TILES))}"
        )
    function = attention_function(inputs.backend)
    if function != SOFTMAX:
        raise ConfigError(
            f"--attention-backend {inputs.backend} computes {function!r}, but --cp-comm-type p2p and all_gather "
            f"compute {SOFTMAX}; give --cp-comm-type a2a"
        )

    row_chunks = chunks_of(axis.rank, axis.size)
    size = len(inputs.q) // len(row_chunks)
    key_size = len(inputs.k) // len(row_chunks)
    options = inputs.softmax_options
    is_plain = inputs.mask is None and options is None and not inputs.dropout.is_active
    if is_plain and inputs.backend in _BY_FLASH and flash_refuses(inputs.q) is None:
        kernel = FlashBlocks(row_chunks, size)
        bias = None
    else:
        has_bias = isinstance(inputs.mask, MaskWithBias)
        mask = inputs.mask.within if has_bias else inputs.mask
        bias = inputs.mask.bias if has_bias else None
        cap = None if options is None else options.cap
        kernel = TiledBlocks(row_chunks, size, mask, inputs.dropout, cap, key_size)
    sinks = None if options is None else options.sinks
    return attention_over_blocks(inputs.q, inputs.k, inputs.v, make_transfer(axis), kernel, sinks, bias)


_BY_FLASH, _BY_TILES = ("auto", "fused", "flash"), ("tiled", "tiled-eager", "unfused", "local")  # of KERNELS


# ---------------------------------------------------------------- Ulysses


def ulysses_attention(inputs: AttentionInputs, axis: Axis) -> Tensor:
    """Compute full samples of this rank's share of the heads: -> this rank's rows of all heads, [s / c, b, n, d].

    Every rank of the axis must call. Raises ConfigError if the ranks do not divide the heads.
    """
    full = _split_heads(inputs, axis)
    out = full.kernel(full.q, full.k, full.v, full.mask)  # [s, b, n / c, d]
    return heads_to_rows(out, axis)


def ulysses_ring_attention(inputs: AttentionInputs, cp: ContextParallel) -> Tensor:
    """Split the heads over neighbours (`cp.heads`), and run a ring over the groups of neighbours (`cp.ring`).

    The result is [s / c, b, n, d]. USP, arXiv:2405.07719. Every rank of cp.axis must call. Errors: those of
    `blockwise_attention` and `ulysses_attention`.

    Each neighbour has the rows of all neighbours, whose chunks lie side by side. So of 2 r chunks, group o of r has the
    chunks o and 2 r - 1 - o.
    """
    out = blockwise_attention(Ring, _split_heads(inputs, cp.heads), cp.ring)
    return heads_to_rows(out, cp.heads)


def _split_heads(inputs: AttentionInputs, axis: Axis) -> AttentionInputs:
    """Return this rank's share of the heads, with the rows of all ranks of the axis.

    Key and value heads that several ranks need are sent to each. ConfigError if the heads do not divide.
    """
    heads = inputs.q.shape[2]
    groups = inputs.k.shape[2]
    if heads % axis.size:
        raise ConfigError(
            f"--cp-comm-type a2a and a2a+p2p distribute the {heads} attention heads of a tensor-parallel rank over "
            f"{axis.size} context-parallel ranks; give a --context-parallel-size that divides the number of heads, "
            "or --cp-comm-type p2p or all_gather"
        )
    copies = math.lcm(groups, axis.size) // groups  # of each key/value head, so that their number divides

    def over_heads(x: Tensor, copies: int = 1) -> Tensor:
        if copies > 1:
            x = x.repeat_interleave(copies, dim=2)
        return rows_to_heads(x, axis)

    options = inputs.softmax_options
    q = over_heads(inputs.q)  # [s, b, n / c, d]
    k = over_heads(inputs.k, copies)  # [s, b, copies groups / c, d]
    v = over_heads(inputs.v, copies)
    if options is not None and options.sinks is not None:
        options = options._replace(sinks=options.sinks.chunk(axis.size)[axis.rank])
    return replace(inputs, q=q, k=k, v=v, mask=_mask_of_all_rows(inputs.mask, axis), softmax_options=options)


def _mask_of_all_rows(mask: Mask, axis: Axis) -> Mask:
    """Return the mask with the rows of all ranks of the axis, where it has rows: [.., s / c, s] -> [.., s, s].

    A bias [n, s / c, s] becomes that of this rank's share of the heads, [n / c, s, s].
    """
    if isinstance(mask, Window):
        return replace(mask, within=_mask_of_all_rows(mask.within, axis))
    if isinstance(mask, MaskWithBias):
        bias = mask.bias.permute(1, 2, 0).unsqueeze(-1)  # [s / c, s, n, 1]
        bias = rows_to_heads(bias, axis)  # [s, s, n / c, 1]
        bias = bias.squeeze(-1).permute(2, 0, 1)  # [n / c, s, s]
        return MaskWithBias(bias, _mask_of_all_rows(mask.within, axis))
    if not isinstance(mask, Tensor) or mask.shape[-2] == 1:
        return mask
    rows_first = mask.movedim(-2, 0).to(torch.uint8)  # bytes travel, not bools
    gathered = collectives.all_gather(rows_first, axis)
    return zigzag_to_sample_order(gathered.chunk(axis.size)).movedim(0, -2).bool()


METHODS: Registry[Method] = Registry(
    "METHODS",
    Method,
    {
        "p2p": Method(lambda inputs, cp: blockwise_attention(Ring, inputs, cp.axis)),
        "all_gather": Method(lambda inputs, cp: blockwise_attention(Gathered, inputs, cp.axis)),
        "a2a": Method(lambda inputs, cp: ulysses_attention(inputs, cp.axis), head_axis=lambda cp: cp.axis),
        "a2a+p2p": Method(ulysses_ring_attention, head_axis=lambda cp: cp.heads),
    },
)
