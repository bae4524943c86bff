"""Import path of Megatron without `core`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.legacy.data.datasets import build_bert as build_train_valid_test_datasets

__all__ = ["build_train_valid_test_datasets"]

__getattr__ = names_of_megatron(__name__)
