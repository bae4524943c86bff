"""Megatron's import path for `get_forward_backward_func`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.schedules": "get_forward_backward_func"})
