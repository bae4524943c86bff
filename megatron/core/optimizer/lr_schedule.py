"""Learning rate and weight decay as functions of the samples consumed. Pure numbers.

The unit is samples, as in Megatron's checkpoints; iterations count as iterations x global batch size. A schedule is a
record of numbers: a checkpoint holds it, and a resumed run compares it with its own.

    settings --learning_rate_schedule--> LearningRateSchedule --at(samples)--> rate
                                              | asdict, saved
    a later run's settings ------------> schedule_in_force <-- saved
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    NotNegative,
    Positive,
    Share,
    WholeNumber,
    knob,
    misfits,
)

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WarmupStyle = Literal["linear", "log"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateConfig(FlagConfig):
    """Learning rate."""

    lr: Positive | None = knob(None, "peak learning rate", required=True)
    min_lr: float = knob(0.0, "learning rate at the end of the decay")
    decoupled_lr: Positive | None = knob(None, "peak learning rate of embedding and output layer; default: --lr")
    decoupled_min_lr: float | None = knob(None, "final learning rate of embedding and output layer; default: --min-lr")
    lr_decay_style: DecayStyle = knob(
        "linear", "decay after the warm-up; WSD: constant, then --lr-wsd-decay-style at the end"
    )
    lr_decay_iters: Count | None = knob(None, "iterations until --min-lr; default: all")
    lr_decay_samples: Count | None = knob(None, "samples until --min-lr, with --train-samples; default: all")
    lr_wsd_decay_style: WsdStyle = knob("exponential", "decay at the end of WSD")
    lr_wsd_decay_iters: Count | None = knob(None, "iterations of the decay of WSD")
    lr_wsd_decay_samples: Count | None = knob(None, "samples of the decay of WSD, with --train-samples")
    lr_warmup_iters: WholeNumber = knob(0, "iterations of warm-up")
    lr_warmup_samples: WholeNumber = knob(0, "samples of warm-up, with --train-samples")
    lr_warmup_fraction: Share | None = knob(None, "warm-up as a share of the decay iterations or samples")
    lr_warmup_init: NotNegative = knob(0.0, "learning rate at the start of the warm-up")
    lr_warmup_style: WarmupStyle = knob("linear", "warm-up by iterations, or by the logarithm of 1 + iterations")
    override_opt_param_scheduler: bool = knob(
        False,
        "resume with this run's learning rate and weight decay schedules instead of the checkpoint's",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = knob(
        False,
        "resume with the checkpoint's learning rate and weight decay schedules",
        flags=(
            "--use-checkpoint-opt_param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
            "--use-checkpoint-lr-scheduler",
        ),
    )

    def problems(self) -> Iterator[str]:
        if self.lr is not None and not 0 <= self.min_lr <= self.lr:
            yield f"--min-lr is {self.min_lr}; it must be between 0 and --lr ({self.lr})"
        if self.lr is not None and self.lr_warmup_init > self.lr > 0:
            yield f"--lr-warmup-init is {self.lr_warmup_init}; it must not be above --lr ({self.lr})"
        highest, lowest = self.decoupled_lr, self.decoupled_min_lr
        if highest is None and lowest is not None:
            yield "--decoupled-min-lr needs --decoupled-lr"
        lowest = self.min_lr if lowest is None else lowest
        if highest is not None and highest > 0 and not 0 <= lowest <= highest:
            yield f"--decoupled-min-lr (or --min-lr) is {lowest}; it must be between 0 and --decoupled-lr ({highest})"
        for unit in ("iters", "samples"):
            if self.lr_warmup_fraction is not None and getattr(self, f"lr_warmup_{unit}"):
                yield f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; give one"
            if self.lr_decay_style != "WSD" and getattr(self, f"lr_wsd_decay_{unit}") is not None:
                yield f"--lr-wsd-decay-{unit} needs --lr-decay-style WSD, not {self.lr_decay_style}"
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, or with --train-samples --lr-wsd-decay-samples"
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one"


@dataclass(frozen=True)
class RunLength:
    """The length of a run, in the user's unit."""

    count: int
    unit: Literal["iters", "samples"] = "iters"
    samples_per_iter: int = 1  # the global batch size, at the end of a ramp

    @property
    def samples_per_unit(self) -> int:
        return self.samples_per_iter if self.unit == "iters" else 1

    @property
    def samples(self) -> int:
        return self.count * self.samples_per_unit


