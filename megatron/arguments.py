"""Import path of Megatron 2.x."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.transformer_config megatron.training.classic.building")
