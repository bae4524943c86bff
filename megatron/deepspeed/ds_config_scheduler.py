"""The schedule that a file's `scheduler` section asks for."""

import inspect
from collections.abc import Mapping
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, fits
from megatron.core.optimizer.deepspeed_lr_schedules import STEP_SCHEDULES, Rates
from megatron.core.optimizer.param_group_schedule import GroupSchedule


def make_schedule(asked: Mapping[str, Any], optimizer: Any) -> GroupSchedule:
    """Raises ConfigError for an unknown one, and for arguments that it does not take."""
    kind, params = asked.get("type"), asked.get("params") or {}
    if kind not in STEP_SCHEDULES:
        known = ", ".join(STEP_SCHEDULES)
        raise ConfigError(
            f"ds_config: scheduler {kind!r} is not supported; use {known}, or pass lr_scheduler= to initialize()"
        )
    takes = inspect.signature(STEP_SCHEDULES[kind])
    try:
        takes.bind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"ds_config: scheduler {kind}: {error}") from error
    if wrong := [f"{name} = {x!r:.60}" for name, x in params.items() if not _can_be(x, takes.parameters[name])]:
        raise ConfigError(f"ds_config: scheduler {kind}: {', '.join(wrong)} must be a number")
    return STEP_SCHEDULES[kind](optimizer, **params)


def _can_be(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a schedule computes with this value of the file: a number, or one for each group where it takes several."""
    if parameter.annotation is str or (value is None and parameter.default is None):
        return True
    is_one = isinstance(value, bool) or fits(value, float)
    return is_one or (parameter.annotation == Rates and fits(value, list[float]))
