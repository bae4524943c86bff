"""Whether a run notices that other work keeps it waiting for cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from said import tells

from megatron.training.monitor.cpu_contention import CpuContention, ProcessorTime, processor_time


def notes_of(samples: list[tuple[float, float]], *, ranks: int = 1, cores: int = 2, seconds: float = 6.0) -> list[int]:
    """The steps after which something is said; samples: what all threads ran and waited until the start and each step."""
    times, now = iter(samples), [0.0]
    watch = CpuContention(ranks, cores, read=lambda: ProcessorTime(*next(times)), clock=lambda: now[0])
    said = []
    for step in range(1, len(samples)):
        now[0] += seconds
        if watch.note_if_due() is not None:
            said.append(step)
    return said


def steps(run: float, waited: float, count: int = 4) -> list[tuple[float, float]]:
    return [(run * i, waited * i) for i in range(count)]


SAMPLES_AND_SAID = [
    (steps(6, 6), [1]),  # two threads of which one can run at a time; said once
    (steps(12, 0.5), []),  # a quiet machine
    (steps(0.5, 0.5), []),  # a rank that waits for others, not for a core
    ([*steps(6, 0.1), (24, 12)], [4]),  # other work began later
]


@pytest.mark.parametrize(("samples", "said"), SAMPLES_AND_SAID)
def test_a_process_that_waits_for_cores_says_so_once(samples, said):
    assert notes_of(samples) == said


def test_ranks_that_outnumber_the_cores_and_looks_too_soon_say_nothing():
    assert notes_of(steps(6, 6), ranks=4, cores=2) == []
    assert notes_of(steps(1, 1), seconds=1.0) == []


def text_of(threads: int, cores: int) -> str:
    samples, now = iter([ProcessorTime(0, 0), ProcessorTime(6, 6)]), [0.0]
    watch = CpuContention(1, cores, threads, lambda: next(samples), lambda: now[0])
    now[0] = 6.0
    return watch.note_if_due()


def test_the_advice_names_the_two_variables(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = text_of(threads=2, cores=2)
    assert "OMP_WAIT_POLICY=PASSIVE" in text and "OMP_NUM_THREADS" in text and "6.0 s" in text
    assert "other work" in text


@pytest.mark.parametrize(
    ("threads", "policy", "count", "advised"),
    [
        (2, None, None, {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"}),
        (2, "passive", None, {"OMP_NUM_THREADS"}),
        (2, None, "1", {"OMP_WAIT_POLICY"}),  # set for others, and not for torch
        (1, None, "1", set()),
        (2, "PASSIVE", "1", set()),
    ],
)
def test_what_is_set_already_is_not_advised(monkeypatch, threads, policy, count, advised):
    for name, value in (("OMP_WAIT_POLICY", policy), ("OMP_NUM_THREADS", count)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    text = text_of(threads, cores=2)
    assert {name for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS") if name in text} == advised


def test_a_run_with_more_threads_than_cores_is_not_told_of_other_work(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    text = text_of(threads=8, cores=2)
    assert tells(text, "8 2") and "OMP_NUM_THREADS (8)" in text and "other work" not in text


@pytest.mark.full
@pytest.mark.skipif(
    processor_time() is None or not hasattr(os, "sched_setaffinity"),
    reason="this system does not say how long a thread waits for a core",
)
def test_the_system_says_how_long_a_process_waited_for_the_core_it_shares():
    code = (
        "import os, time, subprocess, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from megatron.training.monitor.cpu_contention import processor_time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "end = time.monotonic() + 0.4\n"
        "while time.monotonic() < end: pass\n"
        "other.kill(); other.wait(); print(processor_time().waited)"
    )
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert float(ran.stdout) > 0.05


def test_a_system_that_does_not_say_is_asked_once(tmp_path):
    assert processor_time(tmp_path / "none") is None and processor_time(tmp_path) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("2000000000 500000000 7\n")
    (tmp_path / "2").mkdir()  # a thread that has ended
    assert processor_time(tmp_path) == (2.0, 0.5)
