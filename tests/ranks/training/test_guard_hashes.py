"""Checks by hashes see what they promise: copies that differ, and any bit that changes at rest, in every ZeRO stage and tier."""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from layouts import Layout
from local_ranks import run_ranks
from tiny_run import GPT, TINY_GPT2, TINY_LLAMA, TinyTrainer

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.offload.tensor_in_memory_or_file import start_reading, start_writing
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.collectives import PeerError
from megatron.core.parallel.mesh import Mesh
from megatron.training.arguments.nan_spike_and_corruption_config import GuardConfig
from megatron.training.result_checks import weight_hash_across_replicas
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.result_checks.check_runner import CHECKS
from megatron.training.result_checks.hash_state_between_updates import (
    StateCheck,
    changes_since,
    hashes_of,
    resident_state,
)
from megatron.training.result_checks.weight_hash_across_replicas import ReplicaCheck, param_replica_differences

HALF = replace(TINY_GPT2, fp64=False, bf16=True)
STAGES = {
    "0": {},
    "1": {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "hybrid": {"zero_stage": 3, "num_distributed_optimizer_instances": 2},
}


def flip(stored, bit: int) -> None:
    """Flip one bit of a tensor in memory or in a file."""
    values = start_reading(stored).wait()
    raw = values.view(torch.uint8).view(-1)
    raw[bit // 8] ^= 1 << bit % 8
    if values is not stored:
        start_writing(stored, values).wait()


def trained(mesh: Mesh, config, layout: Layout, optimizer: OptimizerConfig | None = None) -> TinyTrainer:
    tiny = TinyTrainer(mesh, config, layout, global_batch=4, optimizer=optimizer)
    tiny.step(0)
    tiny.finish_param_gather()
    return tiny


# ---------------------------------------------------------------- copies


def copies_of_norms(mesh: Mesh, layout: Layout) -> None:
    tiny = trained(mesh, TINY_LLAMA, layout)
    assert param_replica_differences(tiny.model, mesh) == []
    name = "final_norm.weight"
    (name, norm) = next((n, p) for n, p in tiny.model[0].module.named_parameters() if "norm" in n)
    shards = tiny.model[0].param_shards()
    held = shards[name][1] if name in shards else norm.data.view(-1)
    culprit = max(rank for rank in range(mesh["world"].size))
    if mesh["world"].rank == culprit:
        assert held.numel()
        flip(held, 3)
    found = {(one.name, one.axis): one.ranks for one in param_replica_differences(tiny.model, mesh)}
    axes = [mesh["tp"], mesh["dp"]] if layout.data_parallel.stage < 3 else [mesh["tp"]]
    if any(culprit in axis.ranks for axis in axes if axis.size > 1):
        ((_, axis), ranks), *more = found.items()
        assert not more and {culprit} in map(set, ranks) and axis in ("tp", "dp"), found
    tiny.close()


@pytest.mark.parametrize(
    "stage", ["0", pytest.param("1", marks=pytest.mark.full), pytest.param("3", marks=pytest.mark.full)]
)
def test_a_bit_of_one_copy_is_named_with_its_axis_and_ranks(stage):
    layout = Layout(tp=2, dp=2, data_parallel=DataParallelConfig(**STAGES[stage]), delayed=stage == "1", poison=False)
    run_ranks(layout.sizes, partial(copies_of_norms, layout=layout))


def drifting(mesh: Mesh, layout: Layout) -> list:
    """A norm under sequence parallelism whose gradient is partial, declared as if it were whole."""

    def make(*arguments, **named):
        model = GPT.make(*arguments, **named)
        norm = next(p for n, p in model.named_parameters() if "norm" in n)
        norm.placement = replace(norm.placement, partial_grad=())
        return model

    tiny = TinyTrainer(mesh, TINY_LLAMA, layout, global_batch=4, subject=replace(GPT, make=make))
    tiny.step(0)
    tiny.finish_param_gather()
    return [(one.name, one.axis, one.ranks) for one in param_replica_differences(tiny.model, mesh)]


def test_a_copy_that_is_used_apart_drifts_and_is_named():
    layout = Layout(tp=2, sp=True, dp=2)
    found = run_ranks(layout.sizes, partial(drifting, layout=layout))
    for tensor_ranks, mine in zip(([0, 1], [0, 1], [2, 3], [2, 3]), found):
        ((name, axis, ranks),) = mine
        assert "norm" in name and axis == "tp" and ranks == [[rank] for rank in tensor_ranks]


# ---------------------------------------------------------------- state at rest

MARKS = {"one process": [], "stage 3": [], "hybrid": [pytest.mark.sweep], "stage 1": [pytest.mark.sweep]}
AT_REST = {
    "one process": (Layout(), HALF),
    "one process in float64": (Layout(), TINY_GPT2),
    **{f"stage {stage}": (Layout(dp=2, data_parallel=DataParallelConfig(**STAGES[stage])), HALF) for stage in "0123"},
    "hybrid": (Layout(dp=4, data_parallel=DataParallelConfig(**STAGES["hybrid"])), HALF),
    "host": (Layout(offload=OffloadConfig(optimizer_cpu_offload=True)), HALF),
    "pipeline": (Layout(pp=2, tp=2, m=2), HALF),
}


def flips_at_rest(mesh: Mesh, layout: Layout, config, optimizer: OptimizerConfig | None = None) -> set[str]:
    tiny = trained(mesh, config, layout, optimizer)
    draw, kinds = random.Random(mesh["world"].rank), set()
    before = hashes_of(resident_state(tiny.model, tiny.adam))
    assert changes_since(before, resident_state(tiny.model, tiny.adam)) == ""
    everything = list(resident_state(tiny.model, tiny.adam))
    for held in everything:
        kinds.add(held.kind)
        for _ in range(2):
            slot = draw.choice(
                [s for s in held.param_ranges if s.start < held.start + held.values.numel() and s.stop > held.start]
            )
            inside = max(slot.start, held.start), min(slot.stop, held.start + held.values.numel())
            element = draw.randrange(*inside) - held.start
            bit = (element * held.values.dtype.itemsize) * 8 + draw.randrange(8 * held.values.dtype.itemsize)
            flip(held.values, bit)
            told = changes_since(before, resident_state(tiny.model, tiny.adam))
            assert told.count("\n") == 1 and f"{held.kind} of " in told and slot.name in told, told
            flip(held.values, bit)
    assert changes_since(before, resident_state(tiny.model, tiny.adam)) == ""
    tiny.step(1)
    assert changes_since(before, resident_state(tiny.model, tiny.adam)).count("\n") >= 3
    tiny.close()
    return kinds


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [pytest.mark.full])) for case in AT_REST])
def test_any_bit_flipped_at_rest_is_seen_and_named(case):
    layout, config = AT_REST[case]
    kinds = run_ranks(layout.sizes, partial(flips_at_rest, layout=layout, config=config))
    masters = {"masters"} if config.bf16 else set()
    assert all(found == {"weights", "exp_avg", "exp_avg_sq"} | masters for found in kinds)


