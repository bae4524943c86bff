"""ZeRO stages 2 and 3: which unit's parameters and gradients are there when, and what is said of one that is not."""

import copy
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import TINY_GPT2, Layout, run
from torch import Tensor, nn

from megatron.core.distributed.contiguous_buffers import ReleasableBuffer
from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.distributed.released_params_and_grads_guards import ReleasedParameter
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.linear_autograd import linear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer, submodules_of

WIDTH = 8


class Ours(nn.Module):
    """A layer whose weight's gradient is written once a use, and whose scale's once a backward, by autograd."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 3)
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight)) * self.scale


class Model(nn.Module):
    """Two layers, put together as `wiring` says."""

    def __init__(self, wiring: str):
        super().__init__()
        self.wiring, self.layers = wiring, nn.ModuleList([Ours(1), Ours(2)])
        if wiring == "shared":
            self.layers.append(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layers[0], self.layers[1]
        if self.wiring == "shared":
            for layer in self.layers:
                x = layer(x)
            return x
        return {
            "once": lambda: b(a(x)),
            "in a row": lambda: b(a(b(a(x)))),
            "side by side": lambda: b(a(x) + a(2 * x)),
            "looks at a child's": lambda: b(a(x)) * a.scale,
            "ties by hand": lambda: b(a(x)) @ a.weight.t(),
        }[self.wiring]()


def gradients(mesh: Mesh, wiring: str, config: DataParallelConfig, steps: int = 2, m: int = 2) -> dict[str, tuple]:
    """The gradients of the last of some steps, summed over microbatches and ranks, as this rank has them, by name."""
    chunk = DistributedDataParallel(Model(wiring), mesh, config)
    for _ in range(steps):
        chunk.zero_grad_buffer(m)
        for microbatch in range(m):
            generator = torch.Generator().manual_seed(10 * microbatch + mesh["dp"].rank)
            x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
            chunk.begin_microbatch(microbatch, backward=False)
            loss = chunk(x).square().sum()
            chunk.begin_microbatch(microbatch, backward=True)
            loss.backward()
        chunk.start_grad_reduce()
        chunk.finish_grad_reduce()
    return {
        slot.name: (buffer.owned_range(slot), buffer.sums.values(slot).clone())
        for buffer in chunk.buffers
        for slot in buffer.plan.param_ranges
    }


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("wiring", ["once", "in a row", "side by side", "shared"])
def test_a_layer_may_be_applied_several_times(wiring: str, stage: int, overlap: bool):
    """The number of its gradients is found out; nothing is said by hand."""
    config = DataParallelConfig(
        zero_stage=stage, overlap_grad_reduce=overlap, overlap_param_gather=overlap, poison_released_buffers=True
    )
    expected = by_plain_autograd(wiring)
    for got in run_ranks({"dp": 2}, lambda mesh: gradients(mesh, wiring, config)):
        for name, ((start, stop), values) in got.items():
            torch.testing.assert_close(values, expected[name].flatten()[start:stop], rtol=1e-12, atol=1e-13)


def by_plain_autograd(
    wiring: str, microbatches: Sequence[int] = (0, 1), ranks: Sequence[int] = (0, 1)
) -> dict[str, Tensor]:
    """The same sums of one process."""
    model = Model(wiring)
    for microbatch in microbatches:
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * microbatch + rank)
            model(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_travels_in_bfloat16_can_be_summed_wide(stage: int, wide: bool):
    """The sum of the ranks' rounded gradients: exactly where it is taken in the masters' type, float64 here, and to the rounding of
    three partial sums to 8 bits otherwise. In stage 1 a rank rounds the sum of its microbatches, in 2 and 3 each."""
    config = DataParallelConfig(
        zero_stage=stage,
        grad_reduce_in_bf16=True,
        reduce_scatter_with_fp32_accumulation=wide,
        poison_released_buffers=True,
    )
    rounded_together = [(0, 1)] if stage == 1 else [(0,), (1,)]
    parts = [by_plain_autograd("once", microbatches, [rank]) for rank in range(4) for microbatches in rounded_together]
    differs = False
    for got in run_ranks({"dp": 4}, lambda mesh: gradients(mesh, "once", config)):
        for name, ((start, stop), values) in got.items():
            expected = sum(part[name].bfloat16().double() for part in parts).flatten()[start:stop]
            bound = sum(part[name].abs() for part in parts).flatten()[start:stop] * (1e-14 if wide else 3 * 2**-8)
            assert ((values - expected).abs() <= bound).all()
            differs |= not torch.allclose(values, expected, rtol=1e-12)
    assert differs != wide


def test_a_layer_applied_twice_is_summed_once_a_backward():
    """From the second backward on; after the first it is summed with the next."""

    def sums(mesh: Mesh, steps: int) -> int:
        with mesh.ledger.record() as calls:
            gradients(mesh, "in a row", DataParallelConfig(zero_stage=3), steps=steps)
        return Counter(call.op for call in calls)["reduce_scatter"]

    first, both = (run_ranks({"dp": 2}, partial(sums, steps=steps))[0] for steps in (1, 2))
    assert both - first == 2 * 2  # two units, two microbatches


class WithContext(Ours):
    """A layer that reads a context besides, and returns it unchanged, as Megatron's does."""

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + context, context


