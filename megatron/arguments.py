"""Import path of Megatron 2.x."""

from megatron.core.classic.transformer_config import *  # noqa: F403
from megatron.training.classic.building import *  # noqa: F403
