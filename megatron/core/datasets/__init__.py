"""Token files on disk, the order in which training sees them, and batches.

    mmap_indexed_dataset, indexed_dataset_writer     the token files, PREFIX.bin and PREFIX.idx
    index_map, sentence_sample_map,                  which tokens make up sample i: Megatron's algorithms, bit for bit
    blending_indices_and_dataset
    build_datasets, index_cache                      the data sets of a run, and the cache of their index arrays
    gpt_dataset_and_builder                          samples of a GPT
    bert_dataset_builder, t5_dataset_builder         samples of a BERT and of a T5
    bert_and_t5_samples, choose_masked_spans         the tokens that these hide
    data_parallel_sampler_and_loader                 which samples a rank reads, and its batches
    gpt_dataset, blended_megatron_dataset_builder    Megatron's classes over these, with others

A GPT sample's way into a batch: `data_loader.batches` asks for item i, `blend.BlendedDataset` finds its file, and
`gpt_samples.GPTDataset` reads its tokens by the arrays of `index_map`.

Names load on first use. To add a data set, write a class with `__len__` and `__getitem__` and return it from a script's
provider (docs/adding_a_model.md).
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.datasets.data_config import DataConfig as DataConfig
    from megatron.core.datasets.gpt_dataset_and_builder import (
        GPTDataset as GPTDataset,
        MockGPTDataset as MockGPTDataset,
        build_gpt_datasets as build_gpt_datasets,
    )
    from megatron.core.datasets.index_map import requested_samples as requested_samples
    from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter as IndexedDatasetWriter
    from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset as IndexedDataset

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_config": "DataConfig",
        ".mmap_indexed_dataset": "IndexedDataset",
        ".indexed_dataset_writer": "IndexedDatasetWriter",
        ".index_map": "requested_samples",
        ".gpt_dataset_and_builder": "GPTDataset MockGPTDataset build_gpt_datasets",
    },
)
