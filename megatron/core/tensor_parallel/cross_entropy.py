"""Cross entropy of logits that are sharded over the vocabulary. The logits are never gathered.

With logits x_v, l = log(sum_v exp(x_v)), and target probabilities q_v that sum to one:

    loss = -sum_v q_v log softmax_v = l - sum_v q_v x_v      three all-reduces of [s, b]: max, sum_v q_v x_v, sum of exp
    d loss / d x_v = softmax_v - q_v

q is 1 at the target. With label smoothing e (arXiv:1512.00567) q is 1 - e there and e / (K - 1) at each other of the K
tokens of the vocabulary. That is Megatron's meaning: e' = e K / (K - 1), loss = (1 - e') nll - e' mean(log softmax). K
counts tokens, never padding, so that the loss is the same at every tensor-parallel size (Megatron's issue 7452).

z-loss (arXiv:2204.02311, section 5) adds z l^2, which keeps l near 0; its gradient is 2 z l softmax_v.

Both are terms of training. A run reports the cross entropy without them: l - x at the target.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.user_error_and_torchrun_error_file import sequence_parallel_hint
from megatron.core.ops.cross_entropy_kernels import GradFactors, logits_grad, sums_of_rows
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel.token_id_check import check_token_ids


def plain_cross_entropy_of(losses: Tensor) -> Tensor | None:
    """Return the cross entropy alone, shaped as the losses, [b, s].

    A model hangs it on losses that have terms of training; None: the losses are the cross entropy.
    """
    return getattr(losses, "cross_entropy", None)


class _Options(NamedTuple):
    compiled: bool  # run the work on rows compiled
    overwrite: bool  # exponentials and the gradient may take the memory of the logits
    returns_plain: bool  # also return the cross entropy without smoothing and z-loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss and, where requested, the cross entropy without smoothing and z-loss, which has no gradient.

    Logits of half precision are saved, and the backward computes their exponentials again. That costs two passes
    over the logits in their own dtype, and no float32 copy of all (412 MB for 2048 tokens of GPT-2). Of wider logits the
    exponentials are saved in their place: as many bytes, and half of the work. Compiled, the logits are saved in every dtype.

    The backward writes the gradient into the saved memory, unless that is the caller's or a later backward will read it.
    """

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        target: Tensor,
        axis: Axis,
        vocab_size: int,
        smoothing: float,
        z_loss: float,
        options: _Options,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """logits: [s, b, v/t], target: [s, b] global ids -> losses [s, b], and the cross entropy [s, b] if requested"""
        shape = target.shape
        columns = logits.shape[-1]
        rows = logits.reshape(-1, columns)  # [tokens, v/t]
        target = target.reshape(-1)  # [tokens]
        first_id = axis.rank * columns
        local_vocab = min(max(vocab_size - first_id, 0), columns)  # this rank's; the other columns are padding
        # a target's logit is on one rank; the other ranks add zero
        is_elsewhere = (target < first_id) | (target >= first_id + columns)
        local_target = (target - first_id).masked_fill(is_elsewhere, 0).unsqueeze(-1)  # [tokens, 1]
        target_logits = rows.gather(-1, local_target).squeeze(-1)  # [tokens]

        # Detached: logits that are a view, as those of a module with a full backward hook, must not change in the graph.
        saved = logits.detach()
        exps = None
        is_wide = rows.dtype in (torch.float32, torch.float64)
        saves_exps = ctx.needs_input_grad[0] and is_wide and not options.compiled
        if saves_exps:
            if not (options.overwrite and logits.is_contiguous()):
                saved = logits.new_empty(logits.shape)
            exps = saved.view(-1, columns)  # [tokens, v/t]
        sums = sums_of_rows(rows, local_vocab, smoothing=bool(smoothing), compiled=options.compiled, exps=exps)

        # log(sum exp): the sums of exp were taken with each rank's own maximum; rescale them to the largest of all
        largest = collectives.all_reduce(sums.largest.clone(), axis, "max")  # [tokens]
        rescale = (sums.largest - largest).exp()
        sum_exp = collectives.all_reduce(sums.of_exp * rescale, axis)

        # sum_v q_v (x_v - largest)
        everywhere, extra = _target_probabilities(vocab_size, smoothing)
        at_target = (target_logits.to(sum_exp.dtype) - largest).masked_fill(is_elsewhere, 0.0)
        expected = at_target
        if smoothing:
            expected = extra * at_target + everywhere * (sums.of_logits - local_vocab * largest)
        if smoothing and options.returns_plain:
            expected, at_target = collectives.all_reduce(torch.stack((expected, at_target)), axis)
        else:
            collectives.all_reduce(expected, axis)  # without smoothing also at_target, which is the same tensor

        loss = sum_exp.log() - expected
        log_sum = sum_exp.log() + largest
        # The softmax is exp(logit - this rank's largest) times a factor of each row, and the gradient of l.
        factor = rescale / sum_exp
        if z_loss:
            factor *= 1 + 2 * z_loss * log_sum  # d loss / d l

        ctx.save_for_backward(saved, sums.largest, local_target, is_elsewhere, factor)
        ctx.everywhere = everywhere
        ctx.extra = extra
        ctx.local_vocab = local_vocab
        ctx.compiled = options.compiled
        ctx.saves_exps = saves_exps
        # exponentials are in memory of their own, or in that of logits which may be overwritten
        ctx.may_overwrite = saves_exps or options.overwrite

        if z_loss:
            loss = loss + z_loss * log_sum**2
        loss = loss.view(shape)  # [s, b]
        if not options.returns_plain:
            return loss
        plain = (sum_exp.log() - at_target).view(shape)  # [s, b]
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    def backward(ctx, grad: Tensor, *_grad_of_plain: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [s, b] -> the gradient of the logits [s, b, v/t].

        Saved: the logits and the largest of each row, of which the exponentials are computed again, or these; the targets of
        this rank; the factor of each row. No communication: each rank has the gradient of its own columns.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the vocabulary-parallel cross entropy has no second derivative; for one, call the model "
                "without labels, and take the loss of its logits by torch.nn.functional.cross_entropy"
            )
        saved, largest, local_target, is_elsewhere, factor = ctx.saved_tensors
        # With retain_graph=True another backward may follow. torch has no public name for asking.
        overwrite = ctx.may_overwrite and not torch._C._autograd._get_current_graph_task_keep_graph()
        grad = grad.reshape(-1)  # [tokens]
        factors = GradFactors(
            of_exp=grad * factor,
            at_target=ctx.extra * grad.masked_fill(is_elsewhere, 0.0),
            everywhere=ctx.everywhere * grad if ctx.everywhere else None,
        )
        grad_logits = logits_grad(
            saved.reshape(-1, saved.shape[-1]),
            None if ctx.saves_exps else largest,
            local_target.squeeze(-1),
            factors,
            ctx.local_vocab,
            compiled=ctx.compiled,
            overwrite=overwrite,
        )
        return grad_logits.view_as(saved), None, None, None, None, None, None


