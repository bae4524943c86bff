"""The first gradient of a step overwrites what memory holds, whoever comes first and whether anybody comes."""

from itertools import product

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.main_grad import grad_was_added, open_main_grad
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel.linear import linear

WIDTH = 6


class OwnScale(torch.autograd.Function):
    """x * scale by a fork's own backward, which adds to the buffer itself."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        of_scale = (grad * x).sum(0)
        if (main_grad := open_main_grad(ctx.scale)) is None:
            return grad * scale, of_scale
        main_grad.add_(of_scale)
        grad_was_added(ctx.scale)
        return grad * scale, None


class Model(nn.Module):
    """Whose step is put together anew each time."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "scale": (WIDTH,), "odd": (5, WIDTH)}
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)
            )
        self.wiring = ""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.wiring.split():
            x = {
                "a": lambda x: linear(x, self.a),
                "b": lambda x: linear(x, self.b),
                "a-by-autograd": lambda x: x @ self.a.t(),
                "scale": lambda x: OwnScale.apply(x, self.scale),
                "odd": lambda x: linear(linear(x, self.odd), self.odd.t().detach()),
            }[part](x)
            x = torch.tanh(x)
        return x


STEPS = ["a b scale odd", "a b scale odd", "a scale", "a a-by-autograd b odd", "b a-by-autograd", "b", "odd b scale a"]
STAGES = [{"zero_stage": stage} for stage in range(4)] + [{"fixed_order_grad_reduce": True}]


def gradients_of_steps(mesh: Mesh, config: DataParallelConfig, m: int) -> list[dict[str, tuple]]:
    """After each step, the sums of gradients that this rank has."""
    chunk = DistributedDataParallel(Model(), mesh, config)
    results = []
    for wiring in STEPS:
        chunk.zero_grad_buffer(m)
        for microbatch in range(m):
            chunk.module.wiring = wiring if microbatch == 0 else STEPS[0]
            chunk.begin_microbatch(microbatch, backward=False)
            loss = chunk(batch(mesh["dp"].rank, microbatch)).sum()
            chunk.begin_microbatch(microbatch, backward=True)
            loss.backward()
        chunk.start_grad_reduce()
        chunk.finish_grad_reduce()
        results.append(
            {
                slot.name: (buffer.kept(slot), buffer.sums.values(slot).clone())
                for buffer in chunk.buffers
                for slot in buffer.plan.slots
            }
        )
    return results


def batch(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def by_plain_autograd(wiring: str, m: int) -> dict[str, Tensor]:
    model = Model()
    for rank, microbatch in product(range(2), range(m)):
        model.wiring = wiring if microbatch == 0 else STEPS[0]
        model(batch(rank, microbatch)).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_gradients_equal_autograds_whoever_comes_first(settings: dict, m: int):
    """Also with NaN in the place of all zeros that are not needed."""
    config = DataParallelConfig(poison_released_buffers=True, **settings)
    for steps in run_ranks({"dp": 2}, lambda mesh: gradients_of_steps(mesh, config, m)):
        for wiring, got in zip(STEPS, steps):
            expected = by_plain_autograd(wiring, m)
            for name, ((start, stop), values) in got.items():
                torch.testing.assert_close(
                    values, expected[name].flatten()[start:stop], rtol=1e-12, atol=1e-13, msg=f"{name} after {wiring}"
                )


def test_weights_of_products_are_not_set_to_zero():
    """From the second step on: what they hold before the first gradient is what they held before, or NaN to show it."""
    chunk = DistributedDataParallel(
        Model(), run_ranks({"dp": 1}, lambda mesh: mesh)[0], DataParallelConfig(poison_released_buffers=True)
    )
    chunk.module.wiring = STEPS[0]
    for _ in range(2):
        chunk.zero_grad_buffer(1)
        before = {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}
        chunk(batch(0, 0)).sum().backward()
    assert {name: bool(grad.isnan().all()) for name, grad in before.items()} == {
        "a": True,
        "b": True,
        "scale": False,
        "odd": True,
    }
    assert not before["scale"].any()
