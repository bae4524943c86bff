"""Embedding lookup whose gradient is summed in the dtype of the gradient buffer.

torch's own backward sums in the weight's dtype. In bfloat16 a token that occurs 4,096 times with gradients of 0.01
would get 4 instead of 41, since 4 + 0.01 rounds to 4.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.main_grad_interface import grad_was_added, open_main_grad


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        """ids: [..], weight: [rows, h] -> [.., h]"""
        ctx.save_for_backward(ids)  # the gradient is a sum by id; it needs no values of the weight
        ctx.weight = weight  # `main_grad` is an attribute of this object
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None]:
        """grad: [.., h] -> the weight's gradient [rows, h], None if it is in `main_grad`

        Saved: the ids, by which the gradient is summed; it needs no values of the weight.
        """
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        main_grad = open_main_grad(weight)
        if main_grad is None:
            return None, _sum_by_id(grad, ids, weight.shape[0])
        grad = grad.to(main_grad.dtype)
        if grad.device.type == "cpu":  # only rows that occur; on an accelerator, counting them would block the host
            occurring_ids, position = ids.unique(return_inverse=True)
            main_grad.index_add_(0, occurring_ids, _sum_by_id(grad, position, len(occurring_ids)))
        else:
            main_grad.add_(_sum_by_id(grad, ids, weight.shape[0]))
        grad_was_added(weight)
        return None, None


def _sum_by_id(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Sum the gradients of each id, in a fixed order; index_add has none on some devices.

    grad: [.., h], ids: [..] -> [rows, h]
    """
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)


def lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids]. ids: integers [..], weight: [rows, h] -> [.., h]. An id must be below `rows`."""
    return _Lookup.apply(ids, weight)
