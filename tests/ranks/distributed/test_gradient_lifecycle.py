"""One place says what the gradients of a step are divided by, in whatever loop."""

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron.core.distributed.clear_reduce_divide_gradients import GradientStep
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import BatchShape, run_step


@pytest.mark.parametrize(
    ("options", "tokens", "divisor"),
    [
        ({}, 12.0, 12.0),
        ({}, 0.0, 1.0),  # nothing counts: no mean
        ({}, 0.25, 0.25),  # a sum of weights
        ({}, -3.0, -3.0),
        ({"loss_scale": 8.0, "nominal_tokens": 16.0}, 12.0, 6.0),
        ({"loss_scale": 8.0, "nominal_tokens": 16.0, "keeps_loss_scale": True}, 12.0, 0.75),
    ],
)
def test_the_divisor_undoes_the_scale_of_the_objective(options: dict[str, float], tokens: float, divisor: float):
    module = nn.Linear(2, 1, bias=False).double()
    gradients = GradientStep([module], **options)
    gradients.begin(1)
    assert gradients.objective_scale == options.get("loss_scale", 1.0) / options.get("nominal_tokens", 1.0)
    (module(torch.ones(1, 2, dtype=torch.float64)) * gradients.objective_scale).sum().backward()
    gradients.finish(tokens)
    assert gradients.divisor == divisor
    gradients.divide_gradients()
    kept = options["loss_scale"] if options.get("keeps_loss_scale") else 1.0
    assert module.weight.grad.tolist() == [[kept / (tokens or 1.0)] * 2]


class OneNumber(nn.Module):
    """forward() -> its parameter, of gradient 1."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, x: Tensor | None) -> None:
        del x

    def forward(self) -> Tensor:
        return self.number * 1.0


@pytest.mark.parametrize("weight", [2.0, 0.125, 0.0])
def test_a_loop_of_ones_own_divides_by_the_sum_of_weights(weight: float):
    """Two microbatches on two ranks, in buffers and without; and once more by `finalize_model_grads`, which changes nothing."""

    def forward_step(_: None, model: nn.Module):
        return model(), lambda output: (output * weight, weight, {})

    def work(mesh) -> tuple[float, float]:
        wrapped, plain = DistributedDataParallel(OneNumber(), mesh), OneNumber()
        for chunk in (wrapped, plain):
            run_step([chunk], [None], forward_step, mesh, BatchShape(1, 2))
        finalize_model_grads([wrapped], weight)
        return wrapped.module.number.main_grad.item(), plain.number.grad.item()

    for found in run_ranks({"dp": 2}, work):
        in_buffers, own = found
        assert in_buffers == (1.0 if weight else 0.0)
        assert own == (0.5 if weight else 0.0), "nobody sums it over the two ranks"
