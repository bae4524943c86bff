"""Attention as a sum over blocks of keys: of keys that travel round a ring of ranks, or that are gathered first.

Ring (arXiv:2310.01889): in step i a rank has the keys and values of rank r - i, while those of the next step are on
their way. In
the backward they travel again, and their gradients one hop behind them; the last hop brings these home.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.base.async_handle import Pending, done
from megatron.core.context_parallel.block_attention import FlashBlocks, Grads, Merged, TiledBlocks, Total, Upstream
from megatron.core.context_parallel.causal_blocks import ChunkNumbers
from megatron.core.ops.attention.tiles import wide_empty
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import is_accelerator
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sequence_shard import chunks_of

Visit = Callable[[ChunkNumbers, Tensor], None]  # (chunks, their keys and values)
# Takes the sum of the gradients of these keys and values on other ranks, too, which is on its way; returns it with mine, as
# `Total` has it.
VisitBack = Callable[[ChunkNumbers, Tensor, Pending[Tensor] | None], Tensor]


class Travel(Protocol):
    """How the keys and values [2, b, groups, s / c, d] of all ranks come to a rank."""

    def forward(self, mine: Tensor, visit: Visit) -> Tensor:
        """Calls visit for keys and values until all have been seen; returns what `backward` takes."""
        ...

    def backward(self, saved: Tensor, visit: VisitBack) -> Tensor:
        """Calls visit again; returns the sum of the gradients of mine, [2, b, s / c, groups, d]."""
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

    def backward(self, saved: Tensor, visit: VisitBack) -> Tensor:
        here, leaving = saved, None
        for step in range(self.axis.size):
            coming = self._shift(here, step)
            sums = visit(self.chunks(step), here, leaving)
            if step + 1 == self.axis.size:  # complete: rounded before it travels, as it would be after
                sums = sums.to(saved.dtype)
            leaving = collectives.start_shift(sums, self.axis)
            here = coming.wait()
        return leaving.wait()

    def _shift(self, here: Tensor, step: int) -> Pending[Tensor]:
        return collectives.start_shift(here, self.axis) if step + 1 < self.axis.size else done(here)


class Gathered:
    """arXiv:2407.21783, section 3.3.2. The gathered keys and values wait for the backward, unless attention is
    recomputed."""

    def __init__(self, axis: Axis):
        self.axis = axis

    @property
    def chunks(self) -> ChunkNumbers:
        return tuple(range(2 * self.axis.size))

    def forward(self, mine: Tensor, visit: Visit) -> Tensor:
        whole = in_order(collectives.all_gather(mine, self.axis).chunk(self.axis.size), dim=-2)
        visit(self.chunks, whole)
        return whole

    def backward(self, saved: Tensor, visit: VisitBack) -> Tensor:
        grad = by_rank(visit(self.chunks, saved, None), self.axis.size, dim=-3).flatten(0, 1)
        if saved.dtype == grad.dtype:
            return collectives.reduce_scatter(grad, self.axis)
        return collectives.start_reduce_scatter_in(grad.dtype, grad.to(saved.dtype), self.axis).wait()  # half precision


def in_order(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The rows of each rank, [s / c, ..] with `dim` 0 -> [s, ..] in the order of the sample."""
    first, last = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*first, *reversed(last)], dim)


def by_rank(x: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """[s, ..] in the order of the sample, with `dim` 0 -> [c, s / c, ..], the rows of each rank. Not for autograd."""
    chunks, shape = x.chunk(2 * ranks, dim), list(x.shape)
    shape[dim] //= ranks
    found = x.new_empty(ranks, *shape)
    for rank, rows in enumerate(found):
        torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim, out=rows)
    return found


def attention_over_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    travel: Travel,
    kernel: FlashBlocks | TiledBlocks,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of my rows to the keys of all ranks: q [s / c, b, n, d]; k, v [s / c, b, groups, d] -> as q. Keys and
    values may
    be those of another sequence, of another length.

    sinks: [n], bias: [n, my rows, s], as of `Scoring`. Every rank that shares the sample must call, forward and backward."""
    return _OverBlocks.apply(q, k, v, sinks, bias, travel, kernel)


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        travel: Travel,
        kernel: FlashBlocks | TiledBlocks,
    ) -> Tensor:
        heads = _heads(q)
        merged = Merged(heads, sinks)
        pairs = torch.stack((_by_head(k), _by_head(v)))
        saved = travel.forward(pairs, lambda chunks, x: kernel.add(merged, heads, *x, chunks, bias))
        out, log_sums = merged.result
        out = out.to(q.dtype)
        ctx.save_for_backward(heads, saved, out, log_sums, sinks, bias)
        ctx.travel, ctx.kernel = travel, kernel
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputation fills it when it is read
        heads, pairs = saved[:2]
        sinks, bias = saved[4:]
        up = Upstream(_heads(grad), *saved[2:4])
        of_q = Total(heads)
        of_bias = wide_empty(bias.shape, bias).zero_() if ctx.needs_input_grad[4] else None

        def visit(chunks: ChunkNumbers, here: Tensor, arriving: Pending[Tensor] | None) -> Tensor:
            of_pairs = Total(here[0], tensors=len(here), arriving=arriving)
            ctx.kernel.add_grads(Grads(of_q, of_pairs, of_bias), up, heads, *here, chunks, bias)
            return of_pairs.result

        of_pairs = ctx.travel.backward(pairs, visit)
        of_sinks = None if sinks is None else up.grad_of_sinks(sinks)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        of_inputs = (x.transpose(0, 1).to(grad.dtype) for x in (*of_q.rounded(grad.dtype), *of_pairs))
        return *of_inputs, of_sinks, of_bias, None, None


def _by_head(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d]"""
    return x.permute(1, 2, 0, 3)


def _heads(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], on a CPU with each head's rows side by side.

    Its kernel reads them where they lie. The rows of a head of [s, b, n, d] are n d numbers apart, often a power of two, and then
    share a few sets of the cache: 8 float32 heads of 64 and 2,048 rows took 107 + 435 ms of processor time, copied 59 + 191."""
    return _by_head(x) if is_accelerator(x.device) else _by_head(x).contiguous()
