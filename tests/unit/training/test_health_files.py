"""The files for supervisors, and the line of stragglers."""

import errno
import json
import os
import re
import threading
from pathlib import Path

import pytest
from said import tells
from whole_run import run

from megatron.core.base import exit_callbacks_and_hard_exit, tolerate_broken_output
from megatron.training.monitor import heartbeat_and_prometheus_files
from megatron.training.monitor.heartbeat_and_prometheus_files import HealthFiles, prometheus_text
from megatron.training.monitor.straggler_by_busy_time import straggler_line
from megatron.training.step import NotFiniteError

LINE = re.compile(
    r'# (HELP megatron_\w+ [\w ,.]+|TYPE megatron_\w+ gauge)|megatron_\w+(\{name="[^"]*"\})? (-?[\d.e+-]+|NaN|[+-]Inf)'
)


def test_supervisors_read_the_last_step_and_the_last_save(tmp_path):
    heartbeat, prometheus = tmp_path / "heartbeat.json", tmp_path / "run.prom"
    beacon = HealthFiles(str(heartbeat), str(prometheus), train_iters=90, tokens_per_sample=8)
    beacon.step(4, 16, {"lm loss": 2.5}, computed_samples=4)
    beacon.step(5, 20, {"lm loss": 2.0}, computed_samples=4)  # within the second
    beacon.saved(4)
    told = json.loads(heartbeat.read_text())
    assert (told["iteration"], told["train_iterations"], told["last_save_iteration"]) == (5, 90, 4)
    assert (
        told["losses"] == {"lm loss": 2.0}
        and told["heartbeat_timestamp_seconds"] >= told["last_save_timestamp_seconds"]
    )
    text = prometheus.read_text()
    assert all(LINE.fullmatch(line) for line in text.splitlines()) and text.endswith("\n"), text
    assert "megatron_iteration 5\n" in text and 'megatron_loss{name="lm loss"} 2.0\n' in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heartbeat.json", "run.prom"]


def test_steps_that_are_left_out_are_no_speed(tmp_path, monkeypatch):
    """Ten seconds, in which two steps of 4 and 6 samples are computed, and one of 6 is left out."""
    heartbeat = tmp_path / "heartbeat.json"
    clock = [0.0]
    monkeypatch.setattr(heartbeat_and_prometheus_files.time, "monotonic", lambda: clock[0])
    beacon = HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8)
    clock[0] = 100.0
    beacon.step(1, 4, {}, computed_samples=4)
    assert "tokens_per_second" not in heartbeat.read_text()  # its time was the start's, too
    clock[0] = 100.4
    beacon.step(2, 8, {}, computed_samples=4)
    clock[0] = 100.5
    beacon.step(3, 14, {}, computed_samples=0)
    clock[0] = 110.0
    beacon.step(4, 20, {}, computed_samples=6)
    told = json.loads(heartbeat.read_text())
    assert told["tokens_per_second"] == 10 * 8 / 10 and told["step_seconds"] == 5
    assert (told["iteration"], told["consumed_samples"]) == (4, 20)


def test_a_killed_run_leaves_its_last_state_and_the_next_removes_the_rest(tmp_path, monkeypatch):
    heartbeat, others = tmp_path / "heartbeat.json", tmp_path / ".heartbeat.json.bak"
    others.touch()
    HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8).saved(4)
    beacon = HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8)
    before = heartbeat.read_text()

    def die(*names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Path, "replace", die)
        beacon.saved(5)
    (partial,) = set(tmp_path.iterdir()) - {heartbeat, others}
    assert heartbeat.read_text() == before
    os.utime(partial, (0, 0))
    HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8)
    assert set(tmp_path.iterdir()) == {heartbeat, others}


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path):
    heartbeat = tmp_path / "heartbeat.json"
    HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8).step(
        3, 12, {"a": float("nan"), "b": 1.5}, computed_samples=4
    )
    assert '"losses": {"a": null, "b": 1.5}' in heartbeat.read_text()


def test_numbers_that_are_none_are_written_as_prometheus_writes_them():
    text = prometheus_text({}, {"a": float("nan"), "b": float("inf")})
    assert text.splitlines()[-2:] == ['megatron_loss{name="a"} NaN', 'megatron_loss{name="b"} +Inf']


