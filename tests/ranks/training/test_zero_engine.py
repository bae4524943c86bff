"""`megatron.training.zero_engine_for_any_module.Engine` over ranks as threads: loops and modules as scripts have them, against plain torch."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from megatron import deepspeed
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.optimizer.deepspeed_lr_schedules import OneCycle
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.training.zero_engine_for_any_module import Engine, EngineConfig

X = torch.randn(3, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def engine_of(model: nn.Module, mesh: Mesh, stage: int, **config) -> Engine:
    data_parallel = DataParallelConfig(zero_stage=stage)
    return Engine(model, optimizer_of(model), EngineConfig(data_parallel=data_parallel, **config), mesh)


def part(x: Tensor, mesh: Mesh) -> Tensor:
    return x.chunk(mesh.samples.size)[mesh.samples.rank]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


class Odd(nn.Module):
    """Parameters in lists, in a list of lists, of no dimension and of no element, frozen, and of a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.named = nn.ModuleDict({"own": nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.5))})})
        self.rows = nn.ModuleList([nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)]), nn.ModuleList([nn.Tanh()])])
        self.empty, self.frozen = nn.Parameter(torch.zeros(0, 4)), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        for _ in range(2):
            for module in [one for row in self.rows for one in row]:
                x = module(x)
        return self.frozen(x) * self.named["own"]["scale"]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.full
@pytest.mark.parametrize("stage, ranks", [(0, 3), (1, 3), (2, 2), (3, 2), (3, 3)])
def test_odd_modules_and_sizes_and_several_losses_a_step(stage: int, ranks: int, tmp_path: Path):
    alone = Odd()
    optimizer = optimizer_of(alone)
    for x in X:
        optimizer.zero_grad()
        loss_of(alone, x).backward()
        (alone(x) - alone(2 * x)).mean().backward()
        for p in alone.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        optimizer.step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        for first, last in ((0, 2), (2, 3)):  # the second engine goes on from the checkpoint of the first
            engine = engine_of(Odd(), mesh, stage)
            if first:
                engine.load(tmp_path)
            for x in X[first:last]:
                mine = part(x, mesh)
                with engine.no_sync():
                    engine.backward(loss_of(engine, mine))
                engine.backward((engine(mine) - engine(2 * mine)).mean())
                engine.zero_grad()  # forgets nothing of its own
                engine.step()
            engine.save(tmp_path)
        return engine.module_state_dict()

    for found in run_ranks({"dp": ranks}, work):
        assert_same(found, alone.state_dict())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_engines_of_which_one_trains_through_the_other(stage: int):
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double(), nn.Linear(5, 1).double()

    first, second = made()
    optimizers = [optimizer_of(first), optimizer_of(second)]
    for x in X:
        optimizers[0].zero_grad()
        second(first(x)).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss_of(second, first(x)).backward()
        optimizers[1].step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        one, other = (engine_of(model, mesh, stage) for model in made())
        for x in X:
            mine = part(x, mesh)
            one.backward(other(one(mine)).mean())
            one.step()
            other.zero_grad()
            other.backward(loss_of(other, one(mine).detach()))
            other.step()
        return one.module_state_dict() | {f"other.{name}": x for name, x in other.module_state_dict().items()}

    wanted = first.state_dict() | {f"other.{name}": x for name, x in second.state_dict().items()}
    for found in run_ranks({"dp": 2}, work):
        assert_same(found, wanted)


def test_one_cycle_changes_rate_and_beta_of_every_update():
    sizes = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}
    alone = nn.Linear(5, 3).double()
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1.0, weight_decay=0.0)
    schedule = OneCycle(optimizer, **sizes)
    for x in X:
        optimizer.zero_grad()
        loss_of(alone, x).backward()
        optimizer.step()
        schedule.step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = nn.Linear(5, 3).double()
        model.load_state_dict(start)
        given = {"train_batch_size": 12, "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": True}
        given |= {"scheduler": {"type": "OneCycle", "params": sizes}}
        engine, *_ = deepspeed.initialize(model=model, config=given)
        for x in X:
            engine.backward(loss_of(engine, part(x, mesh)))
            engine.step()
        return engine.module_state_dict()

    for found in run_ranks({"dp": 2}, work):
        assert_same(found, alone.state_dict())


