"""Activations that wait for their backward in a tier or in slots: the same bits and the same calls, less memory on the device."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import (
    SEQ,
    TINY_GPT2,
    TINY_LLAMA,
    Layout,
    Outcome,
    assert_equal,
    assert_same_bits,
    build_chunks,
    build_pipeline,
    forward_step,
    microbatches,
    run,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload import activation_offload
from megatron.core.offload.activation_offload import OffloadBufferPool, StageActivations
from megatron.core.offload.contiguous_activation_buffer import RecomputeInputSlots
from megatron.core.offload.host_and_file_stores import FileOffloadStore
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.transformer_block import TransformerBlock

MODELS = {"dropout": TINY_GPT2, "gated": TINY_LLAMA}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
ZERO3 = DataParallelConfig(zero_stage=3, overlap_param_gather=True, overlap_grad_reduce=True)


class LateCopies:
    """A side stream whose copies happen when they are waited for, and not before; what they fill is NaN until then."""

    def __init__(self, device: torch.device):
        self.device = device

    def start_copy(self, target: Tensor, source: Tensor):
        if target.is_floating_point():
            target.fill_(float("nan"))
        else:
            target.fill_(255)  # bytes of a NaN
        return AsyncHandle(lambda: target.copy_(source), target)


@pytest.fixture
def late(monkeypatch):
    """What an accelerator does with memory of the host."""
    make = OffloadBufferPool.__init__

    def late_room(self, offload_store, device):
        make(self, offload_store, device)
        assert self.side is None, "what a CPU has"
        self.side = LateCopies(device)

    monkeypatch.setattr(OffloadBufferPool, "__init__", late_room)


# ---------------------------------------------------------------- the same numbers


SLOTS, PARTS = {"contiguous_checkpointing": True}, {"distribute_saved_activations": True}
ALL, ALL2, HALF = ({"cpu_offloading_num_layers": n} for n in (4, 2, 1))
SAVED = {"min_offloaded_tensor_size": 1}
TP2SP = {"tp": 2, "sp": True}
CASES = [  # (model, where it waits, settings, layout)
    ("dropout", "file", ALL, {"recompute": "uniform 2", "m": 2}),
    ("dropout", "late", ALL | SAVED, {"m": 2}),
    ("gated", "file", HALF | SLOTS, {"pp": 2, "m": 4, "schedule": "zb-h1", "recompute": "uniform 1"}),
    ("dropout", "device", SLOTS | PARTS, {"tp": 2, "pp": 2, "m": 4, "recompute": "uniform 1", "delayed": True}),
    ("gated", "device", SLOTS, {**TP2SP, "pp": 2, "m": 4, "schedule": "zb-h1", "recompute": "uniform 1"}),
    ("dropout", "device", SLOTS, {"pp": 2, "v": 2, "m": 4, "schedule": "interleaved", "recompute": "block 1"}),
    ("gated", "file", ALL | SAVED, {**TP2SP, "m": 2}),
    ("gated", "file", HALF | SLOTS, {"pp": 2, "v": 2, "m": 3, "schedule": "zb-v", "recompute": "uniform 1"}),
    ("dropout", "late", HALF | SAVED, {"pp": 2, "v": 2, "m": 3, "schedule": "zb-v"}),
    ("dropout", "file", ALL | PARTS, {"tp": 4, "recompute": "uniform 1"}),
    ("dropout", "late", HALF | SAVED, {"pp": 2, "v": 2, "m": 4, "schedule": "interleaved", "recompute": "block 1"}),
    ("gated", "late", HALF | SAVED, {"pp": 2, "m": 4, "schedule": "zb-h1", "tp": 2}),
    ("dropout", "late", ALL, {**TP2SP, "recompute": "uniform 1", "m": 2, "delayed": True}),
    ("gated", "host", ALL2 | SAVED, {"pp": 2, "m": 4, "schedule": "zb-h1", "recompute": "selective"}),
    ("dropout", "file", ALL | SAVED, {"dp": 2, "m": 2, "data_parallel": ZERO3}),
    ("gated", "params", ALL, {"dp": 2, "m": 2, "recompute": "uniform 1", "data_parallel": ZERO3}),
    ("dropout", "device", SLOTS, {"dp": 2, "pp": 2, "m": 2, "recompute": "uniform 1", "data_parallel": ZERO3}),
]


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(), steps=1)


def offload(place: str, folder: Path) -> OffloadConfig:
    if place == "file":
        return OffloadConfig(offload_dir=str(folder), optimizer_offload_fraction=0.0)
    return OffloadConfig(offload_dir=str(folder), offload_params=True) if place == "params" else OffloadConfig()


def settings_for(settings: dict, layout: Layout) -> dict:
    return settings | (FULL if layout.recompute[:5] in ("unifo", "block") else {})


@pytest.mark.parametrize(
    ("model", "place", "settings", "layout"),
    [
        pytest.param(
            model,
            place,
            settings,
            Layout(**layout),
            id=f"{place}-{Layout(**layout)}-{'-'.join(settings)}",
            marks=[pytest.mark.full] * (i > 0),
        )
        for i, (model, place, settings, layout) in enumerate(CASES)
    ],
)
def test_numbers_and_calls_are_those_without(
    model: str, place: str, settings: dict, layout: Layout, tmp_path: Path, request: pytest.FixtureRequest
):
    if place == "late":
        request.getfixturevalue("late")
    config, parts = (
        replace(MODELS[model], **settings_for(settings, layout)),
        PARTS if PARTS.items() <= settings.items() else {},
    )
    got = run(config, replace(layout, offload=offload(place, tmp_path)), steps=1)
    same = run(replace(MODELS[model], **settings_for(parts, layout)), layout, steps=1)
    assert_equal(got, one_process(model), 1e-10)
    assert_same_bits(got, same)
    assert got.calls == same.calls
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- less memory


class LiveBytes(TorchDispatchMode):
    """The bytes of every memory made inside, and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in given | self.sizes.keys():
                memory = x.untyped_storage()
                self.sizes[id(memory)] = memory.nbytes()
                weakref.finalize(memory, self.sizes.pop, id(memory))
        return result

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def live_after_forward(mesh: Mesh, config: ModelConfig, folder: Path | None, settled: bool = False, m: int = 1) -> int:
    """Bytes alive on the device between so many forwards and their backwards."""
    offloads = OffloadConfig(offload_dir=str(folder), optimizer_offload_fraction=0.0) if folder else OffloadConfig()
    offload_store = FileOffloadStore(folder, mesh["world"].rank, block=4096) if folder else None
    layout = Layout(tp=mesh["tp"].size, recompute="none", offload=offloads)
    config = replace(config, hidden_dropout=0.0, attention_dropout=0.0)
    chunks, _, _ = build_chunks(
        mesh, replace(config), replace(layout, recompute=recompute_of(config)), offload_store=offload_store
    )
    data = iter([*microbatches(BatchShape(2, m), 0, mesh)])  # not counted: a process keeps the samples that it has made
    with LiveBytes() as live:
        loss = torch.stack([forward_step(data, chunks[0])[0].sum() for _ in range(m)])
        stage = layers_of(chunks[0]).activations
        layer = stage._last() if settled else None
        while layer is not None:
            layer.finish_offload()
            layer = layer.before
        gc.collect()
        total = live.total
        loss.sum().backward()
    if offload_store is not None:
        offload_store.close()
    return total


