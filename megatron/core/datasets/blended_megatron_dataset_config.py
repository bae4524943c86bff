"""Import path of Megatron core."""

from megatron.core.classic.datasets import *  # noqa: F403
