"""Where a run's numbers go: tags, JSON lines, what a resumed run cuts, and what is said when a package is missing."""

import errno
import json
import math
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from said import tells

from megatron.core.base import tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.accelerator import Device, peak_flops_of
from megatron.training.arguments import monitor_config
from megatron.training.arguments.monitor_config import (
    LogConfig,
    ProfileConfig,
    TensorBoardConfig,
    watch_notes,
    watch_problems,
)
from megatron.training.monitor import writers
from megatron.training.monitor.monitor import Monitor
from megatron.training.monitor.torch_profiler import MemoryHistory, StepProfiler
from megatron.training.monitor.writers import (
    MetricsFile,
    Record,
    TensorBoardWriter,
    WandbWriter,
    json_line,
    lines_until,
)

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
    sink = TensorBoardWriter("folder", 5)
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
    sink = WandbWriter("project", "name", "team", str(tmp_path / "wandb"), {"log": {"log_interval": 1}})
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

    sink = TensorBoardWriter(str(tmp_path), 10)
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


def test_a_pipe_gets_the_records_as_they_come(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    opened = threading.Thread(target=lambda: files.append(MetricsFile(str(path), 5)), daemon=True)
    files: list[MetricsFile] = []
    opened.start()
    opened.join(5.0)
    [file] = files  # that it does not wait for the end of what it writes itself
    file.write(Record("interval", 6, 48, {"lm loss": 1.5}))
    file.close()
    assert json.loads(os.read(reader, 4096))["lm loss"] == 1.5
    os.close(reader)


def test_losses_have_a_perplexity_and_shares_of_right_answers_have_none():
    sent, curves = {}, TensorBoardConfig(log_validation_ppl_to_tensorboard=True)
    watch = SimpleNamespace(
        config=SimpleNamespace(tensorboard=curves), _send=lambda kind, values, labels: sent.update(values)
    )
    Monitor.report_validation(watch, "validation", {"sop loss": 0.5, "sop accuracy": 0.75}, at_end=False)
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
    ({}, {}, {"profile": True}, "--profile --tensorboard-dir --save"),
    ({}, {}, {"profile_ranks": [0, 2, -1]}, "--profile-ranks 2 -1 0 1"),
]


@pytest.mark.parametrize(("log", "curves", "profile", "says"), PROBLEMS)
def test_what_cannot_be_watched_is_said(monkeypatch, log, curves, profile, says: str):
    monkeypatch.setattr(monitor_config, "_is_installed", lambda package: False)
    made = LogConfig(**log), TensorBoardConfig(**curves), ProfileConfig(**profile)
    (problem,) = watch_problems(*made, save=None, world_size=2)
    assert tells(problem, says)


def test_a_run_without_the_package_tensorboard_goes_on_and_says_so_once(monkeypatch):
    made = LogConfig(), TensorBoardConfig(tensorboard_dir="x"), ProfileConfig()
    monkeypatch.setattr(monitor_config, "_is_installed", lambda package: False)
    assert not list(watch_problems(*made, save=None, world_size=2))
    (note,) = watch_notes(made[1], made[2], 5)
    assert tells(note, "warning --tensorboard-dir pip install tensorboard")
    assert watch_notes(TensorBoardConfig(), made[2], 5) == []
    monkeypatch.setattr(monitor_config, "_is_installed", lambda package: True)
    assert watch_notes(made[1], made[2], 5) == []


def test_a_run_that_ends_before_its_profile_says_so():
    profile = ProfileConfig(profile=True, profile_step_start=5, profile_step_end=7)
    assert watch_notes(TensorBoardConfig(), profile, 6) == watch_notes(TensorBoardConfig(), profile, None) == []
    (note,) = watch_notes(TensorBoardConfig(), profile, 5)
    assert tells(note, "warning 5 --profile-step-start")


def test_what_can_be_watched_has_no_problem(monkeypatch):
    monkeypatch.setattr(monitor_config, "_is_installed", lambda package: True)
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


# ---------------------------------------------------------------- sinks that cannot be written


class Broken:
    """Stands for a library whose every call fails."""

    def __init__(self):
        self.calls = 0

    def __getattr__(self, name: str):
        def fail(*words, **named):
            self.calls += 1
            raise RuntimeError("no connection")

        return fail


def watch_of(*writers) -> SimpleNamespace:
    """What `Monitor` needs to send a record."""
    state = SimpleNamespace(iteration=10, consumed_train_samples=80)
    return SimpleNamespace(writers=list(writers), state=state)


@pytest.fixture
def losses(monkeypatch) -> list:
    found: list = []
    monkeypatch.setattr(tolerate_broken_output, "losses", found)
    return found


@pytest.mark.parametrize("kind", [TensorBoardWriter, WandbWriter])
def test_a_library_that_fails_is_left_alone_and_the_other_sinks_are_told(kind, curves, losses, tmp_path, capsys):
    sink = kind("folder", 5) if kind is TensorBoardWriter else kind("project", None, None, None, {})
    broken = Broken()
    vars(sink).update(_writer=broken, _run=broken)
    path = tmp_path / "m.jsonl"
    watch = watch_of(sink, MetricsFile(str(path), 0))
    for iteration in (10, 11):
        watch.state.iteration = iteration
        Monitor._send(watch, "interval", {"lm loss": 1.0, "throughput": 2.0})
    sink.close()  # a writer whose thread has ended would be waited for
    assert broken.calls == 1 and losses == [(kind.name, "no connection")]
    assert capsys.readouterr().err.count("the run goes on without it") == 1
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [10, 11]


