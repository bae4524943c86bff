"""Cross entropy of logits whose vocabulary is split over the tensor-parallel axis, without ever gathering them.

With scores x_v, l = log(sum_v exp(x_v)), and wanted probabilities q_v that sum to one:

    loss = -sum_v q_v log softmax_v = l - sum_v q_v x_v          three all-reduces of [s, b]: max, sum_v q_v x_v, sum of exp
    d loss / d x_v = softmax_v - q_v

q is 1 at the target, or with label smoothing e (arXiv:1512.00567) 1 - e there and e / (K - 1) at each other of the K words, which
is how Megatron means it: e' = e K / (K - 1), loss = (1 - e') nll - e' mean(log softmax). K counts words, never padding,
so that the loss is the same at every tensor-parallel size (Megatron's issue 7452).

z-loss (arXiv:2204.02311, section 5) adds z l^2, which keeps l near 0; its gradient is 2 z l softmax_v.
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, axis: Axis, vocab_size: int, smoothing: float, z_loss: float
    ) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        columns = x.shape[-1]
        first = axis.rank * columns
        words = min(max(vocab_size - first, 0), columns)  # of mine; the rest is padding
        x[..., words:] = float("-inf")  # no word: probability zero
        largest = comm.all_reduce(x.amax(dim=-1), axis, "max")
        x -= largest.unsqueeze(-1)

        elsewhere = (target < first) | (target >= first + columns)
        local_target = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)
        everywhere, extra = _wanted(vocab_size, smoothing)
        wanted = x.gather(-1, local_target).squeeze(-1).masked_fill(elsewhere, 0.0)
        if smoothing:
            wanted = extra * wanted + everywhere * x[..., :words].sum(dim=-1)
        comm.all_reduce(wanted, axis)

        x.exp_()
        total = comm.all_reduce(x.sum(dim=-1), axis)
        x /= total.unsqueeze(-1)  # softmax
        loss, log_sum = total.log() - wanted, total.log() + largest
        # d loss / d l: the softmax is the gradient of l.
        ctx.save_for_backward(x, local_target, elsewhere, 1 + 2 * z_loss * log_sum if z_loss else None)
        ctx.dtype, ctx.words, ctx.everywhere, ctx.extra = logits.dtype, words, everywhere, extra
        return loss + z_loss * log_sum**2 if z_loss else loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, local_target, elsewhere, by_log_sum = ctx.saved_tensors
        grad_logits = softmax * (grad if by_log_sum is None else grad * by_log_sum).unsqueeze(-1)
        if ctx.everywhere:
            grad_logits[..., : ctx.words] -= ctx.everywhere * grad.unsqueeze(-1)
        here = ctx.extra * grad.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        grad_logits.scatter_add_(-1, local_target, -here)
        return grad_logits.to(ctx.dtype), None, None, None, None, None


def _wanted(vocab_size: int, smoothing: float) -> tuple[float, float]:
    """(the probability that every word should have, what the target should have beyond that)."""
    others = vocab_size - 1
    everywhere = smoothing / others if others else 0.0  # a vocabulary of one word has nobody to give to
    return everywhere, 1.0 - everywhere * vocab_size


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[target] per token, in float32 or better; smoothed, and with a z-loss, where asked for.

    logits: [s, b, v/t], this rank's part of the vocabulary; target: [s, b] global ids; -> [s, b]. Columns beyond
    `vocab_size` are padding and count as impossible words. Every rank of the axis must call.
    """
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    return _VocabParallelCrossEntropy.apply(logits, target, axis, vocab_size, label_smoothing, z_loss)
