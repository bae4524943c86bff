"""Rows looked up in a table, the gradient of a row being summed over its tokens in the precision of the gradient buffer.

torch's own backward sums in the table's precision: in bfloat16 a word that occurs 4,096 times with gradients of 0.01 would get 4
instead of 41, since 4 + 0.01 rounds to 4.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.main_grad import grad_was_added, open_main_grad


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table  # its buffer hangs on this very object
        return functional.embedding(ids, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,), table = ctx.saved_tensors, ctx.table
        main_grad = open_main_grad(table)
        if main_grad is None:
            return None, _sums_of_rows(grad, ids, table.shape[0])
        grad = grad.to(main_grad.dtype)
        if grad.device.type == "cpu":  # rows that occur; elsewhere counting them would wait for the device
            occurring, position = ids.unique(return_inverse=True)
            main_grad.index_add_(0, occurring, _sums_of_rows(grad, position, len(occurring)))
        else:
            main_grad.add_(_sums_of_rows(grad, ids, table.shape[0]))
        grad_was_added(table)
        return None, None


def _sums_of_rows(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The gradient of a table of `rows` rows; in a fixed order, which index_add has not on every device."""
    return torch.ops.aten.embedding_dense_backward(grad, ids, rows, -1, False)


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]. ids: [..], table: [rows, h] -> [.., h]"""
    return _Lookup.apply(ids, table)
