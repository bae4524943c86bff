"""Token files on disk, the order in which training sees them, and batches.

Names load on first use, so that the pure files (`index_map`, `indexed`) can be imported without torch. The function
`batches` is not among them: its module has the same name.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_config": "DataConfig",
        ".indexed": "IndexedDataset",
        ".indexed_writer": "IndexedDatasetWriter",
        ".index_map": "requested_samples",
        ".gpt": "GPTDataset MockGPTDataset build_gpt_datasets",
    },
)
