"""Two small files tell those who supervise a run how it is: a heartbeat in JSON, and numbers for Prometheus. Pure.

Both are replaced whole, at the start, at most once a second, at every save and at the end, by the rank that logs;
Prometheus' textfile collector reads the second. A run is refused whose files cannot be written at the start. It does
not end because they cannot be written later; it says so once, and tries again. They also say which other outputs of
that rank are lost, and at the end the exit code: without it, a run that has ended would look like one that hangs.
"""

import contextlib
import glob
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.base import tolerate_broken_output
from megatron.core.base.exit_callbacks_and_hard_exit import add_last_word
from megatron.core.storage.atomic_file import is_special

_EVERY = 1.0  # seconds between two writes
_OLD = 10.0  # seconds; a younger partial file may still be written to, by another machine too
_HELP = {
    "iteration": "last finished iteration",
    "train_iterations": "iterations of the whole run",
    "consumed_samples": "training samples read so far",
    "tokens_per_second": "of all ranks, since the numbers before",
    "step_seconds": "mean seconds of an iteration, since the numbers before",
    "last_save_iteration": "iteration of the last checkpoint that is complete",
    "last_save_timestamp_seconds": "when it was complete",
    "heartbeat_timestamp_seconds": "when these numbers were written",
    "lost_outputs": "outputs of the run that cannot be written any more",
    "running": "1 from the start of the run to its end, then 0",
    "exit_code": "of the rank that logs, once the run has ended",
}


class HealthFiles:
    """Write the files of one run. Raises ValueError if one cannot be written.

    heartbeat, prometheus: their paths, or None.
    """

    def __init__(
        self, heartbeat: str | None, prometheus: str | None, *, train_iters: int | None, tokens_per_sample: int
    ):
        self._files: dict[Path, Callable[..., str]] = {}  # path -> its text from numbers, losses and lost outputs
        flags: dict[Path, str] = {}
        if heartbeat:
            self._files[Path(heartbeat)] = _as_json
            flags[Path(heartbeat)] = "--heartbeat-file"
        if prometheus:
            self._files[Path(prometheus)] = prometheus_text
            flags[Path(prometheus)] = "--prometheus-file"
        self._state = "starting"
        self._tokens_per_sample = tokens_per_sample
        self._numbers: dict[str, float] = {} if train_iters is None else {"train_iterations": train_iters}
        self._losses: dict[str, float] = {}
        self._lost: list[str] = []  # outputs, in words
        # when the files were last written, and what was computed since
        self._written = 0.0
        self._last_time: float | None = None  # None before the first step, whose time is that of the start too
        self._computed_steps = 0
        self._computed_samples = 0
        for path in list(self._files):
            if is_special(path):
                tolerate_broken_output.report_lost_output(str(path), "it is not a regular file")
                del self._files[path]
            else:
                _remove_partial(path)

        # the first state; what cannot be written now would not be written for days
        for path in self._files:
            try:
                path.absolute().parent.mkdir(parents=True, exist_ok=True)
                self._replace(path)
            except OSError as error:
                raise ValueError(
                    f"{flags[path]} {path} cannot be written: {error.strerror}; choose another file"
                ) from error
        if self._files:
            add_last_word(self.end)

    def step(
        self, iteration: int, consumed_samples: int, losses: Mapping[str, float], *, computed_samples: int
    ) -> None:
        """Note the numbers of a step that has ended; write them if the last write is a second ago.

        computed_samples: of the step; 0 if it was left out, and then it does not count in speeds.
        """
        if computed_samples:
            self._computed_steps += 1
            self._computed_samples += computed_samples
        self._state = "training"
        self._losses = dict(losses)
        self._numbers |= {"iteration": iteration, "consumed_samples": consumed_samples}
        if self._files and time.monotonic() - self._written >= _EVERY:
            self._write()

    def saved(self, iteration: int) -> None:
        """Note that a checkpoint is complete, and write."""
        self._numbers |= {"last_save_iteration": iteration, "last_save_timestamp_seconds": time.time()}
        self._write()

    def lost(self, text: str) -> None:
        """Note an output of the run, in words, that cannot be written any more, and write."""
        self._lost.append(text)
        self._numbers |= {"lost_outputs": len(self._lost)}
        self._write()

    def end(self, exit_code: int) -> None:
        """Write the last state: the run has ended, and how."""
        self._state = "ended"
        self._numbers |= {"exit_code": exit_code}
        self._write()

    def _write(self) -> None:
        # the speed since the last write
        now = time.monotonic()
        if self._last_time is not None and self._computed_steps > 0:
            seconds = now - self._last_time
            tokens = self._computed_samples * self._tokens_per_sample
            self._numbers |= {"tokens_per_second": tokens / seconds, "step_seconds": seconds / self._computed_steps}
        self._written = now
        if "iteration" in self._numbers:
            self._last_time = now
        self._computed_steps = 0
        self._computed_samples = 0

        # replace the files
        for path in self._files:
            try:
                self._replace(path)
            except OSError as error:
                tolerate_broken_output.report_lost_output(str(path), error)

    def _replace(self, path: Path) -> None:
        """Write a file beside `path`, and put it in its place. Raises OSError."""
        numbers = self._numbers | {"heartbeat_timestamp_seconds": time.time()}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(self._files[path](numbers, self._losses, self._lost, self._state))
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk leaves an empty file
                partial.unlink()
            raise


def _remove_partial(path: Path) -> None:
    """Remove partial files of processes that were killed before they renamed them."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):
            if partial.suffix[1:].isdigit() and time.time() - partial.stat().st_mtime > _OLD:
                partial.unlink()


def _as_json(numbers: Mapping[str, float], losses: Mapping[str, float], lost: Sequence[str], state: str) -> str:
    """Return the heartbeat file's content: one line of JSON. state: starting, training or ended."""
    content: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "state": state, **numbers}
    content["losses"] = {
        name: value if math.isfinite(value) else None for name, value in losses.items()
    }  # no NaN in JSON
    if lost:
        content["lost_outputs"] = list(lost)  # here in words instead of their number
    return json.dumps(content) + "\n"


def prometheus_text(
    numbers: Mapping[str, float], losses: Mapping[str, float], lost: Sequence[str] = (), state: str = "training"
) -> str:
    """Return the numbers in Prometheus' text format (exposition format 0.0.4)."""
    lines = []
    for name, value in {**numbers, "running": int(state != "ended")}.items():
        lines += [
            f"# HELP megatron_{name} {_HELP[name]}",
            f"# TYPE megatron_{name} gauge",
            f"megatron_{name} {value!r}",
        ]
    if losses:
        lines += ["# HELP megatron_loss losses of the last iteration", "# TYPE megatron_loss gauge"]
        lines += [f'megatron_loss{{name="{name}"}} {_number(value)}' for name, value in losses.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return a number as Prometheus spells it."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
