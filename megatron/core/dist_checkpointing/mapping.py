"""Import path of Megatron core."""

from megatron.core.classic.dist_checkpointing import ShardedTensor  # noqa: F401
