"""Megatron's `IndexedDataset` over our reader of token files."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.datasets import mmap_indexed_dataset


class IndexedDataset(mmap_indexed_dataset.IndexedDataset):
    """The sequences of PREFIX.bin and PREFIX.idx."""

    @accepts_defaults_only(
        object_storage_config=None, s3_config=None, fast_cache_load=False, sequences_per_dataset=None, dtype_code=None
    )
    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True):
        super().__init__(path_prefix, multimodal=multimodal, mmap=mmap)


MMapIndexedDataset = IndexedDataset

__getattr__ = names_of_megatron(__name__)
