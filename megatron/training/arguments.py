"""Import path of Megatron core. Our own command line is `megatron.training.command_line`."""

from megatron.core.classic.transformer_config import *  # noqa: F403
from megatron.training.classic.building import *  # noqa: F403
