"""Import path of Megatron core."""

from megatron.core.classic.modules import *  # noqa: F403