def test_files_that_cannot_be_written_are_said_once_each_and_end_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tolerate_broken_output, "losses", [])
    missing, full = tmp_path / "missing" / "file", tmp_path / "full"
    beacon = HealthFiles(str(missing), str(full), train_iters=None, tokens_per_sample=1)
    for path in (missing, full):
        path.unlink()
    missing.parent.rmdir()

    def is_full(path: Path, text: str) -> None:
        path.touch()  # there is room for a name
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", is_full)
        disk.setattr(Path, "touch", lambda path: open(path, "w").close() if path.parent.exists() else None)
        beacon.saved(1)
        beacon.saved(2)
    assert [loss.output for loss in tolerate_broken_output.losses] == [str(missing), str(full)]
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 2 and "the run goes on without it" in said
    assert list(tmp_path.iterdir()) == [], "nothing is left of what could not be written"
    beacon.saved(3)
    assert "megatron_last_save_iteration 3\n" in full.read_text(), "the disk has space again"


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--heartbeat-file", "--prometheus-file"])
@pytest.mark.parametrize("path", ["file/x", "file/deeper/x", "folder"])
def test_a_run_whose_file_cannot_be_written_is_refused_at_its_start(flag: str, path: str, tmp_path, capsys):
    """Below a file, and in the place of a folder; a folder that is not there is made."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as ended:
        run(f"{flag} {tmp_path / path} --train-iters 1")
    said = capsys.readouterr()
    assert ended.value.code == 2 and tells(said.err, f"cannot start {flag} {tmp_path / path} cannot be written")
    assert "iteration" not in said.out.partition("training to iteration")[2]
    run(f"{flag} {tmp_path / 'new' / 'deeper' / 'x'} --train-iters 1")
    assert (tmp_path / "new" / "deeper" / "x").is_file()


def last_state(tmp_path: Path, **more) -> tuple[dict, str]:
    """What both files tell after a run of two steps."""
    files = f"--heartbeat-file {tmp_path / 'h.json'} --prometheus-file {tmp_path / 'p.prom'}"
    run(f"{files} --train-iters 2", **more)
    return json.loads((tmp_path / "h.json").read_text()), (tmp_path / "p.prom").read_text()


def test_a_run_that_has_ended_says_so_with_its_exit_code(tmp_path):
    told, text = last_state(tmp_path)
    assert (told["state"], told["exit_code"], told["iteration"]) == ("ended", 0, 2)
    assert "megatron_running 0\n" in text and "megatron_exit_code 0\n" in text and "megatron_iteration 2\n" in text
    assert all(LINE.fullmatch(line) for line in text.splitlines()), text


ENDS = {  # what a step raises, what the run then ends by, and its exit code
    "an error": (ZeroDivisionError(), ZeroDivisionError, 1),
    "numbers that are wrong": (NotFiniteError("the loss is not finite"), SystemExit, 3),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_fails_leaves_its_exit_code(how: str, tmp_path):
    error, raised, code = ENDS[how]

    def fail(*_):
        raise error

    with pytest.raises(raised):
        last_state(tmp_path, forward_step=fail)
    told, text = json.loads((tmp_path / "h.json").read_text()), (tmp_path / "p.prom").read_text()
    assert (told["state"], told["exit_code"]) == ("ended", code)
    assert f"megatron_exit_code {code}\n" in text and "megatron_running 0\n" in text


def test_a_run_that_fails_before_its_first_step_has_ended(tmp_path, monkeypatch):
    """After the files were opened, and before there is a trainer that would close them."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("megatron.training.trainer.SaveManager", fail)
    with pytest.raises(ZeroDivisionError):
        last_state(tmp_path)
    told = json.loads((tmp_path / "h.json").read_text())
    assert (told["state"], told["exit_code"]) == ("ended", 1) and "iteration" not in told


def test_a_thread_that_ends_the_process_tells_its_exit_code(tmp_path, monkeypatch):
    """As the watch for hangs does; one that cannot tell it ends the process all the same."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    beacon = HealthFiles(str(tmp_path / "h.json"), None, train_iters=9, tokens_per_sample=8)
    assert json.loads((tmp_path / "h.json").read_text())["state"] == "starting"
    beacon.step(1, 4, {}, computed_samples=4)
    beacon.saved(1)
    assert json.loads((tmp_path / "h.json").read_text())["state"] == "training"

    def cannot(code: int) -> None:
        raise OSError

    exit_callbacks_and_hard_exit.add_last_word(cannot)
    exit_callbacks_and_hard_exit.hard_exit(4)
    told = json.loads((tmp_path / "h.json").read_text())
    assert (told["state"], told["exit_code"], told["last_save_iteration"], ended) == ("ended", 4, 1, [4])

    hung = threading.Event()
    exit_callbacks_and_hard_exit.add_last_word(lambda code: hung.wait(30))
    monkeypatch.setattr(exit_callbacks_and_hard_exit, "_SECONDS", 0.05)
    exit_callbacks_and_hard_exit.hard_exit(5)  # a file system that hangs keeps nobody
    assert ended == [4, 5]
    hung.set()


@pytest.mark.parametrize("which", [0, 1])
def test_a_pipe_in_the_place_of_a_file_is_not_replaced(which: int, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tolerate_broken_output, "losses", [])
    os.mkfifo(pipe := tmp_path / "pipe")
    paths = [str(tmp_path / "other")] * 2
    paths[which] = str(pipe)
    beacon = HealthFiles(*paths, train_iters=10, tokens_per_sample=100)
    beacon.step(1, 8, {}, computed_samples=8)
    assert pipe.is_fifo() and (tmp_path / "other").is_file()
    assert capsys.readouterr().err.count("pipe cannot be written (it is not a regular file)") == 1


def test_supervisors_read_which_outputs_are_lost(tmp_path):
    heartbeat, prometheus = tmp_path / "heartbeat.json", tmp_path / "run.prom"
    beacon = HealthFiles(str(heartbeat), str(prometheus), train_iters=90, tokens_per_sample=8)
    beacon.step(4, 16, {}, computed_samples=4)
    assert "lost_outputs" not in heartbeat.read_text() + prometheus.read_text()
    beacon.lost("standard output cannot be written (Broken pipe)")  # at once
    told, text = json.loads(heartbeat.read_text()), prometheus.read_text()
    assert told["lost_outputs"] == ["standard output cannot be written (Broken pipe)"]
    assert "megatron_lost_outputs 1\n" in text and all(LINE.fullmatch(line) for line in text.splitlines())


def test_the_slowest_and_the_fastest_ranks_are_named():
    line = straggler_line([41.0, 43.0, 86.0, 43.0], 2)
    assert "slowest rank 2 86.0, rank 1 43.0, 2.00 times the median" in line
    assert "median 43.0; fastest rank 0 41.0, rank 3 43.0" in line
