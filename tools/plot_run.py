"""Loss curves of training logs: training and validation loss against iterations, as a PNG.

    python tools/plot_run.py --log run.log other.log --output loss.png

A log is what pretrain_gpt.py prints, saved with `tee`. A resumed run may append to its log: where an iteration was trained
twice, the later lines count.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import ConfigError, FlagParser, add_flags, build, knob, read_flags

# The lines of megatron/training/log.py: training_line and validation_line.
_TRAINING = re.compile(r"iteration +(\d+)/ *\d+ \|.*\| lm loss: ([^ |]+)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on \w+ set)? \| lm loss value: ([^ |]+)")


@dataclass(frozen=True)
class PlotRunConfig:
    """Plot of a run."""

    log: list[str] | None = knob(
        None, "logs of training runs, each drawn under its file name", metavar="FILE", required=True
    )
    output: str | None = knob(None, "PNG to write", metavar="FILE", required=True)

    def __post_init__(self) -> None:
        needed = {"--log": self.log, "--output": self.output}
        if problems := [f"{flag} is needed" for flag, value in needed.items() if not value]:
            raise ConfigError(problems)


@dataclass
class Curves:
    """The losses of one log by iteration."""

    training: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


def read_curves(text: str) -> Curves:
    """The losses in a log; lines of any other kind are passed over, and so is the loss on the test set."""
    curves = Curves()
    for line in text.splitlines():
        if match := _TRAINING.search(line):
            curves.training[int(match[1])] = float(match[2])
        elif (match := _VALIDATION.search(line)) and match[2] != " on test set":
            curves.validation[int(match[1])] = float(match[3])
    return curves


def read_log(path: str) -> Curves:
    """The losses in the log at `path`. Raises ValueError if it has none."""
    curves = read_curves(Path(path).read_text(encoding="utf-8", errors="replace"))
    if not curves.training and not curves.validation:
        raise ValueError(
            f"{path} has no line with a loss; give the output of a training run, which has lines such as "
            "'iteration 10/ 100 | ... | lm loss: 7.1E+00 | ...' every --log-interval steps"
        )
    return curves


def summary(name: str, curves: Curves) -> str:
    """`train: training loss 7.31 at iteration 10 to 4.12 at iteration 300; validation loss 4.30 at iteration 300`"""
    ends = {
        what: " to ".join(f"{losses[i]:.2f} at iteration {i}" for i in sorted({min(losses), max(losses)}))
        for what, losses in (("training", curves.training), ("validation", curves.validation))
        if losses
    }
    return f"{name}: " + "; ".join(f"{what} loss {end}" for what, end in ends.items())


def draw(runs: dict[str, Curves], output: str) -> None:
    """One line and one row of markers a run, training and validation, in the same colour."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, curves) in enumerate(runs.items()):
        for losses, style, what in ((curves.training, "-", "training"), (curves.validation, "o--", "validation")):
            if losses:
                steps = sorted(losses)
                axes.plot(steps, [losses[i] for i in steps], style, color=f"C{number}", label=f"{name}, {what}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120, format="png")
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags, 1 anything else the user can mend."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, PlotRunConfig)
    try:
        config = build(PlotRunConfig, read_flags(parser, arguments))
        logs = list(dict.fromkeys(config.log))
        names = [Path(path).stem for path in logs]
        labels = names if len(set(names)) == len(names) else logs  # equal file names: the paths tell them apart
        runs = dict(zip(labels, map(read_log, logs)))
        draw(runs, config.output)
    except (ValueError, OSError, ImportError) as error:
        print(f"plot_run: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for name, curves in runs.items():
        print(summary(name, curves))
    print(f"wrote {config.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
