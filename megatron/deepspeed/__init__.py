"""DeepSpeed's names over this project's data parallelism, for scripts that call `deepspeed.initialize`.

docs/deepspeed.md lists what they do.

    engine, optimizer                  `initialize(...)` -> engine, which runs any torch module, saves and loads; its
                                       optimizer
    settings, config_keys              a ds_config as settings of ours; which of its keys work, have no effect, or are
                                       refused
    refuse_unsupported_config_keys     what a key does here: the records of that table
    ds_config_scheduler                the learning rate schedule of a ds_config
    zero                               `zero.Init`, `zero.GatheredParameters`
    comm                               `init_distributed`, `cdb`, and the collectives
    accelerator                        `get_accelerator()`: the device

May import: everything. Nothing imports it but scripts.
To add a key of ds_config: write a line in `config_keys.py`, and what the key does in `settings.py`.
"""

from megatron.deepspeed import comm, zero
from megatron.deepspeed.accelerator import get_accelerator
from megatron.deepspeed.comm import init_distributed
from megatron.deepspeed.engine import DeepSpeedEngine, add_config_arguments, initialize

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "zero",
]
