"""The files for supervisors, and the line of stragglers."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from megatron.core.base import tolerate_broken_output
from megatron.training.monitor import health_files
from megatron.training.monitor.health_files import HealthFiles, prometheus_text
from megatron.training.monitor.straggler_detector import straggler_line

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
    monkeypatch.setattr(health_files.time, "monotonic", lambda: clock[0])
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
    before, beacon = heartbeat.read_text(), HealthFiles(str(heartbeat), None, train_iters=90, tokens_per_sample=8)

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
