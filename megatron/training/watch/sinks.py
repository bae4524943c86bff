"""Sinks: where a run's numbers go beside the log: TensorBoard, wandb, a JSONL file. A new sink is one more class.

The loop makes `Record`s; each sink writes the kinds it needs. Only the last rank, where losses are known, has sinks.

    step         a training step, every --tensorboard-log-interval: curves
    interval     the numbers of a log line, every --log-interval
    validation   a validation or test
    inspect      statistics of one tensor, every --inspect steps
"""

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megatron.core.storage.atomic import atomic_file

Kind = Literal["step", "interval", "validation", "inspect"]


@dataclass(frozen=True)
class Record:
    """Numbers of one moment of a run, by Megatron's names. labels: their split, or the inspected tensor."""

    kind: Kind
    iteration: int
    samples: int  # consumed so far
    values: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def curve_points(record: Record) -> dict[str, float]:
    """The points that a record adds to curves. An interval adds only numbers that its steps have not added."""
    if record.kind == "interval":
        return {name: value for name, value in record.values.items() if name.endswith("-time") or name in _OF_INTERVALS}
    if record.kind == "inspect":
        of = " ".join(record.labels.values())
        return {f"{of}/{name}": value for name, value in record.values.items()}
    return dict(record.values)


_OF_INTERVALS = ("throughput", "tokens-per-second", "mfu")


class TensorBoardSink:
    """TensorBoard event files. Each curve is written twice: over iterations, and as "X vs samples"."""

    def __init__(self, folder: str, queue_size: int):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        try:
            self._writer = tensorboard.SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {folder} cannot be written: {error.strerror}; choose another"
            ) from error

    def write(self, record: Record) -> None:
        for name, value in curve_points(record).items():
            self._writer.add_scalar(name, value, record.iteration)
            if record.kind != "inspect":
                self._writer.add_scalar(f"{name} vs samples", value, record.samples)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run: curves and settings."""

    def __init__(
        self, project: str, name: str | None, entity: str | None, folder: str | None, settings: dict[str, Any]
    ):
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=name, entity=entity, dir=folder, config=settings)

    def write(self, record: Record) -> None:
        points = curve_points(record)
        if record.kind == "step":
            points["samples vs steps"] = record.samples
        if points:
            self._run.log(points, step=record.iteration)

    def close(self) -> None:
        self._run.finish()


class MetricsFile:
    """A JSONL file: {"kind": "interval", "iteration": 10, "consumed_samples": 80, "lm loss": 6.9, ...}.

    A NaN or infinite number is null, and `not_finite` holds its text. A run resumed at `iteration` first truncates the file to
    it, since it will write later records again. Raises ValueError for a file with other content.
    """

    def __init__(self, path: str, iteration: int):
        self.path = Path(path)
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._cut_after(iteration)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written: {error.strerror}; choose another") from error

    def _cut_after(self, iteration: int) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        kept = lines_until(text, iteration, str(self.path))
        if kept != text:
            with atomic_file(self.path) as file:  # a run killed here loses nothing
                file.write(kept.encode())

    def write(self, record: Record) -> None:
        if record.kind != "step":
            self._file.write(json_line(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def json_line(record: Record) -> str:
    """The record as strict JSON, which has no NaN and no Infinity."""
    start = {"kind": record.kind, "iteration": record.iteration, "consumed_samples": record.samples, **record.labels}
    values = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    odd = {name: str(float(value)) for name, value in record.values.items() if not math.isfinite(value)}
    return json.dumps({**start, **values, **({"not_finite": odd} if odd else {})}, allow_nan=False)


def lines_until(text: str, iteration: int, name: str) -> str:
    """The lines of a metrics file that a run resumed at `iteration` does not write again.

    Validations at the end of the run are dropped: the resumed run repeats them. A last line without a newline was cut by a kill,
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
