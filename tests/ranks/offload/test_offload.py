"""Offload changes no bit: where state lives is not seen in losses, norms, gradients, weights, checkpoints, under any layout."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from local_ranks import run_ranks
from offload_runs import MODELS, STAGES, offload, state_of, tiny_trainer, trained
from tiny_run import Layout, Outcome, assert_equal, assert_same_bits, run
from torch import Tensor

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.host_and_file_stores import FileOffloadStore, FileTensor
from megatron.core.offload.tensor_in_memory_or_file import start_writing
from megatron.core.optimizer.cpu_offloading.sliced_update import SlicedUpdater
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.training.memory.zero_state_bytes_by_tier import Element, predicted_bytes_by_tier

TIERS = ("host", "file", "half", "params")  # half: of the optimizer's state, in files; params: parameters too


LAYOUTS = [
    {"dp": 2},
    {"dp": 2, "tp": 2, "sp": True},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "v": 2, "schedule": "interleaved"},
]


@pytest.fixture(autouse=True)
def slices_are_short(monkeypatch):
    """Several a segment, none of a size that a vector divides but for its multiple of 8."""
    monkeypatch.setattr(SlicedUpdater.__init__, "__defaults__", (200,))


# ---------------------------------------------------------------- any layout, same numbers
def covering() -> list:
    """Every stage with every tier and every layout, by turns: models and overlap change from case to case."""
    found = []
    cases = [
        c for c in product(STAGES, TIERS, range(len(LAYOUTS))) if c[1] != "params" or c[0] in ("3", "hybrid", "outer")
    ]
    for number, (stage, tier, which) in enumerate(cases):
        if (list(STAGES).index(stage) + TIERS.index(tier) - which) % len(LAYOUTS):
            continue
        layout = dict(LAYOUTS[which])
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": stage != "0", "ddp_bucket_size": 1500}
        config = DataParallelConfig(**STAGES[stage], **(overlap if number % 3 else {}))
        if stage in ("hybrid", "outer"):
            layout["dp"] = 4
        model = list(MODELS)[number % 2]
        whole = Layout(**layout, m=2, delayed=number % 5 < 3, data_parallel=config)
        first = (stage, tier) == ("3", "params")
        found.append(
            pytest.param(
                model, whole, tier, id=f"{stage}-{tier}-{whole}-{model}", marks=[pytest.mark.full] * (not first)
            )
        )
    return found


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(), steps=2)


@pytest.mark.parametrize(("model", "layout", "tier"), covering())
def test_offload_equals_one_process(model: str, layout: Layout, tier: str, tmp_path):
    got = run(MODELS[model], replace(layout, offload=offload(tier, tmp_path)), steps=2)
    assert_equal(got, one_process(model), 1e-10)
    assert list(tmp_path.iterdir()) == []


PRECISIONS = {"float32": {"fp64": False}, "bfloat16": {"fp64": False, "bf16": True}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "precision"), [("0", "float32"), ("1", "bfloat16"), ("3", "float32"), ("3", "bfloat16")]
)
def test_offload_has_the_bits_of_none(stage: str, precision: str, tmp_path):
    model = replace(MODELS["tied"], num_layers=2, **PRECISIONS[precision])
    layout = Layout(dp=2, m=2, data_parallel=DataParallelConfig(**STAGES[stage]))
    expected = run(model, layout, steps=2)
    for tier in TIERS if stage == "3" else TIERS[:-1]:
        assert_same_bits(run(model, replace(layout, offload=offload(tier, tmp_path)), steps=2), expected)


CORNERS = {
    "sgd": lambda: {"optimizer": OptimizerConfig(optimizer="sgd")},
    "sgd without momentum": lambda: {"optimizer": OptimizerConfig(optimizer="sgd", sgd_momentum=0.0)},
    "clip": lambda: {"optimizer": OptimizerConfig(clip_grad=0.1)},
    "groups": lambda: {"of_step": {"decoupled_lr": 3e-3, "weight_decay": 0.3}},
    "frozen": lambda: {"frozen": "mlp"},
    "scaler": lambda: {
        "scaler": DynamicGradScaler(2.0**40, minimum=1.0, window=1, hysteresis=1),
        "of_step": {"check_finite": False},
    },
}


@pytest.mark.full
@pytest.mark.parametrize("corner", [pytest.param(c, marks=[pytest.mark.full] * (c != "groups")) for c in CORNERS])
def test_corners_of_a_step_have_the_bits_of_none(corner: str, tmp_path):
    """scaler: the scale is so large that the first step is skipped."""
    precision = {"fp16": True} if corner == "scaler" else {"bf16": True}
    model = replace(MODELS["tied"], fp64=False, num_layers=2, **precision)
    layout = Layout(data_parallel=DataParallelConfig(zero_stage=3))
    (expected,) = run_ranks({}, lambda mesh: trained(mesh, model, layout, **CORNERS[corner]()))
    for kind in ("half", "params"):
        away = replace(layout, offload=offload(kind, tmp_path))
        (got,) = run_ranks({}, partial(trained, model=model, layout=away, **CORNERS[corner]()))
        assert [x.tolist() for x in got[0]] == [x.tolist() for x in expected[0]]
        assert str(got[1:]) == str(expected[1:])  # a norm may be infinite
    assert corner != "scaler" or not torch.tensor(expected[1][0]).isfinite()


def test_what_was_read_ahead_is_forgotten_before_an_update(tmp_path):
    """A unit that is read ahead and not used, as after an error, is read again."""
    layout = Layout(data_parallel=DataParallelConfig(zero_stage=3), offload=offload("params", tmp_path))

    def work(mesh: Mesh) -> None:
        tiny = tiny_trainer(mesh, MODELS["untied"], layout)
        chunk = tiny.chunks[0]
        bucket = chunk._buckets[0]
        bucket.read_ahead()
        for stored in chunk.buffers[0].owned_params.tensors:
            start_writing(stored, torch.full(stored.shape, 7.0)).wait()
        chunk.finish_param_gather()
        bucket.start_gather()
        bucket.finish_gather()
        assert all(bool((chunk.buffers[0].parameters[name] == 7.0).all()) for name in bucket.plan.names)
        chunk.finish_param_gather()
        tiny.close()

    run_ranks({}, work)


# ---------------------------------------------------------------- save and load
SAVES = [
    ("file", "none", "0", "1", "bf16"),
    ("params", "none", "3", "0", "bf16"),
    ("none", "params", "1", "3", "bf16"),
    ("params", "half", "3", "2", "fp32"),
    ("host", "file", "2", "0", "fp32"),
    ("none", "file", "0", "0", "bf16"),
]


@pytest.mark.parametrize(
    ("before", "after", "stage", "then", "precision"),
    [pytest.param(*case, id="-".join(case), marks=[pytest.mark.full]) for case in SAVES],
)
def test_a_checkpoint_does_not_know_of_tiers(before: str, after: str, stage: str, then: str, precision: str, tmp_path):
    """Two steps with one, saved, and two with the other are four with neither, to the last bit."""
    model = replace(MODELS["untied"], fp64=False, num_layers=2, bf16=precision == "bf16")
    plain = OptimizerConfig(clip_grad=0.0)  # a norm is summed in other parts by stages with other shards

    def layout_of(kind: str, stage: str) -> Layout:
        return Layout(
            dp=2, data_parallel=DataParallelConfig(**STAGES[stage]), offload=offload(kind, tmp_path / "tiers")
        )

    def first(mesh: Mesh) -> None:
        tiny = tiny_trainer(mesh, model, layout_of(before, stage), optimizer=plain)
        for number in range(2):
            tiny.step(number)
        tiny.save(tmp_path / "save", 2)
        tiny.close()

    def second(mesh: Mesh) -> list[Tensor]:
        tiny = tiny_trainer(mesh, model, layout_of(after, then), optimizer=plain)
        tiny.load(tmp_path / "save")
        for number in (2, 3):
            tiny.step(number)
        state = state_of(tiny)
        tiny.close()
        return state

    run_ranks({"dp": 2}, first)
    got = run_ranks({"dp": 2}, second)
    expected = run_ranks({"dp": 2}, lambda mesh: trained(mesh, model, layout_of("none", then), 4, optimizer=plain)[0])
    assert [[x.tolist() for x in rank] for rank in got] == [[x.tolist() for x in rank] for rank in expected]


# ---------------------------------------------------------------- what lives where
@pytest.mark.parametrize("stage", [0, 3])
def test_files_hold_what_the_plan_says(stage: int, tmp_path):
    """The bytes taken from the disk are those that were foretold, but for alignment; what is left in memory is the gradients."""
    model = replace(MODELS["tied"], fp64=False, num_layers=2, bf16=True)
    kind = "params" if stage == 3 else "file"
    layout = Layout(dp=2, data_parallel=DataParallelConfig(zero_stage=stage), offload=offload(kind, tmp_path))

    def work(mesh: Mesh) -> tuple[int, int, int]:
        tiny = tiny_trainer(mesh, model, layout)
        assert isinstance(tiny.offload_store, FileOffloadStore)
        stored = [
            x for shards in (tiny.adam.masters, *tiny.adam.moments.values()) for shard in shards for x in shard.tensors
        ]
        stored += [x for b in tiny.adam.buffers for x in b.owned_params.tensors]
        in_file = sum(x.nbytes for x in stored if isinstance(x, FileTensor))
        in_memory = sum(x.nbytes for x in stored if not isinstance(x, FileTensor))
        tiny.close()
        return sum(p.numel() for p in tiny.chunks[0].module.parameters()), in_file, in_memory

    for numel, in_file, in_memory in run_ranks({"dp": 2}, work):
        foretold = predicted_bytes_by_tier(
            numel, Element.of(2, 2), stage=stage, shards=2, tier="file", offload_params=stage == 3
        )
        assert sum(foretold["file"].values()) == pytest.approx(in_file, rel=0.02)
        assert foretold["device"].get("parameters", 0) == pytest.approx(in_memory, rel=0.02)
