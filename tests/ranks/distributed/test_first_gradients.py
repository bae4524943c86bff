"""The first gradient of a step overwrites what memory holds, whoever comes first and whether anybody comes."""

from itertools import product

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import TINY_GPT2, Layout, TinyTrainer
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.ops.main_grad_interface import grad_was_added, open_main_grad
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.linear_autograd import linear

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
                slot.name: (buffer.owned_range(slot), buffer.sums.values(slot).clone())
                for buffer in chunk.buffers
                for slot in buffer.plan.param_ranges
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


@pytest.mark.full
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
    assert {name: bool(grad.isnan().all()) for name, grad in before.items()} == dict(
        a=True, b=True, scale=False, odd=True
    )
    assert not before["scale"].any()


def test_a_step_that_begins_again_before_its_first_gradient_has_nothing_to_clear():
    """After an error, or in a loop that clears twice: the gradients of the last step have been released already."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    chunk = DistributedDataParallel(model, run_ranks({"dp": 1}, lambda mesh: mesh)[0], DataParallelConfig())
    gradients = []
    for _ in range(3):
        chunk.zero_grad_buffer(1)
        chunk.zero_grad_buffer(1)
        chunk(batch(0, 0)).sum().backward()
        chunk.finish_grad_reduce()
        gradients.append([parameter.main_grad.clone() for parameter in model.parameters()])
    expected = torch.autograd.grad(model(batch(0, 0)).sum(), list(model.parameters()))
    for step in gradients:
        torch.testing.assert_close(step, list(expected), rtol=1e-12, atol=1e-13)


class Unannounced(torch.autograd.Function):
    """x weight^T by a fork's own backward, which adds to `main_grad` as if that were there."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        return grad @ weight, None


STAGES_AND_SAID = [
    (0, True, "main_grad of a was changed without a call of open_main_grad"),
    (2, True, "main_grad of a was used, but ZeRO stage 2 or 3 has released it"),
    (0, False, None),
]


@pytest.mark.parametrize(("stage", "first", "said"), STAGES_AND_SAID)
def test_who_adds_without_a_word_is_told_where_that_would_be_lost(stage: int, first: bool, said: str | None):
    """Before a product that overwrites, or to memory that is not there, which would end the process. After one nothing is lost."""
    chunk = DistributedDataParallel(
        Model(), run_ranks({"dp": 1}, lambda mesh: mesh)[0], DataParallelConfig(zero_stage=stage)
    )
    a, x = chunk.module.a, batch(0, 0)

    def step() -> None:
        chunk.zero_grad_buffer(1)
        (Unannounced.apply(linear(x, a), a) if first else linear(Unannounced.apply(x, a), a)).sum().backward()

    if said is None:
        for _ in range(2):
            step()
        expected = torch.autograd.grad(((x @ a.t()) @ a.t()).sum(), a)[0]
        torch.testing.assert_close(a.main_grad, expected, rtol=1e-12, atol=1e-13)
        return
    with pytest.raises(RuntimeError, match=f"{said}.*open_main_grad"):
        for _ in range(2):
            step()


def test_a_released_gradient_has_a_shape_and_no_values():
    chunk = DistributedDataParallel(
        Model(), run_ranks({"dp": 1}, lambda mesh: mesh)[0], DataParallelConfig(zero_stage=2)
    )
    grad = chunk.module.odd.main_grad
    assert (grad.shape, grad.dtype, grad.numel()) == ((5, WIDTH), torch.float64, 5 * WIDTH)
    for use in (grad.norm, grad.zero_, lambda: grad + 1, lambda: repr(grad)):
        with pytest.raises(RuntimeError, match=r"(?s)main_grad.*ZeRO.*2.*3"):
            use()


def bytes_of_gradients(chunk: DistributedDataParallel) -> dict[str, int]:
    """Bytes of the memory that each `main_grad` lies in, without use of its values."""
    with torch._C.DisableTorchFunctionSubclass():
        return {name: p.main_grad.untyped_storage().nbytes() for name, p in chunk.module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_one_rank_take_memory_from_their_first_to_the_next_step(stage: int):
    """Unit by unit, so that the backward has freed the activations of a layer when the layer before it gets gradients."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    chunk = DistributedDataParallel(
        layers, run_ranks({"dp": 1}, lambda mesh: mesh)[0], DataParallelConfig(zero_stage=stage)
    )
    own, seen = (40 + 8) * 8, []  # bytes: 36 weights and 6 biases, each up to a multiple of 8 elements

    def step() -> None:
        chunk.zero_grad_buffer(1)
        hidden = layers[0](batch(0, 0))
        hidden.register_hook(lambda grad: seen.append(bytes_of_gradients(chunk)))
        seen.append(bytes_of_gradients(chunk))
        layers[2](layers[1](hidden)).sum().backward()
        seen.append(bytes_of_gradients(chunk))

    step()
    seen.clear()
    step()
    assert [tuple(bytes_by_name.values()) for bytes_by_name in seen] == [(0,) * 4, (0, 0, own, own), (own,) * 4]


READERS = {
    "main_grad": lambda trainer: sum(p.main_grad.abs().sum() for p in trainer.model[0].parameters()),
    "sums": lambda trainer: sum(part.abs().sum() for part in trainer.buffers[0].sums.tensors),
    "norm": lambda trainer: trainer.adam.grad_norm(),  # of views that were made before
    "scaled": lambda trainer: (trainer.model[0].scale_gradients(2.0), trainer.adam.grad_norm())[1],
    "reduced": lambda trainer: (trainer.model[0].finish_grad_reduce(), trainer.adam.grad_norm())[1],
}


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_gradients_that_have_not_come_are_zeros_to_every_reader(reader: str):
    def reads(mesh: Mesh) -> tuple[float, bool, float]:
        """(what it reads with gradients, whether they take memory in the next step, what it reads there)"""
        trainer = TinyTrainer(mesh, TINY_GPT2, Layout(poison=False))
        chunk, read = trainer.model[0], READERS[reader]
        for number in range(0 if reader == "main_grad" else 2):  # which later holds anything until it is opened
            trainer.step(number)
        for parameter in chunk.parameters():
            open_main_grad(parameter).fill_(1.0)
        before = float(read(trainer))
        chunk.zero_grad_buffer(1)
        return before, any(bytes_of_gradients(chunk).values()), float(read(trainer))

    ((before, takes_memory, after),) = run_ranks({"dp": 1}, reads)
    assert before > 0
    assert (takes_memory, after) == (False, 0.0)


@pytest.mark.parametrize("settings", [{"zero_stage": 0}, {"zero_stage": 1}, {"fixed_order_grad_reduce": True}], ids=str)
def test_gradients_that_ranks_sum_stay_in_one_piece(settings: dict):
    def pieces(mesh: Mesh) -> list[int]:
        chunk = DistributedDataParallel(Model(), mesh, DataParallelConfig(**settings))
        chunk.zero_grad_buffer(1)
        return [len({p.main_grad.untyped_storage().data_ptr() for p in chunk.module.parameters()})]

    assert run_ranks({"dp": 2}, pieces) == [[1], [1]]


def test_unused_memory_is_given_back_after_the_backwards_and_after_the_update():
    """By the optimizer's count of updates at each call."""

    def calls(mesh: Mesh) -> list[tuple[int, int]]:
        trainer, seen = TinyTrainer(mesh, TINY_GPT2, Layout()), []
        trainer.step(0, empty=lambda level: seen.append((level, trainer.adam.step_count)))
        return seen

    assert run_ranks({"dp": 1}, calls) == [[(1, 0), (2, 1)]]