def test_an_error_of_our_own_is_not_told_as_a_lost_output(curves, losses, monkeypatch):
    monkeypatch.setattr(writers, "curve_points", lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Monitor._send(watch_of(TensorBoardWriter("folder", 5)), "interval", {})
    assert losses == []


def test_a_metrics_file_on_a_full_disk_has_whole_lines_and_says_what_is_missing(losses, tmp_path, monkeypatch):
    path, write, room = tmp_path / "m.jsonl", os.write, [1000]

    def limited(handle: int, data) -> int:
        """As a disk with so many bytes left writes."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        return write(handle, data[:taken])

    monkeypatch.setattr(writers.os, "write", limited)
    sink = MetricsFile(str(path), 0)
    watch = watch_of(sink)
    for iteration, left in ((1, 1000), (2, 10), (3, 0), (4, 1000), (5, 1000)):
        watch.state.iteration, room[0] = iteration, left
        Monitor._send(watch, "interval", {"lm loss": float(iteration)})
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["kind"], entry["iteration"]) for entry in entries] == [
        ("interval", 1),
        ("lost output", 2),
        ("interval", 4),
        ("interval", 5),
    ]
    assert (entries[1]["records"], entries[1]["why"]) == (2, "No space left on device")
    assert losses == [("--metrics-file", "No space left on device")]
    assert lines_until(path.read_text(), 4, "m.jsonl").count("\n") == 3, "a resumed run reads it"


def test_an_output_that_is_lost_is_told_in_every_other(curves, losses, tmp_path):
    path = tmp_path / "m.jsonl"
    board, wandb = TensorBoardWriter("folder", 5), WandbWriter("project", None, None, None, {})
    curves.add_text = lambda name, text, step: curves.points.append((name, text, step))
    curves.alert = lambda title, text: curves.points.append((title, text))
    told = []
    watch = watch_of(board, wandb, MetricsFile(str(path), 0))
    vars(watch).update(_losses_told=0, _beacon=SimpleNamespace(lost=told.append), note_progress=told.append)
    watch._send = lambda *record: Monitor._send(watch, *record)
    Monitor._tell_of_losses(watch)
    losses.append(tolerate_broken_output.Loss("standard output", "Broken pipe"))
    Monitor._tell_of_losses(watch)
    Monitor._tell_of_losses(watch)
    said = "standard output cannot be written (Broken pipe); the run goes on without it"
    assert told == [said, f"WARNING: {said}"]
    text = "standard output cannot be written: Broken pipe"
    assert curves.points == [("lost output", text, 10), ("lost output", text)]
    (entry,) = map(json.loads, path.read_text().splitlines())
    assert (entry["kind"], entry["output"], entry["why"]) == ("lost output", "standard output", "Broken pipe")


def profiled(folder: Path) -> StepProfiler:
    """A profiler that has recorded a step."""

    class Mesh(dict):
        ledger = SimpleNamespace(profiled=False)

    config = ProfileConfig(profile=True, profile_step_start=0, profile_step_end=1, profile_ranks=[0])
    profiler = StepProfiler(config, str(folder), Mesh(world=SimpleNamespace(rank=0)))
    with profiler.step(1):
        torch.ones(2) + 1
    return profiler


@pytest.mark.full
@pytest.mark.parametrize("how", ["no folder", "a full disk"])
def test_a_profile_that_cannot_be_written_ends_no_run(how: str, losses, tmp_path, monkeypatch):
    if how == "no folder":
        (tmp_path / "profile").write_text("a file")
    else:  # as torch 2.13 leaves it, without a word
        (tmp_path / "profile").mkdir()
        (tmp_path / "profile" / "steps-1-1-rank-0.json").write_text("{}")  # of an earlier run
        half = lambda profile, path: Path(f"{path}.tmp").write_text('{"traceEvents": [')  # noqa: E731
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", half)
    profiler = profiled(tmp_path)
    profiler.write_if_done(1)
    profiler.finish()
    (loss,) = losses
    assert "steps-1-1-rank-0.json" in loss.output


def test_a_memory_snapshot_and_a_line_of_progress_that_cannot_be_written_end_no_run(losses, tmp_path):
    (tmp_path / "file").touch()
    device = SimpleNamespace(save_memory_history=pytest.fail)
    config = ProfileConfig(record_memory_history=True, memory_snapshot_path=str(tmp_path / "file" / "s.pickle"))
    MemoryHistory(config, device, 0).save()
    config = SimpleNamespace(
        log=SimpleNamespace(log_progress=True), checkpoint=SimpleNamespace(save=str(tmp_path / "removed"))
    )
    world = {"world": SimpleNamespace(is_first=True)}
    watch = SimpleNamespace(config=config, _mesh=world, runtime=SimpleNamespace(world_size=1))
    Monitor.note_progress(watch, "Starting job")
    assert [loss.output.split()[0] for loss in losses] == ["--memory-snapshot-path", "progress.txt"]
