"""Attention of some rows to some keys, with the logarithm of each row's sum of exponentials, and its backward.

Results of several blocks of keys merge into that of all keys (online softmax: arXiv:2205.14135, ring attention:
arXiv:2310.01889). With L = log(sum exp) of a block's scores and O its result,

    L = log(exp L1 + exp L2)        O = O1 exp(L1 - L) + O2 exp(L2 - L)

A block's backward takes the L of all keys, and for each row the inner product of its result and its gradient: then each
pair of a row and a key contributes once, and no results are merged.

Shapes: b samples, n query heads, groups of key/value heads, rows of this rank, keys of a block, d features of a head.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.context_parallel.causal_blocks import ChunkNumbers, ScoreTile, blocks_between, tiles_between
from megatron.core.ops.attention.document_and_window_masks import Documents, Mask, Window
from megatron.core.ops.attention.query_tiles import wide_empty
from megatron.core.ops.attention.softcap_and_sinks import SoftmaxOptions
from megatron.core.ops.dropout_masks import MaskWords, clear_dropped, ones_where_kept
from megatron.core.ops.layout_invariant_dropout import AttentionDropout
from megatron.core.parallel.accelerator import is_accelerator

_QUERIES, _KEYS = 128, 1024  # of a tile


# ---------------------------------------------------------------- sums over blocks


class OnlineSoftmax:
    """Attention to the keys added so far: out [b, n, rows, d], and L [b, n, rows], both in float32 or wider.

    q: [b, n, rows, d], for the shape, dtype and device of the result. sinks: [n], a first key of each head, whose value
    is 0; None: no key yet.
    """

    def __init__(self, q: Tensor, sinks: Tensor | None = None):
        self._q = q
        self._sinks = sinks
        self._so_far: tuple[Tensor, Tensor] | None = None

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """out [b, n, rows, d] and L [b, n, rows], in float32 or wider."""
        if self._so_far is None:
            out = wide_empty(self._q.shape, self._q)  # [b, n, rows, d]
            log_sums = wide_empty(self._q.shape[:3], self._q)  # [b, n, rows]
            if self._sinks is None:
                log_sums.fill_(-math.inf)
            else:
                log_sums.copy_(self._sinks.view(-1, 1))
            self._so_far = out.zero_(), log_sums
        return self._so_far

    def add(self, rows: slice, out: Tensor, log_sums: Tensor) -> None:
        """Merge the rows' attention to further keys. A row that sees none of them has L = -inf.

        rows: a slice of this rank's rows. out: [b, n, rows, d]; log_sums: [b, n, rows], of these rows. The first block,
        if it has all rows, is kept as it is, not copied.
        """
        out = out.to(log_sums.dtype)
        if self._so_far is None and self._sinks is None and out.shape == self._q.shape:
            self._so_far = out, log_sums
            return
        total_out, total_log_sums = (x[:, :, rows] for x in self.result)
        merged_log_sums = torch.logaddexp(total_log_sums, log_sums)
        weight = (log_sums - _finite(merged_log_sums)).exp_().unsqueeze(-1)  # [b, n, rows, 1]
        total_out.lerp_(out, weight)  # O1 + exp(L2 - L) (O2 - O1), in one pass
        total_log_sums.copy_(merged_log_sums)


def _finite(log_sums: Tensor) -> Tensor:
    """Return the L [b, n, rows] to subtract from scores: 0 for rows that see no key.

    The probabilities of such rows then are 0 and not NaN.
    """
    return log_sums.masked_fill(log_sums == -math.inf, 0)


class BackwardInputs(NamedTuple):
    """The inputs of every block's backward that belong to the rows.

    They are the rows' gradient, and the forward's result over all blocks of keys.
    """

    grad: Tensor  # [b, n, rows, d]
    out: Tensor  # [b, n, rows, d], in the dtype of grad
    log_sums: Tensor  # [b, n, rows]

    @property
    def inner(self) -> Tensor:
        """The sum over each row's keys of probability x the probability's gradient: [b, n, rows], as wide as log_sums.

        It is the inner product of the row's gradient and result (FlashAttention, arXiv:2205.14135, appendix B.2).
        """
        return (self.grad.to(self.log_sums.dtype) * self.out).sum(dim=-1)

    def grad_of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks [n] from this rank's rows: [n], in the dtype of the sinks.

        A sink has no value, so its probability has no gradient of its own.
        """
        probabilities = (sinks.view(-1, 1) - self.log_sums).exp()  # [b, n, rows]
        return -(probabilities * self.inner).sum(dim=(0, 2)).to(sinks.dtype)


