"""Import path of Megatron without `core`."""

from megatron.core.base.lazy_imports import all_names

__getattr__ = all_names(__name__, "megatron.training.utils")
