"""Import path of Megatron core. Our own command line is `megatron.training.command_line`."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.transformer_config megatron.training.classic.building")