def recompute_of(config: ModelConfig) -> str:
    return "none" if config.recompute_granularity is None else f"uniform {config.recompute_num_layers or 1}"


def layers_of(chunk: nn.Module) -> TransformerBlock:
    return next(module for module in chunk.modules() if isinstance(module, TransformerBlock))


INPUT = SEQ * 2 * 16 * 8  # bytes of [s, b, h]


@pytest.mark.full
def test_inputs_on_the_way_out_are_two(tmp_path: Path):
    """Of four layers' inputs the device has those of the last two until the next microbatch, and after that none."""
    config = replace(MODELS["dropout"], **FULL)
    live = lambda more, folder, *how: run_ranks(  # noqa: E731
        {}, lambda mesh: live_after_forward(mesh, replace(config, **more), folder, *how)
    )[0]
    assert live({}, None, False, 2) - live(ALL, tmp_path, False, 2) == (4 + 2) * INPUT
    plain = live({}, None)
    assert plain - live(ALL, tmp_path) == 2 * INPUT
    assert plain - live(ALL, tmp_path, True) == 4 * INPUT
    assert plain - live(HALF, tmp_path, True) == INPUT


@pytest.mark.full
def test_what_offloaded_layers_save_does_not_grow_with_them(tmp_path: Path):
    """Between forward and backward four layers hold no more of the device than two."""
    for model in MODELS.values():
        sizes = [
            run_ranks(
                {},
                partial(
                    live_after_forward,
                    config=replace(model, num_layers=n, cpu_offloading_num_layers=n, **SAVED),
                    folder=tmp_path,
                    settled=True,
                ),
            )[0]
            for n in (2, 4)
        ]
        assert sizes[0] == sizes[1]


