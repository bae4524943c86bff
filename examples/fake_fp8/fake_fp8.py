"""Products of 8-bit factors, as fp8 training has them (arXiv:2209.05433): quantised, and multiplied after they are widened again.

    Q(z) = s round(z / s)        e4m3 for inputs and weights, e5m2 for gradients; s = amax / largest number of the format
    Y = Q(X) Q(W)^T              dX = Q(dY) Q(W)              dW = Q(dY)^T Q(X)

The scales of a step follow from the largest values of the step before, over all ranks (delayed scaling). The quantised input
is saved for dW instead of the input: a byte for each element.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.sync_persistent_module_buffers import ChangesAtStepEnd
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Placement
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.transformer.layer_parallel_context import LayerContext

INPUT, WEIGHT, GRAD = range(3)
FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = [torch.finfo(dtype).max for dtype in FORMATS]


class Scales(ChangesAtStepEnd):
    """The scales of one weight's three factors, and the largest values of the factors in the step so far."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer("scale", torch.tensor([8.0, 1.0, 1.0], dtype=dtype, device=device))  # [3]
        self.register_buffer("amax", torch.zeros(3, dtype=dtype, device=device))  # [3]
        self.register_buffer("largest", torch.tensor(LARGEST, dtype=dtype, device=device), persistent=False)
        self.scale /= self.largest
        over_all_ranks = Placement((3,), None, replicated_over=("tp",), partial_grad=("tp",))
        self.buffer_placements = {"amax": BufferPlacement("max", over_all_ranks)}

    def quantise(self, values: Tensor, factor: int) -> Tensor:
        """Return values of any shape in 8 bits, and remember the largest."""
        if self.training and values.numel():
            self.amax[factor] = torch.maximum(self.amax[factor], values.detach().abs().max())
        scaled = values / self.scale[factor]
        return scaled.clamp(-LARGEST[factor], LARGEST[factor]).to(FORMATS[factor])

    def widen(self, quantised: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
        return (quantised.to(self.scale.dtype) * self.scale[factor]).to(dtype)

    def rounded(self, values: Tensor, factor: int) -> Tensor:
        """Return values of any shape, rounded to 8 bits, in their own dtype."""
        return self.widen(self.quantise(values, factor), factor, values.dtype)

    def end_of_step(self) -> None:  # on every rank; `amax` is that of all ranks
        self.scale = torch.where(self.amax > 0, self.amax / self.largest, self.scale)
        self.amax.zero_()


class FakeFp8(MatmulBackend):
    """Without a state (a weight that no linear made, such as an adapter's), products are torch's."""

    def state_of(self, placement: Placement, dtype: torch.dtype, device: torch.device | str) -> Scales:
        return Scales(dtype, device)

    def forward(self, x: Tensor, weight: Tensor, state: Scales | None) -> Tensor:
        if state is None:
            return x @ weight.t()
        return state.rounded(x, INPUT) @ state.rounded(weight, WEIGHT).t()

    def dgrad(self, grad: Tensor, weight: Tensor, state: Scales | None) -> Tensor:
        if state is None:
            return grad @ weight
        return state.rounded(grad, GRAD) @ state.rounded(weight, WEIGHT)

    def wgrad(self, grad: Tensor, x: Tensor, state: Scales | None) -> Tensor:  # x is rounded: `restore` returned it
        if state is None:
            return grad.t() @ x
        return state.rounded(grad, GRAD).t() @ x

    def save(self, x: Tensor, state: Scales | None) -> tuple[Tensor, ...] | None:
        if state is None:
            return None
        return state.quantise(x, INPUT), x.new_empty(0)  # the second says the dtype

    def restore(self, saved: tuple[Tensor, ...], state: Scales | None) -> Tensor:
        quantised, like = saved
        return state.widen(quantised, INPUT, like.dtype)


class FakeFp8GPTModel(GPTModel):
    """GPT with 8-bit factors in every linear layer and the output layer."""

    def __init__(self, *given: Any, context: LayerContext, **named: Any):
        super().__init__(*given, context=context.with_matmul_backend(FakeFp8()), **named)


def states_of(model: nn.Module) -> dict[str, Scales]:
    """Return the scales of each product by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Scales)}
