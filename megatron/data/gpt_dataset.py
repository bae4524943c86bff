"""Import path of Megatron without `core`."""

from megatron.legacy.data.datasets import build_gpt as build_train_valid_test_datasets

__all__ = ["build_train_valid_test_datasets"]