@pytest.mark.full
def test_slots_in_parts_take_a_rank_its_part():
    config = replace(MODELS["dropout"], **FULL)
    plain, slots = (
        run_ranks({"tp": 2}, partial(live_after_forward, config=replace(config, **more), folder=None))[0]
        for more in ({}, SLOTS | PARTS)
    )
    assert plain - slots == 4 * INPUT // 2


@pytest.mark.full
def test_a_received_input_lives_as_long_as_its_layers_keep_it():
    """Beside what the layers keep the executor holds nothing: with inputs in slots, the received memory is free after the forward."""

    def work(mesh: Mesh) -> list[bool]:
        config = replace(MODELS["dropout"], num_layers=2, **FULL, **SLOTS)
        pipeline = pipeline_of(mesh, config, Layout(pp=2, recompute="uniform 1"))
        gone: list[bool] = []
        if mesh["pp"].rank == 1:
            layers = layers_of(pipeline.chunks[1])
            layers.register_forward_pre_hook(
                lambda _, inputs: received.append(weakref.ref(inputs[0].untyped_storage()))
            )
            received: list[weakref.ref] = []
            backward = pipeline.chunks[1].begin_microbatch

            def begin(microbatch: int, *, backward: bool) -> None:
                if backward:
                    gc.collect()
                    gone.append(received[0]() is None)
                begin_as_before(microbatch, backward=backward)

            begin_as_before, pipeline.chunks[1].begin_microbatch = backward, begin
        train_once(pipeline, mesh)
        return gone

    assert run_ranks({"pp": 2}, work) == [[], [True]]


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t(), lambda x: x[:, :3].t(), lambda x: x[:, None, ::2].transpose(0, 2), lambda x: x[:1].expand(4, 6)],
)
def test_a_slot_gives_the_values_back_whatever_the_strides(make):
    x = make(torch.arange(24.0).view(4, 6))
    assert torch.equal(RecomputeInputSlots().keep(x)(), x)


def test_a_slot_is_free_when_nothing_looks_into_it():
    buffer, x = RecomputeInputSlots(), torch.arange(6.0).view(2, 3).t()
    buffer.reserve(2)
    first, second = buffer.keep(x), buffer.keep(x + 10)
    part = first()[1:]
    assert part.stride() == x[1:].stride() and torch.equal(part, x[1:])
    with pytest.raises(RuntimeError, match=r"(?s)2.*--contiguous-checkpointing"):
        buffer.keep(x)
    del first
    with pytest.raises(RuntimeError, match="in use"):
        buffer.keep(x)
    assert torch.equal(part, x[1:])
    del part
    third = buffer.keep(x + 20)
    assert torch.equal(second(), x + 10) and torch.equal(third(), x + 20) and buffer.in_use == 2
    del second, third
    assert buffer.in_use == 0
    with pytest.raises(RuntimeError, match="slot"):
        buffer.keep(torch.zeros(1000))


