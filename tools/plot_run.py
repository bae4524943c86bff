"""Plot training runs: losses, learning rate, gradient norm, throughput and load of experts against iterations, as a PNG.

    python tools/plot_run.py --log run.log other.jsonl --output runs.png

A log is the output of pretrain_gpt.py, saved with `tee`, or its --metrics-file. A resumed run may append to its log (`tee -a`) or
have its own: a log that loads a checkpoint saved in another log is drawn as the continuation of that run. If an iteration was
trained twice, the later lines count. The load of experts is in a metrics file alone, with --moe-per-layer-logging.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from tools.errors import missing, naming_flag, run_tool

# Lines of training_line and validation_line in megatron/training/monitor/training_log.py. An interval in which all
# steps were skipped has no loss.
_TRAINING = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: ([^ |]+)")
# Loss, learning rate, gradient norm, samples and time of an iteration, by their names in the log and in --metrics-file.
_IN_LOG = ("lm loss", "learning rate", "grad norm", "global batch size", "elapsed time per iteration (ms)")
_IN_METRICS = ("lm loss", "learning-rate", "grad-norm", "batch-size", "iteration-time")
# Curves of megatron/training/monitor/expert_loads.py, one for each layer with experts.
_LOADS = re.compile(r"moe/(max|min)_load_layer_\d+")
# Lines of megatron/training/checkpointing/save_and_load_run_state.py. They show that a log continues the run of another one.
_SAVED = re.compile(r"^saved checkpoint at iteration (\d+) to (.+)$", re.MULTILINE)
_LOADED = re.compile(r"^loaded checkpoint of iteration (\d+) from (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PlotRunConfig(FlagConfig):
    """Plot of a run."""

    log: list[str] | None = option(
        None,
        "logs or metrics files of training runs; each curve is labelled with its file's name",
        metavar="FILE",
        required=True,
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
    ("load of experts", "tokens, in multiples of an equal share", ("busiest expert", "idlest expert")),
]


class Curves:
    """The numbers of one run: `of` is {curve: {iteration: value}}, without NaN and infinite values."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float]] = {name: {} for _, _, names in PANELS for name in names}
        self._consumed: dict[int, int] = {0: 0}  # iteration -> samples that were consumed by then

    def add(self, name: str, iteration: int, value: float | None) -> None:
        """Add a point to a curve, unless the value is missing or not finite."""
        if value is not None and math.isfinite(value):
            self.of[name][iteration] = value

    def add_interval(self, iteration: int, consumed: int, numbers: list[float | None], per_second: int) -> None:
        """Add a log line's numbers, in the order of `_IN_LOG`. per_second: units of its time in a second."""
        loss, learning_rate, grad_norm, batch_size, time = numbers
        self.add("training", iteration, loss)
        self.add("learning rate", iteration, learning_rate)
        self.add("gradient norm", iteration, grad_norm)
        samples = self._samples_per_iteration(iteration, consumed, batch_size)
        self._consumed[iteration] = consumed
        if samples and time:
            self.add("throughput", iteration, per_second * samples / time)

    def add_loads(self, iteration: int, values: dict[str, float]) -> None:
        """Add the largest and the smallest load of an expert in any layer, of a step's curves."""
        layers: dict[str, list[float]] = {"max": [], "min": []}
        for name, value in values.items():
            if match := _LOADS.fullmatch(name):
                layers[match[1]].append(value)
        self.add("busiest expert", iteration, max(layers["max"], default=None))
        self.add("idlest expert", iteration, min(layers["min"], default=None))

    def _samples_per_iteration(self, iteration: int, consumed: int, batch_size: float | None) -> float | None:
        """Return the mean batch since the line before; where that is unknown, the last batch, which a ramp had grown."""
        before = max((i for i in self._consumed if i < iteration), default=None)
        if before is None:
            return batch_size
        return (consumed - self._consumed[before]) / (iteration - before)

    def resume_from(self, iteration: int) -> None:
        """Drop later iterations, which the resumed run trains again."""
        for name, points in self.of.items():
            self.of[name] = {i: value for i, value in points.items() if i <= iteration}
        self._consumed = {iteration: self._consumed[iteration]} if iteration in self._consumed else {}


