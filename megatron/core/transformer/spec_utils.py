"""Import path of Megatron core."""

from megatron.core.classic.specs import *  # noqa: F403
