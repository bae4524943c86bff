"""Import path of Megatron 2.x: the models of `megatron.training.classic`."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.training.classic.flat_models")
