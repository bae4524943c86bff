"""Make the learning rate schedule that a ds_config's `scheduler` section names."""

import inspect
from collections.abc import Mapping
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, fits
from megatron.core.optimizer.deepspeed_lr_schedules import STEP_SCHEDULES, Rates
from megatron.core.optimizer.write_lr_into_param_groups import GroupSchedule


def make_schedule(section: Mapping[str, Any], optimizer: Any) -> GroupSchedule:
    """Return the schedule. Raises ConfigError for an unknown one, and for arguments that it does not take."""
    kind = section.get("type")
    params = section.get("params") or {}
    if kind not in STEP_SCHEDULES:
        known = ", ".join(STEP_SCHEDULES)
        raise ConfigError(
            f"ds_config: scheduler {kind!r} is not supported; use {known}, or pass lr_scheduler= to initialize()"
        )
    signature = inspect.signature(STEP_SCHEDULES[kind])
    try:
        signature.bind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"ds_config: scheduler {kind}: {error}") from error
    wrong = []
    for name, value in params.items():
        if not _is_valid(value, signature.parameters[name]):
            wrong.append(f"{name} = {value!r:.60}")
    if wrong:
        raise ConfigError(f"ds_config: scheduler {kind}: {', '.join(wrong)} must be a number")
    return STEP_SCHEDULES[kind](optimizer, **params)


def _is_valid(value: Any, parameter: inspect.Parameter) -> bool:
    """Return whether a schedule can compute with a value.

    That is a number, or where it takes rates, one for each parameter group.
    """
    if parameter.annotation is str or (value is None and parameter.default is None):
        return True
    if isinstance(value, bool) or fits(value, float):
        return True
    return parameter.annotation == Rates and fits(value, list[float])