@dataclass(frozen=True)
class LearningRateSchedule:
    """`at(samples)`: the rate of the iteration that begins after `samples` samples. All lengths are in samples."""

    lr: float
    min_lr: float
    warmup_init: float
    warmup: float  # not an integer if given as a share of the decay
    decay: int
    style: DecayStyle
    wsd_decay: int | None = None
    wsd_style: WsdStyle = "exponential"
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    warmup_style: WarmupStyle = "linear"
    warmup_unit: int = 1  # samples of an iteration, whose number the logarithm is of

    def at(self, samples: int) -> float:
        return self._between(self.min_lr, self.lr, samples)

    def decoupled_at(self, samples: int) -> float | None:
        """The rate of the word table and the output layer; None if it is that of all parameters."""
        if self.decoupled_lr is None:
            return None
        lowest = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return self._between(lowest, self.decoupled_lr, samples)

    def _between(self, lowest: float, highest: float, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + self._risen(highest - self.warmup_init, samples)
        if self.style == "constant":
            return highest
        if samples > self.decay:
            return lowest
        if self.style == "inverse-square-root":
            return max(lowest, highest * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        # WSD stays at the highest rate until its own decay begins.
        wsd = self.style == "WSD"
        style, start = (self.wsd_style, self.decay - self.wsd_decay) if wsd else (self.style, self.warmup)
        return lowest + _FALLS[style](max(samples - start, 0) / (self.decay - start)) * (highest - lowest)

    def _risen(self, rise: float, samples: int) -> float:
        """The part of the warm-up's rise after `samples` samples. By the logarithm it is complete an iteration before
        the end."""
        if self.warmup_style == "linear":
            return rise * samples / self.warmup
        of_all = max(2.0, self.warmup / self.warmup_unit)
        return rise * min(1.0, math.log(1 + samples / self.warmup_unit) / math.log(of_all))

    def problems(self) -> Iterator[str]:
        """Values for which `at` has no result; one of `learning_rate_schedule` has none."""
        if self.warmup < 0 or self.warmup_unit < 1:
            yield f"warmup {self.warmup}, warmup_unit {self.warmup_unit}"
        if self.style != "constant" and self.decay <= self.warmup:
            yield f"warmup {self.warmup}, decay {self.decay}"
        if self.style == "WSD" and not 0 < (self.wsd_decay or 0) <= self.decay:
            yield f"wsd_decay {self.wsd_decay}, decay {self.decay}"

    @property
    def ignored(self) -> set[str]:
        """The fields that this style does not read."""
        wsd = set() if self.style == "WSD" else {"wsd_decay", "wsd_style"}
        wsd |= {"warmup_unit"} if self.warmup_style == "linear" else set()
        return wsd | ({"min_lr", "decay", "decoupled_min_lr"} if self.style == "constant" else set())


# The height (1 at the start, 0 at the end) after a share `x` of the decay, 0 <= x <= 1.
_FALLS = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


def learning_rate_schedule(config: LearningRateConfig, length: RunLength) -> LearningRateSchedule:
    """The schedule of a run of this length. Raises ConfigError if warm-up or WSD decay exceed the decay.

    Lengths are in the run's unit; the caller checks that no setting uses the other unit.
    """
    unit, share = length.samples_per_unit, config.lr_warmup_fraction

    def of(name: str) -> int | None:
        return getattr(config, f"lr_{name}_{length.unit}")

    decay, wsd = of("decay") or length.count, of("wsd_decay")
    warmup, given = of("warmup"), f"--lr-warmup-{length.unit}"
    if share is not None:
        warmup, given = share * decay, "--lr-warmup-fraction"
    word = "iterations" if length.unit == "iters" else "samples"
    if warmup >= decay and config.lr_decay_style != "constant":
        raise ConfigError(
            f"the warm-up ({warmup:g} {word}) must end before the decay does ({decay:g}); lower {given} or raise "
            f"--lr-decay-{length.unit}"
        )
    if config.lr_decay_style == "WSD" and wsd is not None and wsd > decay:
        raise ConfigError(
            f"--lr-wsd-decay-{length.unit} ({wsd}) must not exceed the decay ({decay} {word}); lower it or raise "
            f"--lr-decay-{length.unit}"
        )
    return LearningRateSchedule(
        lr=config.lr,
        min_lr=config.min_lr,
        warmup_init=config.lr_warmup_init,
        # The share is taken of samples, not of iterations, which gives Megatron's last digit.
        warmup=warmup * unit if share is None else share * (decay * unit),
        decay=decay * unit,
        style=config.lr_decay_style,
        wsd_decay=None if wsd is None else wsd * unit,
        wsd_style=config.lr_wsd_decay_style,
        decoupled_lr=config.decoupled_lr,
        decoupled_min_lr=config.decoupled_min_lr,
        warmup_style=config.lr_warmup_style,
        warmup_unit=length.samples_per_iter,
    )


@dataclass(frozen=True)
class WeightDecaySchedule:
    """`at(samples)`: the weight decay of the iteration that begins after `samples` samples; it grows over `samples`."""

    start: float
    end: float
    style: IncreaseStyle
    samples: int

    def at(self, samples: int) -> float:
        if self.style == "constant" or samples > self.samples:
            return self.end
        share = samples / self.samples
        if self.style == "cosine":
            share = _FALLS["cosine"](1.0 - share)
        return self.start + share * (self.end - self.start)

    def problems(self) -> Iterator[str]:
        """Values for which `at` has no result."""
        if self.style != "constant" and self.samples < 1:
            yield f"samples {self.samples}"

    @property
    def ignored(self) -> set[str]:
        return {"samples"} if self.style == "constant" else set()


AnySchedule = TypeVar("AnySchedule", LearningRateSchedule, WeightDecaySchedule)


def read_schedule(kind: type[AnySchedule], saved: Mapping[str, Any], *, what: str) -> AnySchedule:
    """The schedule that was saved as `asdict` gives it. Raises ConfigError for what no run has saved: a checkpoint may
    come from
    anywhere. what: names the schedule in the message."""
    needed = [f.name for f in fields(kind) if f.default is MISSING]
    wrong = [f"{name} is missing" for name in needed if name not in saved]
    wrong += [f"{name} is unknown" for name in saved if name not in {f.name for f in fields(kind)}]
    wrong += misfits(kind, saved)
    schedule = None if wrong else kind(**saved)
    if schedule is not None:
        wrong = list(schedule.problems())
    if wrong:
        raise ConfigError(f"the checkpoint's {what} schedule is none that a run has written: {'; '.join(wrong)}")
    return schedule


def schedule_in_force(
    mine: AnySchedule, saved: Mapping[str, Any] | None, config: LearningRateConfig, *, what: str, samples: int
) -> AnySchedule:
    """The schedule of a resumed run: its own, or the one `saved` in the checkpoint (None: the checkpoint has none).

    Raises ConfigError if they differ and no flag decides. `what` names the schedule in the message, which gives both
    values of the next step, the one after `samples` samples.
    """
    if saved is None or config.override_opt_param_scheduler:
        return mine
    theirs = read_schedule(type(mine), saved, what=what)
    if config.use_checkpoint_opt_param_scheduler:
        return theirs
    if differ := differences(theirs, mine):
        stretched = "decay" in differ or "samples" in differ
        hint = " (--train-iters or --train-samples set its length, unless --lr-decay-* does)" if stretched else ""
        raise ConfigError(
            f"the checkpoint's {what} schedule is another (in samples: {'; '.join(differ.values())}){hint}; give "
            f"--override-opt_param-scheduler to follow this run's settings ({mine.at(samples):.6g} at the next step), "
            f"or --use-checkpoint-opt_param-scheduler for the checkpoint's ({theirs.at(samples):.6g})"
        )
    return mine


def differences(theirs: AnySchedule, mine: AnySchedule) -> dict[str, str]:
    """field -> "before, now", for fields that at least one of the schedules reads."""
    before, now = asdict(theirs), asdict(mine)
    names = [name for name in before if name not in mine.ignored & theirs.ignored and before[name] != now[name]]
    return {name: "{} {} before, {} now".format(name, *_told_apart(before[name], now[name])) for name in names}


def _told_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two different values as text; floats with as few digits as tell them apart: 22.4 for 22.400000000000002 (0.01 *
    2240)."""
    for digits in (6, 12, 17):
        texts = [f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in (one, other)]
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]