def test_a_parameter_of_two_groups_and_a_module_of_two_engines_are_refused():
    def work(mesh: Mesh) -> None:
        model = nn.Linear(3, 3)
        groups = [{"params": [model.weight, model.bias], **GROUP}, {"params": [model.weight], **GROUP}]
        with pytest.raises(ConfigError, match="in more than one group"):
            Engine(model, ("adam", groups), EngineConfig(), mesh)
        Engine(model, ("adam", groups[:1]), EngineConfig(), mesh)
        with pytest.raises(ConfigError, match="already in the buffers of an engine"):
            Engine(model, ("adam", groups[:1]), EngineConfig(), mesh)

    run_ranks({"dp": 1}, work)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: schedules.MultiStepLR(optimizer, [3, 5], 0.1),  # keeps numbers as keys
        lambda optimizer: schedules.OneCycleLR(
            optimizer, 0.5, total_steps=9, cycle_momentum=False
        ),  # notes in the groups
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=1),  # keeps infinity
    ],
    ids=["steps", "cycle", "plateau"],
)
def test_a_schedule_of_torchs_goes_on_from_a_checkpoint(make: Callable, tmp_path: Path):
    def rates(mesh: Mesh, updates: int, *, loads: bool = False) -> list[float]:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = make(optimizer)
        engine, found = Engine(model, optimizer, EngineConfig(), mesh), []
        engine.lr_scheduler = schedule
        metrics = {"metrics": 1.0} if isinstance(schedule, schedules.ReduceLROnPlateau) else None
        if loads:
            engine.load(tmp_path)
        for _ in range(updates):
            engine.backward(loss_of(engine, X[0].float()))
            engine.step(metrics)
            found += engine.optimizer.rates()
        if updates == 2:
            engine.save(tmp_path)
        return found

    def work(mesh: Mesh) -> tuple[list[float], ...]:
        return rates(mesh, 6), rates(mesh, 2) + rates(mesh, 4, loads=True)

    for at_once, with_a_break in run_ranks({"dp": 1}, work):
        assert at_once == with_a_break and len(set(at_once)) > 1


def test_what_a_flat_update_cannot_follow_is_an_error():
    def work(mesh: Mesh) -> None:
        model = nn.Linear(5, 3)
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), EngineConfig(), mesh)
        engine.optimizer.param_groups[0]["momentum"] = 0.5
        engine.backward(loss_of(engine, X[0].float()))
        with pytest.raises(ConfigError, match="momentum was changed to 0"):
            engine.step()

    run_ranks({"dp": 1}, work)


def test_names_that_scripts_of_deepspeed_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    adam = importlib.import_module("deepspeed.ops.adam")
    assert importlib.import_module("deepspeed.runtime.lr_schedules").OneCycle is OneCycle
    device = importlib.import_module("deepspeed.accelerator").get_accelerator()
    assert torch.device(device.current_device_name()).type == device.device_name() and device.device_count() >= 1

    def work(mesh: Mesh) -> dict[str, Tensor]:
        model = Odd()
        given = {"train_batch_size": 12, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1}]
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam.DeepSpeedCPUAdam(groups, lr=1e-2), config=given)
        assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
        engine.backward(loss_of(engine, part(X[0], mesh)))
        engine.step()
        return engine.module_state_dict()

    alone = Odd()
    optimizer = optimizer_of(alone)
    loss_of(alone, X[0]).backward()
    alone.empty.grad = torch.zeros_like(alone.empty)
    optimizer.step()
    for found in run_ranks({"dp": 2}, work):
        assert_same(found, alone.state_dict())
    with pytest.raises(ConfigError, match="amsgrad"):
        adam.FusedAdam([torch.ones(1)], amsgrad=True)


def test_ranks_with_different_models_are_told_apart():
    def work(mesh: Mesh) -> None:
        with pytest.raises(
            RuntimeError, match=r"rank 1 has another model .* weight \[4, 5\] trained where the other has weight"
        ):
            engine_of(nn.Linear(5, 3 + mesh.samples.rank), mesh, 0)

    run_ranks({"dp": 2}, work)


GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


CYCLE = {
    "cycle_min_lr": 1e-3,
    "cycle_max_lr": 1e-2,
    "cycle_first_step_size": 3,
    "cycle_min_mom": 0.6,
    "cycle_max_mom": 0.95,
}


