"""DeepSpeed's names over this project's data parallelism, for scripts that call `deepspeed.initialize` (docs/deepspeed.md).

    engine, optimizer      `initialize(...)` -> engine, which runs any torch module, saves and loads; its optimizer
    settings               every key of ds_config, answered by config_keys; what a file asks for
    schedules, zero, comm  learning rates by steps; `zero.Init`, `zero.GatheredParameters`; `init_distributed`, `cdb`

    accelerator            `get_accelerator()`: the device

May import: everything. Nothing imports it but scripts.
To add a key of ds_config: a line in `supported_config_keys.py`, and what it does in `settings.py`.
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
