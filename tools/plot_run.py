"""Curves of training runs: losses, learning rate, gradient norm and throughput against iterations, as a PNG.

    python tools/plot_run.py --log run.log other.jsonl --output runs.png

A log is what pretrain_gpt.py prints, saved with `tee`, or the file of its --metrics-file. A resumed run may append to its log
(`tee -a`) or have a log of its own: a log that loads a checkpoint which another log saves is drawn as the rest of that run.
Where an iteration was trained twice, the later lines count.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import ConfigError, FlagParser, add_flags, build, knob, read_flags
from tools.errors import naming_flag, say_what_is_wrong

# The lines of megatron/training/watch/log.py: training_line and validation_line. An interval of skipped steps has no loss.
_TRAINING = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples:")
_NUMBERS = {
    "training": re.compile(r"\| lm loss: ([^ |]+)"),
    "learning rate": re.compile(r"\| learning rate: ([^ |]+)"),
    "gradient norm": re.compile(r"\| grad norm: ([^ |]+)"),
}
_PACE = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).*\| global batch size: +(\d+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: ([^ |]+)")
# Those of megatron/training/checkpointing.py, which say that one log goes on where another stopped.
_SAVED = re.compile(r"^saved checkpoint at iteration (\d+) to (.+)$", re.MULTILINE)
_LOADED = re.compile(r"^loaded checkpoint of iteration (\d+) from (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PlotRunConfig:
    """Plot of a run."""

    log: list[str] | None = knob(
        None, "logs or metrics files of training runs, each drawn under its file name", metavar="FILE", required=True
    )
    output: str | None = knob(None, "PNG to write", metavar="FILE", required=True)

    def __post_init__(self) -> None:
        needed = {"--log": self.log, "--output": self.output}
        problems = [f"{flag} is needed" for flag, value in needed.items() if not value]
        if self.output and Path(self.output).suffix.lower() != ".png":
            problems.append(f"--output ({self.output}) must end in .png: a PNG is what is written")
        if problems:
            raise ConfigError(problems)


# What is drawn, a panel each: title, label of the axis, the curves in it.
PANELS = [
    ("loss", "nats per token", ("training", "validation")),
    ("learning rate", "learning rate", ("learning rate",)),
    ("gradient norm", "L2 norm before clipping", ("gradient norm",)),
    ("throughput", "samples per second", ("throughput",)),
]


class Curves:
    """The numbers of one run: name of a curve -> iteration -> value. Those that are not finite are left out."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float]] = {name: {} for _, _, names in PANELS for name in names}

    def add(self, name: str, iteration: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.of[name][iteration] = value

    def go_on_from(self, iteration: int) -> None:
        """Forget what came after it, which is trained again."""
        for name, points in self.of.items():
            self.of[name] = {i: value for i, value in points.items() if i <= iteration}


def read_curves(text: str) -> Curves:
    """The numbers in a log; lines of any other kind are passed over, and so is the loss on the test set."""
    curves = Curves()
    for line in text.splitlines():
        if match := _TRAINING.search(line):
            iteration = int(match[1])
            for name, pattern in _NUMBERS.items():
                if found := pattern.search(line):
                    curves.add(name, iteration, _number(found[1]))
            if (pace := _PACE.search(line)) and float(pace[1]):
                curves.add("throughput", iteration, 1000 * int(pace[2]) / float(pace[1]))
        elif (match := _VALIDATION.search(line)) and match[2] != " on test set":
            curves.add("validation", int(match[1]), _number(match[3]))
        elif match := _LOADED.search(line):
            curves.go_on_from(int(match[1]))
    return curves


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # a line cut short


def read_metrics(text: str) -> Curves:
    """The numbers in a file of --metrics-file (megatron/training/watch/sinks.py)."""
    curves, names = Curves(), {"training": "lm loss", "learning rate": "learning-rate", "gradient norm": "grad-norm"}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        iteration = entry["iteration"]
        if entry["kind"] == "interval":
            for name, tag in names.items():
                curves.add(name, iteration, entry.get(tag))
            if entry.get("iteration-time"):
                curves.add("throughput", iteration, entry["batch-size"] / entry["iteration-time"])
        elif entry["kind"] == "validation":
            curves.add("validation", iteration, entry.get("lm loss validation"))
    return curves


def read_text(path: str) -> str:
    """What is in a log. Raises ValueError if it is empty."""
    with naming_flag(
        "--log", path, "give what pretrain_gpt.py printed, saved with tee, or the file of its --metrics-file"
    ):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty; a run writes its first line after --log-interval steps")
    return text


def read_log(path: str, text: str) -> Curves:
    """The numbers in the text of the log or metrics file at `path`. Raises ValueError if it has none."""
    try:
        curves = read_metrics(text) if text.lstrip().startswith("{") else read_curves(text)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds JSON, but not that of --metrics-file: {error} is missing or odd") from None
    if not any(curves.of.values()):
        raise ValueError(
            f"{path} has no line of a run; give what pretrain_gpt.py printed, which has lines such as "
            "'iteration 10/ 100 | ... | lm loss: 7.1E+00 | ...' every --log-interval steps, or the file of its --metrics-file"
        )
    return curves


def in_runs(texts: dict[str, str]) -> list[list[str]]:
    """The logs of each run in the order of its parts: a part begins by loading what the part before it has saved.

    Of several logs that go on from one checkpoint the first is its run's next part, and the others are runs of their own.
    """
    saved = {path: {_checkpoint(*found) for found in _SAVED.findall(text)} for path, text in texts.items()}
    after: dict[str, str] = {}
    for path, text in texts.items():
        loaded = _LOADED.search(text)
        sources = [
            p for p in texts if p != path and p not in after and loaded and _checkpoint(*loaded.groups()) in saved[p]
        ]
        if sources and not _leads_to(after, path, sources[0]):
            after[sources[0]] = path
    runs = []
    for path in texts:
        if path not in after.values():
            runs.append([path])
            while runs[-1][-1] in after:
                runs[-1].append(after[runs[-1][-1]])
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
    """A panel for each quantity that some run has; a run has one colour in all of them."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    panels = [panel for panel in PANELS if any(run.of[name] for run in runs.values() for name in panel[2])]
    rows, columns = -(-len(panels) // 2), min(2, len(panels))
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(7 * columns, 4 * rows), layout="constrained", squeeze=False, sharex=True
    )
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


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags, 1 anything else the user can mend."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, PlotRunConfig)
    try:
        config = build(PlotRunConfig, read_flags(parser, arguments))
        texts = {path: read_text(path) for path in dict.fromkeys(config.log)}
        names = [Path(path).stem for path in texts]
        labels = dict(zip(texts, names if len(set(names)) == len(names) else texts))  # paths tell equal names apart
        alone = {path: read_log(path, text) for path, text in texts.items()}
        runs = {}
        for parts in in_runs(texts):
            whole = "\n".join(texts[path] for path in parts)
            name = " + ".join(labels[path] for path in parts)
            runs[name] = read_log(parts[0], whole) if len(parts) > 1 else alone[parts[0]]
        draw(runs, config.output)
    except (ValueError, OSError, ImportError) as error:
        return say_what_is_wrong("plot_run", error)
    for name, curves in runs.items():
        print(summary(name, curves))
    print(f"wrote {config.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
