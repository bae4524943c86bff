"""Import path of Megatron core. The settings of our own layers are `megatron.core.transformer.model_config.ModelConfig`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.transformer_config": "TransformerConfig"})
