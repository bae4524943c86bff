"""Who hangs, told from the places of all ranks; and how a place is written by one process and read by another."""

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.base import tolerate_broken_output
from megatron.core.base.rank_status import (
    Calls,
    RankStatus,
    RankStatusWriter,
    begin_step,
    group_text,
    ranks_of,
    read_status,
)
from megatron.training.arguments.hang_config import HangConfig
from megatron.training.fault_tolerance import hang_watch, hang_watch_folder
from megatron.training.fault_tolerance.find_hung_rank import RankSnapshot, diagnose, hang_report
from megatron.training.fault_tolerance.hang_watch import HangWatch
from megatron.training.fault_tolerance.hang_watch_folder import (
    create_status_in_run_folder,
    leave_run_folder,
    make_run_folder,
)
from megatron.training.fault_tolerance.process_stat import ProcessState, process_state, seconds_without_core

SLEEPS, STOPPED = ProcessState("S"), ProcessState("T")


def calls(axis: str, group: str, count: int, peer: int | None = None, op: str = "all_reduce") -> Calls:
    return Calls(axis, group, peer, count, op, 32)


def seen(rank: int, *made: Calls, waits: int | None = None, state: ProcessState = SLEEPS, **more) -> RankSnapshot:
    """A rank in its tenth step, that has made these calls, and waits in one of them."""
    waiting = None if waits is None else made[waits]
    place = RankStatus(
        rank, 4, 100 + rank, 1, 0.0, 0.0, more.pop("starved", 0.0), "training", 10, 10, waiting, waiting, made
    )
    if "phase" in more:
        place = replace(place, phase=more.pop("phase"), steps=0)
    return RankSnapshot(place, "gpu07", state, 9.0, **more)


CASES = {
    "a rank has not come to a collective": (
        [seen(0, calls("dp", "0:2:1", 7), waits=0), seen(1, calls("dp", "0:2:1", 6))],
        (1,),
        "rank 0 waits in all_reduce, number 7 on axis dp (32 bytes), over ranks 0, 1, and rank 1 did not come",
    ),
    "one of a chain": (
        [
            seen(0, calls("tp", "0:2:1", 7), waits=0),
            seen(1, calls("tp", "0:2:1", 6), calls("dp", "1:4:2", 3), waits=1),
            seen(2, calls("tp", "2:4:1", 9)),
            seen(3, calls("tp", "2:4:1", 9), calls("dp", "1:4:2", 2)),
        ],
        (3,),
        "rank 1 waits in all_reduce, number 3 on axis dp",
    ),
    "a transfer": (
        [seen(0, calls("pp", "0:2:1", 4, 1, "recv"), waits=0), seen(1, calls("pp", "0:2:1", 3, 0, "send"))],
        (1,),
        "rank 0 waits in recv from rank 1, number 4 on axis pp",
    ),
    "stopped within the call that all have issued": (
        [seen(0, calls("dp", "0:2:1", 7), waits=0, state=STOPPED), seen(1, calls("dp", "0:2:1", 7), waits=0)],
        (0,),
        "rank 1 waits in all_reduce, number 7 on axis dp",
    ),
    "calls that do not match": (
        [seen(0, calls("tp", "0:2:1", 7), waits=0), seen(1, calls("dp", "0:2:1", 2), calls("tp", "0:2:1", 6), waits=0)],
        (),
        "the ranks wait for each other",
    ),
    "in the start-up": (
        [seen(0, phase="making groups", idle=99.0), seen(1, phase="connecting", idle=99.0)],
        (1,),
        "has hung, while connecting",
    ),
    "on another machine": (
        [seen(0, calls("dp", "0:2:1", 7), waits=0)],
        (1,),
        "rank 1 (on another machine) has hung: rank 0 waits in all_reduce, number 7 on axis dp (32 bytes), over ranks 0, 1, and rank 1 did not come",
    ),
    "on another machine, and so all wait": (
        [
            seen(0, calls("tp", "0:2:1", 7), calls("dp", "0:4:2", 3), waits=1),
            seen(1, calls("tp", "0:2:1", 7), calls("dp", "1:4:2", 3), waits=1),
        ],
        (2, 3),
        "ranks 2, 3 (on another machine) have hung",
    ),
    "that computes for ever, while others are elsewhere": (
        [seen(0, calls("dp", "0:4:1", 7)), seen(1, calls("dp", "0:4:1", 7), calls("tp", "0:2:1", 3), waits=1)],
        (0,),
        "rank 1 waits in all_reduce, number 3 on axis tp (32 bytes), over ranks 0, 1, and rank 0 did not come",
    ),
    "alone": ([seen(0)], (0,), "rank 0 (on gpu07, process 100) has hung, training, iteration 10"),
}


