"""What formulas of regions are made of: they compute in float32 or wider and round once, at their end."""

import torch
from torch import Tensor


def wide_of(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def of_rows(grad: Tensor, like: Tensor | None) -> Tensor | None:
    """The gradient of a vector that each row used."""
    return None if like is None else grad.sum(dim=tuple(range(grad.dim() - 1))).to(like.dtype)


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide_of(x) if bias is None else wide_of(x) + wide_of(bias)
