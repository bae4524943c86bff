"""The files for supervisors, and the line of stragglers."""

import json
import os
import re
from pathlib import Path

import pytest

from megatron.training.watch.beacon import Beacon, prometheus_text
from megatron.training.watch.stragglers import straggler_line

LINE = re.compile(
    r'# (HELP megatron_\w+ [\w ,.]+|TYPE megatron_\w+ gauge)|megatron_\w+(\{name="[^"]*"\})? (-?[\d.e+-]+|NaN|[+-]Inf)'
)


def test_supervisors_read_the_last_step_and_the_last_save(tmp_path):
    heartbeat, prometheus = tmp_path / "heartbeat.json", tmp_path / "run.prom"
    beacon = Beacon(str(heartbeat), str(prometheus), train_iters=90, tokens_per_sample=8)
    beacon.step(4, 16, {"lm loss": 2.5})
    beacon.step(5, 20, {"lm loss": 2.0})  # within the second
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


def test_a_killed_run_leaves_its_last_state_and_the_next_removes_the_rest(tmp_path, monkeypatch):
    heartbeat, others = tmp_path / "heartbeat.json", tmp_path / ".heartbeat.json.bak"
    others.touch()
    Beacon(str(heartbeat), None, train_iters=90, tokens_per_sample=8).saved(4)
    before, beacon = heartbeat.read_text(), Beacon(str(heartbeat), None, train_iters=90, tokens_per_sample=8)

    def die(*names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Path, "replace", die)
        beacon.saved(5)
    (partial,) = set(tmp_path.iterdir()) - {heartbeat, others}
    assert heartbeat.read_text() == before
    os.utime(partial, (0, 0))
    Beacon(str(heartbeat), None, train_iters=90, tokens_per_sample=8)
    assert set(tmp_path.iterdir()) == {heartbeat, others}


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path):
    heartbeat = tmp_path / "heartbeat.json"
    Beacon(str(heartbeat), None, train_iters=90, tokens_per_sample=8).step(3, 12, {"a": float("nan"), "b": 1.5})
    assert '"losses": {"a": null, "b": 1.5}' in heartbeat.read_text()


def test_numbers_that_are_none_are_written_as_prometheus_writes_them():
    text = prometheus_text({}, {"a": float("nan"), "b": float("inf")})
    assert text.splitlines()[-2:] == ['megatron_loss{name="a"} NaN', 'megatron_loss{name="b"} +Inf']


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path):
    said = []
    beacon = Beacon(str(tmp_path / "missing" / "file"), None, train_iters=None, tokens_per_sample=1, say=said.append)
    beacon.saved(1)
    beacon.saved(2)
    assert len(said) == 1 and "cannot be written" in said[0]


def test_the_slowest_and_the_fastest_ranks_are_named():
    line = straggler_line([41.0, 43.0, 86.0, 43.0], 2)
    assert "slowest rank 2 86.0, rank 1 43.0, 2.00 times the median" in line
    assert "median 43.0; fastest rank 0 41.0, rank 3 43.0" in line
