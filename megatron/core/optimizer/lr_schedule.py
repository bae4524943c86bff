"""The learning rate as a function of the samples consumed. Pure numbers.

The unit is samples even where the user speaks of iterations (iterations x global batch size), as Megatron saves it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import ConfigError, knob


@dataclass(frozen=True)
class LearningRateConfig:
    """Learning rate."""

    lr: float | None = knob(None, "highest learning rate")
    min_lr: float = knob(0.0, "lowest learning rate, reached at the end of the decay")
    decoupled_lr: float | None = knob(None, "highest rate of the word table and the output layer; --lr when unset")
    decoupled_min_lr: float | None = knob(
        None, "lowest rate of the word table and the output layer; --min-lr when unset"
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = knob("linear", "how the rate falls after the warm-up")
    lr_decay_iters: int | None = knob(None, "iterations until --min-lr; all training iterations when unset")
    lr_warmup_iters: int = knob(0, "iterations over which the rate rises linearly")
    lr_warmup_fraction: float | None = knob(None, "the same as a share of the decay iterations")
    lr_warmup_init: float = knob(0.0, "rate at the start of the warm-up")

    def __post_init__(self) -> None:
        problems = []
        if self.lr is not None and self.lr <= 0:
            problems.append(f"--lr is {self.lr}; it must be positive")
        if self.lr is not None and not 0 <= self.min_lr <= self.lr:
            problems.append(f"--min-lr is {self.min_lr}; it must be between 0 and --lr ({self.lr})")
        problems += self._decoupled_problems()
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            problems.append("--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one")
        if self.lr_warmup_fraction is not None and not 0 <= self.lr_warmup_fraction <= 1:
            problems.append(f"--lr-warmup-fraction is {self.lr_warmup_fraction}; it must be in [0, 1]")
        if self.lr_warmup_iters < 0:
            problems.append(f"--lr-warmup-iters is {self.lr_warmup_iters}; it must not be negative")
        if not self.lr_warmup_init >= 0:
            problems.append(f"--lr-warmup-init is {self.lr_warmup_init}; it must not be negative")
        if self.lr_decay_iters is not None and self.lr_decay_iters < 1:
            problems.append(f"--lr-decay-iters is {self.lr_decay_iters}; it must be at least 1")
        if problems:
            raise ConfigError(problems)

    def _decoupled_problems(self) -> list[str]:
        highest, lowest = self.decoupled_lr, self.decoupled_min_lr
        if highest is None:
            return [] if lowest is None else ["--decoupled-min-lr needs --decoupled-lr"]
        if highest <= 0:
            return [f"--decoupled-lr is {highest}; it must be positive"]
        lowest = self.min_lr if lowest is None else lowest
        if not 0 <= lowest <= highest:
            return [
                f"--decoupled-min-lr (or --min-lr) is {lowest}; it must be between 0 and --decoupled-lr ({highest})"
            ]
        return []


class LearningRateSchedule:
    """`at(samples)` is the rate of the iteration that begins after `samples` samples."""

    def __init__(self, config: LearningRateConfig, train_iters: int, global_batch_size: int):
        self.config = config
        self.decay = (config.lr_decay_iters or train_iters) * global_batch_size
        self.warmup: float = config.lr_warmup_iters * global_batch_size
        if config.lr_warmup_fraction is not None:
            self.warmup = config.lr_warmup_fraction * self.decay
        if self.warmup >= self.decay and config.lr_decay_style != "constant":
            given = "--lr-warmup-iters" if config.lr_warmup_fraction is None else "--lr-warmup-fraction"
            raise ConfigError(
                f"the warm-up ({self.warmup / global_batch_size:g} iterations) must end before the decay does "
                f"({self.decay / global_batch_size:g}); lower {given} or raise --lr-decay-iters"
            )

    def at(self, samples: int) -> float:
        return self._between(self.config.min_lr, self.config.lr, samples)

    def decoupled_at(self, samples: int) -> float | None:
        """The rate of the word table and the output layer, by the same curve; None if they have none of their own."""
        config = self.config
        if config.decoupled_lr is None:
            return None
        lowest = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        return self._between(lowest, config.decoupled_lr, samples)

    def _between(self, lowest: float, highest: float, samples: int) -> float:
        config = self.config
        if self.warmup > 0 and samples <= self.warmup:
            return config.lr_warmup_init + (highest - config.lr_warmup_init) * samples / self.warmup
        if config.lr_decay_style == "constant":
            return highest
        if samples > self.decay:
            return lowest
        done = (samples - self.warmup) / (self.decay - self.warmup)
        left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return lowest + left * (highest - lowest)
