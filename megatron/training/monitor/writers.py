"""Writers send a run's numbers to TensorBoard, wandb and a JSONL file, beside the log. A new writer is one more class.

The loop creates `Record`s; each writer writes the kinds it needs. Only the last rank, where losses are known, has
writers.

    step         a training step, every --tensorboard-log-interval: curves
    interval     the numbers of a log line, every --log-interval
    validation   a validation or test
    inspect      statistics of one tensor, every --inspect steps
    lost output  an output of the run cannot be written any more

A writer that fails does not end the run: it raises `WriterError` once. TensorBoard and wandb are not called again,
since it is unknown what they have written; the JSONL file is tried again at each record.
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
    """Numbers of one moment of a run, by Megatron's names."""

    kind: Kind
    iteration: int
    samples: int  # consumed so far
    values: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)  # the split, the inspected tensor, the lost output


class WriterError(Exception):
    """A writer cannot write. writer: its name; why: the reason."""

    def __init__(self, writer: str, why: BaseException):
        super().__init__(f"{writer}: {why}")
        self.writer = writer
        self.why = why


class Writer(Protocol):
    def write(self, record: Record) -> None: ...  # raises WriterError
    def close(self) -> None: ...  # raises WriterError


_ONLY_OF_INTERVALS = ("throughput", "tokens-per-second", "mfu")


def curve_points(record: Record) -> dict[str, float]:
    """Return the points that a record adds to curves. An interval adds only numbers that its steps have not added."""
    if record.kind == "interval":
        points = {}
        for name, value in record.values.items():
            if name.endswith("-time") or name in _ONLY_OF_INTERVALS:
                points[name] = value
        return points
    if record.kind == "inspect":
        tensor = " ".join(record.labels.values())
        return {f"{tensor}/{name}": value for name, value in record.values.items()}
    return dict(record.values)


def lost_output_text(record: Record) -> str:
    """Return the text of a record of a lost output."""
    return f"{record.labels['output']} cannot be written: {record.labels['why']}"


class _LibraryWriter:
    """A writer of another library, which may raise errors of any kind. It is not called again after the first."""

    name = ""

    def __init__(self) -> None:
        self._has_failed = False

    @contextlib.contextmanager
    def _library_call(self) -> Iterator[None]:
        """Turn any error of the block, which calls the library, into a WriterError."""
        try:
            yield
        except Exception as error:
            self._has_failed = True
            raise WriterError(self.name, error) from error


class TensorBoardWriter(_LibraryWriter):
    """TensorBoard event files. Each curve is written twice: over iterations, and as "X vs samples"."""

    name = "TensorBoard"

    def __init__(self, folder: str, queue_size: int):
        super().__init__()
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        try:
            self._writer = tensorboard.SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {folder} cannot be written: {error.strerror}; choose another folder"
            ) from error

    def write(self, record: Record) -> None:
        if self._has_failed:
            return
        points = curve_points(record)
        text = lost_output_text(record) if record.kind == "lost output" else None
        with self._library_call():
            for name, value in points.items():
                self._writer.add_scalar(name, value, record.iteration)
                if record.kind != "inspect":
                    self._writer.add_scalar(f"{name} vs samples", value, record.samples)
            if text is not None:
                self._writer.add_text("lost output", text, record.iteration)

    def close(self) -> None:
        """Close the file. After a failure do nothing: closing would wait for the writer's thread, which has ended."""
        if not self._has_failed:
            with self._library_call():
                self._writer.close()


class WandbWriter(_LibraryWriter):
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
        text = lost_output_text(record) if record.kind == "lost output" else None
        with self._library_call():
            if points:
                self._run.log(points, step=record.iteration)
            if text is not None:
                self._run.alert(title="lost output", text=text)

    def close(self) -> None:
        if not self._has_failed:
            with self._library_call():
                self._run.finish()


class MetricsFile:
    """A JSONL file: {"kind": "interval", "iteration": 10, "consumed_samples": 80, "lm loss": 6.9, ...}.

    On a full disk records are missing: a line of the kind "lost output", with their number, is written in their place
    once there is space. A NaN or infinite number is null, and `not_finite` has its text.

    A run resumed at `iteration` first removes the later records, since it will write them again. Raises ValueError for
    a file with other content, and for a path that cannot be written.
    """

    def __init__(self, path: str, iteration: int):
        self.path = Path(path)
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():  # a pipe, a terminal and a device have no end to read to
                self._truncate_after(iteration)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"--metrics-file {path} cannot be written: {error.strerror}; choose another file"
            ) from error
        self._missing: list[Record] = []  # since the last write that worked
        self._why = ""

    def _truncate_after(self, iteration: int) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        remaining = lines_until(text, iteration, str(self.path))
        if remaining != text:
            with atomic_file(self.path) as file:  # a run killed here loses nothing
                file.write(remaining.encode())

    def write(self, record: Record) -> None:
        if record.kind == "step":
            return
        line = json_line(record) + "\n"
        try:
            self._append(self._missing_line() + line)
        except OSError as error:
            self._missing.append(record)
            self._why = error.strerror or str(error)
            if len(self._missing) == 1:
                raise WriterError("--metrics-file", error) from error
        else:
            self._missing.clear()

    def _missing_line(self) -> str:
        """Return a line that tells how many records are missing; "" if none are."""
        if not self._missing:
            return ""
        first = self._missing[0]
        labels = {"output": "--metrics-file", "why": self._why}
        line = json_line(Record("lost output", first.iteration, first.samples, {"records": len(self._missing)}, labels))
        return line + "\n"

    def _append(self, text: str) -> None:
        """Write all of the text or nothing: half a line would break the file for its readers."""
        remaining = memoryview(text.encode())
        size = os.fstat(self._file.fileno()).st_size
        try:
            while remaining:
                written = os.write(self._file.fileno(), remaining)
                remaining = remaining[written:]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe cannot be truncated, nor a file of a failed disk
                os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise WriterError("--metrics-file", error) from error


def json_line(record: Record) -> str:
    """Return the record as strict JSON, which has no NaN and no Infinity."""
    content: dict[str, Any] = {
        "kind": record.kind,
        "iteration": record.iteration,
        "consumed_samples": record.samples,
        **record.labels,
    }
    not_finite = {}
    for name, value in record.values.items():
        if math.isfinite(value):
            content[name] = value
        else:
            content[name] = None
            not_finite[name] = str(float(value))
    if not_finite:
        content["not_finite"] = not_finite
    return json.dumps(content, allow_nan=False)


def lines_until(text: str, iteration: int, name: str) -> str:
    """Return the lines of a metrics file that a run resumed at `iteration` does not write again.

    Validations at the end of the run are dropped: the resumed run repeats them. A last line without a newline was cut
    off by a kill, and is dropped too. name: of the file, for messages.
    """
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        is_complete = line.endswith("\n")
        try:
            record = json.loads(line)
            record_iteration = record["iteration"]
            is_end = record.get("at") == "end"
            _ = record["kind"]
        except (ValueError, KeyError, TypeError, AttributeError):
            if is_complete or number == 1:
                raise ValueError(
                    f"--metrics-file {name}: line {number} is not a record of a run; give another file, or move this "
                    "one away"
                ) from None
            break
        is_before = record_iteration < iteration or (record_iteration == iteration and not is_end)
        if is_complete and is_before:
            lines.append(line)
    return "".join(lines)