def pipeline_of(mesh: Mesh, config: ModelConfig, layout: Layout, step=forward_step) -> Pipeline:
    return build_pipeline(mesh, config, layout, BatchShape(2, layout.m), build_chunks(mesh, config, layout), step)


def train_once(pipeline: Pipeline, mesh: Mesh) -> None:
    for chunk in pipeline.chunks.values():
        chunk.train()
        chunk.zero_grad_buffer(pipeline.batch.num_microbatches)
    pipeline.run(data_of(pipeline, mesh), 0)


def data_of(pipeline: Pipeline, mesh: Mesh) -> dict[int, Iterator]:
    return {stage: microbatches(pipeline.batch, 0, mesh) for stage in pipeline.chunks}


SCHEDULES_AND_PEAKS = [
    ("1f1b", 1, {0: 2, 1: 1}),
    ("zb-h1", 1, {0: 2, 1: 1}),
    ("gpipe", 1, {0: 4, 1: 4}),
    ("interleaved", 2, {0: 4, 1: 3, 2: 2, 3: 1}),
    ("zb-v", 2, {0: 4, 1: 3, 2: 2, 3: 1}),
]
NO_NORM_FIRST = ("branch", "post")  # attention reads the layer's input itself, and its weight gradient does in W
SLOTS_OF_PLACEMENTS = [
    *(("pre", *row) for row in SCHEDULES_AND_PEAKS),
    *((placement, *row) for placement in NO_NORM_FIRST for row in SCHEDULES_AND_PEAKS if row[0] != "zb-h1"),
    *((placement, "zb-h1", 1, {0: 2, 1: 2}) for placement in NO_NORM_FIRST),
    ("pre", "zb-interleaved", 2, {0: 4, 1: 3, 2: 2, 3: 1}),
    *((placement, "zb-interleaved", 2, {0: 4, 1: 4, 2: 2, 3: 2}) for placement in NO_NORM_FIRST),
]


def test_slots_suffice_if_weight_gradients_read_the_inputs():
    config = replace(MODELS["gated"], norm_placement="branch", **FULL)
    layout = Layout(pp=2, m=3, schedule="zb-h1", recompute="uniform 1")
    plain, slots = (run(replace(config, **more), layout, steps=1) for more in ({}, SLOTS))
    assert_same_bits(slots, plain)


def test_a_shard_in_a_slot_is_free_after_the_backward_whatever_reads_the_whole():
    layout = Layout(tp=2, pp=2, m=3, schedule="zb-h1", recompute="uniform 1")
    config = replace(MODELS["gated"], norm_placement="branch", **FULL, **SLOTS, **PARTS)

    def work(mesh: Mesh) -> dict[int, int]:
        pipeline = pipeline_of(mesh, config, layout)
        train_once(pipeline, mesh)
        return {stage: layers_of(chunk).activations.slots._allocated for stage, chunk in pipeline.chunks.items()}

    assert run_ranks({"tp": 2, "pp": 2}, work) == [{0: 4}, {0: 4}, {1: 2}, {1: 2}]


