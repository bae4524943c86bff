"""Attention of some rows to some keys, with the logarithm of each row's sum of exponentials, and its backward.

Results of several blocks merge into that of all their keys (arXiv:2205.14135, arXiv:2310.01889): with L = log(sum exp) of a
block's scores and O its result,

    L = log(exp L1 + exp L2)        O = O1 exp(L1 - L) + O2 exp(L2 - L)

A block's backward takes the L of all keys, and for each row the inner product of its result and its gradient: then each
pair of a
row and a key contributes once, and nothing needs merging.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.base.async_handle import Pending
from megatron.core.context_parallel.causal_blocks import ChunkNumbers, ScoreTile, blocks_between, tiles_between
from megatron.core.ops.attention.masks import Documents, Mask, Window
from megatron.core.ops.attention.softcap_and_sinks import Scoring
from megatron.core.ops.attention.tiles import wide_empty
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.dropout_masks import MaskWords, clear_dropped, ones_where_kept
from megatron.core.parallel.accelerator import is_accelerator

_QUERIES, _KEYS = 128, 1024  # of a tile


class Merged:
    """The result of attention to the keys so far: out [b, n, rows, d], and L [b, n, rows], both in float32 or wider.

    sinks: [n], a first key of each head, whose value is 0; None: no key yet.
    """

    def __init__(self, q: Tensor, sinks: Tensor | None = None):
        self._q, self._sinks = q, sinks
        self._so_far: tuple[Tensor, Tensor] | None = None

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """(out, L)"""
        if self._so_far is None:
            out, log_sums = (wide_empty(shape, self._q) for shape in (self._q.shape, self._q.shape[:3]))
            log_sums.fill_(-math.inf) if self._sinks is None else log_sums.copy_(self._sinks.view(-1, 1))
            self._so_far = out.zero_(), log_sums
        return self._so_far

    def add(self, rows: slice, out: Tensor, log_sums: Tensor) -> None:
        """Merge the result of the rows' attention to further keys. A row that sees none of them has L = -inf.

        The first block of all rows is kept as it is, not copied."""
        wide = out.to(log_sums.dtype)
        if self._so_far is None and self._sinks is None and out.shape == self._q.shape:
            self._so_far = wide, log_sums
            return
        so_far, sums = (x[:, :, rows] for x in self.result)
        together = torch.logaddexp(sums, log_sums)
        weight = (log_sums - _finite(together)).exp_().unsqueeze(-1)
        so_far.lerp_(wide, weight)  # O1 + exp(L2 - L) (O2 - O1), in one pass
        sums.copy_(together)


def _finite(log_sums: Tensor) -> Tensor:
    """The L of rows to subtract; 0 of those that see no key, so that their probabilities become 0 and not NaN."""
    return log_sums.masked_fill(log_sums == -math.inf, 0)


class Upstream(NamedTuple):
    """What the backward of a block takes from the forward of all blocks, and from the gradient. All of my rows."""

    grad: Tensor  # [b, n, rows, d]
    out: Tensor  # as grad, in its dtype
    log_sums: Tensor  # [b, n, rows]

    @property
    def inner(self) -> Tensor:
        """[b, n, rows]: for each row the sum over its keys of probability x the probability's gradient."""
        return (self.grad.to(self.log_sums.dtype) * self.out).sum(dim=-1)

    def grad_of_sinks(self, sinks: Tensor) -> Tensor:
        """[n], of my rows. A sink has no value, so that its probability has no gradient of its own."""
        probabilities = (sinks.view(-1, 1) - self.log_sums).exp()
        return -(probabilities * self.inner).sum(dim=(0, 2)).to(sinks.dtype)


class Total:
    """Sums over blocks, [tensors, b, rows, heads, d] in float32 or wider: rows before heads, as kernels return gradients.

    heads: of these, [b, heads, rows, d]. arriving: the sums of other ranks' blocks, which those of this rank are added
    to."""

    def __init__(self, heads: Tensor, tensors: int = 1, arriving: Pending[Tensor] | None = None):
        self._like, self._tensors = heads.transpose(1, 2), tensors
        self._arriving = arriving
        self._sum: Tensor | None = None
        self._unsummed: list[_Block] = []  # at most two, of which the first has all rows

    @property
    def mine(self) -> Tensor:
        """The sums of this rank's blocks; a kernel of many small blocks adds to it while others' are on their way."""
        if self._sum is None:
            self._sum = self._empty().zero_()
        return self._sum

    @property
    def result(self) -> Tensor:
        if self._unsummed:
            self._sum = self._empty()
            for total, x in zip(self._sum, self._unsummed[0].tensors):  # copied, a pass less than zeros and a sum
                total.copy_(x)
            for block in self._unsummed[1:]:
                block.add_to(self._sum)
            self._unsummed = []
        if self._arriving is not None:
            arrived, self._arriving = self._arriving.wait(), None
            self._sum = arrived if self._sum is None else arrived.add_(self._sum)
        return self.mine

    def rounded(self, dtype: torch.dtype) -> Sequence[Tensor]:
        """The tensors of `result` in the dtype of the blocks, in which a sum of two is rounded once as well."""
        if self._arriving is None and len(self._unsummed) == 2:
            first, second = self._unsummed
            second.add_to(first.tensors)
            return first.tensors
        return [x.to(dtype) for x in self.result]

    def add(self, rows: slice, *tensors: Tensor) -> None:
        """Add a block of each tensor, [b, heads, rows, d], to what has arrived. It must be nobody else's."""
        block = _Block(rows, [x.transpose(1, 2) for x in tensors])
        is_first = self._sum is None and self._arriving is None and block.tensors[0].shape == self._like.shape
        if len(self._unsummed) == 1 or (is_first and not self._unsummed):
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