class InPlace(Ours):
    """A layer that returns the tensor that it was given, changed."""

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(super().forward(context)), context


class Skipped(Ours):
    """A layer with parameters that returns its inputs alone."""

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x, context


class Stack(nn.Module):
    """A layer that makes the context, and four that read it. by_name: they are given it by keyword."""

    def __init__(self, make_layer: type[Ours], by_name: bool):
        super().__init__()
        self.by_name, self.encoder = by_name, Ours(0)
        self.layers = nn.ModuleList([make_layer(seed) for seed in range(1, 5)])

    def forward(self, x: Tensor) -> Tensor:
        context = self.encoder(x)
        x = 2 * context
        for layer in self.layers:
            x, context = layer(x, context=context) if self.by_name else layer(x, context)
        return x + context


def of_stack(mesh: Mesh, make_layer: type[Ours], by_name: bool) -> tuple[list[int], int, dict[str, tuple]]:
    return gathers_and_grads(mesh, Stack(make_layer, by_name))


def gathers_and_grads(mesh: Mesh, model: nn.Module) -> tuple[list[int], int, dict[str, tuple]]:
    """All-gathers of parameters in a forward and in its backward, buckets resident after it, and the gradients."""
    chunk = DistributedDataParallel(model, mesh, DataParallelConfig(zero_stage=3))
    x = torch.full((3, WIDTH), 0.1 * (1 + mesh["dp"].rank), dtype=torch.float64)
    chunk.zero_grad_buffer(1)
    gathers = []
    with mesh.ledger.record() as calls:
        chunk.begin_microbatch(0, backward=False)
        loss = chunk(x).square().sum()
        gathers.append(Counter(call.op for call in calls)["all_gather"])
        chunk.begin_microbatch(0, backward=True)
        loss.backward()
        gathers.append(Counter(call.op for call in calls)["all_gather"] - gathers[0])
    resident = sum(not isinstance(p, ReleasedParameter) for p in chunk.parameters())
    chunk.start_grad_reduce()
    chunk.finish_grad_reduce()
    grads = {
        slot.name: (buffer.owned_range(slot), buffer.sums.values(slot).clone())
        for buffer in chunk.buffers
        for slot in buffer.plan.param_ranges
    }
    return gathers, resident, grads


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make_layer", [WithContext, InPlace])
def test_a_context_that_a_layer_returns_costs_no_all_gather(make_layer: type[Ours], by_name: bool):
    """Each of the five units is gathered once in a forward and once in a backward, and none is resident after it."""
    plain = Stack(make_layer, by_name)
    for rank in range(2):
        plain(torch.full((3, WIDTH), 0.1 * (1 + rank), dtype=torch.float64)).square().sum().backward()
    expected = {name: p.grad.flatten() for name, p in plain.named_parameters()}
    for gathers, resident, grads in run_ranks({"dp": 2}, lambda mesh: of_stack(mesh, make_layer, by_name)):
        assert (gathers, resident) == ([5, 5], 0)
        for name, ((start, stop), values) in grads.items():
            torch.testing.assert_close(values, expected[name][start:stop], rtol=1e-12, atol=1e-13)


class Recomputed(Stack):
    """Layers in reentrant checkpoints, whose first forward has no gradients but inputs that require some."""

    def __init__(self):
        super().__init__(WithContext, by_name=False)

    def forward(self, x: Tensor) -> Tensor:
        context = self.encoder(x)
        x = 2 * context
        for layer in self.layers:
            x, context = torch.utils.checkpoint.checkpoint(layer, x, context, use_reentrant=True)
        return x + context


