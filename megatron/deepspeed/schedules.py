"""The schedule that a file's `scheduler` section asks for."""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import ConfigError
from megatron.core.optimizer.group_schedule import GroupSchedule
from megatron.core.optimizer.step_schedules import STEP_SCHEDULES


def make_schedule(asked: Mapping[str, Any], optimizer: Any) -> GroupSchedule:
    """Raises ConfigError for an unknown one, and for arguments that it does not take."""
    kind, params = asked.get("type"), asked.get("params") or {}
    if kind not in STEP_SCHEDULES:
        known = ", ".join(STEP_SCHEDULES)
        raise ConfigError(
            f"ds_config: scheduler {kind!r} is not supported; use {known}, or pass lr_scheduler= to initialize()"
        )
    if texts := [f"{name} = {x!r}" for name, x in params.items() if isinstance(x, str) and name != "warmup_type"]:
        raise ConfigError(f"ds_config: scheduler {kind}: {', '.join(texts)} must be a number")
    try:
        return STEP_SCHEDULES[kind](optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"ds_config: scheduler: {error}") from error
