"""Attention as a sum over blocks of keys: keys that travel round a ring of ranks, or that are gathered first.

The c ranks of an axis share a sample of s rows, cut into 2 c chunks; rank r has chunks r and 2 c - 1 - r, side by side:
s / c rows of queries, keys and values. The queries, their result and their gradient stay on their rank. Keys and values
of another sequence are cut in the same way.

Ring (arXiv:2310.01889), in steps 0 to c - 1; a hop is from rank r to rank r + 1, the last to the first:

    forward     step i: start to send on the keys and values here, those of rank r - i (not in the last step); attend to
                them, and merge the result into that of the steps before; wait for those that come
    saved       this rank's queries, keys and values, the merged result, and log(sum exp) of its rows over all keys
    backward    step i: the same, with the gradients of these keys and values one hop behind. This rank adds its part to
                the sum of the ranks before, which arrives meanwhile, and sends it on (also in the last step)

That is c - 1 hops of keys and values forward, and backward c - 1 of these and c of gradients: after the last step rank r has
the complete gradient of rank r + 1, which the last hop returns to its rank. `Gathered` gathers all keys and values once
instead, visits them at once, and reduce-scatters their gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.context_parallel.block_attention import (
    BackwardInputs,
    FlashBlocks,
    GradSums,
    LazySum,
    OnlineSoftmax,
    TiledBlocks,
)
from megatron.core.context_parallel.causal_blocks import ChunkNumbers
from megatron.core.ops.attention.query_tiles import wide_empty
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import is_accelerator
from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import chunks_of

Visit = Callable[[ChunkNumbers, Tensor], None]  # (chunks, their keys and values)
# (chunks, their keys and values, the sum of their gradients on the ranks before, in flight, or None) -> that sum with
# this rank's added, [2, b, rows, groups, d] as `LazySum` has it: rows of keys, in float32 or wider.
VisitBackward = Callable[[ChunkNumbers, Tensor, AsyncHandle[Tensor] | None], Tensor]


# ---------------------------------------------------------------- how keys and values get to a rank


class KVCommStrategy(Protocol):
    """A way for the keys and values kv [2, b, groups, s / c, d] of all ranks to get to each rank.

    Every rank of the axis must call `forward`, and then `backward`.
    """

    def forward(self, kv: Tensor, visit: Visit) -> Tensor:
        """Call visit for keys and values [2, b, groups, keys, d] until all have been seen.

        Return what `backward` needs.
        """
        ...

    def backward(self, saved: Tensor, visit: VisitBackward) -> Tensor:
        """Call visit again for the keys and values in `saved`, which `forward` returned.

        Return the sum over ranks of the gradient of this rank's kv: [2, b, s / c, groups, d].
        """
        ...


class Ring:
    """Keys and values shift from rank to rank; this rank's alone are saved for the backward.

    All ranks make all steps and hops, whatever a mask hides. At most two ranks' keys and values are in memory besides
    this rank's own: those of the step, and those that come.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    def chunks(self, step: int) -> ChunkNumbers:
        """Return the chunks of the sample whose keys are here in a step: those of the rank `step` positions before."""
        return chunks_of((self.axis.rank - step) % self.axis.size, self.axis.size)

    def forward(self, kv: Tensor, visit: Visit) -> Tensor:
        """Visit the keys and values of one rank after the other; return kv [2, b, groups, s / c, d] itself.

        They keep this shape on every rank: the first visit is of this rank's own, the next of those of the rank before.
        """
        here = kv
        for step in range(self.axis.size):
            coming = self._start_shift(here, step)  # in flight while this step's block is computed
            visit(self.chunks(step), here)
            here = coming.wait()
        return kv

    def backward(self, saved: Tensor, visit: VisitBackward) -> Tensor:
        """Visit them again. saved: this rank's, [2, b, groups, s / c, d] -> their gradient [2, b, s / c, groups, d].

        It is that of this rank's own keys and values, summed over all ranks' queries, in the dtype of `saved`.
        """
        here = saved
        # The sums in flight: a hop sends those of this step's keys and values after them, to the next rank; its `wait`
        # returns, from the rank before, those of the next step's. None in step 0: this rank is the first to add to the
        # sum of its own.
        leaving = None
        for step in range(self.axis.size):
            coming = self._start_shift(here, step)
            # `visit` itself waits for the sums that arrive, once it has computed something to add to them
            sums = visit(self.chunks(step), here, leaving)  # [2, b, s / c, groups, d], float32 or wider
            if step + 1 == self.axis.size:  # complete: rounded before it travels, as it would be after
                sums = sums.to(saved.dtype)
            # in flight during the next step; in the last step these are the next rank's own, which go home
            leaving = collectives.start_shift(sums, self.axis)
            here = coming.wait()
        return leaving.wait()

    def _start_shift(self, here: Tensor, step: int) -> AsyncHandle[Tensor]:
        """Start to send `here` to the next rank; the result is what the rank before sends. Nothing in the last step."""
        is_last = step + 1 == self.axis.size
        return done(here) if is_last else collectives.start_shift(here, self.axis)


