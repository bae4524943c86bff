"""--async-save as a run ends: a signal, a time limit or a failing writer while a save is in flight, and state in files.

Nothing half stays, what was said to be saved is there, and the same command goes on to the bits of a run that waits for its saves.
"""

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from failing_files import Killed, failing
from said import tells
from stopped_runs import ended, job, lines
from thread_writers import thread_writers
from whole_run import run

from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.storage import file_layer

ALONE = "--train-iters 5 --save-interval 2 --save {root} --load {root} "


def end_of(root: Path) -> dict[str, object]:
    """What a run ends in, but for what it was told about signals."""
    end = ended(root)
    del end["manifest"]["state"]["config"]["training"]["exit_signal_handler"]
    return end


@cache
def whole() -> dict[str, object]:
    """What the run ends in that waits for its saves."""
    root = Path(mkdtemp(prefix="endings-")) / "root"
    run(ALONE.format(root=root))
    return end_of(root)


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


class Slow:
    """The file layer, whose first write of an iteration raises a signal in this process and then takes its time."""

    def __init__(self, inner, iteration: int, number: int | None):
        self.inner, self.name, self.number = inner, f"iter_{iteration:07d}.partial", number

    def __getattr__(self, kind: str):
        return getattr(self.inner, kind)

    def make_folder(self, path: Path) -> None:
        self.inner.make_folder(path)
        if path.name == self.name and self.number is not None:
            number, self.number = self.number, None
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # steps, and the end of the run, come meanwhile


@contextmanager
def slow(iteration: int, number: int | None):
    before = file_layer.local
    file_layer.local = Slow(before, iteration, number)
    try:
        yield
    finally:
        file_layer.local = before


@pytest.mark.full
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.sweep)], ids=["SIGTERM", "SIGUSR1"]
)
def test_a_signal_while_a_save_is_in_flight_leaves_both_saves(number, tmp_path, capsys):
    root = tmp_path / "root"
    flags = ALONE.format(root=root) + "--async-save --exit-signal-handler"
    with thread_writers(), slow(2, number):
        run(flags)
    said = capsys.readouterr().out
    stopped = int(said.rpartition("exiting at iteration ")[2].split(",")[0])
    assert 2 <= stopped < 5 and open_checkpoint(root).iteration == stopped
    there = sorted({f"iter_{number:07d}" for number in (2, stopped)})
    assert names_in(root) == [*there, "latest_checkpointed_iteration.txt"]
    assert all(f"saved checkpoint at iteration {int(name[5:])} to" in said for name in there)
    run(flags)
    again = end_of(root) | {"names": None}
    assert again == whole() | {"names": None}


@pytest.mark.full
def test_a_time_limit_ends_a_run_with_its_save_on_disk(tmp_path, capsys):
    root = tmp_path / "root"
    run(ALONE.format(root=root) + "--async-save --exit-duration-in-mins 0")
    said = capsys.readouterr().out
    assert "exiting at iteration 1" in said and "saved checkpoint at iteration 1" in said
    assert names_in(root) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    run(ALONE.format(root=root) + "--async-save")
    assert end_of(root)["manifest"] == whole()["manifest"]


FAILS = [
    pytest.param(kind, how, marks=pytest.mark.full if (kind, how) == ("sync", "EIO") else pytest.mark.sweep)
    for kind in ("write", "sync", "rename")
    for how in ("ENOSPC", "EIO", "killed")
]


@pytest.mark.parametrize("kind, how", FAILS)
def test_a_writer_that_fails_in_the_last_save_ends_the_run_with_an_error_and_loses_nothing(kind, how, tmp_path, capsys):
    root = tmp_path / "root"
    flags = ALONE.format(root=root) + "--async-save"
    only = lambda call: call.kind == kind and "0000005" in call.name  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(thread_writers())
        calls = stack.enter_context(failing(1, how, only=only))
        # The double takes a killed writer and its rank for one.
        stack.enter_context(pytest.raises((SystemExit, Killed)))
        run(flags)
    assert calls.hit
    err = capsys.readouterr().err
    assert tells(err, "iteration 4") if how != "killed" else "--async-save" in err
    assert open_checkpoint(root).iteration == 4
    run(flags)
    assert end_of(root) == whole()


@pytest.mark.full
def test_a_save_that_fails_while_a_signal_ends_the_run_is_told_of(tmp_path, capsys):
    """The state of the last step is not on disk, so the exit code is that of an error."""
    root = tmp_path / "root"
    flags = ALONE.format(root=root) + "--async-save --exit-signal-handler"
    only = lambda call: call.kind == "write" and "0000002" in call.name  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(thread_writers())
        stack.enter_context(slow(2, signal.SIGTERM))
        stack.enter_context(failing(1, "ENOSPC", only=only))
        stop = stack.enter_context(pytest.raises(SystemExit))
        run(flags)
    assert stop.value.code == 1 and "28" in capsys.readouterr().err
    assert not list(root.glob("iter_*"))
    run(flags)
    assert end_of(root) == whole()


OFFLOADED = {
    "host, ZeRO 1": "--use-distributed-optimizer --optimizer-cpu-offload ",
    "files, ZeRO 1, bf16": "--use-distributed-optimizer --bf16 --offload-dir {root}/../off ",
    "files, ZeRO 3 and parameters": "--zero-stage 3 --offload-params --offload-dir {root}/../off ",
}


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.full if "parameters" in what else pytest.mark.sweep) for what in OFFLOADED],
)
def test_state_in_files_is_copied_before_the_next_step_changes_it(what, tmp_path):
    """Against a run that waits; stopped after iteration 3 and gone on, every step saved."""
    flags = "--train-iters 6 --save-interval 1 --global-batch-size 2 --save {root} --load {root} " + OFFLOADED[what]
    last = {}
    for name, more in (("waits", ""), ("beside", "--async-save ")):
        root = tmp_path / name / "root"
        said = job(flags.format(root=root) + more + "--exit-interval 3", dp=2)
        said += job(flags.format(root=root) + more, dp=2)
        parts = {path.relative_to(root): path.read_bytes() for path in root.rglob("*.bin")}
        last[name] = lines(said), parts
    assert len(last["waits"][1]) == 12 and last["beside"] == last["waits"]
