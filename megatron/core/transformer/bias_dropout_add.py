"""Megatron's `get_bias_dropout_add`: the residual plus the dropout of an output with its bias."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return f((x, bias or None), residual, probability) -> residual + dropout(x + bias), with torch's generator.

    x, residual and result: [s, b, h]; bias: [h]. `TransformerLayer` replaces the function by the dropout of our layers,
    whose masks are the same in every layout.
    """
    del fused  # in Megatron's signature

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        """x, residual: [s, b, h]; bias: [h] -> [s, b, h]"""
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        return residual + functional.dropout(x, prob, training)

    return add