@pytest.mark.full
@pytest.mark.parametrize(("placement", "schedule", "v", "peaks"), SLOTS_OF_PLACEMENTS)
def test_there_are_as_many_slots_as_inputs_at_once(placement: str, schedule: str, v: int, peaks: dict[int, int]):
    """peaks: microbatches of each stage that wait for a backward at once, of four. One slot less, and a step cannot run."""
    layout = Layout(pp=2, m=4, v=v, schedule=schedule, recompute="uniform 1")
    config = replace(MODELS["gated"], norm_placement=placement, **FULL, **SLOTS)
    layers = 4 // 2 // v

    def work(mesh: Mesh) -> dict[int, int]:
        pipeline = pipeline_of(mesh, config, layout)
        train_once(pipeline, mesh)
        buffers = {stage: layers_of(chunk).activations.slots for stage, chunk in pipeline.chunks.items()}
        gc.collect()
        assert all(buffer.in_use == 0 for buffer in buffers.values())
        return {stage: buffer._allocated for stage, buffer in buffers.items()}

    made = {stage: count for rank in run_ranks({"pp": 2}, work) for stage, count in rank.items()}
    assert made == {stage: peak * layers for stage, peak in peaks.items()}

    def one_less(mesh: Mesh) -> None:
        pipeline = pipeline_of(mesh, config, layout)
        pipeline.schedule()
        slots = layers_of(pipeline.chunks[0]).activations.slots if 0 in pipeline.chunks else RecomputeInputSlots()
        slots.reserve(peaks[0] * layers - 1)
        train_once(pipeline, mesh)

    with pytest.raises(RuntimeError, match="slots"):
        run_ranks({"pp": 2}, one_less)


# ---------------------------------------------------------------- order, errors, evaluation


class Scale(nn.Module):
    """A layer that says when it runs."""

    def __init__(self, number: int, log: list):
        super().__init__()
        self.weight, self.number, self.log = nn.Parameter(torch.tensor(2.0)), number, log

    def forward(self, x: Tensor, mask=None, angles=None) -> Tensor:
        self.log.append(("run", self.number))
        return (x * self.weight).sin()


def scales(mesh: Mesh, log: list, n: int = 3, **settings) -> ParallelTransformer:
    config = ModelConfig(num_layers=n, hidden_size=8, num_attention_heads=1, cpu_offloading_num_layers=n, **settings)
    context = LayerContext.from_mesh(mesh, torch.float32)
    return ParallelTransformer(
        config, range(n), context, post_process=False, make_layer=lambda config, i, context: Scale(i, log)
    )


def test_an_input_is_sent_for_one_layer_ahead(monkeypatch):
    """Before layer 2 is computed again its input and that of layer 1 are on their way, and not yet that of layer 0."""
    log: list = []
    fetch, send = OffloadBufferPool.fetch, OffloadBufferPool.send
    sent: list = []
    monkeypatch.setattr(
        OffloadBufferPool, "send", lambda self, slot, flat: (sent.append(slot), send(self, slot, flat))[1]
    )

    def logged(self, slot):
        log.append(("fetch", next(i for i, x in enumerate(sent) if x is slot)))
        return fetch(self, slot)

    monkeypatch.setattr(OffloadBufferPool, "fetch", logged)

    def work(mesh: Mesh) -> None:
        scales(mesh, log, **FULL)(torch.ones(2, 1, 8, requires_grad=True)).sum().backward()

    run_ranks({}, work)
    assert log == [
        ("run", 0),
        ("run", 1),
        ("run", 2),
        ("fetch", 2),
        ("fetch", 1),
        ("run", 2),
        ("fetch", 0),
        ("run", 1),
        ("run", 0),
    ]


@pytest.mark.parametrize("settings", [FULL, SAVED], ids=["inputs", "saved"])
def test_a_change_on_the_way_is_told(settings: dict):
    def work(mesh: Mesh) -> None:
        layers = scales(mesh, [], 1, **settings)
        start = torch.ones(2, 1, 8, requires_grad=True)
        x = start * 1
        y = layers(x)
        with torch.no_grad():
            x += 1
        y.sum().backward()

    with pytest.raises(RuntimeError, match="in place"):
        run_ranks({}, work)