@pytest.mark.parametrize("ranks, hung, said", CASES.values(), ids=CASES)
def test_who_hangs(ranks, hung, said):
    verdict = diagnose(ranks, max_idle=5.0, max_wait=100.0)
    assert (verdict.hung, verdict.slow) == (hung, False) and said in verdict.headline, verdict
    assert all(
        f"rank {one.rank} (on gpu07, process {one.status.pid}): " in hang_report(verdict, ranks) for one in ranks
    )


def test_nobody_is_blamed_for_waiting_for_ranks_that_come_late_or_work_elsewhere():
    """The lines of the start name who has not come; what a rank of another machine does in the start-up is not known here."""
    for phase in ("meeting the others", "connecting", "making groups"):
        assert diagnose([seen(0, phase=phase, idle=99.0)], max_idle=5.0, max_wait=8.0).hung == ()
    together = [seen(rank, phase="meeting the others", idle=99.0) for rank in range(2)]
    assert diagnose(together, max_idle=5.0, max_wait=8.0).hung == ()
    building = seen(0, calls("world", "0:4:1", 7), waits=0, phase="building the data sets", idle=99.0)
    assert diagnose([building], max_idle=5.0, max_wait=100.0).slow
    assert not diagnose([building], max_idle=5.0, max_wait=8.0).slow


def test_a_rank_that_writes_in_a_save_is_slow_until_the_back_end_gives_up():
    waiting = seen(1, calls("world", "0:2:1", 7), waits=0)
    ranks = [seen(0, calls("world", "0:2:1", 6), phase="saving", idle=0.5), waiting]
    assert diagnose(ranks, max_idle=5.0, max_wait=100.0).slow
    assert not diagnose([replace(ranks[0], idle=6.0), waiting], max_idle=5.0, max_wait=100.0).slow
    assert diagnose([replace(ranks[0], idle=6.0, state=ProcessState("D")), waiting], max_idle=5.0, max_wait=100.0).slow
    assert not diagnose(ranks, max_idle=5.0, max_wait=8.0).slow
    assert not diagnose([replace(ranks[0], state=STOPPED), waiting], max_idle=5.0, max_wait=100.0).slow


def test_on_a_crowded_machine_the_time_without_a_core_does_not_count():
    """Whichever rank's thread it is that all wait for; a rank that does not answer is no question of cores."""
    behind, waiting = seen(0, calls("dp", "0:2:1", 6)), seen(1, calls("dp", "0:2:1", 7), waits=0)
    limits = {"max_wait": 100.0, "allowed": 2.0}
    assert not diagnose([behind, waiting], **limits).slow
    for starved in (
        [replace(behind, status=replace(behind.status, starved=7.5)), waiting],
        [behind, seen(1, starved=7.5)],
    ):
        assert diagnose(starved, **limits).slow and not diagnose(starved, max_wait=100.0, allowed=1.0).slow
        assert not diagnose(starved, max_wait=8.0, allowed=2.0).slow or not starved[1].status.waiting
    stopped = [replace(behind, status=replace(behind.status, starved=7.5), state=STOPPED), waiting]
    assert not diagnose(stopped, **limits).slow
    mutual = [seen(rank, calls("dp", "0:2:1", 7), waits=0, starved=7.5) for rank in range(2)]
    assert diagnose(mutual, **limits).slow and "without a core" in hang_report(diagnose(mutual), mutual)


