"""Import path of Megatron core."""

from megatron.core.classic.cross_attention import *  # noqa: F403
