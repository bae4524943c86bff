"""Cross entropy of logits that are sharded over the vocabulary. The logits are never gathered.

With scores x_v, l = log(sum_v exp(x_v)), and target probabilities q_v that sum to one:

    loss = -sum_v q_v log softmax_v = l - sum_v q_v x_v          three all-reduces of [s, b]: max, sum_v q_v x_v, sum of exp
    d loss / d x_v = softmax_v - q_v

q is 1 at the target. With label smoothing e (arXiv:1512.00567) q is 1 - e there and e / (K - 1) at each other of the K
words. That is Megatron's meaning: e' = e K / (K - 1), loss = (1 - e') nll - e' mean(log softmax). K counts words,
never padding, so that the loss is the same at every tensor-parallel size (Megatron's issue 7452).

z-loss (arXiv:2204.02311, section 5) adds z l^2, which keeps l near 0; its gradient is 2 z l softmax_v.

Both are terms of training. What a run reports is the cross entropy without them: l - x at the target.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.base.error_reporting import sequence_parallel_hint
from megatron.core.base.lazy_imports import lazy_names
from megatron.core.ops.cross_entropy_kernels import Factors, grad_of_rows, sums_of_rows
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.grid import Axis
from megatron.core.tensor_parallel.token_id_check import check_word_ids


def cross_entropy_of(losses: Tensor) -> Tensor | None:
    """The cross entropy alone, beside a model's losses with the terms of training; None: the losses are it."""
    return getattr(losses, "cross_entropy", None)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss and, where `how` asks for it, the cross entropy without smoothing and z-loss, which has no gradient.

    Saves the logits and log(sum exp), and computes the softmax again in the backward.
    That costs two passes over the logits in their own dtype, and no float32 copy of all (412 MB for 2048 tokens of
    GPT-2).
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, axis: Axis, vocab_size: int, smoothing: float, z_loss: float, how: "_How"
    ) -> Tensor | tuple[Tensor, Tensor]:
        shape, columns = target.shape, logits.shape[-1]
        rows, target = logits.reshape(-1, columns), target.reshape(-1)
        first = axis.rank * columns
        words = min(max(vocab_size - first, 0), columns)  # this rank's; the other columns are padding
        sums = sums_of_rows(rows, words, smoothing=bool(smoothing), compiled=how.compiled)
        mine, word_sum = sums.largest, sums.of_scores
        # The sums of exp were taken with each rank's own maximum; rescale them to the largest over all ranks.
        largest = collectives.all_reduce(mine.clone(), axis, "max")
        total = collectives.all_reduce(sums.of_exp * (mine - largest).exp(), axis)

        # Each target's score lies on one rank; the other ranks add zero.
        elsewhere = (target < first) | (target >= first + columns)
        local_target = (target - first).masked_fill(elsewhere, 0).unsqueeze(-1)
        everywhere, extra = _wanted(vocab_size, smoothing)
        at_target = (rows.gather(-1, local_target).squeeze(-1).to(total.dtype) - largest).masked_fill(elsewhere, 0.0)
        wanted = extra * at_target + everywhere * (word_sum - words * largest) if smoothing else at_target
        if smoothing and how.plain:
            wanted, at_target = collectives.all_reduce(torch.stack((wanted, at_target)), axis)
        else:
            collectives.all_reduce(wanted, axis)  # without smoothing also at_target, which is the same tensor

        loss, log_sum = total.log() - wanted, total.log() + largest
        # d loss / d l: the softmax is the gradient of l.
        by_log_sum = 1 + 2 * z_loss * log_sum if z_loss else None
        ctx.save_for_backward(logits, log_sum, local_target, elsewhere, by_log_sum)
        ctx.everywhere, ctx.extra = everywhere, extra
        ctx.words, ctx.how = words, how
        loss = (loss + z_loss * log_sum**2 if z_loss else loss).view(shape)
        if not how.plain:
            return loss
        plain = (total.log() - at_target).view(shape)
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    def backward(ctx, grad: Tensor, *of_plain: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.how is None:
            raise RuntimeError("the first backward has overwritten the scores with their gradient; there is no second")
        logits, *kept = ctx.saved_tensors
        log_sum, local_target = kept[:2]
        elsewhere, by_log_sum = kept[2:]
        grad, how = grad.reshape(-1), ctx.how
        if how.overwrite:
            ctx.how = None
        factors = Factors(
            by_softmax=grad if by_log_sum is None else grad * by_log_sum,
            at_target=ctx.extra * grad.masked_fill(elsewhere, 0.0),
            everywhere=ctx.everywhere * grad if ctx.everywhere else None,
        )
        grad_rows = grad_of_rows(
            logits.reshape(-1, logits.shape[-1]),
            log_sum,
            local_target.squeeze(-1),
            factors,
            ctx.words,
            compiled=how.compiled,
            overwrite=how.overwrite,
        )
        return grad_rows.view_as(logits), *(None,) * 6


class _How(NamedTuple):
    compiled: bool
    overwrite: bool
    plain: bool


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
    compiled: bool = False,
    overwrite: bool = False,
) -> Tensor:
    """-log softmax(logits)[target] per token, in float32 or wider, with optional label smoothing and z-loss.

    The arguments are those of `sharded_losses`, and the result its first one.
    """
    how = _How(compiled, overwrite, plain=False)
    return _losses(logits, target, axis, vocab_size, label_smoothing, z_loss, how)


def sharded_losses(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    compiled: bool = False,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the loss of each token with label smoothing and z-loss, its cross entropy), in float32 or wider. Without
    smoothing and
    z-loss both are the same tensor; else the cross entropy has no gradient.

    logits: [s, b, v/t], this rank's shard of the vocabulary; target: [s, b] global ids; -> [s, b] each. Columns beyond
    `vocab_size` are padding, with probability 0. Every rank of the axis must call.

    compiled: run the work on rows compiled (`megatron/core/ops/compile/compiled_region.py`). overwrite: the backward
    writes the gradient
    into the memory of `logits`, which nobody may read after that.
    """
    has_terms = bool(label_smoothing or z_loss)
    how = _How(compiled, overwrite, plain=has_terms)
    made = _losses(logits, target, axis, vocab_size, label_smoothing, z_loss, how)
    return made if has_terms else (made, made)


def _losses(
    logits: Tensor, target: Tensor, axis: Axis, vocab_size: int | None, label_smoothing: float, z_loss: float, how: _How
) -> Tensor | tuple[Tensor, Tensor]:
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"cross entropy: scores of {tuple(logits.shape[:-1])} tokens, but targets of {tuple(target.shape)}"
            + (sequence_parallel_hint(len(logits), len(target)) if logits.shape[1:-1] == target.shape[1:] else "")
        )
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    # Negative labels, such as -1, mark positions without loss.
    check_word_ids(target, vocab_size, "the labels", least=None)
    return _VocabParallelCrossEntropy.apply(logits, target, axis, vocab_size, label_smoothing, z_loss, how)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each token. vocab_parallel_logits: [s, b, v/t]; target: [s, b] -> [s, b]."""
    return sharded_cross_entropy(vocab_parallel_logits, target, get_mesh()["tp"], label_smoothing=label_smoothing)


__getattr__, __dir__ = lazy_names(__name__, {})
