"""Import path of Megatron core: small functions of its scripts."""

from megatron.core.lazy import all_names

__getattr__ = all_names(__name__, "megatron.core.classic.utils megatron.training.batches megatron.training.runtime")
