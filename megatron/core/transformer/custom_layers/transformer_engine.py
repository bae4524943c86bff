"""Import path of Megatron core, up to 0.8."""

from megatron.core.base.lazy_imports import all_names

__getattr__ = all_names(__name__, "megatron.core.extensions.transformer_engine")
