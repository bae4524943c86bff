"""Timers: sums of times, nothing when off, and Megatron's table."""

import pytest

from megatron.core import timers as timers_module
from megatron.core.timers import Timers, time_table


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 50.0

    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_a_timer_adds_up_until_it_is_read(clock):
    timer = Timers(1)("optimizer")
    for seconds in (1.0, 2.0):
        timer.start()
        clock.now += seconds
        timer.stop()
        clock.now += 100.0
    assert timer.elapsed(reset=False) == 3.0
    timer.start()
    clock.now += 4.0
    assert timer.elapsed() == 7.0  # it goes on
    clock.now += 5.0
    timer.stop()
    assert (timer.elapsed(), timer.elapsed()) == (5.0, 0.0)


def test_with_measures_a_block_that_fails_too(clock):
    timers = Timers(2)
    with pytest.raises(KeyError), timers("batch-generator", log_level=2):
        clock.now += 0.25
        raise KeyError
    assert timers("batch-generator", log_level=2).elapsed() == 0.25


@pytest.mark.parametrize(("level", "on"), [(0, set()), (1, {1}), (2, {1, 2})])
def test_timers_above_the_level_do_nothing(clock, level: int, on: set):
    said = []
    timers = Timers(level, say=said.append)
    for log_level in (1, 2):
        timer = timers(f"of level {log_level}", log_level=log_level)
        timer.start()
        clock.now += 1.0
        timer.stop()
        assert timer.elapsed(reset=False) == (1.0 if log_level in on else 0.0)
    assert timers("x", log_level=3) is timers("y", log_level=3), "nothing is made for a timer that is off"
    assert set(timers.log()) == {f"of level {n}" for n in on} and len(said) == bool(on)


SECONDS = {"forward-backward": {0: 0.4, 1: 0.6}, "batch-generator": {1: 0.02}}
TABLES = {
    "max": [
        "max time across ranks (ms):",
        "    forward-backward ...............................: 300.00",
        "    batch-generator ................................: 10.00",
    ],
    "minmax": [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (200.00, 300.00)",
        "    batch-generator ................................: (10.00, 10.00)",
    ],
    "all": [
        "times across ranks (ms):",
        "  forward-backward:",
        "     rank  0: 200.00",
        "     rank  1: 300.00",
        "  batch-generator:",
        "     rank  1: 10.00",
    ],
}


@pytest.mark.parametrize("option", TABLES)
def test_the_table_is_megatrons(option):
    assert time_table(SECONDS, option, normalizer=2).splitlines() == TABLES[option]
