"""Import path of Megatron core, up to 0.8."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.engine_layers")
