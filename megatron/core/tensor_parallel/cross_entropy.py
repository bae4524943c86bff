"""Cross entropy of logits whose vocabulary is split over the tensor-parallel axis, without ever gathering them.

loss = log(sum_v exp(x_v - max)) - (x_target - max)          three all-reduces of [s, b]: max, target, sum
d loss / d x_v = softmax_v - [v is the target]
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, axis: Axis, vocab_size: int) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        columns = x.shape[-1]
        first = axis.rank * columns
        if first + columns > vocab_size:  # padding is no word: probability zero
            x[..., max(vocab_size - first, 0) :] = float("-inf")
        largest = comm.all_reduce(x.amax(dim=-1), axis, "max")
        x -= largest.unsqueeze(-1)

        elsewhere = (target < first) | (target >= first + columns)
        local_target = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)
        at_target = x.gather(-1, local_target).squeeze(-1).masked_fill(elsewhere, 0.0)
        comm.all_reduce(at_target, axis)

        x.exp_()
        total = comm.all_reduce(x.sum(dim=-1), axis)
        x /= total.unsqueeze(-1)  # softmax
        ctx.save_for_backward(x, local_target, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - at_target

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local_target, elsewhere = ctx.saved_tensors
        grad_logits = softmax * grad.unsqueeze(-1)
        here = grad.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        grad_logits.scatter_add_(-1, local_target, -here)
        return grad_logits.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, axis: Axis, vocab_size: int | None = None) -> Tensor:
    """-log softmax(logits)[target] per token, in float32 or better.

    logits: [s, b, v/t], this rank's part of the vocabulary; target: [s, b] global ids; -> [s, b]. Columns beyond
    `vocab_size` are padding and count as impossible words. Every rank of the axis must call.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, axis, vocab_size or logits.shape[-1] * axis.size)
