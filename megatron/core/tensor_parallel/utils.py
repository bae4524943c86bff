"""Megatron's path of its arithmetic for sharded tensors."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"megatron.core.classic.utils": "VocabUtility divide split_tensor_along_last_dim"}
)
