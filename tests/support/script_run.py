"""A whole run of a top-level script inside `run_ranks`: its trainer, from flags, as `pretrain` would build it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import split
from types import ModuleType, SimpleNamespace

import torch

from megatron.core.offload.host_and_file_stores import make_offload_store
from megatron.core.ops.attention.kernels import KERNELS
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.optimizer import OPTIMIZERS
from megatron.core.optimizer.param_groups import default_group
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel import SCHEDULES
from megatron.core.tokenizers import TOKENIZERS, build_tokenizer
from megatron.training import trainer as trainer_module
from megatron.training.arguments.command_line import Arguments, parse_args
from megatron.training.arguments.config import Config
from megatron.training.arguments.validation import check
from megatron.training.global_vars import Runtime, set_runtime
from megatron.training.memory.forecast_memory_along_schedule import Forecast, RankMemory
from megatron.training.trainer import Trainer

TABLES: list[dict] = [OPTIMIZERS, SCHEDULES, KERNELS, TOKENIZERS]  # those that a script may add to


class _WhereAsked(Forecast):
    """A prediction takes as long as some steps of a tiny model: runs that are tested for something else do without."""

    this_thread = threading.local()

    @property
    def ranks(self) -> list[RankMemory]:
        return super().ranks if getattr(self.this_thread, "predicts", True) else []


trainer_module.Forecast = _WhereAsked


@contextmanager
def leaving_nothing_of(folder: Path) -> Iterator[None]:
    """After the block the tables are as before, and the modules in the folder are not imported."""
    before = [dict(table) for table in TABLES]
    try:
        yield
    finally:
        for table, entries in zip(TABLES, before, strict=True):
            table.clear()
            table.update(entries)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def settings_of(script: ModuleType | SimpleNamespace, flags: str) -> tuple[Config, Arguments]:
    """The settings of a run of the script, and its flags as `get_args()` gives them."""
    config, args, _ = parse_args(
        split(flags), getattr(script, "extra_args_provider", None), getattr(script, "args_defaults", None)
    )
    return config, args


@contextmanager
def trainer_of(
    script: ModuleType | SimpleNamespace, mesh: Mesh, flags: str, *, predicts: bool = True
) -> Iterator[Trainer]:
    """This rank's trainer. The script's functions find their run as long as the block lasts.

    script: has the arguments of `pretrain` under their names; those that have a default may be missing. predicts: whether the run
    predicts its memory, as a user's does.
    """
    config, args = settings_of(script, flags)
    check(config, mesh["world"].size)
    mesh.stages = config.stages
    get_global_state().sequence_parallel = config.parallel.sequence_parallel_on
    keys = SampleDropoutKeys(config.training.seed)
    tokenizer = build_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type else None
    offload_store = make_offload_store(config.offload, mesh["world"].rank, torch.device("cpu"), block=4096)
    runtime = Runtime(
        config, args, mesh, Device("cpu"), tokenizer, keys, WeightGradStore(), offload_store=offload_store
    )
    if offload_store is not None:
        runtime.resources.callback(offload_store.close)
    set_runtime(runtime, this_thread_only=True)
    _WhereAsked.this_thread.predicts = predicts
    try:
        yield Trainer(
            runtime,
            script.train_valid_test_datasets_provider,
            script.model_provider,
            script.forward_step,
            getattr(script, "group_of", default_group),
        )
    finally:
        runtime.resources.close()
        set_runtime(None, this_thread_only=True)
