"""Import path of Megatron core."""

from megatron.core.classic.dist_checkpointing import *  # noqa: F403
