"""Import path of Megatron core."""

from megatron.core.classic.transformer_config import ModelParallelConfig as ModelParallelConfig
