"""Megatron's `get_bias_dropout_add`: the residual plus the dropout of an output with its bias."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """f((x, bias or None), residual, probability) -> residual + dropout(x + bias), with torch's generator.

    In a `TransformerLayer` it stands for the dropout of our layers, whose masks are those of one process in every layout.
    """
    del fused  # in Megatron's signature

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return residual + functional.dropout(x if bias is None else x + bias, prob, training)

    return add
