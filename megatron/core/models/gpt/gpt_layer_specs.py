"""Import path of Megatron core."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.layers")
