"""Megatron's `FusedLayerNorm`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.torch_norm import FusedLayerNorm as FusedLayerNorm

__getattr__ = names_of_megatron(__name__)
