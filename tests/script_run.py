"""A whole run of a top-level script inside `run_ranks`: its trainer, from flags, as `pretrain` would build it."""

from collections.abc import Iterator
from contextlib import contextmanager
from shlex import split
from types import ModuleType

from megatron.core.deferred import WeightGradStore
from megatron.core.device import Device
from megatron.core.mesh import Mesh
from megatron.core.random import DropoutKeys
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_args
from megatron.training.runtime import Runtime, set_runtime
from megatron.training.settings.rules import check
from megatron.training.trainer import Trainer


@contextmanager
def trainer_of(script: ModuleType, mesh: Mesh, flags: str) -> Iterator[Trainer]:
    """This rank's trainer. The script's functions find their run as long as the block lasts."""
    config, args, _ = parse_args(split(flags))
    check(config, mesh["world"].size)
    if config.chunks_per_rank > 1:
        mesh.virtual_size = config.chunks_per_rank
    keys, tokenizer = DropoutKeys(config.training.seed), build_tokenizer(config.tokenizer)
    runtime = Runtime(config, args, mesh, Device("cpu"), tokenizer, keys, WeightGradStore())
    set_runtime(runtime, this_thread_only=True)
    try:
        yield Trainer(runtime, script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
    finally:
        runtime.held.close()
        set_runtime(None, this_thread_only=True)