def test_layers_with_a_context_may_be_in_reentrant_checkpoints():
    plain = Stack(WithContext, by_name=False)
    for rank in range(2):
        plain(torch.full((3, WIDTH), 0.1 * (1 + rank), dtype=torch.float64)).square().sum().backward()
    expected = {name: p.grad.flatten() for name, p in plain.named_parameters()}
    for _, _, grads in run_ranks({"dp": 2}, lambda mesh: gathers_and_grads(mesh, Recomputed())):
        assert grads.keys() == expected.keys()
        for name, ((start, stop), values) in grads.items():
            torch.testing.assert_close(values, expected[name][start:stop], rtol=1e-12, atol=1e-13)


def test_a_layer_that_returns_its_inputs_alone_says_so():
    with pytest.raises(RuntimeError, match=r"(?s)layers\.0 \(Skipped\).*ZeRO stage 3.*--zero-stage 2"):
        run_ranks({"dp": 2}, lambda mesh: of_stack(mesh, Skipped, False))


@pytest.mark.parametrize(
    ("wiring", "name"), [("looks at a child's", "layers.0.scale"), ("ties by hand", "layers.0.weight")]
)
def test_a_released_parameter_says_so_by_name(wiring: str, name: str):
    """Its memory is not there: without a word the process would end by a signal."""
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*ZeRO.*3.*--zero-stage.*2"):
        run_ranks({"dp": 2}, lambda mesh: gradients(mesh, wiring, DataParallelConfig(zero_stage=3)))


def test_what_needs_no_values_can_be_asked_of_a_released_parameter():
    def work(mesh: Mesh) -> None:
        model = Model("once")
        DistributedDataParallel(model, mesh, DataParallelConfig(zero_stage=3))
        p = model.layers[0].weight
        assert (p.shape, p.dtype, p.numel(), p.dim()) == ((WIDTH, WIDTH), torch.float64, WIDTH**2, 2)
        assert p.grad is None and p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter) and p in {p}
        assert repr(p) == "Parameter containing:\nReleasedParameter(layers.0.weight, (8, 8))"
        for use in (
            lambda: p.data,
            lambda: p.T,
            lambda: p + 1,
            lambda: torch.cat([p, p]),
            p.tolist,
            p.detach,
            p.data_ptr,
            model.state_dict,
            model.float,
            lambda: copy.deepcopy(model),
        ):
            with pytest.raises(RuntimeError, match=r"(?s)layers\.[01]\.\w+.*ZeRO.*3"):
                use()

        with pytest.raises(ValueError, match="contiguous buffers"):
            model.load_state_dict({"layers.0.weight": torch.zeros(8, 8)}, strict=False, assign=True)

    run_ranks({"dp": 2}, work)


@pytest.mark.parametrize("kind", ["parameters", "gradients"])
def test_poisoned_memory_shows_what_is_used_while_it_is_away(kind: str):
    """Views taken while the values were there: nothing else sees these."""

    def work(mesh: Mesh) -> tuple[Tensor, Tensor]:
        model, seen = Model("once"), []
        chunk = DistributedDataParallel(model, mesh, DataParallelConfig(zero_stage=3, poison_released_buffers=True))
        weight = model.layers[0].weight
        take = (
            (lambda *_: seen.append(weight.data))
            if kind == "parameters"
            else (lambda *_: seen.append(weight.main_grad))
        )
        model.layers[0].register_forward_hook(take, prepend=True)
        chunk.begin_microbatch(0, backward=False)
        return chunk(torch.ones(1, WIDTH, dtype=torch.float64)), seen[0]

    for output, view in run_ranks({"dp": 2}, work):
        assert output.isfinite().all() and view.isnan().all()


