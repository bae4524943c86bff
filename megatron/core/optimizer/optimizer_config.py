"""Import path of Megatron core."""

from megatron.core.classic.optimizers import OptimizerConfig as OptimizerConfig
