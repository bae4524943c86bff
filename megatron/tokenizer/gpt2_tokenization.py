"""Import path of Megatron 2.x."""

from megatron.core.classic.gpt2_files import *  # noqa: F403