class Gathered:
    """Keys and values of all ranks are gathered first (Llama 3, arXiv:2407.21783, section 3.3.2).

    One visit sees all of them, in the order of the sample. The gather is waited for: nothing is computed beside it.
    All of them are saved for the backward, unless attention is recomputed.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    @property
    def chunks(self) -> ChunkNumbers:
        return tuple(range(2 * self.axis.size))

    def forward(self, kv: Tensor, visit: Visit) -> Tensor:
        """Gather kv [2, b, groups, s / c, d], visit all, and return them: [2, b, groups, s, d]."""
        # In one expression, so that the ranks' parts are freed before the visit.
        gathered = zigzag_to_sample_order(collectives.all_gather(kv, self.axis).chunk(self.axis.size), dim=-2)
        visit(self.chunks, gathered)
        return gathered

    def backward(self, saved: Tensor, visit: VisitBackward) -> Tensor:
        """Visit `saved` [2, b, groups, s, d]; return the gradient [2, b, s / c, groups, d] of this rank's part."""
        grad = visit(self.chunks, saved, None)  # [2, b, s, groups, d], float32 or wider
        # dimension 0 is that of the ranks, in whose order the reduce-scatter cuts it: [c 2, ..] -> [2, ..]
        grad = sample_to_zigzag_order(grad, self.axis.size, dim=-3).flatten(0, 1)  # [c 2, b, s / c, groups, d]
        if saved.dtype == grad.dtype:
            return collectives.reduce_scatter(grad, self.axis)
        # Half precision travels, and is summed in float32; `_OverBlocks.backward` rounds the sum.
        return collectives.start_reduce_scatter_in(grad.dtype, grad.to(saved.dtype), self.axis).wait()


