"""Import path of Megatron core, since 0.9."""

from megatron.core.classic.engine_layers import *  # noqa: F403
