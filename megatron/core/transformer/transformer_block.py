"""Import path of Megatron core."""

from megatron.core.classic.layers import *  # noqa: F403