def zigzag_to_sample_order(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Put the rows of each rank, [s / c, ..] with `dim` 0, into the order of the sample: [s, ..].

    A rank has two chunks, one from each end of the sample: rank r of c has chunks r and 2 c - 1 - r, in this order. So
    the first halves are chunks 0 .. c - 1, and the second halves, from the last rank to the first, c .. 2 c - 1.
    It does not communicate. parts: in rank order.
    """
    first_chunks, last_chunks = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*first_chunks, *reversed(last_chunks)], dim)


def sample_to_zigzag_order(x: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """Invert `zigzag_to_sample_order`: [s, ..] with `dim` 0 -> [c, s / c, ..], the rows of each rank.

    The ranks, c >= 2 of them, are a new dimension 0 in front, whatever `dim` is. All ranks' rows, in new memory; it does
    not communicate. Not for autograd: `out=` raises an error for an x that requires a gradient, unless gradients are off.
    """
    chunks = x.chunk(2 * ranks, dim)
    shape = list(x.shape)
    shape[dim] //= ranks
    out = x.new_empty(ranks, *shape)  # [c, s / c, ..]
    for rank, rows in enumerate(out):
        torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim, out=rows)
    return out


# ---------------------------------------------------------------- attention


def attention_over_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transfer: KVCommStrategy,
    kernel: FlashBlocks | TiledBlocks,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of this rank's rows to the keys of all ranks; which of them a row sees is the kernel's mask.

    q: [s / c, b, n, d]; k, v: [s / c, b, groups, d] -> [s / c, b, n, d]. Keys and values may be of another sequence, of
    another length. sinks: [n], bias: [n, s / c, s], as in `SoftmaxOptions`.

    Every rank that shares the sample must call, forward and backward.
    """
    return _OverBlocks.apply(q, k, v, sinks, bias, transfer, kernel)


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        transfer: KVCommStrategy,
        kernel: FlashBlocks | TiledBlocks,
    ) -> Tensor:
        """q: [s / c, b, n, d]; k, v: [s / c, b, groups, d]; sinks: [n]; bias: [n, s / c, s] -> [s / c, b, n, d]

        Saved, with heads before rows: q, what the transfer returns (this rank's keys and values, or all), the result, and
        log(sum exp); and sinks and bias. No scores and no probabilities.
        """
        q_heads = _heads_for_kernel(q)  # [b, n, s / c, d]
        kv = torch.stack((_heads_first(k), _heads_first(v)))  # [2, b, groups, s / c, d]
        # the attention to the keys so far, normalized, with log(sum exp) of each row; a visit merges one or more blocks
        softmax = OnlineSoftmax(q_heads, sinks)
        # `here` is [2, b, groups, keys, d] of the chunks; the kernel is given k and v of it
        saved_kv = transfer.forward(kv, lambda chunks, here: kernel.add(softmax, q_heads, *here, chunks, bias))
        out, log_sums = softmax.result  # [b, n, s / c, d] and [b, n, s / c], in float32 or wider
        out = out.to(q.dtype)  # [b, n, s / c, d]
        ctx.save_for_backward(q_heads, saved_kv, out, log_sums, sinks, bias)
        ctx.transfer = transfer
        ctx.kernel = kernel
        return out.permute(2, 0, 1, 3)  # [s / c, b, n, d]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [s / c, b, n, d] -> the gradients of q, k, v, sinks and bias, each shaped as its tensor.

        Saved: q and this rank's (or all) keys and values, whose scores are computed again block by block; the result
        and log(sum exp) of its rows over all keys, which give probabilities without another merge; sinks and bias.
        """
        # Read once: under recomputation, reading saved_tensors recomputes them.
        q_heads, kv, out, log_sums, sinks, bias = ctx.saved_tensors
        inputs = BackwardInputs(_heads_for_kernel(grad), out, log_sums)
        grad_q = LazySum(q_heads)  # over all visits; it never travels
        grad_bias = wide_empty(bias.shape, bias).zero_() if ctx.needs_input_grad[4] else None

        def visit(chunks: ChunkNumbers, here: Tensor, arriving: AsyncHandle[Tensor] | None) -> Tensor:
            # This rank's part is computed first: what arrives may be in flight until the first block (flash) or all
            # tiles are done; then both are added.
            grad_kv = LazySum(here[0], tensors=len(here), arriving=arriving)
            ctx.kernel.add_grads(GradSums(grad_q, grad_kv, grad_bias), inputs, q_heads, *here, chunks, bias)
            return grad_kv.result

        grad_kv = ctx.transfer.backward(kv, visit)  # [2, b, s / c, groups, d]
        # The sinks, log_sums, the result and its gradient suffice: no block of keys. This gradient is of this rank's rows
        # alone; data parallelism, whose ranks include this axis, sums that of the parameter. The bias has the rows of this
        # rank alone, so its gradient is complete, and must not be summed over the ring.
        grad_sinks = None if sinks is None else inputs.grad_of_sinks(sinks)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        # [b, s / c, heads, d] -> [s / c, b, heads, d]
        grads_qkv = [x.transpose(0, 1).to(grad.dtype) for x in (*grad_q.rounded(grad.dtype), *grad_kv)]
        return *grads_qkv, grad_sinks, grad_bias, None, None


def _heads_first(x: Tensor) -> Tensor:
    """Permute [s, b, n, d] -> [b, n, s, d]."""
    return x.permute(1, 2, 0, 3)


def _heads_for_kernel(x: Tensor) -> Tensor:
    """Permute [s, b, n, d] -> [b, n, s, d], on a CPU contiguous: each head's rows side by side.

    The CPU's kernel reads rows in place. The rows of a head of [s, b, n, d] are b n d numbers apart, often a power of
    two, and then share a few sets of the cache: 8 float32 heads of 64 and 2,048 rows took 107 + 435 ms of processor
    time, copied 59 + 191.
    """
    heads = _heads_first(x)
    return heads if is_accelerator(x.device) else heads.contiguous()
