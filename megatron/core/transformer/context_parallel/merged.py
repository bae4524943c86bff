"""Attention as a sum over blocks of keys: of keys that travel round a ring of ranks, or that are gathered first.

Ring (arXiv:2310.01889): in step i a rank has the keys and values of rank r - i, while those of the next step are on their way. In
the backward they travel again, and their gradients one hop behind them; the last hop brings these home.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis
from megatron.core.pending import Pending, done
from megatron.core.sequence_rows import chunks_of
from megatron.core.transformer.context_parallel.block_kernels import FlashBlocks, Grads, Merged, TiledBlocks, Upstream
from megatron.core.transformer.context_parallel.blocks import ChunkNumbers
from megatron.core.transformer.tiles import wide_empty

Visit = Callable[[ChunkNumbers, Tensor], Any]  # (chunks, their keys and values)


class Travel(Protocol):
    """How the keys and values [s / c, 2, b, groups, d] of all ranks come to a rank."""

    def forward(self, mine: Tensor, visit: Visit) -> Tensor:
        """Calls visit for keys and values until all have been seen; returns what `backward` takes."""
        ...

    def backward(self, saved: Tensor, visit: Visit) -> Tensor:
        """Calls visit again, which returns the gradient of what it was given; returns the sum of those of mine."""
        ...


class Ring:
    def __init__(self, axis: Axis):
        self.axis = axis

    def chunks(self, step: int) -> ChunkNumbers:
        return chunks_of((self.axis.rank - step) % self.axis.size, self.axis.size)

    def forward(self, mine: Tensor, visit: Visit) -> Tensor:
        here = mine
        for step in range(self.axis.size):
            coming = self._shift(here, step)
            visit(self.chunks(step), here)
            here = coming.wait()
        return mine

    def backward(self, saved: Tensor, visit: Visit) -> Tensor:
        here, leaving = saved, None
        for step in range(self.axis.size):
            coming = self._shift(here, step)
            grad = visit(self.chunks(step), here)
            if leaving is not None:
                grad += leaving.wait()  # the sum so far, which has travelled with these keys
            leaving = comm.start_shift(grad, self.axis)
            here = coming.wait()
        return leaving.wait()

    def _shift(self, here: Tensor, step: int) -> Pending[Tensor]:
        return comm.start_shift(here, self.axis) if step + 1 < self.axis.size else done(here)


class Gathered:
    """arXiv:2407.21783, section 3.3.2. The gathered keys and values wait for the backward, unless attention is recomputed."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @property
    def chunks(self) -> ChunkNumbers:
        return tuple(range(2 * self.axis.size))

    def forward(self, mine: Tensor, visit: Visit) -> Tensor:
        whole = in_order(comm.all_gather(mine, self.axis), self.axis.size)
        visit(self.chunks, whole)
        return whole

    def backward(self, saved: Tensor, visit: Visit) -> Tensor:
        grad = by_rank(visit(self.chunks, saved), self.axis.size)
        if saved.dtype == grad.dtype:
            return comm.reduce_scatter(grad, self.axis)
        return comm.start_reduce_scatter_in(grad.dtype, grad.to(saved.dtype), self.axis).wait()  # half precision


def in_order(x: Tensor, ranks: int) -> Tensor:
    """[s, ..] as gathered, rank after rank -> in the order of the sample."""
    places = [2 * i if i < ranks else 4 * ranks - 1 - 2 * i for i in range(2 * ranks)]
    return torch.cat([x.chunk(2 * ranks)[place] for place in places])


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """[s, ..] in the order of the sample -> the rows of rank 0, of rank 1, ..."""
    parts = x.chunk(2 * ranks)
    return torch.cat([parts[chunk] for rank in range(ranks) for chunk in chunks_of(rank, ranks)])


def attention_over_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    travel: Travel,
    kernel: FlashBlocks | TiledBlocks,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of my rows to the keys of all ranks: q [s / c, b, n, d]; k, v [s / c, b, groups, d] -> as q. Keys and values may
    be those of another sequence, of another length.

    sinks: [n], bias: [n, my rows, s], as of `Scoring`. Every rank that shares the sample must call, forward and backward."""
    return _OverBlocks.apply(q, torch.stack((k, v), dim=1), sinks, bias, travel, kernel)


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        pairs: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        travel: Travel,
        kernel: FlashBlocks | TiledBlocks,
    ) -> Tensor:
        """pairs: keys and values [s / c, 2, b, groups, d]."""
        heads = _heads(q)
        merged = Merged(heads, sinks)
        saved = travel.forward(pairs, lambda chunks, x: kernel.add(merged, heads, *_pair(x), chunks, bias))
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, saved, out, merged.log_sums, sinks, bias)
        ctx.travel, ctx.kernel = travel, kernel
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputation fills it when it is read
        q, pairs = saved[:2]
        sinks, bias = saved[4:]
        up = Upstream(_heads(grad), *saved[2:4])
        heads = _heads(q)
        of_q = wide_empty(heads.shape, heads).zero_()
        of_bias = wide_empty(bias.shape, bias).zero_() if ctx.needs_input_grad[3] else None

        def visit(chunks: ChunkNumbers, here: Tensor) -> Tensor:
            of_pairs = wide_empty(here.shape, here).zero_()
            ctx.kernel.add_grads(Grads(of_q, *_pair(of_pairs), of_bias), up, heads, *_pair(here), chunks, bias)
            return of_pairs

        of_pairs = ctx.travel.backward(pairs, visit)
        of_sinks = None if sinks is None else up.grad_of_sinks(sinks)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_q.permute(2, 0, 1, 3).to(q.dtype), of_pairs.to(q.dtype), of_sinks, of_bias, None, None


def _heads(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d]"""
    return x.permute(1, 2, 0, 3)


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """[s, 2, b, groups, d] -> two of [b, groups, s, d]"""
    return _heads(x[:, 0]), _heads(x[:, 1])
