"""Token files on disk, the order in which training sees them, and batches.

    indexed, indexed_writer            the token files: PREFIX.bin and PREFIX.idx
    index_map, sample_map, blend       which tokens make up sample i: Megatron's algorithms, bit for bit
    split_plan, index_cache            the data sets of a run, and the files that keep their index arrays
    gpt, bert, masked                  samples
    batches                            which samples a rank reads

May import: `config`, `storage`; no other mechanism. Names load on first use. The function `batches` is not among them: the
submodule of that name would shadow it.
To add a data set: a class with `__len__` and `__getitem__`, returned by a script's provider (docs/adding_a_model.md).
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
