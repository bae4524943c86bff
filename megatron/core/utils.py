"""Megatron's import path for its small helpers."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.utils": "divide ensure_divisibility get_attr_wrapped_model get_model_config init_method_normal "
        "scaled_init_method_normal unwrap_model",
        "megatron.core.classic.dist_checkpointing": "make_sharded_tensor_for_checkpoint make_tp_sharded_tensor_for_checkpoint",
        "megatron.core.parallel_state": "GlobalMemoryBuffer",
    },
)
