"""Megatron's `maybe_wrap_for_inprocess_restart`, for runs that end where a rank fails."""

from collections.abc import Callable
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Return `pretrain` as it is, and no store: --inprocess-restart is refused among the flags."""
    return pretrain, None


__getattr__ = names_of_megatron(__name__)
