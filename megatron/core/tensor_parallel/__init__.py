"""Layers and losses divided over the tensor-parallel axis.

Modules here are handed the axis that they work on. Names of the package, and of its modules `layers`, `data`, `random` and
`utils`, are Megatron's, with Megatron's arguments: they find the axis in the current mesh, and live in `megatron.core.classic`.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.random": "checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed",
        "megatron.core.classic.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding broadcast_data "
        "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region "
        "reduce_from_tensor_model_parallel_region reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region "
        "scatter_to_tensor_model_parallel_region vocab_parallel_cross_entropy",
        "megatron.core.classic.utils": "VocabUtility divide split_tensor_along_last_dim",
        ".linear_layers": "TensorParallel",
    },
)
