"""Token files on disk, the order in which training sees them, and batches.

    mmap_indexed_dataset, indexed_dataset_writer    the token files, PREFIX.bin and PREFIX.idx
    index_map, sentence_sample_map, blend           which tokens make up sample i: Megatron's algorithms, bit for bit
    dataset_splits, index_cache                     the data sets of a run, and the files that keep their index arrays
    gpt_samples, bert_samples, t5_samples           samples; `masked_samples` and `token_masking` hide tokens
    data_loader                                     which samples a rank reads, and its batches
    gpt_dataset, blended_megatron_dataset_builder, ...    Megatron's classes over these

Names load on first use. To add a data set: a class with `__len__` and `__getitem__`, returned by a script's provider
(docs/adding_a_model.md).
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_config": "DataConfig",
        ".mmap_indexed_dataset": "IndexedDataset",
        ".indexed_dataset_writer": "IndexedDatasetWriter",
        ".index_map": "requested_samples",
        ".gpt_samples": "GPTDataset MockGPTDataset build_gpt_datasets",
    },
)
