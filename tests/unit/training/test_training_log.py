"""The lines that scripts parse, character by character, and the averages in them."""

import json
import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megatron.training.monitor import training_log as log_module
from megatron.training.monitor.training_log import (
    Interval,
    StepNumbers,
    TrainingLog,
    eta_and_throughput_line,
    progress_line,
    training_line,
    validation_line,
)

LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration [ \d]{7}\d/[ \d]{7}\d"
    r" \| consumed samples: [ \d]{11}\d"
    r" \| elapsed time per iteration \(ms\): (?P<ms>\d+\.\d)"
    r" \| learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d)"
    r" \| global batch size: [ \d]{4}\d"
    r"( \| lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d|NAN))?"
    r" \| loss scale: \d+\.\d"
    r" \| grad norm: (?P<norm>\d+\.\d{3}|nan)"
    r" \| number of skipped iterations: [ \d]{2}\d"
    r" \| number of nan iterations: (?P<nan>[ \d]{2}\d) \|"
)


def without_time(line: str) -> str:
    return line[line.index("]") + 1 :]


def test_a_training_line_is_megatrons():
    line = training_line(
        Interval(StepNumbers(7, 3584, 512, 1.5e-4, grad_norm=1.23456), 500_000, 123.456, {"lm loss": 10.8765432})
    )
    assert LINE.fullmatch(line)
    assert without_time(line) == (
        " iteration        7/  500000 | consumed samples:         3584 | elapsed time per iteration (ms): 123.5 | "
        "learning rate: 1.500000E-04 | global batch size:   512 | lm loss: 1.087654E+01 | loss scale: 1.0 | "
        "grad norm: 1.235 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    stamp = datetime.strptime(line[2 : line.index("]")], "%Y-%m-%d %H:%M:%S.%f")
    assert abs((datetime.now() - stamp).total_seconds()) < 60


def test_a_line_holds_every_loss_and_every_count():
    last = StepNumbers(12345678, 123456789012, 4, 0.0, loss_scale=4096.0, grad_norm=1234.5)
    losses = {"lm loss": 0.5, "sop loss": 1e-9}
    of = Interval(last, 99999999, 0.04, losses, skipped_iterations=12, nan_iterations=345)
    line = training_line(of)
    assert without_time(line) == (
        " iteration 12345678/99999999 | consumed samples: 123456789012 | elapsed time per iteration (ms): 0.0 | "
        "learning rate: 0.000000E+00 | global batch size:     4 | lm loss: 5.000000E-01 | sop loss: 1.000000E-09 | "
        "loss scale: 4096.0 | grad norm: 1234.500 | number of skipped iterations:  12 | number of nan iterations: 345 |"
    )


