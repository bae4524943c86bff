"""Import path of Megatron core."""

from megatron.core.classic.schedules import *  # noqa: F403