def test_a_second_backward_reads_again():
    def grads(mesh: Mesh, offloaded: int) -> list[Tensor]:
        layers = scales(mesh, [], **SAVED)
        layers.activations.offloaded = offloaded
        y = layers(torch.ones(2, 1, 8, requires_grad=True)).sum()
        parameters = list(layers.parameters())
        return [torch.stack(torch.autograd.grad(y, parameters, retain_graph=again)) for again in (True, False)]

    (got,), (expected,) = (run_ranks({}, partial(grads, offloaded=n)) for n in (3, 0))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "recompute"), [(FULL | HALF | SLOTS, "uniform 1"), (ALL | SAVED, "none")], ids=["inputs", "saved"]
)
def test_an_error_leaves_nothing_behind(settings: dict, recompute: str):
    """What stood between a forward and a backward when it came is given back, and the next step is as if there had been none."""
    config, layout = replace(MODELS["dropout"], **settings), Layout(m=3, recompute=recompute)
    fails: list[bool] = []

    def step(data: Iterator, model: nn.Module):
        losses, loss_func = forward_step(data, model)
        if len(fails) == 1:
            fails.append(True)
            raise ValueError("the second microbatch is bad")
        if fails and len(fails) < 2:
            fails.append(True)
        return losses, loss_func

    def work(mesh: Mesh, fail: bool) -> list[Tensor]:
        fails[:] = [True] if fail else []
        pipeline = pipeline_of(mesh, config, layout, step)
        stage = layers_of(pipeline.chunks[0]).activations
        if fail:
            with pytest.raises(ValueError, match="second microbatch"):
                train_once(pipeline, mesh)
            gc.collect()
            assert stage.slots.in_use == 0 and stage.offload_slots(torch.device("cpu")).in_use == 0
            assert stage.offload_slots(torch.device("cpu")).slots
        train_once(pipeline, mesh)
        return [p.main_grad.clone() for p in pipeline.chunks[0].module.parameters()]

    (got,), (expected,) = (run_ranks({}, partial(work, fail=fail)) for fail in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_evaluation_keeps_nothing(monkeypatch):
    monkeypatch.setattr(activation_offload, "OffloadBufferPool", None)
    monkeypatch.setattr(RecomputeInputSlots, "keep", None)

    def work(mesh: Mesh) -> float:
        pipeline = pipeline_of(mesh, replace(MODELS["dropout"], **FULL, **HALF, **SLOTS), Layout(recompute="uniform 1"))
        return float(pipeline.run(data_of(pipeline, mesh), 0, training=False).report["lm loss"][0])

    assert run_ranks({}, work)[0] > 0


@pytest.mark.full
def test_room_is_used_again():
    """Three microbatches one after the other take the room of one."""

    def work(mesh: Mesh) -> tuple[int, int]:
        layers = scales(mesh, [], **FULL)
        for _ in range(3):
            layers(torch.ones(2, 1, 8, requires_grad=True)).sum().backward()
        gc.collect()
        room = layers.activations.offload_slots(torch.device("cpu"))
        return len(room.slots), room.in_use

    assert run_ranks({}, work) == [(3, 0)]


def test_queries_keys_and_values_come_back_once(monkeypatch):
    """What an operation reads in several views of one memory is brought back for all of them."""
    fetched: list = []
    fetch = OffloadBufferPool.fetch
    monkeypatch.setattr(OffloadBufferPool, "fetch", lambda self, slot: (fetched.append(slot), fetch(self, slot))[1])
    kept, x = StageActivations(1, smallest=1), torch.arange(12.0).view(3, 4).requires_grad_()
    with kept.saving(0, x, ()):
        q, k, v = (x * 2).unbind()
        out = torch.addcmul(q, k, v)  # keeps k and v
    out.sum().backward()
    assert len(fetched) == 1
    expected = torch.stack((torch.full((4,), 2.0), 4 * x[2], 4 * x[1]))
    assert torch.equal(x.grad, expected)


def test_a_stage_without_offload_has_no_keeper():
    assert StageActivations().input_saver(0) is None
