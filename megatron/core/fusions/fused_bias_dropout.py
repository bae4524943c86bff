"""Megatron's `get_bias_dropout_add`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add as get_bias_dropout_add

__getattr__ = names_of_megatron(__name__)
