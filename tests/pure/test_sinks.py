"""Where a run's numbers go: tags, JSON lines, what a resumed run cuts, and what is said when a package is missing."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from said import tells

from megatron.core.config import ConfigError
from megatron.core.device import Device, peak_flops_of
from megatron.training.watch import watch_config
from megatron.training.watch.profiling import MemoryHistory
from megatron.training.watch.sinks import MetricsFile, Record, TensorBoardSink, WandbSink, json_line
from megatron.training.watch.watch_config import (
    LogConfig,
    ProfileConfig,
    TensorBoardConfig,
    watch_notes,
    watch_problems,
)
from megatron.training.watch.watchers import Watch

STEP = Record("step", 7, 56, {"lm loss": 2.5, "grad-norm": 1.5})
INTERVAL = Record("interval", 10, 80, {"lm loss": 2.0, "iteration-time": 0.5, "throughput": 3.0, "optimizer-time": 0.1})
VALIDATION = Record("validation", 10, 80, {"lm loss validation": 2.25}, {"split": "validation", "at": "step"})
INSPECT = Record("inspect", 10, 80, {"mean": 0.0, "std": 1.0}, {"what": "gradient", "name": "layers.0.weight"})


class Curves:
    """Stands for torch.utils.tensorboard, and for a wandb run."""

    def __init__(self, **options):
        self.options, self.points, self.closed = options, [], False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def log(self, values: dict, step: int) -> None:
        self.points.append((values, step))

    def close(self) -> None:
        self.closed = True

    finish = close


@pytest.fixture
def curves(monkeypatch) -> Curves:
    made = Curves()

    def make(**options):
        made.options = options
        return made

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=make))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=make))
    return made


def test_tensorboard_has_every_curve_by_iterations_and_by_samples(curves):
    sink = TensorBoardSink("folder", 5)
    for record in (STEP, INTERVAL, VALIDATION, INSPECT):
        sink.write(record)
    sink.close()
    assert curves.options == {"log_dir": "folder", "max_queue": 5} and curves.closed
    assert curves.points == [
        ("lm loss", 2.5, 7),
        ("lm loss vs samples", 2.5, 56),
        ("grad-norm", 1.5, 7),
        ("grad-norm vs samples", 1.5, 56),
        ("iteration-time", 0.5, 10),
        ("iteration-time vs samples", 0.5, 80),
        ("throughput", 3.0, 10),
        ("throughput vs samples", 3.0, 80),
        ("optimizer-time", 0.1, 10),
        ("optimizer-time vs samples", 0.1, 80),
        ("lm loss validation", 2.25, 10),
        ("lm loss validation vs samples", 2.25, 80),
        ("gradient layers.0.weight/mean", 0.0, 10),
        ("gradient layers.0.weight/std", 1.0, 10),
    ]


def test_wandb_gets_the_settings_and_the_same_curves(curves, tmp_path):
    sink = WandbSink("project", "name", "team", str(tmp_path / "wandb"), {"log": {"log_interval": 1}})
    sink.write(STEP)
    sink.write(VALIDATION)
    sink.close()
    assert curves.options == dict(
        project="project", name="name", entity="team", dir=str(tmp_path / "wandb"), config={"log": {"log_interval": 1}}
    )
    assert curves.points == [
        ({"lm loss": 2.5, "grad-norm": 1.5, "samples vs steps": 56}, 7),
        ({"lm loss validation": 2.25}, 10),
    ]
    assert (tmp_path / "wandb").is_dir() and curves.closed


def test_torch_writes_what_tensorboard_reads(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra [watch] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(str(tmp_path), 10)
    sink.write(STEP)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(7, 2.5)]
    assert [(e.step, e.value) for e in events.Scalars("lm loss vs samples")] == [(56, 2.5)]


# ---------------------------------------------------------------- the file of JSON lines


def test_json_lines_hold_one_record_each_and_no_steps(tmp_path):
    path = tmp_path / "new folder" / "metrics.jsonl"
    sink = MetricsFile(str(path), 0)
    for record in (STEP, INTERVAL, VALIDATION, INSPECT):
        sink.write(record)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [  # also before the file is closed
        {
            "kind": "interval",
            "iteration": 10,
            "consumed_samples": 80,
            "lm loss": 2.0,
            "iteration-time": 0.5,
            "throughput": 3.0,
            "optimizer-time": 0.1,
        },
        {
            "kind": "validation",
            "iteration": 10,
            "consumed_samples": 80,
            "split": "validation",
            "at": "step",
            "lm loss validation": 2.25,
        },
        {
            "kind": "inspect",
            "iteration": 10,
            "consumed_samples": 80,
            "what": "gradient",
            "name": "layers.0.weight",
            "mean": 0.0,
            "std": 1.0,
        },
    ]
    sink.close()


def test_what_is_no_number_is_null_and_a_word():
    line = json_line(Record("interval", 1, 8, {"lm loss": math.nan, "grad-norm": math.inf, "low": -math.inf, "x": 1.0}))
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kind": "interval",
        "iteration": 1,
        "consumed_samples": 8,
        "lm loss": None,
        "grad-norm": None,
        "low": None,
        "x": 1.0,
        "not_finite": {"lm loss": "nan", "grad-norm": "inf", "low": "-inf"},
    }


def write_run(path, after: int) -> None:
    """What a run of 6 steps that goes on after step `after` writes: its steps, and the validation at its end."""
    sink = MetricsFile(str(path), after)
    for iteration in range(after + 1, 7):
        sink.write(Record("interval", iteration, 8 * iteration, {"lm loss": 1.0 / iteration}))
    sink.write(Record("validation", 6, 48, {"lm loss validation": 1.0}, {"split": "validation", "at": "end"}))
    sink.close()


@pytest.mark.parametrize("after", range(7))
def test_a_resumed_run_leaves_the_file_of_one_that_did_not_stop(tmp_path, after: int):
    """The first came to its end; the second goes on from an earlier checkpoint, or from the last."""
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_run(whole, 0)
    write_run(resumed, 0)
    with resumed.open("a") as file:
        file.write('{"kind": "interval", "iter')  # what was being written when it was killed
    write_run(resumed, after)
    assert resumed.read_text() == whole.read_text()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", '{"some": "settings"}\n', '{"some": "settings"}', "[1, 2]\n", "one word"]
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, text: str):
    path = tmp_path / "precious.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"precious.json.* 1"):
        MetricsFile(str(path), 0)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--metrics-file .*/file/m.jsonl"):
        MetricsFile(str(tmp_path / "file" / "m.jsonl"), 0)


def test_losses_have_a_perplexity_and_shares_of_right_answers_have_none():
    sent, curves = {}, TensorBoardConfig(log_validation_ppl_to_tensorboard=True)
    watch = SimpleNamespace(
        config=SimpleNamespace(tensorboard=curves), _send=lambda kind, values, labels: sent.update(values)
    )
    Watch.report_validation(watch, "validation", {"sop loss": 0.5, "sop accuracy": 0.75}, at_end=False)
    assert sent == {
        "sop loss validation": 0.5,
        "sop accuracy validation": 0.75,
        "sop loss validation ppl": pytest.approx(1.6487212707),
    }


# ---------------------------------------------------------------- settings

PROBLEMS = [
    ({"inspect": 5}, {"tensorboard_dir": "x"}, {}, "--inspect --metrics-file FILE --tensorboard-dir DIR"),
    ({}, {"wandb_project": "x"}, {}, "--wandb-project"),
    ({"log_progress": True}, {}, {}, "--log-progress needs --save"),
    ({"inspect": 5}, {}, {}, "--inspect --metrics-file FILE"),
    ({}, {"log_timers_to_tensorboard": True}, {}, "--log-timers-to-tensorboard --timing-log-level 1 2"),
    ({}, {}, {"profile": True}, "--profile --tensorboard-dir --save"),
    ({}, {}, {"profile_ranks": [0, 2, -1]}, "--profile-ranks 2 -1 0 1"),
]


@pytest.mark.parametrize(("log", "curves", "profile", "says"), PROBLEMS)
def test_what_cannot_be_watched_is_said(monkeypatch, log, curves, profile, says: str):
    monkeypatch.setattr(watch_config, "_is_installed", lambda package: False)
    made = LogConfig(**log), TensorBoardConfig(**curves), ProfileConfig(**profile)
    (problem,) = watch_problems(*made, save=None, world_size=2)
    assert tells(problem, says)


def test_a_run_without_the_package_tensorboard_goes_on_and_says_so_once(monkeypatch):
    made = LogConfig(), TensorBoardConfig(tensorboard_dir="x"), ProfileConfig()
    monkeypatch.setattr(watch_config, "_is_installed", lambda package: False)
    assert not list(watch_problems(*made, save=None, world_size=2))
    (note,) = watch_notes(made[1], made[2], 5)
    assert tells(note, "warning --tensorboard-dir pip install tensorboard")
    assert watch_notes(TensorBoardConfig(), made[2], 5) == []
    monkeypatch.setattr(watch_config, "_is_installed", lambda package: True)
    assert watch_notes(made[1], made[2], 5) == []


def test_a_run_that_ends_before_its_profile_says_so():
    profile = ProfileConfig(profile=True, profile_step_start=5, profile_step_end=7)
    assert watch_notes(TensorBoardConfig(), profile, 6) == watch_notes(TensorBoardConfig(), profile, None) == []
    (note,) = watch_notes(TensorBoardConfig(), profile, 5)
    assert tells(note, "warning 5 --profile-step-start")


def test_what_can_be_watched_has_no_problem(monkeypatch):
    monkeypatch.setattr(watch_config, "_is_installed", lambda package: True)
    made = LogConfig(log_progress=True, inspect=1), TensorBoardConfig(tensorboard_dir="x"), ProfileConfig(profile=True)
    assert not list(watch_problems(*made, save="y", world_size=1))


MAKERS_AND_SAID = [
    (lambda: LogConfig(log_interval=0, inspect=0), "--log-interval is 0; it must be at least 1\n--inspect is 0"),
    (lambda: TensorBoardConfig(tensorboard_log_interval=0), "--tensorboard-log-interval is 0"),
    (lambda: TensorBoardConfig(wandb_entity="team"), "--wandb-entity needs --wandb-project"),
    (lambda: ProfileConfig(profile_step_start=5, profile_step_end=5), "--profile-step-end 5"),
]


@pytest.mark.parametrize(("make", "says"), MAKERS_AND_SAID)
def test_settings_that_cannot_be_are_said(make, says: str):
    with pytest.raises(ConfigError) as error:
        make()
    assert tells(error.value, says)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA A100-PCIE-40GB", torch.bfloat16, 312.0),
        ("NVIDIA H100 PCIe", torch.bfloat16, None),  # a slower one of the same name
        ("NVIDIA H200", torch.float64, None),
        ("Something new", torch.bfloat16, None),
    ],
)
def test_peaks_are_of_dense_products(name: str, dtype: torch.dtype, tflops: float | None):
    peak = peak_flops_of(name, dtype)
    assert peak is None if tflops is None else peak == pytest.approx(tflops * 1e12)


def test_an_accelerator_counts_memory_under_megatrons_tags_and_keeps_its_history(tmp_path):
    """With a double of torch.cuda: names of statistics as torch.cuda.memory_stats has them."""
    calls = []
    memory = SimpleNamespace(_record_memory_history=lambda: calls.append("record"), _dump_snapshot=calls.append)
    stats = {
        "reserved_bytes.all.current": 8,
        "allocated_bytes.all.current": 4,
        "allocated_bytes.all.peak": 6,
        "allocation.all.current": 2,
        "num_ooms": 0,
    }
    device = Device("cpu")
    device.name, device.module = "some", SimpleNamespace(memory=memory, memory_stats=lambda: stats)
    assert device.memory_numbers() == {
        "mem-reserved-bytes": 8,
        "mem-allocated-bytes": 4,
        "mem-max-allocated-bytes": 6,
        "mem-allocated-count": 2,
    }
    device.record_memory_history()
    config = ProfileConfig(
        record_memory_history=True, memory_snapshot_path=str(tmp_path / "new" / "s.pickle"), profile_ranks=[0, 3]
    )
    for rank in (0, 1, 3):
        MemoryHistory(config, device, rank).save()
    assert calls == ["record", f"{tmp_path}/new/s.pickle", f"{tmp_path}/new/s-rank-3.pickle"]


def test_a_cpu_has_no_peak_no_memory_numbers_and_no_memory_history():
    cpu = Device("cpu")
    assert cpu.peak_flops(torch.float32) is None and cpu.memory_numbers() == {}
    with pytest.raises(ConfigError, match="cpu"):
        cpu.record_memory_history()