def read_curves(text: str) -> Curves:
    """Read the numbers of a log. Other lines and the loss on the test set are ignored."""
    curves = Curves()
    for line in text.splitlines():
        if match := _TRAINING.search(line):
            fields = dict(part.rsplit(": ", 1) for part in line.split(" | ") if ": " in part)
            numbers = [_number(fields.get(name, "")) for name in _IN_LOG]
            curves.add_interval(int(match[1]), int(match[2]), numbers, 1000)
        elif (match := _VALIDATION.search(line)) and match[2] != " on test set":
            curves.add("validation", int(match[1]), _number(match[3]))
        elif match := _LOADED.search(line):
            curves.resume_from(int(match[1]))
    return curves


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # missing, or cut short


def read_metrics(text: str) -> Curves:
    """Read the numbers of a --metrics-file (megatron/training/monitor/writers.py)."""
    curves = Curves()
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the incomplete last line of a killed run
        iteration = entry["iteration"]
        if entry["kind"] == "interval":
            numbers = [entry.get(name) for name in _IN_METRICS]
            curves.add_interval(iteration, entry["consumed_samples"], numbers, 1)
            curves.add_loads(iteration, entry)
        elif entry["kind"] == "validation":
            curves.add("validation", iteration, entry.get("lm loss validation"))
    return curves


def read_text(path: str) -> str:
    """Read the text of a log. Raises ValueError if it is empty."""
    with naming_flag("--log", path, "give the output of pretrain_gpt.py, saved with tee, or its --metrics-file"):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty; a run logs first after --log-interval iterations")
    return text


def read_log(path: str, text: str) -> Curves:
    """Read the numbers in `text`, the log or metrics file at `path`. Raises ValueError if it has none."""
    try:
        curves = read_metrics(text) if text.lstrip().startswith("{") else read_curves(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} contains JSON, but is not a --metrics-file: {error} is missing or invalid") from None
    if not any(curves.of.values()):
        raise ValueError(
            f"{path} has no line of a run; give the output of pretrain_gpt.py, which has lines such as 'iteration 10/ 100 | "
            "... | lm loss: 7.1E+00 | ...' every --log-interval iterations, or its --metrics-file"
        )
    return curves


def in_runs(texts: dict[str, str]) -> list[list[str]]:
    """Group logs into runs; return the paths of each run, in order. texts: path -> text of a log.

    A log continues the run of a log that saved the checkpoint which it loads. If several logs load the same checkpoint,
    the first continues the run, and the others are runs of their own.
    """
    # find for each log the one that continues it
    saved = {path: {_checkpoint(*groups) for groups in _SAVED.findall(text)} for path, text in texts.items()}
    next_log: dict[str, str] = {}
    for path, text in texts.items():
        loaded = _LOADED.search(text)
        if loaded is None:
            continue
        checkpoint = _checkpoint(*loaded.groups())
        for other in texts:
            if other != path and other not in next_log and checkpoint in saved[other]:
                if not _leads_to(next_log, path, other):  # which would close a circle
                    next_log[other] = path
                break

    # follow each run from its first log
    runs = []
    for path in texts:
        if path not in next_log.values():
            run = [path]
            while run[-1] in next_log:
                run.append(next_log[run[-1]])
            runs.append(run)
    return runs


def _checkpoint(iteration: str, folder: str) -> tuple[int, str]:
    return int(iteration), folder.strip().rstrip("/")


def _leads_to(next_log: dict[str, str], path: str, target: str) -> bool:
    """Whether the run continues from `path` to `target`."""
    while path in next_log and path != target:
        path = next_log[path]
    return path == target


def summary(name: str, curves: Curves) -> str:
    """Return a line with the first and the last losses of a run.

    `train: training loss 7.31 at iteration 10 to 4.12 at iteration 300; validation loss 4.30 at iteration 300`
    """
    parts = []
    for kind in ("training", "validation"):
        losses = curves.of[kind]
        if losses:
            ends = sorted({min(losses), max(losses)})  # first and last iteration
            parts.append(f"{kind} loss " + " to ".join(f"{losses[i]:.2f} at iteration {i}" for i in ends))
    return f"{name}: " + ("; ".join(parts) or "no loss is a number")