def test_throughput_zeros_and_norm_have_megatrons_places():
    last = StepNumbers(20, 160, 8, 1e-3, grad_norm=1.0, num_zeros=1234, params_norm=98.76543)
    of = Interval(last, 100, 250.0, {"lm loss": 2.0}, tflops=412.345)
    assert without_time(training_line(of)) == (
        " iteration       20/     100 | consumed samples:          160 | elapsed time per iteration (ms): 250.0 | "
        "throughput per GPU (TFLOP/s/GPU): 412.3 | learning rate: 1.000000E-03 | global batch size:     8 | "
        "lm loss: 2.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | num zeros: 1234.0 | params norm: 98.765 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_a_progress_line_is_for_people_and_never_taken_for_a_log_line():
    of = Interval(StepNumbers(20, 160, 8, 1e-3, grad_norm=1.0), 100, 45_000.0, {"lm loss": 2.0}, tflops=412.345)
    line = eta_and_throughput_line(of, tokens_per_sample=2048, mfu=0.4167)
    assert line == (  # 80 steps of 45 s; 8 x 2048 tokens in each
        "   progress: 20.0% done, 1:00:00 left, 364 tokens/s, 412.3 TFLOP/s per device, MFU 41.7%"
    )
    assert "MFU" not in eta_and_throughput_line(of, 2048, None)
    for word in ("iteration ", "consumed samples", "grad norm:", "loss", "|"):
        assert word not in line


def test_throughput_is_flops_by_the_time_of_a_step(clock, capsys):
    log = TrainingLog(4, 2, device_flops_per_sample=3e12)
    for iteration in (1, 2):
        clock.now += 2.0
        log.add({"lm loss": 1.0})
        interval = log.line_if_due(StepNumbers(iteration, 8 * iteration, 8, 1e-3, grad_norm=1.0))
    assert interval.tflops == pytest.approx(3 * 8 / 2)
    assert "| throughput per GPU (TFLOP/s/GPU): 12.0 |" in capsys.readouterr().out


def test_speeds_count_the_samples_of_an_interval_whose_batch_grows(clock, capsys):
    """Steps of 2, 4 and 6 samples in 6 seconds: 2 samples a second, whatever the last step's size; 4 a step, on average."""
    log = TrainingLog(3, 3, device_flops_per_sample=3e12)
    for iteration, size in enumerate((2, 4, 6), start=1):
        clock.now += 2.0
        log.add({"lm loss": 1.0})
        interval = log.line_if_due(StepNumbers(iteration, 0, size, 1e-3, grad_norm=1.0))
    assert (interval.samples_per_second, interval.tflops, interval.milliseconds) == (2.0, 3 * 2.0, 2000.0)
    assert interval.samples_per_second * 10 == float(
        re.search(r"(\d+) tokens/s", eta_and_throughput_line(interval, 10, None))[1]
    )


@pytest.mark.parametrize(
    ("sizes", "left"),
    [
        ((2, 4, 6), "0:00:42"),  # 2 samples a second; 7 steps of 12 are left
        ((6, 4, 2), "0:00:42"),
        ((4, 4, 4), "0:00:42"),
    ],
)
def test_the_time_left_counts_the_samples_of_later_steps(sizes: tuple[int, ...], left: str, clock, capsys):
    """`eta_and_throughput_line` and progress lines have it; by the steps alone it would be 14 seconds."""
    log = TrainingLog(10, 3, samples_of_run=12 + 7 * 12)
    consumed = 0
    for iteration, size in enumerate(sizes, start=1):
        clock.now += 2.0
        consumed += size
        log.add({"lm loss": 1.0})
        interval = log.line_if_due(StepNumbers(iteration, consumed, size, 1e-3, grad_norm=1.0))
    assert f"{left} left" in eta_and_throughput_line(interval, 10, None)
    assert f"{left} left" in progress_line(interval, 10)
    by_steps = replace(interval, samples_left=None)
    assert "0:00:14 left" in progress_line(by_steps, 10)


def test_a_step_that_is_left_out_has_no_part_in_speeds(clock, capsys):
    """Of four steps of 8 samples two are computed, in 2 seconds each."""
    log = TrainingLog(4, 4, device_flops_per_sample=3e12)
    for iteration in (1, 2, 3, 4):
        if iteration % 2:
            log.leave_out()
        else:
            clock.now += 2.0
            log.add({"lm loss": 1.0})
        interval = log.line_if_due(StepNumbers(iteration, 8 * iteration, 8, 1e-3))
    assert (interval.samples_per_second, interval.tflops, interval.milliseconds) == (4.0, 3 * 4.0, 2000.0)
    assert interval.skipped_iterations == 2 and interval.losses == {"lm loss": 1.0}


PLACES_AND_LINES = [
    (
        "iteration 40",
        {"lm loss": math.log(2.0)},
        " validation loss at iteration 40 | lm loss value: 6.931472E-01 | lm loss PPL: 2.000000E+00 | ",
    ),
    (
        "iteration 40 on test set",
        {"lm loss": 25.0},
        " validation loss at iteration 40 on test set | lm loss value: 2.500000E+01 | lm loss PPL: 4.851652E+08 | ",
    ),
    (
        "iteration 1",
        {"a": 0.0, "b": 1.0},
        " validation loss at iteration 1 | a value: 0.000000E+00 | a PPL: 1.000000E+00 | "
        "b value: 1.000000E+00 | b PPL: 2.718282E+00 | ",
    ),
    ("iteration 1", {}, " validation loss at iteration 1 | "),
    (
        "iteration 1",
        {"a": math.nan, "b": math.inf},
        " validation loss at iteration 1 | a value: NAN | a PPL: NAN | b value: INF | b PPL: INF | ",
    ),
]


@pytest.mark.parametrize(("where", "losses", "line"), PLACES_AND_LINES)
def test_a_validation_line_is_megatrons(where: str, losses: dict, line: str):
    assert validation_line(where, losses) == line


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(log_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(log_module.time, "monotonic", lambda: self.now)

    def step(self, log: TrainingLog, iteration: int, loss: float, seconds: float = 0.5, norm: float = 1.0) -> None:
        self.now += seconds
        log.add({"lm loss": loss}, math.isnan(norm))
        log.line_if_due(StepNumbers(iteration, 8 * iteration, 8, 1e-3 * iteration, grad_norm=norm))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def printed(capsys) -> list[dict[str, str]]:
    lines = capsys.readouterr().out.splitlines()
    return [{"line": without_time(line), **LINE.fullmatch(line).groupdict()} for line in lines]


def test_a_line_averages_its_interval_and_no_other(clock, capsys):
    log = TrainingLog(train_iters=10, log_interval=3)
    for iteration, loss in enumerate((6.0, 5.0, 1.0, 3.0, 2.0, 1.0, 9.0), start=1):
        clock.step(log, iteration, loss, seconds=iteration / 10, norm=float(iteration))
    first, second = printed(capsys)
    assert (first["loss"], first["ms"], first["lr"], first["norm"]) == (
        "4.000000E+00",
        "200.0",
        "3.000000E-03",
        "3.000",
    )
    assert (second["loss"], second["ms"], second["lr"]) == ("2.000000E+00", "500.0", "6.000000E-03")
    assert second["line"].startswith(" iteration        6/      10 | consumed samples:           48 | ")


def test_a_line_has_the_size_of_its_step(clock, capsys):
    log = TrainingLog(10, 1)
    for iteration, size in enumerate((4, 6), start=1):
        log.add({"lm loss": 1.0})
        log.line_if_due(StepNumbers(iteration, 4, size, 0.0, grad_norm=1.0))
    lines = [line["line"].split(" | ")[4] for line in printed(capsys)]
    assert lines == [f"global batch size: {size:5d}" for size in (4, 6)]


def test_an_interval_of_one_prints_every_step(clock, capsys):
    log = TrainingLog(3, 1)
    for iteration in (1, 2, 3):
        clock.step(log, iteration, float(iteration))
    assert [line["loss"] for line in printed(capsys)] == ["1.000000E+00", "2.000000E+00", "3.000000E+00"]


def test_steps_without_a_finite_gradient_are_counted_once(clock, capsys):
    log = TrainingLog(4, 2)
    clock.step(log, 1, 1.0, norm=math.nan)
    clock.step(log, 2, 1.0)
    clock.step(log, 3, 1.0)
    clock.step(log, 4, 1.0)
    assert [line["nan"] for line in printed(capsys)] == ["  1", "  0"]


def test_a_slow_run_without_a_log_interval_says_every_few_seconds_how_far_it_is(clock, capsys):
    log = TrainingLog(1000, 100, progress_in_tokens=64)
    for iteration in range(1, 101):
        clock.step(log, iteration, 4.0, seconds=2.0)
    lines = capsys.readouterr().out.splitlines()
    progress = [line for line in lines if line.startswith("   progress: ")]
    assert [int(line.split()[2]) for line in progress] == list(
        range(3, 100, 3)
    )  # every 6 s, and none beside a log line
    assert progress[0] == "   progress: step 3 of 1000, 0:33:14 left, 256 tokens/s, lm loss 4.0000"
    assert len(lines) == len(progress) + 1 and LINE.fullmatch(lines[-1])
    clock.now += 600
    for iteration in range(101, 200):
        clock.step(log, iteration, 4.0, seconds=2.0)
    assert len(capsys.readouterr().out.splitlines()) == 99 * 2 // 60 + 1  # a minute apart, once it has settled


def test_a_fast_run_and_one_with_a_log_interval_print_no_progress(clock, capsys):
    for log, seconds in ((TrainingLog(200, 100, progress_in_tokens=64), 0.04), (TrainingLog(200, 100), 2.0)):
        for iteration in range(1, 201):
            clock.step(log, iteration, 4.0, seconds=seconds)
        assert len(printed(capsys)) == 2


def test_a_rank_that_knows_no_loss_prints_none(clock, capsys):
    log = TrainingLog(2, 1)
    clock.now += 1
    log.add({}, False)
    log.line_if_due(StepNumbers(1, 8, 8, 0.0, grad_norm=0.0))
    (line,) = printed(capsys)
    assert line["loss"] is None


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5])
def test_an_interval_survives_a_restart(clock, capsys, stop_after: int):
    losses = [6.0, 5.0, 1.0, 3.0, 2.0, 1.0]
    whole = TrainingLog(6, 3)
    for iteration, loss in enumerate(losses, start=1):
        clock.step(whole, iteration, loss)
    expected = printed(capsys)
    log = TrainingLog(6, 3)
    for iteration, loss in enumerate(losses, start=1):
        clock.step(log, iteration, loss, norm=math.nan if iteration == 1 else 1.0)
        if iteration == stop_after:
            state = json.loads(json.dumps(log.state()))
            clock.now += 1000.0  # the time between the two runs is nobody's
            log = TrainingLog(6, 3)
            log.load_state(state)
    got = printed(capsys)
    assert [line["loss"] for line in got] == [line["loss"] for line in expected]
    assert [line["ms"] for line in got] == [line["ms"] for line in expected]
    assert [line["nan"] for line in got] == ["  1", "  0"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_no_number_survives_a_restart(clock, loss: float):
    """As JSON to the letter of its standard, which has no such numbers."""
    log = TrainingLog(6, 3)
    clock.step(log, 1, loss)
    state = json.loads(json.dumps(log.state(), allow_nan=False))
    log = TrainingLog(6, 3)
    log.load_state(state)
    assert str(log.sums["lm loss"]) == str(loss)


def test_the_saved_state_does_not_follow_the_run(clock):
    log = TrainingLog(6, 3)
    clock.step(log, 1, 2.0)
    state = log.state()
    clock.step(log, 2, 5.0)
    assert state == {"sums": {"lm loss": 2.0}, "steps": 1, "nan_steps": 0, "skipped_steps": 0}


def test_validation_and_saving_take_no_time_from_the_steps(clock, capsys):
    log = TrainingLog(4, 2)
    clock.step(log, 1, 1.0)
    with log.paused():
        clock.now += 50.0
    clock.step(log, 2, 1.0)
    with log.paused():
        clock.now += 50.0
    clock.step(log, 3, 1.0)
    clock.step(log, 4, 1.0)
    assert [line["ms"] for line in printed(capsys)] == ["500.0", "500.0"]


def test_only_the_last_rank_prints(clock, capsys, monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    for rank, lines in (("0", 0), ("2", 0), ("3", 1)):
        monkeypatch.setenv("RANK", rank)
        clock.step(TrainingLog(2, 1), 1, 1.0)
        assert len(printed(capsys)) == lines
