"""Import path of Megatron without `core`."""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
