"""Import path of Megatron core. The settings of our own layers are `megatron.core.transformer.model_config.ModelConfig`."""

from megatron.core.classic.transformer_config import TransformerConfig as TransformerConfig
