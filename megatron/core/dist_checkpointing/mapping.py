"""Import path of Megatron core."""

from megatron.core.classic.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: F401
