"""Import path of Megatron core."""

from megatron.core.classic.optimizers import OptimizerParamScheduler as OptimizerParamScheduler
