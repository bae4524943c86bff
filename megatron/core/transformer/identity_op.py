"""Megatron's identities, in the place of parts that a layer lacks."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.core.base.lazy_imports import names_of_megatron


class IdentityOp(nn.Module):
    """Return the first argument: forward(x, ...) -> x, of any shape. The constructor takes any arguments."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """Return an identity: forward(...) -> a function that returns its first argument."""

    def forward(self, *_: Any, **__: Any) -> Callable[..., Any]:
        return super().forward


__getattr__ = names_of_megatron(__name__)
