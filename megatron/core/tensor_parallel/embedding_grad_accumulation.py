"""Table lookup whose gradient is summed in the dtype of the gradient buffer.

torch's own backward sums in the table's dtype. In bfloat16 a word that occurs 4,096 times with gradients of 0.01 would
get 4 instead of 41, since 4 + 0.01 rounds to 4.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.main_grad_interface import grad_was_added, open_main_grad


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table  # `main_grad` is an attribute of this object
        return functional.embedding(ids, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,), table = ctx.saved_tensors, ctx.table
        main_grad = open_main_grad(table)
        if main_grad is None:
            return None, _sums_of_rows(grad, ids, table.shape[0])
        grad = grad.to(main_grad.dtype)
        if grad.device.type == "cpu":  # only rows that occur; on an accelerator, counting them would block the host
            occurring, position = ids.unique(return_inverse=True)
            main_grad.index_add_(0, occurring, _sums_of_rows(grad, position, len(occurring)))
        else:
            main_grad.add_(_sums_of_rows(grad, ids, table.shape[0]))
        grad_was_added(table)
        return None, None


def _sums_of_rows(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The gradient of a table of `rows` rows, summed in a fixed order; index_add has none on some devices."""
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]. ids: [..], table: [rows, h] -> [.., h]"""
    return _Lookup.apply(ids, table)
