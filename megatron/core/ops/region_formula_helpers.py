"""Helpers of the formulas of compiled regions: they compute in float32 or wider and round once, at their end."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Return x, of any shape, in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sum_over_rows(grad: Tensor, vector: Tensor | None) -> Tensor | None:
    """Return the gradient of a vector [h] that was added to, or multiplied, each row: [h].

    grad: [.., h]. The result is in the dtype of the vector; None without a vector.

    Sums of 8 rows first, whose elements are made in one pass and stay in the cache. For a GELU of [1024, 2048] in
    bfloat16 with its bias 1.4 ms on two threads, and 2.1 in one sum; by 32 rows it takes twice as long as that.
    """
    if vector is None:
        return None
    rows = grad.reshape(-1, grad.shape[-1])  # [rows, h]
    if len(rows) % 8 == 0:
        rows = rows.unflatten(0, (-1, 8)).sum(dim=1)  # [rows / 8, h]
    return rows.sum(dim=0).to(vector.dtype)


def widened_add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias, widened; without a bias, x widened. x: [.., h], bias: [h] or the last dimensions of x."""
    return widen(x) if bias is None else widen(x) + widen(bias)
