"""Two small files for those who supervise a run: a heartbeat in JSON, and numbers for Prometheus' textfile collector. Pure.

Both are replaced whole, at most once a second and at every save, by the rank that logs. A run does not end because they
cannot be
written; it says so once, and tries again. They also say which other outputs of that rank are lost.
"""

import contextlib
import glob
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.core.base import output_streams
from megatron.core.storage.atomic_file import is_special

_EVERY = 1.0  # seconds
_OLD = 10.0  # seconds: a younger file may be being written, on another machine too
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
}


class Beacon:
    """The files of one run. heartbeat, prometheus: their paths, or None."""

    def __init__(
        self, heartbeat: str | None, prometheus: str | None, *, train_iters: int | None, tokens_per_sample: int
    ):
        self._files = {
            Path(path): form for path, form in ((heartbeat, _as_json), (prometheus, prometheus_text)) if path
        }
        self._tokens_per_sample = tokens_per_sample
        self._numbers: dict[str, float] = {} if train_iters is None else {"train_iterations": train_iters}
        self._losses: dict[str, float] = {}
        self._at = time.monotonic(), 0, 0  # time, iteration and samples of the numbers before
        self._written = 0.0
        self._lost: list[str] = []
        for path in list(self._files):
            if is_special(path):
                output_streams.lose(str(path), "it is no regular file")
                del self._files[path]
            else:
                _remove_partial(path)

    def step(self, iteration: int, consumed_samples: int, losses: Mapping[str, float]) -> None:
        """A step has ended."""
        self._losses = dict(losses)
        self._numbers |= {"iteration": iteration, "consumed_samples": consumed_samples}
        if self._files and time.monotonic() - self._written >= _EVERY:
            self._write()

    def saved(self, iteration: int) -> None:
        """A checkpoint is complete."""
        self._numbers |= {"last_save_iteration": iteration, "last_save_timestamp_seconds": time.time()}
        self._write()

    def lost(self, text: str) -> None:
        """An output of the run, in these words, cannot be written any more."""
        self._lost.append(text)
        self._numbers |= {"lost_outputs": len(self._lost)}
        self._write()

    def _write(self) -> None:
        now, numbers = time.monotonic(), self._numbers
        iteration, samples = numbers.get("iteration", 0), numbers.get("consumed_samples", 0)
        steps, seconds = iteration - self._at[1], now - self._at[0]
        if self._at[1] and steps > 0:
            speed = (samples - self._at[2]) * self._tokens_per_sample / seconds
            numbers |= {"tokens_per_second": speed, "step_seconds": seconds / steps}
        self._written, self._at = now, (now, iteration, samples)
        numbers = self._numbers | {"heartbeat_timestamp_seconds": time.time()}
        for path, form in self._files.items():
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                partial.write_text(form(numbers, self._losses, self._lost))
                partial.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):  # an empty file of a full disk
                    partial.unlink()
                output_streams.lose(str(path), error)


def _remove_partial(path: Path) -> None:
    """Remove what processes have left that were killed before they gave their numbers the final name."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):
            if partial.suffix[1:].isdigit() and time.time() - partial.stat().st_mtime > _OLD:
                partial.unlink()


def _as_json(numbers: Mapping[str, float], losses: Mapping[str, float], lost: Sequence[str]) -> str:
    known = {name: value if math.isfinite(value) else None for name, value in losses.items()}  # JSON has no NaN
    told = {"losses": known} | ({"lost_outputs": list(lost)} if lost else {})  # in words here
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **numbers, **told}) + "\n"


def prometheus_text(numbers: Mapping[str, float], losses: Mapping[str, float], lost: Sequence[str] = ()) -> str:
    """The numbers in Prometheus' text format (exposition format 0.0.4)."""
    lines = []
    for name, value in numbers.items():
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
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
