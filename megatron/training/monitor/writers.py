"""Sinks: where a run's numbers go beside the log: TensorBoard, wandb, a JSONL file. A new sink is one more class.

The loop makes `Record`s; each sink writes the kinds it needs. Only the last rank, where losses are known, has sinks.

    step         a training step, every --tensorboard-log-interval: curves
    interval     the numbers of a log line, every --log-interval
    validation   a validation or test
    inspect      statistics of one tensor, every --inspect steps
    lost output  an output of the run cannot be written any more

A sink that fails ends no run: its write says so by `SinkError`, once. TensorBoard and wandb are left alone from then on,
since
what they have kept is unknown; the JSONL file is tried again at each record.
"""

import contextlib
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megatron.core.storage.atomic_file import atomic_file

Kind = Literal["step", "interval", "validation", "inspect", "lost output"]


@dataclass(frozen=True)
class Record:
    """Numbers of one moment of a run, by Megatron's names. labels: their split, the inspected tensor, the lost output."""

    kind: Kind
    iteration: int
    samples: int  # consumed so far
    values: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


class SinkError(Exception):
    """A sink cannot be written. sink: its name; why: the reason."""

    def __init__(self, sink: str, why: BaseException):
        super().__init__(f"{sink}: {why}")
        self.sink, self.why = sink, why


class Sink(Protocol):
    def write(self, record: Record) -> None: ...  # raises SinkError
    def close(self) -> None: ...  # raises SinkError


def curve_points(record: Record) -> dict[str, float]:
    """The points that a record adds to curves. An interval adds only numbers that its steps have not added."""
    if record.kind == "interval":
        return {name: value for name, value in record.values.items() if name.endswith("-time") or name in _OF_INTERVALS}
    if record.kind == "inspect":
        of = " ".join(record.labels.values())
        return {f"{of}/{name}": value for name, value in record.values.items()}
    return dict(record.values)


def lost_text(record: Record) -> str:
    """The text of a record of a lost output, for those who show text."""
    return f"{record.labels['output']} cannot be written: {record.labels['why']}"


_OF_INTERVALS = ("throughput", "tokens-per-second", "mfu")


class _Foreign:
    """A sink of another library, which tells of a failure by an error of any kind. It is left alone after the first."""

    name = ""

    def __init__(self) -> None:
        self._has_failed = False

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """The block calls the library."""
        try:
            yield
        except Exception as error:
            self._has_failed = True
            raise SinkError(self.name, error) from error


class TensorBoardSink(_Foreign):
    """TensorBoard event files. Each curve is written twice: over iterations, and as "X vs samples"."""

    name = "TensorBoard"

    def __init__(self, folder: str, queue_size: int):
        super().__init__()
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        try:
            self._writer = tensorboard.SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {folder} cannot be written: {error.strerror}; choose another"
            ) from error

    def write(self, record: Record) -> None:
        if self._has_failed:
            return
        points, text = curve_points(record), lost_text(record) if record.kind == "lost output" else None
        with self._calling():
            for name, value in points.items():
                self._writer.add_scalar(name, value, record.iteration)
                if record.kind != "inspect":
                    self._writer.add_scalar(f"{name} vs samples", value, record.samples)
            if text is not None:
                self._writer.add_text("lost output", text, record.iteration)

    def close(self) -> None:
        """Not after a failure: the writer's thread has ended, and would be waited for."""
        if not self._has_failed:
            with self._calling():
                self._writer.close()


class WandbSink(_Foreign):
    """A Weights & Biases run: curves and settings."""

    name = "wandb"

    def __init__(
        self, project: str, name: str | None, entity: str | None, folder: str | None, settings: dict[str, Any]
    ):
        super().__init__()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=name, entity=entity, dir=folder, config=settings)

    def write(self, record: Record) -> None:
        if self._has_failed:
            return
        points = curve_points(record)
        if record.kind == "step":
            points["samples vs steps"] = record.samples
        text = lost_text(record) if record.kind == "lost output" else None
        with self._calling():
            if points:
                self._run.log(points, step=record.iteration)
            if text is not None:
                self._run.alert(title="lost output", text=text)

    def close(self) -> None:
        if not self._has_failed:
            with self._calling():
                self._run.finish()


class MetricsFile:
    """A JSONL file: {"kind": "interval", "iteration": 10, "consumed_samples": 80, "lm loss": 6.9, ...}.

    On a full disk records are missing: a line of the kind "lost output", with their number, stands in their place once
    there is space.

    A NaN or infinite number is null, and `not_finite` holds its text. A run resumed at `iteration` first truncates the
    file to
    it, since it will write later records again. Raises ValueError for a file with other content.
    """

    def __init__(self, path: str, iteration: int):
        self.path = Path(path)
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a pipe, a terminal and a device have no end to read to
                self._cut_after(iteration)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written: {error.strerror}; choose another") from error
        self._missing: list[Record] = []  # since the last write that worked
        self._why = ""

    def _cut_after(self, iteration: int) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        kept = lines_until(text, iteration, str(self.path))
        if kept != text:
            with atomic_file(self.path) as file:  # a run killed here loses nothing
                file.write(kept.encode())

    def write(self, record: Record) -> None:
        if record.kind == "step":
            return
        line = json_line(record) + "\n"
        try:
            self._append(self._of_missing() + line)
        except OSError as error:
            self._missing.append(record)
            self._why = error.strerror or str(error)
            if len(self._missing) == 1:
                raise SinkError("--metrics-file", error) from error
        else:
            self._missing.clear()

    def _of_missing(self) -> str:
        if not self._missing:
            return ""
        first = self._missing[0]
        labels = {"output": "--metrics-file", "why": self._why}
        line = json_line(Record("lost output", first.iteration, first.samples, {"records": len(self._missing)}, labels))
        return line + "\n"

    def _append(self, text: str) -> None:
        """All of the text or nothing: half a line would spoil the file for its readers."""
        left = memoryview(text.encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe, or a disk that allows nothing any more
                os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise SinkError("--metrics-file", error) from error


def json_line(record: Record) -> str:
    """The record as strict JSON, which has no NaN and no Infinity."""
    start = {"kind": record.kind, "iteration": record.iteration, "consumed_samples": record.samples, **record.labels}
    values = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    odd = {name: str(float(value)) for name, value in record.values.items() if not math.isfinite(value)}
    return json.dumps({**start, **values, **({"not_finite": odd} if odd else {})}, allow_nan=False)


def lines_until(text: str, iteration: int, name: str) -> str:
    """The lines of a metrics file that a run resumed at `iteration` does not write again.

    Validations at the end of the run are dropped: the resumed run repeats them. A last line without a newline was cut by
    a kill,
    and is dropped too.
    """
    kept = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            entry = json.loads(line)
            at, is_end = entry["iteration"], entry.get("at") == "end"
            _ = entry["kind"]
        except (ValueError, KeyError, TypeError, AttributeError):
            if line.endswith("\n") or number == 1:
                raise ValueError(
                    f"--metrics-file {name}: line {number} is not a record of a run; give another name, or move the file"
                ) from None
            break
        if line.endswith("\n") and (at < iteration or (at == iteration and not is_end)):
            kept.append(line)
    return "".join(kept)
