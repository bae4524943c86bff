"""Import path of Megatron: the data set that fills in the middle."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.fim_dataset import (
    GPTFIMDataset as GPTFIMDataset,
    GPTFIMDatasetConfig as GPTFIMDatasetConfig,
)

__getattr__ = names_of_megatron(__name__)
