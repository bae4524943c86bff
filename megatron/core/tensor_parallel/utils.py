"""Megatron's path of the arithmetic of divided tensors."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"megatron.core.classic.utils": "VocabUtility divide split_tensor_along_last_dim"}
)