class Grads(NamedTuple):
    q: Total  # of one tensor
    pairs: Total  # of two, of keys and of values
    bias: Tensor | None = None  # [n, rows, s], in float32 or wider


# ---------------------------------------------------------------- torch's flash kernels


@dataclass(frozen=True)
class FlashBlocks:
    """Causal attention without dropout by torch's flash kernels, which hold no scores. size: rows of a chunk."""

    mine: ChunkNumbers
    size: int
    name = "flash"

    def add(self, merged: Merged, q: Tensor, k: Tensor, v: Tensor, theirs: ChunkNumbers, bias: None = None) -> None:
        for rows, keys, causal in blocks_between(self.mine, theirs, self.size):
            merged.add(rows, *_flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)[:2])

    def add_grads(
        self, grads: Grads, up: Upstream, q: Tensor, k: Tensor, v: Tensor, theirs: ChunkNumbers, bias: None = None
    ) -> None:
        for rows, keys, causal in blocks_between(self.mine, theirs, self.size):
            here = Upstream(*(x[:, :, rows] for x in up))
            found = _flash_backward(here, q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
            grads.q.add(rows, found[0])
            grads.pairs.add(keys, *found[1:])


def flash_refuses(q: Tensor) -> str | None:
    """Why torch's flash kernels cannot take these heads; None: they can."""
    if not is_accelerator(q.device):
        return None
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"has no {q.dtype} on {q.device.type}"
    width = q.shape[-1]
    return f"takes heads of a multiple of 8 up to 256, not of {width}" if width > 256 or width % 8 else None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    """(out, L, ...)"""
    if not is_accelerator(q.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, *_repeated(q, k, v), 0.0, causal)


def _flash_backward(up: Upstream, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not is_accelerator(q.device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            up.grad, q, k, v, up.out, up.log_sums, 0.0, causal
        )
    wide_k, wide_v = _repeated(q, k, v)
    log_sums = up.log_sums.contiguous()  # of which the kernel reads no strides
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    of_q, *of_pair = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        up.grad, q, wide_k, wide_v, up.out, log_sums, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
    )
    return of_q, *(_summed(x, k.shape[1]) for x in of_pair)


def _repeated(q: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Key or value heads [b, groups, ..], once for each query head."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in heads)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Gradients of repeated heads [b, n, ..] -> [b, groups, ..]"""
    return x.unflatten(1, (groups, -1)).sum(2)


# ---------------------------------------------------------------- tiles, for any mask and for dropout


@dataclass(frozen=True)
class TiledBlocks:
    """Attention under any mask, with dropout or without, tile by tile. mask: as the kernels take it, for all of the
    sample; a
    tensor's rows are mine, [.., rows or 1, s]. key_size: keys of a chunk, of another sequence than the rows'.

    bias of `add` and `add_grads`: [n, my rows, s], of `Scoring`."""

    mine: ChunkNumbers
    size: int
    mask: Mask
    dropout: AttentionDropout
    cap: float | None = None  # as of `Scoring`
    key_size: int | None = None
    name = "tiled"

    def add(
        self, merged: Merged, q: Tensor, k: Tensor, v: Tensor, theirs: ChunkNumbers, bias: Tensor | None = None
    ) -> None:
        k, v = _repeated(q, k, v)
        for tile in self._tiles(theirs):
            scores = self._masked(self._products(q, k, tile), tile, bias)
            log_sums = scores.logsumexp(dim=-1)
            probabilities = scores.sub_(_finite(log_sums).unsqueeze(-1)).exp_()
            self._drop(self._kept(q, tile), probabilities)
            merged.add(tile.rows, probabilities.to(q.dtype) @ v[:, :, tile.keys], log_sums)

    def add_grads(
        self,
        grads: Grads,
        up: Upstream,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        theirs: ChunkNumbers,
        bias: Tensor | None = None,
    ) -> None:
        groups = k.shape[1]
        k, v = _repeated(q, k, v)
        inner, base = up.inner.unsqueeze(-1), _finite(up.log_sums).unsqueeze(-1)
        of_q = grads.q.mine.transpose(2, 3)[0]
        of_k, of_v = grads.pairs.mine.transpose(2, 3)
        for tile in self._tiles(theirs):
            rows, keys = tile[:2]
            products, grad = self._products(q, k, tile), up.grad[:, :, rows]
            slope = self._scoring.slope(products) / math.sqrt(q.shape[-1])
            scores = self._masked(products, tile, bias)
            probabilities = scores.sub_(base[:, :, rows]).exp_()
            kept = self._kept(q, tile)
            by_probabilities = (grad @ v[:, :, keys].transpose(-1, -2)).to(scores.dtype)
            self._drop(kept, by_probabilities)
            by_sums = probabilities * (by_probabilities - inner[:, :, rows])  # of product and bias
            if grads.bias is not None:
                _of_tile(grads.bias, tile).add_(by_sums.sum(dim=0))
            by_scores = (by_sums * slope).to(q.dtype)
            self._drop(kept, probabilities)
            of_q[:, :, rows] += by_scores @ k[:, :, keys]
            of_k[:, :, keys] += _summed(by_scores.transpose(-1, -2) @ q[:, :, rows], groups)
            of_v[:, :, keys] += _summed(probabilities.to(q.dtype).transpose(-1, -2) @ grad, groups)

    def _tiles(self, theirs: ChunkNumbers) -> Iterator[ScoreTile]:
        before = self.mask.before if isinstance(self.mask, Window) else None
        is_causal = not isinstance(self.mask, Tensor)
        where = {"queries": _QUERIES, "keys": _KEYS, "before": before, "is_causal": is_causal}
        return tiles_between(self.mine, theirs, self.size, **where, key_size=self.key_size)

    @property
    def _scoring(self) -> Scoring:
        return Scoring(self.cap, None)

    def _products(self, q: Tensor, k: Tensor, tile: ScoreTile) -> Tensor:
        """The tile's scores [b, n, rows, keys] before cap and mask, in float32 or wider."""
        q = q[:, :, tile.rows] / math.sqrt(q.shape[-1])  # before the product, which would overflow float16
        scores = q @ k[:, :, tile.keys].transpose(-1, -2)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def _masked(self, products: Tensor, tile: ScoreTile, bias: Tensor | None) -> Tensor:
        """Capped, with the bias, and -inf where a key is hidden. May overwrite the products."""
        scores = self._scoring.capped(products)
        scores = scores if bias is None else scores.add_(_of_tile(bias, tile))
        return scores.masked_fill_(_hidden(self.mask, tile, products), -math.inf)

    def _kept(self, q: Tensor, tile: ScoreTile) -> Tensor | None:
        """1 where a probability of the tile is kept, 0 where dropout takes it; None: all are kept."""
        if not self.dropout.is_active:
            return None
        first, count = tile.first_row, tile.rows.stop - tile.rows.start
        words = self.dropout.words_of_part(q.shape[:2], (first, count), (tile.first_key, _length(tile.keys)), q.device)
        return ones_where_kept(MaskWords(*words), self.dropout.probability)

    def _drop(self, kept: Tensor | None, x: Tensor) -> None:
        if kept is not None:
            clear_dropped(x, kept)
            x *= 1 / (1 - self.dropout.probability)


def _hidden(mask: Mask, tile: ScoreTile, scores: Tensor) -> Tensor:
    """The tile's part of `hidden_keys`, which broadcasts to its scores."""
    if isinstance(mask, Tensor):
        return _of_tile(mask, tile)
    device, keys = scores.device, slice(tile.first_key, tile.first_key + _length(tile.keys))
    rows = slice(tile.first_row, tile.first_row + _length(tile.rows))
    before, within = (mask.before, mask.within) if isinstance(mask, Window) else (None, mask)
    distance = torch.arange(rows.start, rows.stop, device=device)[:, None] - torch.arange(
        keys.start, keys.stop, device=device
    )
    hidden = distance < 0 if before is None else (distance < 0) | (distance > before)
    if isinstance(within, Tensor):
        return hidden | _of_tile(within, tile)
    if isinstance(within, Documents):
        other = within.numbers[:, rows, None] != within.numbers[:, None, keys]
        return (hidden | other)[:, None]
    return hidden


def _of_tile(x: Tensor, tile: ScoreTile) -> Tensor:
    """The tile's part of x [.., my rows or 1, s]."""
    rows = tile.rows if x.shape[-2] > 1 else slice(None)
    return x[..., rows, tile.first_key : tile.first_key + _length(tile.keys)]


def _length(part: slice) -> int:
    return part.stop - part.start
