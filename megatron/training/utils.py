"""Import path of Megatron core: small functions of its scripts."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.utils": "unwrap_model",
        "megatron.training.batches": "average_losses_across_data_parallel_group get_batch_on_this_cp_rank "
        "get_batch_on_this_tp_rank get_ltor_masks_and_position_ids",
        "megatron.training.runtime": "is_last_rank print_rank_0 print_rank_last",
    },
)
