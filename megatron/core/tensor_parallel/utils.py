"""Megatron's path of its arithmetic for sharded tensors."""

from megatron.core.base.lazy_imports import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.utils megatron.core.classic.regions")
