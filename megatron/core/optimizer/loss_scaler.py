"""The loss scale, which keeps float16 gradients above underflow: state machines fed with "did this step overflow?".

good good good ... good     after `loss_scale_window` good steps in a row: scale x 2, patience restored
bad                         an overflow: the step is skipped, patience falls by one
bad                         no patience left: scale x 1/2, and again at every overflow until the next growth
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.base.dataclass_flags import Count, FlagConfig, NotNegative, Positive, fits, flag_of, option

# Powers of two, so that scaling rounds nothing.
GROWTH = 2.0
BACKOFF = 0.5


@dataclass(frozen=True)
class LossScaleConfig(FlagConfig):
    """Loss scaling."""

    loss_scale: NotNegative | None = option(None, "static loss scale; 0 or unset: dynamic with --fp16")
    initial_loss_scale: float = option(2.0**32, "initial dynamic loss scale")
    min_loss_scale: Positive = option(1.0, "smallest dynamic loss scale")
    loss_scale_window: Count = option(1000, "iterations without an overflow after which the loss scale is doubled")
    hysteresis: Count = option(2, "overflows after which the loss scale is halved")

    def problems(self) -> Iterator[str]:
        scales = {"initial_loss_scale": self.initial_loss_scale, "min_loss_scale": self.min_loss_scale}
        for name, value in scales.items():
            mantissa, _ = math.frexp(value)
            if mantissa != 0.5:
                yield (
                    f"{flag_of(name)} is {value}; it must be a power of two, so that scaling does not round, "
                    "such as 65536"
                )
        initial = self.initial_loss_scale
        if self.min_loss_scale > initial:
            yield f"--min-loss-scale is {self.min_loss_scale}; it must be at most --initial-loss-scale ({initial})"


class ConstantGradScaler:
    """A fixed scale."""

    can_fall = False

    def __init__(self, scale: float):
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Count one step. An overflow does not change a fixed scale."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume. A fixed scale comes from the command line, not from the checkpoint."""


class DynamicGradScaler:
    """A scale that doubles after a window of good steps and halves when overflows have used up its patience.

    Only growth restores the patience, a good step does not: two overflows far apart within one window halve the scale.
    With `restores` a good step does.
    """

    restores = False

    def __init__(self, initial: float, *, minimum: float, window: int, hysteresis: int):
        self.scale = initial
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.good_steps = 0  # since the last overflow or growth
        self.patience = hysteresis  # overflows left before the scale falls

    @property
    def can_fall(self) -> bool:
        """Whether the next overflow may be due to the scale.

        False after an overflow at the lowest scale without patience left.
        """
        return self.scale > self.minimum or self.patience > 0 or self.good_steps > 0

    def update(self, overflow: bool) -> None:
        """Count one step."""
        if overflow:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * BACKOFF, self.minimum)
            return
        self.good_steps += 1
        if self.restores:
            self.patience = self.hysteresis
        if self.good_steps == self.window:
            self.good_steps = 0
            self.patience = self.hysteresis
            self.scale *= GROWTH

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; the names are Megatron's."""
        return {"scale": self.scale, "growth_tracker": self.good_steps, "hysteresis_tracker": self.patience}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. A state without a scale, from a run with a fixed scale or none, changes nothing."""
        if "scale" in state:
            self.scale = float(state["scale"])
            self.good_steps = int(state["growth_tracker"])
            self.patience = int(state["hysteresis_tracker"])


GradScaler = ConstantGradScaler | DynamicGradScaler


def problems_of_scaler(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a saved state, which may come from anywhere."""
    if "scale" not in state:
        return
    if not (fits(state["scale"], float) and state["scale"] > 0):
        yield f"grad_scaler/scale is {state['scale']!r:.40}; it must be a number above 0"
    for name in ("growth_tracker", "hysteresis_tracker"):
        if not fits(state.get(name), int):
            yield f"grad_scaler/{name} is {state.get(name)!r:.40}; it must be a whole number"


def make_grad_scaler(config: LossScaleConfig, *, fp16: bool) -> GradScaler | None:
    """Return the scaler of a run; None if the loss is not scaled. A fixed scale applies in every precision."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
