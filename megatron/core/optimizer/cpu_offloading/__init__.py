"""The update of optimizer state that lies in host memory or in files."""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
