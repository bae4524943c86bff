"""Import path of Megatron core."""

from megatron.core.classic.dist_checkpointing import make_sharded_tensors_for_checkpoint  # noqa: F401