class Grouped:
    """A model of two groups of torch's AdamW; the script changes decay and betas after they are made."""

    def __init__(self, **more: float):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        groups = [{"params": self.model[0].parameters(), "lr": 3e-2}, {"params": self.model[2].parameters()}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, **more)

    def change(self, groups: list[dict[str, Any]]) -> None:
        groups[0]["weight_decay"], groups[1]["betas"] = 0.7, (0.5, 0.9)


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        lambda optimizer: schedules.OneCycleLR(optimizer, 0.05, total_steps=9),
        lambda optimizer: OneCycle(optimizer, **CYCLE),
    ],
    ids=["set by the script", "OneCycleLR", "OneCycle"],
)
def test_a_resume_has_all_numbers_of_the_groups(schedule: Callable | None, tmp_path: Path):
    alone = Grouped()
    theirs = schedule(alone.optimizer) if schedule else None
    if schedule is None:
        alone.change(alone.optimizer.param_groups)
    for x in (X[0], X[1], X[2], X[0], X[1]):
        alone.optimizer.zero_grad()
        loss_of(alone.model, x).backward()
        alone.optimizer.step()
        if theirs is not None:
            theirs.step()

    def work(mesh: Mesh) -> dict[str, Tensor]:
        for first, last in ((0, 2), (2, 5)):
            made = Grouped()
            ours = schedule(made.optimizer) if schedule else None
            engine = Engine(
                made.model, made.optimizer, EngineConfig(data_parallel=DataParallelConfig(zero_stage=1)), mesh
            )
            engine.lr_scheduler = ours
            if first:
                engine.load(tmp_path)
            elif schedule is None:
                made.change(engine.optimizer.param_groups)
            for x in [X[i % 3] for i in range(first, last)]:
                engine.backward(loss_of(engine, part(x, mesh)))
                engine.step()
            engine.save(tmp_path)
        return engine.module_state_dict()

    for found in run_ranks({"dp": 2}, work):
        assert_same(found, alone.model.state_dict())


def test_a_checkpoint_of_other_groups_is_refused(tmp_path: Path):
    def work(mesh: Mesh) -> None:
        made = Grouped()
        Engine(made.model, made.optimizer, EngineConfig(), mesh).save(tmp_path)
        other = Grouped(eps=1e-4)
        engine = Engine(other.model, other.optimizer, EngineConfig(), mesh)
        with pytest.raises(CheckpointError, match=r"its optimizer has eps = 1e-08, this engine's has 0\.0001"):
            engine.load(tmp_path)
        engine.load(tmp_path, optimizer=False)
        single = Grouped().model
        engine = Engine(single, torch.optim.AdamW(single.parameters()), EngineConfig(), mesh)
        with pytest.raises(CheckpointError, match="has 2 groups of parameters, this engine's has 1"):
            engine.load(tmp_path)
        engine.load(tmp_path, optimizer=False, schedule=False)

    run_ranks({"dp": 1}, work)


class Normalized(nn.Module):
    """With running statistics, a moving average that is another tensor after each forward, and a count of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(5))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.buffer_placements = {"seen": BufferPlacement("own"), "largest": BufferPlacement("max")}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        self.average = 0.9 * self.average + 0.1 * x.detach().mean()
        self.largest = torch.maximum(self.largest, x.detach().amax(0))
        self.seen += torch.tensor([1, int(x[0, 0].item() * 1e9)])
        return x + self.average


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_resumes_buffers_to_the_bit_and_loads_them_with_other_ranks(stage: int, tmp_path: Path):
    def train(mesh: Mesh, steps: range) -> dict[str, Tensor]:
        model = Normalized()
        engine = engine_of(model, mesh, stage)
        if steps.start:
            engine.load(tmp_path)
        for i in steps:
            engine.backward(loss_of(engine, part(X[i], mesh)))
            engine.step()
            if i == 1:
                engine.save(tmp_path)
        return {name: value.clone() for name, value in model.named_buffers()} | engine.module_state_dict()

    whole = run_ranks({"dp": 2}, lambda mesh: train(mesh, range(3)))
    resumed = run_ranks({"dp": 2}, lambda mesh: train(mesh, range(2, 3)))
    for before, after in zip(whole, resumed, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    first, second = whole
    assert torch.equal(first["norm.running_var"], second["norm.running_var"])
    assert torch.equal(first["largest"], second["largest"]) and not torch.equal(first["seen"], second["seen"])

    saved = load_whole_tensors(tmp_path)
    assert saved["buffer/seen"].shape == (2, 2) and saved["buffer/largest"].shape == (5,)
    for ranks in (1, 3):
        loaded = run_ranks({"dp": ranks}, lambda mesh: train(mesh, range(2, 2)))
        for rank, buffers in enumerate(loaded):
            assert torch.equal(buffers["norm.running_mean"], saved["buffer/norm.running_mean"])
            assert torch.equal(buffers["seen"], saved["buffer/seen"][rank % 2])
