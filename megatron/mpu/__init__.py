"""Import path of Megatron without `core`: the accessors of ranks, and everything tensor-parallel."""

from megatron.core.base.lazy_imports import all_names

__getattr__ = all_names(__name__, "megatron.core.parallel_state megatron.core.tensor_parallel megatron.mpu.initialize")
