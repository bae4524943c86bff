"""Cross entropy of logits that are sharded over the vocabulary. The logits are never gathered.

With scores x_v, l = log(sum_v exp(x_v)), and target probabilities q_v that sum to one:

    loss = -sum_v q_v log softmax_v = l - sum_v q_v x_v          three all-reduces of [s, b]: max, sum_v q_v x_v, sum of exp
    d loss / d x_v = softmax_v - q_v

q is 1 at the target. With label smoothing e (arXiv:1512.00567) q is 1 - e there and e / (K - 1) at each other of the K
words. That is Megatron's meaning: e' = e K / (K - 1), loss = (1 - e') nll - e' mean(log softmax). K counts words,
never padding, so that the loss is the same at every tensor-parallel size (Megatron's issue 7452).

z-loss (arXiv:2204.02311, section 5) adds z l^2, which keeps l near 0; its gradient is 2 z l softmax_v.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.errors import sequence_parallel_hint
from megatron.core.grid import Axis
from megatron.core.lazy import lazy_names
from megatron.core.tensor_parallel.word_ids import check_word_ids


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Saves the logits and log(sum exp), and computes the softmax again in the backward.

    That costs two passes over the logits in their own dtype, and no float32 copy of all (412 MB for 2048 tokens of
    GPT-2).
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, axis: Axis, vocab_size: int, smoothing: float, z_loss: float
    ) -> Tensor:
        shape, columns = target.shape, logits.shape[-1]
        rows, target = logits.reshape(-1, columns), target.reshape(-1)
        first = axis.rank * columns
        words = min(max(vocab_size - first, 0), columns)  # this rank's; the other columns are padding
        wide = torch.promote_types(logits.dtype, torch.float32)
        mine = torch.full((len(rows),), float("-inf"), dtype=wide, device=rows.device)  # the largest score
        total, word_sum = torch.zeros_like(mine), torch.zeros_like(mine)
        for part, x in _widened_parts(rows, words, wide) if words else ():
            if smoothing:
                word_sum[part] = x.sum(dim=-1)
            mine[part] = x.amax(dim=-1)
            total[part] = x.sub_(mine[part].unsqueeze(-1)).exp_().sum(dim=-1)
        # The sums of exp were taken with each rank's own maximum; rescale them to the largest over all ranks.
        largest = comm.all_reduce(mine.clone(), axis, "max")
        total = comm.all_reduce(total * (mine - largest).exp(), axis)

        # Each target's score lies on one rank; the other ranks add zero.
        elsewhere = (target < first) | (target >= first + columns)
        local_target = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)
        everywhere, extra = _wanted(vocab_size, smoothing)
        wanted = (rows.gather(-1, local_target).squeeze(-1).to(wide) - largest).masked_fill(elsewhere, 0.0)
        if smoothing:
            wanted = extra * wanted + everywhere * (word_sum - words * largest)
        comm.all_reduce(wanted, axis)

        loss, log_sum = total.log() - wanted, total.log() + largest
        # d loss / d l: the softmax is the gradient of l.
        by_log_sum = 1 + 2 * z_loss * log_sum if z_loss else None
        ctx.save_for_backward(logits, log_sum, local_target, elsewhere, by_log_sum)
        ctx.everywhere, ctx.extra = everywhere, extra
        ctx.words = words
        return (loss + z_loss * log_sum**2 if z_loss else loss).view(shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, *kept = ctx.saved_tensors
        log_sum, local_target = kept[:2]
        elsewhere, by_log_sum = kept[2:]
        rows, grad = logits.reshape(-1, logits.shape[-1]), grad.reshape(-1)
        times = (grad if by_log_sum is None else grad * by_log_sum).unsqueeze(-1)
        here = ctx.extra * grad.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        grad_rows = torch.empty_like(rows)
        grad_rows[:, ctx.words :] = 0.0
        for part, x in _widened_parts(rows, ctx.words, log_sum.dtype):
            x.sub_(log_sum[part].unsqueeze(-1)).exp_().mul_(times[part])
            if ctx.everywhere:
                x -= ctx.everywhere * grad[part].unsqueeze(-1)
            if ctx.words:
                x.scatter_add_(-1, local_target[part].clamp(max=ctx.words - 1), -here[part])
            grad_rows[part, : ctx.words] = x
        return grad_rows.view_as(logits), None, None, None, None, None


def _widened_parts(rows: Tensor, words: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, one after the other: (rows, a copy of their first `words` columns in `dtype`, to be overwritten).

    On a CPU a block fits the cache of a core: 46 instead of 57 ms for both directions of 512 tokens of GPT-2. On an
    accelerator a block is large enough to hide kernel launches, and small beside the scores.
    """
    cached = _CACHED_ELEMENTS * torch.get_num_threads() if rows.device.type == "cpu" else _ON_ACCELERATOR
    at_once = max(1, cached // max(1, words))
    buffer = torch.empty((min(at_once, len(rows)), words), dtype=dtype, device=rows.device)
    for start in range(0, len(rows), at_once):
        part = slice(start, min(start + at_once, len(rows)))
        yield part, buffer[: part.stop - part.start].copy_(rows[part, :words])


_CACHED_ELEMENTS = 2**18  # per thread: 1 MB in float32
_ON_ACCELERATOR = 2**25  # 128 MB in float32


def _wanted(vocab_size: int, smoothing: float) -> tuple[float, float]:
    """(target probability of every word, additional probability of the target)."""
    others = vocab_size - 1
    everywhere = smoothing / others if others else 0.0  # a vocabulary of one word has no other word to smooth over
    return everywhere, 1.0 - everywhere * vocab_size


def sharded_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[target] per token, in float32 or wider, with optional label smoothing and z-loss.

    logits: [s, b, v/t], this rank's shard of the vocabulary; target: [s, b] global ids; -> [s, b]. Columns beyond
    `vocab_size` are padding, with probability 0. Every rank of the axis must call.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"cross entropy: scores of {tuple(logits.shape[:-1])} tokens, but targets of {tuple(target.shape)}"
            + (sequence_parallel_hint(len(logits), len(target)) if logits.shape[1:-1] == target.shape[1:] else "")
        )
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    # Negative labels, such as -1, mark positions without loss.
    check_word_ids(target, vocab_size, "the labels", least=None)
    return _VocabParallelCrossEntropy.apply(logits, target, axis, vocab_size, label_smoothing, z_loss)


__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.tensor_parallel": "vocab_parallel_cross_entropy"})
