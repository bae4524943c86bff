"""Import path of Megatron 2.x: the models of `megatron.training.classic`."""

from megatron.training.classic.flat_models import *  # noqa: F403
