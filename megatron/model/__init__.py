"""Import path of Megatron 2.x: the models of `megatron.training.classic`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.training.classic.flat_models": "BertModel GPTModel"})
