"""Megatron's `OptimizerParamScheduler`, over our schedules of rates and weight decay."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.optimizer.lr_wd_schedule_by_samples import (
    LearningRateConfig,
    LearningRateSchedule,
    WeightDecaySchedule,
)
from megatron.core.optimizer.write_lr_into_param_groups import SampleSchedule


class OptimizerParamScheduler(SampleSchedule):
    """Sets `lr` and `weight_decay` of an optimizer's groups.

    The unit of a step is the caller's: samples, in Megatron's loop.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ):
        rate = LearningRateSchedule(
            max_lr,
            min_lr,
            init_lr,
            lr_warmup_steps,
            lr_decay_steps,
            lr_decay_style,
            wsd_decay_steps,
            lr_wsd_decay_style or "exponential",
        )
        decay = WeightDecaySchedule(start_wd, end_wd, wd_incr_style, wd_incr_steps)
        super().__init__(optimizer, rate, decay)
        self._choice = LearningRateConfig(
            override_opt_param_scheduler=bool(override_opt_param_scheduler),
            use_checkpoint_opt_param_scheduler=bool(use_checkpoint_opt_param_scheduler),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the saved step.

        Raises ConfigError if the saved schedule differs and no option says which one counts.
        """
        self.resume(state_dict, self._choice)


__getattr__ = names_of_megatron(__name__)
