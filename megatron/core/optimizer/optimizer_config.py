"""Import path of Megatron core."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.optimizers": "OptimizerConfig"})