@pytest.mark.full
def test_masters_that_share_bits_with_weights_and_state_in_files_are_seen_too(tmp_path):
    kinds = run_ranks(
        {}, partial(flips_at_rest, layout=Layout(), config=HALF, optimizer=OptimizerConfig(reuse_fp32_param=True))
    )
    assert kinds == [{"weights", "masters", "exp_avg", "exp_avg_sq"}]
    files = OffloadConfig(offload_dir=str(tmp_path), offload_params=True)
    layout = Layout(dp=2, data_parallel=DataParallelConfig(zero_stage=3), offload=files)
    run_ranks(layout.sizes, partial(flips_at_rest, layout=layout, config=HALF))


def stops(mesh: Mesh) -> None:
    tiny = trained(mesh, HALF, Layout(dp=2))
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    runtime = SimpleNamespace(
        mesh=mesh, device=device, config=SimpleNamespace(guard=GuardConfig(check_state_hash_interval=2))
    )
    check = StateCheck(runtime, tiny.model, tiny.adam)
    check.begin()
    check.before_save()
    check.before_update()
    tiny.step(1)
    check.after_update(1)  # not due
    check.before_update()
    tiny.step(2)
    check.after_update(2)
    if mesh["world"].is_last:
        flip(tiny.adam.moments["exp_avg"][0].tensors[0], 70)
    with pytest.raises(
        WrongNumbersError if mesh["world"].is_last else PeerError, match="since the update of iteration 2:"
    ):
        check.before_update()


@pytest.mark.full
def test_a_changed_bit_stops_every_rank_before_the_next_update():
    run_ranks({"dp": 2}, stops)


@pytest.mark.parametrize(("interval", "compared"), [(None, [1, 2, 3, 4]), (2, [2, 4])])
def test_test_mode_compares_the_copies_after_each_iteration(interval: int | None, compared: list[int], monkeypatch):
    """Unless the interval of the comparisons is given."""
    iterations = []
    monkeypatch.setattr(
        weight_hash_across_replicas, "param_replica_differences", lambda *_: iterations.append(iteration) or []
    )
    config = GuardConfig(test_mode=True, check_weight_hash_across_dp_replicas_interval=interval)
    setting = "check_weight_hash_across_dp_replicas_interval"
    assert CHECKS[setting] is ReplicaCheck
    assert ReplicaCheck.is_on(config, setting) and not ReplicaCheck.is_on(GuardConfig(), setting)
    check = ReplicaCheck.__new__(ReplicaCheck)
    check.config, check.chunks, check.mesh = config, [], None
    check.stop_if = lambda problem: None
    for iteration in range(1, 5):
        check.after_update(iteration)
    assert iterations == compared
