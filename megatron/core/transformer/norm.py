"""Normalization of the residual stream. Under sequence parallelism a rank normalizes its part of the sequence."""

from torch import Tensor, nn
from torch.nn import functional

from megatron.core.placement import Constant
from megatron.core.tensor_parallel.layers import TensorParallel


class LayerNorm(nn.Module):
    """x -> (x - mean) / sqrt(var + epsilon) * weight + bias over the last dimension."""

    def __init__(self, width: int, epsilon: float, tp: TensorParallel):
        super().__init__()
        self.epsilon = epsilon
        self.weight = tp.replicated((width,), Constant(1.0))
        self.bias = tp.replicated((width,), Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x -> x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float, tp: TensorParallel):
        super().__init__()
        self.epsilon = epsilon
        self.weight = tp.replicated((width,), Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def make_norm(kind: str, width: int, epsilon: float, tp: TensorParallel) -> nn.Module:
    return _NORMS[kind](width, epsilon, tp)
