"""Megatron's path of `broadcast_data`. Our function, which takes the shapes, is in `broadcast`."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.tensor_parallel": "broadcast_data"})
