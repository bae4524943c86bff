"""Import path of Megatron core, up to 0.8."""

from megatron.core.classic.engine_layers import *  # noqa: F403