def _target_probabilities(vocab_size: int, smoothing: float) -> tuple[float, float]:
    """Return (target probability of every token, additional probability of the target)."""
    others = vocab_size - 1
    everywhere = smoothing / others if others else 0.0  # a vocabulary of one token has no other to smooth over
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
    """Return -log softmax(logits)[target] per token, in float32 or wider, with optional label smoothing and z-loss.

    logits: [s, b, v/t]; target: [s, b] global ids -> [s, b]. Every rank of the axis must call. Arguments and errors are
    those of `losses_and_cross_entropy`, and the result its first one.
    """
    options = _Options(compiled, overwrite, returns_plain=False)
    return _losses(logits, target, axis, vocab_size, label_smoothing, z_loss, options)


def losses_and_cross_entropy(
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
    """Return (the loss of each token with label smoothing and z-loss, its cross entropy), in float32 or wider.

    Without smoothing and z-loss both are the same tensor; else the cross entropy has no gradient.

    logits: [s, b, v/t], this rank's shard of the vocabulary; target: [s, b] global ids; -> [s, b] each. Columns beyond
    `vocab_size` are padding, with probability 0. Every rank of the axis must call. Raises ValueError if logits and
    target differ in [s, b], and ConfigError for a target of `vocab_size` or more.

    compiled: run the work on rows compiled (`megatron/core/ops/compile/compiled_region.py`). overwrite: where a gradient is
    needed, the forward (in float32 or wider, uncompiled) and the backward may write into the memory of `logits`, which nobody
    else may read after this call. A backward with retain_graph=True writes elsewhere, so that another may follow.
    RuntimeError in a backward with create_graph=True.
    """
    has_terms = bool(label_smoothing or z_loss)
    options = _Options(compiled, overwrite, returns_plain=has_terms)
    losses = _losses(logits, target, axis, vocab_size, label_smoothing, z_loss, options)
    return losses if has_terms else (losses, losses)


def _losses(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    vocab_size: int | None,
    label_smoothing: float,
    z_loss: float,
    options: _Options,
) -> Tensor | tuple[Tensor, Tensor]:
    if logits.shape[:-1] != target.shape:
        differ_in_length_alone = logits.shape[1:-1] == target.shape[1:]
        hint = sequence_parallel_hint(len(logits), len(target)) if differ_in_length_alone else ""
        raise ValueError(
            f"cross entropy: logits for {tuple(logits.shape[:-1])} tokens, but targets for {tuple(target.shape)}{hint}"
        )
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    # Negative labels, such as -1, mark positions without loss.
    check_token_ids(target, vocab_size, "the labels", least=None)
    if not torch.is_grad_enabled():
        logits = logits.detach()  # else the function would prepare a backward
    return _VocabParallelCrossEntropy.apply(logits, target, axis, vocab_size, label_smoothing, z_loss, options)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each token, over the tensor-parallel axis of the current mesh, whose ranks must all call.

    vocab_parallel_logits: [s, b, v/t]; target: [s, b] global ids -> [s, b], in float32 or wider. Megatron's function;
    errors are those of `losses_and_cross_entropy`.
    """
    return sharded_cross_entropy(vocab_parallel_logits, target, get_mesh()["tp"], label_smoothing=label_smoothing)


__getattr__, __dir__ = lazy_names(__name__, {})
