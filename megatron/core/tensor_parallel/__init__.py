"""Layers and losses split over the tensor-parallel axis.

    linear_layers, linear_autograd,           the split layers; the matrix product and the lookup with their backward
    embedding_grad_in_buffer_dtype
    matmul_backend_interface                  how products are computed: the interface of one's own
    autograd_collectives                      pairs of collectives: one in forward, its counterpart in backward
    cross_entropy, broadcast_batch_over_tp    the loss of split logits; a batch read once a group
    distribute_saved_activations_over_tp      saved activations, sharded or offloaded
    mappings, data, random, utils             Megatron's names, which find the axis in the current mesh
    layers                                    Megatron's module of the split layers

To add a split layer: its collectives as lines of its forward, and a `Placement` after each parameter.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.data import broadcast_data as broadcast_data
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
        RowParallelLinear as RowParallelLinear,
        VocabParallelEmbedding as VocabParallelEmbedding,
    )
    from megatron.core.tensor_parallel.linear_layers import TensorParallel as TensorParallel
    from megatron.core.tensor_parallel.mappings import (
        all_to_all as all_to_all,
        copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
    )
    from megatron.core.tensor_parallel.random import (
        CudaRNGStatesTracker as CudaRNGStatesTracker,
        checkpoint as checkpoint,
        get_cuda_rng_tracker as get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
    )
    from megatron.core.tensor_parallel.utils import (
        VocabUtility as VocabUtility,
        gather_split_1d_tensor as gather_split_1d_tensor,
        split_tensor_along_last_dim as split_tensor_along_last_dim,
        split_tensor_into_1d_equal_chunks as split_tensor_into_1d_equal_chunks,
    )
    from megatron.core.utils import divide as divide

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".random": "CudaRNGStatesTracker checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed",
        ".mappings": "all_to_all copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
        "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region",
        ".layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
        ".data": "broadcast_data",
        ".cross_entropy": "vocab_parallel_cross_entropy",
        ".utils": "VocabUtility gather_split_1d_tensor split_tensor_along_last_dim split_tensor_into_1d_equal_chunks",
        "megatron.core.utils": "divide",
        ".linear_layers": "TensorParallel",
    },
)
