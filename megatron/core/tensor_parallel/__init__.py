"""Layers and losses split over the tensor-parallel axis.

    linear_layers, linear, lookup   the split layers; the matrix product and the lookup with their backward
    library_sums                    float32 sums of bfloat16 products on a CPU, for weight gradients
    mappings                        pairs of collectives: one in forward, its counterpart in backward
    cross_entropy, broadcast        the loss of split logits; a batch read once per group
    saved                           saved activations, sharded or offloaded

Modules receive the axis that they work on. The package's own names, and `layers`, `data`, `random`, `utils`, are Megatron's:
they find the axis in the current mesh, and live in `megatron.core.classic`.
May import: floors 0 and 1; no other mechanism.
To add a split layer: its collectives as lines of its forward, and a `Placement` after each parameter.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.random": "CudaRNGStatesTracker checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed",
        "megatron.core.classic.regions": "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region gather_split_1d_tensor reduce_from_tensor_model_parallel_region "
        "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region "
        "split_tensor_into_1d_equal_chunks",
        "megatron.core.classic.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding broadcast_data "
        "vocab_parallel_cross_entropy",
        "megatron.core.classic.utils": "VocabUtility divide split_tensor_along_last_dim",
        ".linear_layers": "TensorParallel",
    },
)
