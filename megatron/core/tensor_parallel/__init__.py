"""Layers and losses divided over the tensor-parallel axis.

The names below take Megatron's arguments and find the axis in the current mesh; the files they stand on are handed theirs.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ColumnParallelLinear": "classic",
        "RowParallelLinear": "classic",
        "VocabParallelEmbedding": "classic",
        "broadcast_data": "classic",
        "vocab_parallel_cross_entropy": "classic",
        "TensorParallel": "layers",
        "copy_to_tensor_model_parallel_region": "mappings",
        "gather_from_sequence_parallel_region": "mappings",
        "gather_from_tensor_model_parallel_region": "mappings",
        "reduce_from_tensor_model_parallel_region": "mappings",
        "reduce_scatter_to_sequence_parallel_region": "mappings",
        "scatter_to_sequence_parallel_region": "mappings",
        "scatter_to_tensor_model_parallel_region": "mappings",
        "checkpoint": "random",
        "get_cuda_rng_tracker": "random",
        "model_parallel_cuda_manual_seed": "random",
        "VocabUtility": "utils",
        "divide": "utils",
        "split_tensor_along_last_dim": "utils",
    },
)
