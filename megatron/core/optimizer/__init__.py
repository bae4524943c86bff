"""The optimizer: what updates the parameters of this rank, element by element in flat buffers.

A new one is a line of OPTIMIZERS (`optimizer_config.py`), from a script too; which parameters it updates is said by
their group.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".optimizer": "FlatOptimizer",
        ".optimizer_config": "OPTIMIZERS OptimizerConfig UpdateRule",
        ".param_groups": "ParamGroup",
        ".update": "adam_update sgd_update",
    },
)
