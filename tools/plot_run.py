"""Curves of training runs: losses, learning rate, gradient norm and throughput against iterations, as a PNG.

    python tools/plot_run.py --log run.log other.jsonl --output runs.png

A log is the output of pretrain_gpt.py, saved with `tee`, or its --metrics-file. A resumed run may append to its log (`tee -a`) or
have its own: a log that loads a checkpoint saved in another log is drawn as the continuation of that run. If an iteration was
trained twice, the later lines count.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from tools.errors import missing, naming_flag, run_tool

# The lines of megatron/training/monitor/training_log.py: training_line and validation_line. An interval of skipped
# steps has no loss.
_TRAINING = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples:")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: ([^ |]+)")
# Loss, learning rate, gradient norm, samples and time of an iteration, as the log and --metrics-file name them.
_IN_LOG = ("lm loss", "learning rate", "grad norm", "global batch size", "elapsed time per iteration (ms)")
_IN_METRICS = ("lm loss", "learning-rate", "grad-norm", "batch-size", "iteration-time")
# Lines of megatron/training/checkpointing/save_and_load.py, which show that a log resumes where another one stopped.
_SAVED = re.compile(r"^saved checkpoint at iteration (\d+) to (.+)$", re.MULTILINE)
_LOADED = re.compile(r"^loaded checkpoint of iteration (\d+) from (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PlotRunConfig(FlagConfig):
    """Plot of a run."""

    log: list[str] | None = option(
        None, "logs or metrics files of training runs, each drawn under its file name", metavar="FILE", required=True
    )
    output: str | None = option(None, "PNG to write", metavar="FILE", required=True)

    def problems(self) -> Iterator[str]:
        yield from missing(self, "log", "output")
        if self.output and Path(self.output).suffix.lower() != ".png":
            yield f"--output ({self.output}) must end in .png: the tool writes a PNG"


# Panels: title, axis label, curves.
PANELS = [
    ("loss", "nats per token", ("training", "validation")),
    ("learning rate", "learning rate", ("learning rate",)),
    ("gradient norm", "L2 norm before clipping", ("gradient norm",)),
    ("throughput", "samples per second", ("throughput",)),
]


class Curves:
    """The numbers of one run: {curve: {iteration: value}}, without NaN and infinite values."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float]] = {name: {} for _, _, names in PANELS for name in names}

    def add(self, name: str, iteration: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.of[name][iteration] = value

    def add_interval(self, iteration: int, numbers: list[float | None], per_second: int) -> None:
        """Add a log line's numbers, in the order of `_IN_LOG`. per_second: units of its time in a second."""
        samples, time = numbers[3:]
        pace = per_second * samples / time if samples and time else None
        for name, value in zip(("training", "learning rate", "gradient norm", "throughput"), [*numbers[:3], pace]):
            self.add(name, iteration, value)

    def go_on_from(self, iteration: int) -> None:
        """Drop later iterations, which the resumed run trains again."""
        for name, points in self.of.items():
            self.of[name] = {i: value for i, value in points.items() if i <= iteration}


def read_curves(text: str) -> Curves:
    """The numbers in a log. Other lines and the loss on the test set are ignored."""
    curves = Curves()
    for line in text.splitlines():
        if match := _TRAINING.search(line):
            fields = dict(part.rsplit(": ", 1) for part in line.split(" | ") if ": " in part)
            curves.add_interval(int(match[1]), [_number(fields.get(name, "")) for name in _IN_LOG], 1000)
        elif (match := _VALIDATION.search(line)) and match[2] != " on test set":
            curves.add("validation", int(match[1]), _number(match[3]))
        elif match := _LOADED.search(line):
            curves.go_on_from(int(match[1]))
    return curves


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # missing, or cut short


def read_metrics(text: str) -> Curves:
    """The numbers in a --metrics-file (megatron/training/monitor/writers.py)."""
    curves = Curves()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the cut last line of a killed run
        iteration = entry["iteration"]
        if entry["kind"] == "interval":
            curves.add_interval(iteration, [entry.get(name) for name in _IN_METRICS], 1)
        elif entry["kind"] == "validation":
            curves.add("validation", iteration, entry.get("lm loss validation"))
    return curves


def read_text(path: str) -> str:
    """The text of a log. Raises ValueError if it is empty."""
    with naming_flag("--log", path, "give the output of pretrain_gpt.py, saved with tee, or its --metrics-file"):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty; a run logs first after --log-interval iterations")
    return text


def read_log(path: str, text: str) -> Curves:
    """The numbers in `text`, the log or metrics file at `path`. Raises ValueError if it has none."""
    try:
        curves = read_metrics(text) if text.lstrip().startswith("{") else read_curves(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds JSON, but is no --metrics-file: {error} is missing or invalid") from None
    if not any(curves.of.values()):
        raise ValueError(
            f"{path} has no line of a run; give the output of pretrain_gpt.py, which has lines such as 'iteration 10/ 100 | "
            "... | lm loss: 7.1E+00 | ...' every --log-interval iterations, or its --metrics-file"
        )
    return curves


def in_runs(texts: dict[str, str]) -> list[list[str]]:
    """The logs of each run, in order: each log loads a checkpoint that the log before it has saved.

    If several logs load the same checkpoint, the first continues the run, and the others are runs of their own.
    """
    saved = {path: {_checkpoint(*found) for found in _SAVED.findall(text)} for path, text in texts.items()}
    after: dict[str, str] = {}
    for path, text in texts.items():
        if (loaded := _LOADED.search(text)) is not None:
            others = (other for other in texts if other != path and other not in after)
            source = next((other for other in others if _checkpoint(*loaded.groups()) in saved[other]), None)
            if source is not None and not _leads_to(after, path, source):
                after[source] = path
    runs = []
    for path in texts:
        if path not in after.values():
            runs.append([path])
            while (following := after.get(runs[-1][-1])) is not None:
                runs[-1].append(following)
    return runs


def _checkpoint(iteration: str, folder: str) -> tuple[int, str]:
    return int(iteration), folder.strip().rstrip("/")


def _leads_to(after: dict[str, str], path: str, target: str) -> bool:
    while path in after and path != target:
        path = after[path]
    return path == target


def summary(name: str, curves: Curves) -> str:
    """`train: training loss 7.31 at iteration 10 to 4.12 at iteration 300; validation loss 4.30 at iteration 300`"""
    ends = {
        what: " to ".join(f"{losses[i]:.2f} at iteration {i}" for i in sorted({min(losses), max(losses)}))
        for what, losses in ((what, curves.of[what]) for what in ("training", "validation"))
        if losses
    }
    return f"{name}: " + ("; ".join(f"{what} loss {end}" for what, end in ends.items()) or "no loss is a number")


def draw(runs: dict[str, Curves], output: str) -> None:
    """Draw a panel per quantity that a run has; each run has one colour in all panels."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    panels = [panel for panel in PANELS if any(run.of[name] for run in runs.values() for name in panel[2])]
    rows, columns = -(-len(panels) // 2), min(2, len(panels))
    options = {"figsize": (7 * columns, 4 * rows), "layout": "constrained", "squeeze": False, "sharex": True}
    figure, grid = pyplot.subplots(rows, columns, **options)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, unit, names) in zip(grid.flat, panels):
        for number, (run, curves) in enumerate(runs.items()):
            for name in names:
                points = sorted(curves.of[name].items())
                label = f"{run}, {name}" if len(names) > 1 else run
                style = "o--" if name == "validation" else "-" if len(points) > 1 else "o"
                if points:
                    axes.plot(*zip(*points), style, markersize=4, color=f"C{number}", label=label)
        axes.set(title=title, xlabel="iteration", ylabel=unit)
        axes.tick_params(labelbottom=True)
        axes.grid(alpha=0.3)
        axes.legend()
    with naming_flag("--output", output, "choose a file that can be written"):
        Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120, format="png")
    pyplot.close(figure)


def run(config: PlotRunConfig) -> None:
    texts = {path: read_text(path) for path in dict.fromkeys(config.log)}
    names = [Path(path).stem for path in texts]
    labels = dict(zip(texts, names if len(set(names)) == len(names) else texts))  # paths tell equal names apart
    for path, text in texts.items():
        read_log(path, text)  # a log without numbers is an error, also beside others of its run
    runs = {
        " + ".join(labels[path] for path in parts): read_log(parts[0], "\n".join(texts[path] for path in parts))
        for parts in in_runs(texts)
    }
    draw(runs, config.output)
    for name, curves in runs.items():
        print(summary(name, curves))
    print(f"wrote {config.output}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlotRunConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