def draw(runs: dict[str, Curves], output: str) -> None:
    """Draw a panel for each quantity that some run has. A run has one colour in all panels."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    panels = [panel for panel in PANELS if any(run.of[name] for run in runs.values() for name in panel[2])]
    rows = -(-len(panels) // 2)
    columns = min(2, len(panels))
    options = {"figsize": (7 * columns, 4 * rows), "layout": "constrained", "squeeze": False, "sharex": True}
    figure, grid = pyplot.subplots(rows, columns, **options)
    # the ten colours of matplotlib would come again; of more runs the last are as far apart as the first
    colours = [f"C{number}" for number in range(len(runs))]
    if len(runs) > 10:
        colours = list(matplotlib.colormaps["turbo"]([number / (len(runs) - 1) for number in range(len(runs))]))
    # earlier runs are broader, so that a run with equal numbers does not hide them: two layouts of one model
    widths = [1.5 + 1.5 * min(len(runs) - 1 - number, 3) for number in range(len(runs))]
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, unit, names) in zip(grid.flat, panels):
        for number, (run, curves) in enumerate(runs.items()):
            for name in names:
                points = sorted(curves.of[name].items())
                if not points:
                    continue
                if name == "validation":
                    style = "o--"
                elif name == "idlest expert" and len(points) > 1:
                    style = "--"
                elif len(points) > 1:
                    style = "-"
                else:
                    style = "o"  # a line of one point cannot be seen
                label = f"{run}, {name}" if len(names) > 1 else run
                look = {"markersize": 2.5 + widths[number], "linewidth": widths[number], "color": colours[number]}
                axes.plot(*zip(*points), style, **look, label=label)
        axes.set(title=title, xlabel="iteration", ylabel=unit)
        axes.tick_params(labelbottom=True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="medium" if len(runs) <= 10 else "x-small")
    uncover_curves(figure)
    with naming_flag("--output", output, "choose a file that can be written"):
        Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120, format="png")
    pyplot.close(figure)


def uncover_curves(figure: Any) -> None:
    """Move the legends that cover a curve: above the curves, which get the height for it, or beside the panel if they are tall.

    figure: matplotlib's Figure.
    """
    legends = {axes: axes.get_legend() for axes in figure.axes if axes.get_legend() is not None}
    above = set()  # the panels whose legend lies above the curves
    is_moved = True
    while is_moved:  # a legend beside a panel makes others narrower
        is_moved = False
        figure.canvas.draw()  # matplotlib chooses places when it draws
        for axes, legend in list(legends.items()):
            place = legend.get_window_extent().padded(4)  # half of the broadest curve's width, in pixels
            curves = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
            if not any(curve.intersects_bbox(place, filled=False) for curve in curves):
                continue
            is_moved = True
            share = place.height / axes.get_window_extent().height
            if share < 0.45 and axes not in above:
                above.add(axes)
                bottom, top = axes.get_ylim()
                axes.set_ylim(bottom, bottom + (top - bottom) / (0.93 - share))
                legend.set_loc("upper right")
            else:
                legend.set_loc("upper left")
                legend.set_bbox_to_anchor((1.01, 1))
                del legends[axes]


def run(config: PlotRunConfig) -> None:
    """Read the logs, draw the runs, and print a summary of each."""
    texts = {path: read_text(path) for path in dict.fromkeys(config.log)}
    for path, text in texts.items():
        read_log(path, text)  # a log without numbers is an error, even if other logs of its run have some

    # label logs by file name, or by path if two have the same name
    names = [Path(path).stem for path in texts]
    labels = dict(zip(texts, names if len(set(names)) == len(names) else texts))

    runs = {}
    for paths in in_runs(texts):
        run_label = " + ".join(labels[path] for path in paths)
        run_text = "\n".join(texts[path] for path in paths)
        runs[run_label] = read_log(paths[0], run_text)
    draw(runs, config.output)
    for name, curves in runs.items():
        print(summary(name, curves))
    print(f"wrote {config.output}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlotRunConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