@pytest.mark.full
def test_a_thread_tells_how_long_it_has_waited_for_a_core():
    """Two busy processes on one core: each waits about half of the time."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    busy = subprocess.Popen([sys.executable, "-IS", "-c", "while True: pass"])
    try:
        start = time.monotonic()
        began = seconds_without_core(os.getpid())[threading.get_native_id()]
        while time.monotonic() < start + 0.3:
            pass
        waited = seconds_without_core(os.getpid())[threading.get_native_id()] - began
        assert 0.03 < waited < time.monotonic() - start
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, before)


def test_equal_stacks_are_shown_once():
    stack = 'Thread 0x1 (most recent call first):\n  File "w.py", line 1 in x\n\nCurrent thread 0x2 (most recent call first):\n  File "a.py", line 2 in f\n'
    ranks = [seen(rank, calls("dp", "0:4:1", 7), waits=0, stack=stack) for rank in range(3)]
    text = hang_report(diagnose(ranks), [*ranks, seen(3)])
    assert text.count('  File "a.py", line 2 in f') == 1 and "w.py" not in text
    assert "ranks 0 to 2, most recent call first:" in text and "no stack of rank 3" in text


def test_a_place_is_read_as_it_was_written(tmp_path):
    here = RankStatusWriter(tmp_path / "rank_00002", 2, 8, 77)
    here.enter("making groups")
    here.begin_step(41)
    for _ in range(3):
        here.issue("all_gather", "tp", (2, 3), 4096, -1)
        here.end_wait()
    here.issue("send", "pp", (2, 6), 512, 6)
    place = read_status(tmp_path / "rank_00002")
    assert (place.rank, place.ranks, place.pid, place.started) == (2, 8, os.getpid(), 77)
    assert (place.phase, place.iteration, place.steps) == ("training", 41, 1)
    assert place.calls == (Calls("tp", "2:4:1", None, 3, "all_gather", 4096), Calls("pp", "2:7:4", 6, 1, "send", 512))
    assert place.waiting == place.last == place.calls[1]
    (tmp_path / "rank_00003").write_bytes(b"something else")
    assert read_status(tmp_path / "rank_00003") is None and read_status(tmp_path / "none") is None


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (1, 3, 5), (0, 1, 4, 5)], ids=str)
def test_ranks_of_a_group_are_kept_as_text(ranks):
    assert ranks_of(group_text(ranks)) == ranks


def test_the_folder_of_a_job_goes_with_its_last_rank(tmp_path):
    folder, killed = tmp_path / f"megatron-{os.getuid()}-1", tmp_path / f"megatron-{os.getuid()}-2"
    killed.mkdir()
    RankStatusWriter(killed / "rank_00000", 0, 1, 1)  # of another process: this one did not start at tick 1
    for path in (killed / "rank_00000", killed):
        os.utime(path, (1, 1))
    make_run_folder(folder)
    assert not killed.exists()
    for rank in (0, 1):
        RankStatusWriter(folder / f"rank_{rank:05}", rank, 2, process_state(os.getpid()).started)
    leave_run_folder(folder, 0)
    assert not folder.exists()


def test_what_a_killed_run_of_the_same_name_left_goes_and_what_a_beginning_rank_wrote_stays(tmp_path):
    """Each rank of a job removes leftovers, also while another one has just entered the folder."""
    folder = tmp_path / f"megatron-{os.getuid()}-6"
    folder.mkdir()
    for name, age in [("rank_00000", 100), ("alarm", 100), (f"rank_00001.{os.getpid()}", 0)]:
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age, time.time() - age))
    os.utime(folder, (1, 1))
    make_run_folder(folder)
    assert [path.name for path in folder.iterdir()] == [f"rank_00001.{os.getpid()}"]
    assert time.time() - folder.stat().st_mtime < 5  # in use again: another job does not remove it


def test_a_rank_enters_the_folder_again_when_another_removed_it_meanwhile(tmp_path, monkeypatch):
    folder = tmp_path / f"megatron-{os.getuid()}-7"
    make, removals = hang_watch_folder.make_run_folder, [True, True]

    def make_and_lose(path: Path) -> None:
        make(path)
        if removals:
            removals.pop()
            path.rmdir()

    monkeypatch.setattr(hang_watch_folder, "make_run_folder", make_and_lose)
    create_status_in_run_folder(folder, 1, 2, 1)
    assert not removals and [path.name for path in folder.iterdir()] == ["rank_00001"]


def test_a_watch_tells_of_its_own_rank_and_ends_it(tmp_path, capsys):
    """Alone, in its fourth step."""
    codes, limits = [], HangConfig(hang_timeout=1, hang_timeout_floor=0.1)
    watch = HangWatch(tmp_path / f"megatron-{os.getuid()}-3", 0, 1, limits, codes.append)
    for step in range(1, 5):
        begin_step(step)
    deadline = time.monotonic() + 5
    while not codes and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.close()
    said = capsys.readouterr().err
    assert codes[:1] == [4] and "has hung, training, iteration 4" in said and "test_hang_watch.py" in said
    assert not list(tmp_path.iterdir())


def no_space(*words, **named) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_watch_without_room_for_its_verdict_ends_its_rank_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tolerate_broken_output, "losses", [])
    codes, limits = [], HangConfig(hang_timeout=1, hang_timeout_floor=0.1)
    watch = HangWatch(tmp_path / f"megatron-{os.getuid()}-4", 0, 1, limits, codes.append)
    monkeypatch.setattr(Path, "write_text", no_space)
    monkeypatch.setattr(Path, "touch", no_space)
    for step in range(1, 5):
        begin_step(step)
    deadline = time.monotonic() + 5
    while not codes and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.close()
    said = capsys.readouterr().err
    assert codes[:1] == [4] and "has hung, training, iteration 4" in said, said
    assert [loss.output.rpartition("/")[2] for loss in tolerate_broken_output.losses] == ["verdict.partial"]


def test_a_run_without_room_for_its_place_runs_unwatched_and_says_so(tmp_path, capsys, monkeypatch):
    """The map of a file without blocks would end the run by SIGBUS."""
    monkeypatch.setattr(tolerate_broken_output, "losses", [])
    monkeypatch.setattr(
        hang_watch.hang_watch_folder, "folder_of_job", lambda *words, **named: tmp_path / f"megatron-{os.getuid()}-5"
    )
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    monkeypatch.setattr(mmap, "mmap", lambda *words: pytest.fail("there is no room"))
    with hang_watch.watching(0, 1):
        begin_step(1)
    assert "No space left on device" in capsys.readouterr().err and len(tolerate_broken_output.losses) == 1