class LazySum:
    """Sums over blocks, [tensors, b, rows, heads, d] in float32 or wider.

    Rows come before heads, as kernels return gradients. Nothing is summed before it must be: a single block, or two in
    half precision, need no float32 sum.

    like: [b, heads, rows, d]. arriving: the sum of other ranks' blocks, shaped as `result`, to which this
    rank's are added.
    """

    def __init__(self, like: Tensor, tensors: int = 1, arriving: AsyncHandle[Tensor] | None = None):
        self._like = like.transpose(1, 2)  # [b, rows, heads, d]
        self._tensors = tensors
        self._arriving = arriving
        self._sum: Tensor | None = None
        self._unsummed: list[_Block] = []  # at most two, of which the first has all rows

    @property
    def local_sum(self) -> Tensor:
        """The sums of this rank's blocks, [tensors, b, rows, heads, d].

        A kernel of many small blocks adds to them while the other ranks' sums are in flight.
        """
        if self._sum is None:
            self._sum = self._empty().zero_()
        return self._sum

    @property
    def result(self) -> Tensor:
        """The sums over all blocks added, and those that arrive: [tensors, b, rows, heads, d]."""
        # sum the blocks that were put off
        if self._unsummed:
            self._sum = self._empty()
            for total, x in zip(self._sum, self._unsummed[0].tensors):  # copied, a pass less than zeros and a sum
                total.copy_(x)
            for block in self._unsummed[1:]:
                block.add_to(self._sum)
            self._unsummed = []
        # add them to the sum of the other ranks
        if self._arriving is not None:
            arrived, self._arriving = self._arriving.wait(), None
            self._sum = arrived if self._sum is None else arrived.add_(self._sum)
        return self.local_sum

    def rounded(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the tensors of `result`, each [b, rows, heads, d], in the dtype of the blocks.

        A sum of two blocks is rounded once as well if the second is added to the first.
        """
        if self._arriving is None and len(self._unsummed) == 2:
            first, second = self._unsummed
            second.add_to(first.tensors)
            return first.tensors
        return [x.to(dtype) for x in self.result]

    def add(self, rows: slice, *tensors: Tensor) -> None:
        """Add a block of each tensor, [b, heads, rows, d].

        The tensors must be the caller's own: a sum may be accumulated in them.
        """
        block = _Block(rows, [x.transpose(1, 2) for x in tensors])
        has_all_rows = block.tensors[0].shape == self._like.shape
        is_first = self._sum is None and self._arriving is None and not self._unsummed
        if len(self._unsummed) == 1 or (is_first and has_all_rows):
            self._unsummed.append(block)
        else:
            block.add_to(self.result)

    def _empty(self) -> Tensor:
        return wide_empty((self._tensors, *self._like.shape), self._like)


class _Block(NamedTuple):
    rows: slice
    tensors: list[Tensor]  # [b, rows, heads, d]

    def add_to(self, totals: Iterable[Tensor]) -> None:
        for total, x in zip(totals, self.tensors, strict=True):
            total[:, self.rows].add_(x)


class GradSums(NamedTuple):
    """Gradients of the inputs of attention, to which each block adds."""

    q: LazySum  # of one tensor
    kv: LazySum  # of two, keys and values
    bias: Tensor | None = None  # [n, rows, s], in float32 or wider


# ---------------------------------------------------------------- torch's flash kernels


@dataclass(frozen=True)
class FlashBlocks:
    """Causal attention without dropout by torch's flash kernels, which hold no scores.

    row_chunks: this rank's chunks of the sample. size: rows of a chunk.
    """

    row_chunks: ChunkNumbers
    size: int
    name = "flash"

    def add(
        self, softmax: OnlineSoftmax, q: Tensor, k: Tensor, v: Tensor, key_chunks: ChunkNumbers, bias: None = None
    ) -> None:
        """Add the attention of q [b, n, rows, d] to k and v [b, groups, keys, d], which are the chunks `key_chunks`."""
        for rows, keys, causal in blocks_between(self.row_chunks, key_chunks, self.size):
            out, log_sums, *_ = _flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
            softmax.add(rows, out, log_sums)

    def add_grads(
        self,
        grads: GradSums,
        inputs: BackwardInputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_chunks: ChunkNumbers,
        bias: None = None,
    ) -> None:
        """Add the gradients of q [b, n, rows, d] and of k and v [b, groups, keys, d] to `grads`.

        inputs: of the same rows. The rest as in `add`.
        """
        for rows, keys, causal in blocks_between(self.row_chunks, key_chunks, self.size):
            inputs_of_rows = BackwardInputs(*(x[:, :, rows] for x in inputs))
            grad_q, grad_k, grad_v = _flash_backward(
                inputs_of_rows, q[:, :, rows], k[:, :, keys], v[:, :, keys], causal
            )
            grads.q.add(rows, grad_q)
            grads.kv.add(keys, grad_k, grad_v)


def flash_refuses(q: Tensor) -> str | None:
    """Return the reason why torch's flash kernels cannot take the heads q [.., d]; None: they can."""
    if not is_accelerator(q.device):
        return None
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {q.dtype} on {q.device.type}"
    width = q.shape[-1]
    return f"takes heads of a multiple of 8 up to 256, not of {width}" if width > 256 or width % 8 else None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    """Return (out [b, n, rows, d], L [b, n, rows], ...)."""
    if not is_accelerator(q.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, *_repeat_groups(q, k, v), 0.0, causal)


def _flash_backward(
    inputs: BackwardInputs, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [b, n, rows, d] and of k and v [b, groups, keys, d], each shaped as its tensor."""
    if not is_accelerator(q.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            inputs.grad, q, k, v, inputs.out, inputs.log_sums, 0.0, causal
        )
    groups = k.shape[1]
    repeated_k, repeated_v = _repeat_groups(q, k, v)  # [b, n, keys, d]
    log_sums = inputs.log_sums.contiguous()  # the kernel ignores its strides
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        inputs.grad,
        q,
        repeated_k,
        repeated_v,
        inputs.out,
        log_sums,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        no_seed,
        no_seed[:0],
    )
    return grad_q, _sum_groups(grad_k, groups), _sum_groups(grad_v, groups)


def _repeat_groups(q: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Repeat key or value heads [b, groups, ..] once for each query head: [b, n, ..]."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in heads)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum gradients of repeated heads: [b, n, ..] -> [b, groups, ..]"""
    return x.unflatten(1, (groups, -1)).sum(2)


# ---------------------------------------------------------------- tiles, for any mask and for dropout


@dataclass(frozen=True)
class TiledBlocks:
    """Attention under any mask, with dropout or without, tile by tile.

    row_chunks: this rank's chunks of the sample. size: rows of a chunk.
    mask: as the kernels take it, for the full sample; a tensor has this rank's rows, bool [.., rows or 1, s].
    key_size: keys of a chunk, if they are of another sequence than the rows.
    bias of `add` and `add_grads`: [n, rows, s], as in `SoftmaxOptions`.
    """

    row_chunks: ChunkNumbers
    size: int
    mask: Mask
    dropout: AttentionDropout
    cap: float | None = None  # as in `SoftmaxOptions`
    key_size: int | None = None
    name = "tiled"

    def add(
        self,
        softmax: OnlineSoftmax,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_chunks: ChunkNumbers,
        bias: Tensor | None = None,
    ) -> None:
        """Add the attention of q [b, n, rows, d] to k and v [b, groups, keys, d], which are the chunks `key_chunks`."""
        k, v = _repeat_groups(q, k, v)  # [b, n, keys, d]
        for tile in self._tiles(key_chunks):
            scores = self._mask_scores(self._raw_scores(q, k, tile), tile, bias)  # [b, n, rows, keys] of the tile
            log_sums = scores.logsumexp(dim=-1)
            probabilities = scores.sub_(_finite(log_sums).unsqueeze(-1)).exp_()
            self._drop(self._dropout_ones(q, tile), probabilities)
            softmax.add(tile.rows, probabilities.to(q.dtype) @ v[:, :, tile.keys], log_sums)

    def add_grads(
        self,
        grads: GradSums,
        inputs: BackwardInputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_chunks: ChunkNumbers,
        bias: Tensor | None = None,
    ) -> None:
        """Add the gradients of q [b, n, rows, d], of k and v [b, groups, keys, d] and of bias [n, rows, s] to `grads`.

        inputs: of the same rows. Each tile computes its probabilities again, and its dropout mask.
        """
        groups = k.shape[1]
        k, v = _repeat_groups(q, k, v)  # [b, n, keys, d]
        inner = inputs.inner.unsqueeze(-1)  # [b, n, rows, 1]
        log_sums = _finite(inputs.log_sums).unsqueeze(-1)  # [b, n, rows, 1]
        grad_q = grads.q.local_sum.transpose(2, 3)[0]  # [b, n, rows, d], a view
        grad_k, grad_v = grads.kv.local_sum.transpose(2, 3)  # [b, groups, keys, d], views
        for tile in self._tiles(key_chunks):
            rows = tile.rows
            keys = tile.keys
            grad = inputs.grad[:, :, rows]

            # probabilities, by the L of all keys
            raw_scores = self._raw_scores(q, k, tile)
            slope = self._softmax_options.slope(raw_scores) / math.sqrt(
                q.shape[-1]
            )  # before the scores are overwritten
            scores = self._mask_scores(raw_scores, tile, bias)
            probabilities = scores.sub_(log_sums[:, :, rows]).exp_()

            # through dropout and the softmax: p (dp - sum p dp), to the scores after cap and bias
            dropout_ones = self._dropout_ones(q, tile)
            grad_probabilities = (grad @ v[:, :, keys].transpose(-1, -2)).to(scores.dtype)
            self._drop(dropout_ones, grad_probabilities)
            grad_biased_scores = probabilities * (grad_probabilities - inner[:, :, rows])
            if grads.bias is not None:
                _of_tile(grads.bias, tile).add_(grad_biased_scores.sum(dim=0))

            # through cap and scale, to q, k and v
            grad_scores = (grad_biased_scores * slope).to(q.dtype)
            self._drop(dropout_ones, probabilities)
            grad_q[:, :, rows] += grad_scores @ k[:, :, keys]
            grad_k[:, :, keys] += _sum_groups(grad_scores.transpose(-1, -2) @ q[:, :, rows], groups)
            grad_v[:, :, keys] += _sum_groups(probabilities.to(q.dtype).transpose(-1, -2) @ grad, groups)

    def _tiles(self, key_chunks: ChunkNumbers) -> Iterator[ScoreTile]:
        return tiles_between(
            self.row_chunks,
            key_chunks,
            self.size,
            queries=_QUERIES,
            keys=_KEYS,
            window_left=self.mask.left if isinstance(self.mask, Window) else None,
            is_causal=not isinstance(self.mask, Tensor),
            key_size=self.key_size,
        )

    @property
    def _softmax_options(self) -> SoftmaxOptions:
        return SoftmaxOptions(self.cap, None)

    def _raw_scores(self, q: Tensor, k: Tensor, tile: ScoreTile) -> Tensor:
        """Return the tile's scores [b, n, rows, keys] before cap and mask, in float32 or wider."""
        q = q[:, :, tile.rows] / math.sqrt(q.shape[-1])  # before the product, which would overflow float16
        scores = q @ k[:, :, tile.keys].transpose(-1, -2)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def _mask_scores(self, raw_scores: Tensor, tile: ScoreTile, bias: Tensor | None) -> Tensor:
        """Return the scores [b, n, rows, keys] capped, with the bias, and -inf where a key is hidden.

        May overwrite the raw scores.
        """
        scores = self._softmax_options.softcap(raw_scores)
        if bias is not None:
            scores = scores.add_(_of_tile(bias, tile))
        return scores.masked_fill_(_hidden(self.mask, tile, raw_scores), -math.inf)

    def _dropout_ones(self, q: Tensor, tile: ScoreTile) -> Tensor | None:
        """Return 1 where a probability of the tile is kept, 0 where dropout clears it; None: all are kept.

        The shape is [b, n, rows, keys] of the tile.
        """
        if not self.dropout.is_active:
            return None
        rows = tile.first_row, _length(tile.rows)
        keys = tile.first_key, _length(tile.keys)
        words = self.dropout.words_of_part(q.shape[:2], rows, keys, q.device)
        return ones_where_kept(MaskWords(*words), self.dropout.probability)

    def _drop(self, dropout_ones: Tensor | None, x: Tensor) -> None:
        if dropout_ones is not None:
            clear_dropped(x, dropout_ones)
            x *= 1 / (1 - self.dropout.probability)


def _hidden(mask: Mask, tile: ScoreTile, scores: Tensor) -> Tensor:
    """Return the tile's part of `hidden_keys`, which broadcasts to its scores [b, n, rows, keys]."""
    if isinstance(mask, Tensor):
        return _of_tile(mask, tile)
    window_left = mask.left if isinstance(mask, Window) else None
    within = mask.within if isinstance(mask, Window) else mask

    # causal, and within the window
    rows = slice(tile.first_row, tile.first_row + _length(tile.rows))  # positions in the sample
    keys = slice(tile.first_key, tile.first_key + _length(tile.keys))
    row_positions = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    key_positions = torch.arange(keys.start, keys.stop, device=scores.device)
    distance = row_positions - key_positions  # [rows, keys]
    hidden = distance < 0
    if window_left is not None:
        hidden = hidden | (distance > window_left)

    if isinstance(within, Tensor):
        return hidden | _of_tile(within, tile)
    if isinstance(within, Documents):
        is_other = within.numbers[:, rows, None] != within.numbers[:, None, keys]  # [b, rows, keys]
        return (hidden | is_other)[:, None]  # [b, 1, rows, keys]
    return hidden


def _of_tile(x: Tensor, tile: ScoreTile) -> Tensor:
    """Return the tile's part of x [.., rows or 1, s]."""
    rows = tile.rows if x.shape[-2] > 1 else slice(None)
    return x[..., rows, tile.first_key : tile.first_key + _length(tile.keys)]


def _length(part: slice) -> int:
    return part.stop - part.start
