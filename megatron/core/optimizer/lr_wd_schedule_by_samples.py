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
    option,
    type_mismatches,
)

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
WarmupStyle = Literal["linear", "log"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearningRateConfig(FlagConfig):
    """Learning rate."""

    lr: Positive | None = option(None, "peak learning rate", required=True)
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    decoupled_lr: Positive | None = option(None, "peak learning rate of embedding and output layer; default: --lr")
    decoupled_min_lr: float | None = option(
        None, "final learning rate of embedding and output layer; default: --min-lr"
    )
    lr_decay_style: DecayStyle = option(
        "linear", "learning rate decay after the warm-up; WSD: constant, and at the end decay by --lr-wsd-decay-style"
    )
    lr_decay_iters: Count | None = option(None, "iterations until --min-lr; default: all")
    lr_decay_samples: Count | None = option(
        None, "samples until the learning rate reaches --min-lr, with --train-samples; default: all"
    )
    lr_wsd_decay_style: WsdStyle = option("exponential", "shape of the final decay of --lr-decay-style WSD")
    lr_wsd_decay_iters: Count | None = option(None, "iterations of the final decay of --lr-decay-style WSD")
    lr_wsd_decay_samples: Count | None = option(
        None, "samples of the final decay of --lr-decay-style WSD; needs --train-samples"
    )
    lr_warmup_iters: WholeNumber = option(0, "iterations of warm-up")
    lr_warmup_samples: WholeNumber = option(0, "samples of warm-up, with --train-samples")
    lr_warmup_fraction: Share | None = option(None, "warm-up as a share of the iterations or samples of the decay")
    lr_warmup_init: NotNegative = option(0.0, "learning rate at the start of the warm-up")
    lr_warmup_style: WarmupStyle = option(
        "linear",
        "growth of the learning rate in the warm-up: linear in the iterations, or in the logarithm of 1 + iterations",
    )
    override_opt_param_scheduler: bool = option(
        False,
        "resume with this run's learning rate and weight decay schedules instead of the checkpoint's",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
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
            yield f"--lr-warmup-init is {self.lr_warmup_init}; it must be at most --lr ({self.lr})"
        highest = self.decoupled_lr
        lowest = self.decoupled_min_lr
        if highest is None and lowest is not None:
            yield "--decoupled-min-lr needs --decoupled-lr"
        if lowest is None:
            lowest = self.min_lr
        if highest is not None and highest > 0 and not 0 <= lowest <= highest:
            yield f"--decoupled-min-lr (or --min-lr) is {lowest}; it must be between 0 and --decoupled-lr ({highest})"
        for unit in ("iters", "samples"):
            if self.lr_warmup_fraction is not None and getattr(self, f"lr_warmup_{unit}"):
                yield f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; give only one of them"
            if self.lr_decay_style != "WSD" and getattr(self, f"lr_wsd_decay_{unit}") is not None:
                yield f"--lr-wsd-decay-{unit} needs --lr-decay-style WSD, not {self.lr_decay_style}"
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None and self.lr_wsd_decay_samples is None:
            yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, or with --train-samples --lr-wsd-decay-samples"
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; "
                "give only one of them"
            )


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
    """A learning rate schedule: `at(samples)` is the rate of the iteration that begins after `samples` samples.

    All lengths are in samples.
    """

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
    warmup_unit: int = 1  # samples of an iteration; the logarithmic warm-up counts iterations

    def at(self, samples: int) -> float:
        """Return the rate of the iteration that begins after `samples` samples."""
        return self._between(self.min_lr, self.lr, samples)

    def decoupled_at(self, samples: int) -> float | None:
        """Return the rate of the embedding and the output layer; None if it is that of all parameters."""
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
        if self.style == "WSD":  # stays at the highest rate until its own decay begins
            height_of = _HEIGHTS[self.wsd_style]
            start = self.decay - self.wsd_decay
        else:
            height_of = _HEIGHTS[self.style]
            start = self.warmup
        share = max(samples - start, 0) / (self.decay - start)
        return lowest + height_of(share) * (highest - lowest)

    def _risen(self, rise: float, samples: int) -> float:
        """Return the part of the warm-up's rise after `samples` samples.

        By the logarithm it is complete an iteration before the end.
        """
        if self.warmup_style == "linear":
            return rise * samples / self.warmup
        warmup_iterations = max(2.0, self.warmup / self.warmup_unit)
        return rise * min(1.0, math.log(1 + samples / self.warmup_unit) / math.log(warmup_iterations))

    def problems(self) -> Iterator[str]:
        """Yield the values for which `at` has no result. A schedule of `learning_rate_schedule` has none."""
        if self.warmup < 0 or self.warmup_unit < 1:
            yield f"warmup {self.warmup}, warmup_unit {self.warmup_unit}"
        if self.style != "constant" and self.decay <= self.warmup:
            yield f"warmup {self.warmup}, decay {self.decay}"
        if self.style == "WSD" and not 0 < (self.wsd_decay or 0) <= self.decay:
            yield f"wsd_decay {self.wsd_decay}, decay {self.decay}"

    @property
    def ignored(self) -> set[str]:
        """The fields that this style does not read."""
        names: set[str] = set()
        if self.style != "WSD":
            names |= {"wsd_decay", "wsd_style"}
        if self.warmup_style == "linear":
            names |= {"warmup_unit"}
        if self.style == "constant":
            names |= {"min_lr", "decay", "decoupled_min_lr"}
        return names


# The height (1 at the start, 0 at the end) after a share `x` of the decay, 0 <= x <= 1.
_HEIGHTS = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


def learning_rate_schedule(config: LearningRateConfig, length: RunLength) -> LearningRateSchedule:
    """Return the schedule of a run of this length. Raises ConfigError if warm-up or WSD decay exceed the decay.

    Lengths are in the run's unit; the caller checks that no setting uses the other unit. Without --lr, as a run of
    --skip-train may be, the rate is 0.
    """
    unit = length.samples_per_unit

    # the settings in the run's unit
    if length.unit == "iters":
        word = "iterations"
        decay = config.lr_decay_iters or length.count
        wsd = config.lr_wsd_decay_iters
        warmup: float = config.lr_warmup_iters
    else:
        word = "samples"
        decay = config.lr_decay_samples or length.count
        wsd = config.lr_wsd_decay_samples
        warmup = config.lr_warmup_samples
    warmup_flag = f"--lr-warmup-{length.unit}"
    share = config.lr_warmup_fraction
    if share is not None:
        warmup = share * decay
        warmup_flag = "--lr-warmup-fraction"

    if warmup >= decay and config.lr_decay_style != "constant":
        raise ConfigError(
            f"the warm-up ({warmup:g} {word}) must end before the decay ({decay:g}) does; lower {warmup_flag} or "
            f"raise --lr-decay-{length.unit}"
        )
    if config.lr_decay_style == "WSD" and wsd is not None and wsd > decay:
        raise ConfigError(
            f"--lr-wsd-decay-{length.unit} ({wsd}) must be at most the length of the decay ({decay} {word}); lower "
            f"it, or raise --lr-decay-{length.unit}"
        )
    return LearningRateSchedule(
        lr=config.lr or 0.0,
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
    """A weight decay schedule: `at(samples)` is the weight decay of the iteration that begins after `samples` samples.

    It grows over the first `samples`.
    """

    start: float
    end: float
    style: IncreaseStyle
    samples: int

    def at(self, samples: int) -> float:
        if self.style == "constant" or samples > self.samples:
            return self.end
        share = samples / self.samples
        if self.style == "cosine":
            share = _HEIGHTS["cosine"](1.0 - share)
        return self.start + share * (self.end - self.start)

    def problems(self) -> Iterator[str]:
        """Yield the values for which `at` has no result."""
        if self.style != "constant" and self.samples < 1:
            yield f"samples {self.samples}"

    @property
    def ignored(self) -> set[str]:
        """The fields that this style does not read."""
        return {"samples"} if self.style == "constant" else set()


AnySchedule = TypeVar("AnySchedule", LearningRateSchedule, WeightDecaySchedule)


def read_schedule(kind: type[AnySchedule], saved: Mapping[str, Any], *, what: str) -> AnySchedule:
    """Return the schedule that was saved as `asdict` gives it. what: names the schedule in the message.

    Raises ConfigError for values that no run has saved: a checkpoint may come from anywhere.
    """
    known = [f.name for f in fields(kind)]
    required = [f.name for f in fields(kind) if f.default is MISSING]
    problems = [f"{name} is missing" for name in required if name not in saved]
    problems += [f"{name} is unknown" for name in saved if name not in known]
    problems += type_mismatches(kind, saved)
    if not problems:
        schedule = kind(**saved)
        problems = list(schedule.problems())
        if not problems:
            return schedule
    raise ConfigError(f"the {what} schedule in the checkpoint is not valid: {'; '.join(problems)}")


def schedule_in_force(
    own: AnySchedule, saved: Mapping[str, Any] | None, config: LearningRateConfig, *, what: str, samples: int
) -> AnySchedule:
    """Return the schedule of a resumed run: its own, or the one `saved` in the checkpoint.

    saved None: the checkpoint has none.

    Raises ConfigError if they differ and no flag decides. `what` names the schedule in the message, which gives both
    values of the next step, the one after `samples` samples.
    """
    if saved is None or config.override_opt_param_scheduler:
        return own
    checkpoints = read_schedule(type(own), saved, what=what)
    if config.use_checkpoint_opt_param_scheduler:
        return checkpoints
    changed = differences(checkpoints, own)
    if changed:
        length_changed = "decay" in changed or "samples" in changed
        hint = " (--train-iters or --train-samples set its length, unless --lr-decay-* does)" if length_changed else ""
        raise ConfigError(
            f"the {what} schedule of the checkpoint differs from that of this run (in samples: "
            f"{'; '.join(changed.values())}){hint}; give --override-opt_param-scheduler to use this run's settings "
            f"({own.at(samples):.6g} at the next step), or --use-checkpoint-opt_param-scheduler to use the "
            f"checkpoint's ({checkpoints.at(samples):.6g})"
        )
    return own


def differences(before: AnySchedule, now: AnySchedule) -> dict[str, str]:
    """Return field -> "field value before, value now", for fields that at least one of the schedules reads."""
    values_now = asdict(now)
    ignored = before.ignored & now.ignored
    result = {}
    for name, value in asdict(before).items():
        if name not in ignored and value != values_now[name]:
            old, new = _distinct_texts(value, values_now[name])
            result[name] = f"{name} {old} before, {new} now"
    return result


def _distinct_texts(a: Any, b: Any) -> tuple[str, str]:
    """Return two different values as text.

    Floats with as few digits as tell them apart: 22.4 for 22.400000000000002 (0.01 * 2240).
    """
    for digits in (6, 12, 17):
        texts = [f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in (a, b)]
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]
