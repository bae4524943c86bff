"""The settings of the optimizer. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import BelowOne, FlagConfig, NotNegative, Positive, knob
from megatron.core.optimizer.lr_schedule import IncreaseStyle, WeightDecaySchedule


@dataclass(frozen=True)
class OptimizerConfig(FlagConfig):
    """Optimizer."""

    optimizer: Literal["adam", "sgd"] = knob("adam", "AdamW, or gradient descent with momentum")
    weight_decay: NotNegative = knob(
        0.01,
        "adam: the share of a weight taken off per unit of rate; sgd: the share added to its gradient; biases and "
        "norms have none",
    )
    start_weight_decay: float | None = knob(
        None, "weight decay at the start, with --weight-decay-incr-style linear or cosine"
    )
    end_weight_decay: float | None = knob(None, "weight decay after all training samples, instead of --weight-decay")
    weight_decay_incr_style: IncreaseStyle = knob(
        "constant", "how the weight decay grows from start to end over the run"
    )
    adam_beta1: BelowOne = knob(0.9, "decay of the first moment")
    adam_beta2: BelowOne = knob(0.999, "decay of the second moment")
    adam_eps: Positive = knob(1e-8, "added to the root of the second moment")
    sgd_momentum: BelowOne = knob(0.9, "share of the last update that sgd repeats")
    clip_grad: NotNegative = knob(1.0, "largest norm of the gradient; a longer one is scaled down; 0 for no limit")
    reuse_fp32_param: bool = knob(
        False,
        "with --bf16: hold a master as the model's weight and the 16 bits that it lacks, two bytes a parameter less; weights are "
        "the masters rounded to nearest even, as without it; one master in 131,072 is kept one unit in the last place nearer to zero",
    )

    def problems(self) -> list[str]:
        return self._weight_decay_problems()

    def _weight_decay_problems(self) -> list[str]:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant":
            given = {"--start-weight-decay": start, "--end-weight-decay": end}
            return [
                f"{flag} needs --weight-decay-incr-style linear or cosine; a constant one is --weight-decay"
                for flag, value in given.items()
                if value is not None
            ]
        if start is None or end is None:
            return [f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"]
        if not 0 <= start <= end < math.inf:
            return [f"--start-weight-decay ({start}) must not be negative, nor above --end-weight-decay ({end})"]
        return []

    def weight_decay_schedule(self, samples: int) -> WeightDecaySchedule:
        """The weight decay of a run of so many samples."""
        if self.weight_decay_incr_style == "constant":
            return WeightDecaySchedule(self.weight_decay, self.weight_decay, "constant", samples)
        return WeightDecaySchedule(
            self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style, samples
        )

    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept of past gradients: torch's names, under which checkpoints hold them."""
        if self.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.sgd_momentum else ()