@contextmanager
def open_at_once() -> Iterator[dict[int, int]]:
    """The largest number of parameter and gradient buckets of the block that had their memory at a time, by thread."""
    now, most, opened, released = Counter(), Counter(), ReleasableBuffer.open, ReleasableBuffer.release

    def count(self: ReleasableBuffer, change: int) -> None:
        me = threading.get_ident()
        if self.is_open == (change < 0):
            now[me] += change
            most[me] = max(most[me], now[me])

    def open_(self: ReleasableBuffer) -> Tensor:
        count(self, +1)
        return opened(self)

    def release(self: ReleasableBuffer) -> None:
        if now[threading.get_ident()]:  # not that of the beginning, where all are open
            count(self, -1)
        released(self)

    ReleasableBuffer.open, ReleasableBuffer.release = open_, release
    try:
        yield most
    finally:
        ReleasableBuffer.open, ReleasableBuffer.release = opened, released


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [("zb-h1", 3), *(pytest.param(*pair, marks=pytest.mark.full) for pair in (("zb-h1", 2), ("1f1b", 2), ("1f1b", 3)))],
)
@pytest.mark.full
def test_a_unit_is_there_only_while_it_computes(schedule: str, stage: int):
    """One unit's parameters and one's gradients, and, where weight gradients are put off, those of a table that a stage holds: the
    embedding writes in the backward, the output layer after it. Four units a stage, all of them would be eight."""
    config = DataParallelConfig(zero_stage=stage, ddp_bucket_size=500)
    model = replace(TINY_GPT2, num_layers=8)
    with open_at_once() as most:
        run(model, Layout(pp=2, dp=2, m=4, schedule=schedule, data_parallel=config), steps=2)
    assert len(most) == 4 and max(most.values()) <= 2


class Odd(nn.Module):
    """A layer with what is seldom: a frozen weight, a parameter that no forward uses, one of no and one of a single element."""

    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = Ours(1), Ours(2), Ours(3)
        self.frozen.weight.requires_grad_(False)
        self.none = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x)) * self.one + self.none.sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_unused_and_empty_parameters_are_no_special_case(stage: int):
    """Four ranks, so that most own nothing of the smallest; two steps of sgd, against plain autograd on one process."""

    def batch(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)

    def work(mesh: Mesh) -> dict[str, tuple]:
        chunk = DistributedDataParallel(
            Odd(), mesh, DataParallelConfig(zero_stage=stage, overlap_grad_reduce=True, poison_released_buffers=True)
        )
        settings = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        sgd = FlatOptimizer(chunk.buffers, settings, mesh)
        for step in range(2):
            chunk.zero_grad_buffer(1)
            chunk.begin_microbatch(0, backward=False)
            loss = chunk(batch(step, mesh["dp"].rank)).square().sum()
            chunk.begin_microbatch(0, backward=True)
            loss.backward()
            chunk.start_grad_reduce()
            chunk.finish_grad_reduce()
            assert math.isfinite(sgd.grad_norm())
            sgd.step(0.1)
            chunk.gather_params()
        return {
            s.name: (b.owned_range(s), b.owned_params.values(s).clone())
            for b in chunk.buffers
            for s in b.plan.param_ranges
        }

    plain = Odd()
    for step in range(2):
        for p in plain.parameters():
            p.grad = None
        sum(plain(batch(step, rank)).square().sum() for rank in range(4)).backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
    expected = dict(plain.named_parameters())
    for got in run_ranks({"dp": 4}, work):
        assert got.keys() == expected.keys() - {"frozen.weight"}
        for name, ((start, stop), values) in got.items():
            torch.testing.assert_close(
                values.flatten(), expected[name].detach().flatten()[start:stop], rtol=1e-12, atol=1e-14
            )


def test_a_decoder_of_ours_is_gathered_once_in_a_backward():
    """Its layers hand on the encoder's output: three of them, and the final norm."""

    def work(mesh: Mesh) -> None:
        config = ModelConfig(num_layers=3, hidden_size=WIDTH, num_attention_heads=2, fp64=True)
        spec = ModuleSpec(TransformerLayer, submodules=submodules_of(config, cross_attention=True))
        context = LayerContext.from_mesh(mesh, torch.float64)
        block = TransformerBlock(config, spec, layers=range(3), layer_context=context)
        chunk = DistributedDataParallel(block, mesh, DataParallelConfig(zero_stage=3))
        x, memory = torch.randn(2, 5, 1, WIDTH, dtype=torch.float64).requires_grad_().unbind()
        chunk.zero_grad_buffer(1)
        with mesh.ledger.record() as calls:
            chunk.begin_microbatch(0, backward=False)
            loss = chunk(x, None, memory).sum()
            assert Counter(call.op for call in calls)["all_gather"] == 4
            chunk.begin_microbatch(0, backward=True)
            loss.backward()
            assert Counter(call.op for call in calls)["all_gather"] == 4 + 4
        assert all(isinstance(p, ReleasedParameter) for p in chunk.parameters())

    run_ranks({"dp": 2}, work)
