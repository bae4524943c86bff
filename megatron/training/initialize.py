"""From the command line to a `Runtime`: parse, check, join the other processes, agree."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core import comm, parallel_state
from megatron.core.config import ConfigError
from megatron.core.deferred import WeightGradStore
from megatron.core.device import Device
from megatron.core.random import DropoutKeys
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import ExtraArgs, parse_args
from megatron.training.config import check
from megatron.training.runtime import Runtime, print_rank_0, set_runtime


def initialize_megatron(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> Runtime:
    """Everything that precedes the model. Every rank must call. Raises ConfigError before anything communicates."""
    config, args, notes = parse_args(argv, extra_args_provider, args_defaults)
    check(config, parallel_state.launched_world_size())
    local_rank = config.device.local_rank
    device = Device.select(
        config.device.device, parallel_state.launched_local_rank() if local_rank is None else local_rank
    )
    tokenizer = build_tokenizer(config.tokenizer)
    parallel_state.start_distributed(
        config.device.distributed_backend or device.backend, config.device.distributed_timeout_minutes
    )
    mesh = parallel_state.initialize_model_parallel(
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        config.chunks_per_rank if config.chunks_per_rank > 1 else None,
        ranks_per_kv_head=config.transformer.ranks_per_kv_head(config.parallel.tensor_model_parallel_size),
        distributed_timeout_minutes=config.device.distributed_timeout_minutes,
        order=config.parallel.order,
    )
    runtime = Runtime(config, args, mesh, device, tokenizer, DropoutKeys(config.training.seed), WeightGradStore())
    set_runtime(runtime)
    agree_on_settings(runtime)
    announce(runtime, notes)
    return runtime


def agree_on_settings(runtime: Runtime) -> None:
    """Stop every rank if some were started with other settings: silent disagreement would train a wrong model."""
    shared = {name: part for name, part in runtime.config.as_json().items() if name != "device"}
    mine = comm.fingerprint(f"{shared} {runtime.tokenizer.vocab_size}")
    world = runtime.mesh["world"]
    ends = torch.tensor([mine, -mine], dtype=torch.int64, device=runtime.device.torch_device)
    comm.all_reduce(ends, world, "max")
    if ends[0].item() != -ends[1].item():
        raise ConfigError(
            "the ranks were started with different settings or vocabularies; start all with the same ones"
        )


def announce(runtime: Runtime, notes: Sequence[str]) -> None:
    """Say, once, what is about to run."""
    config, mesh = runtime.config, runtime.mesh
    layout = ", ".join(f"{name} {mesh[name].size}" for name in ("tp", "pp", "dp"))
    print_rank_0(
        f"{runtime.world_size} rank(s) on {runtime.device.name}: {layout}; "
        f"{runtime.num_microbatches} microbatch(es) of {config.training.micro_batch_size} per rank and step"
    )
    if changed := config.changed_lines():
        print_rank_0("settings that are not the default:\n" + "\n".join(changed))
    for note in notes:
        print_rank_0(note)


def stop_with(error: ConfigError) -> None:
    """Print what is wrong with the settings, once, and end the process. Every rank ends; none has communicated yet."""
    if parallel_state.launched_rank() == 0:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot start, {len(error.problems)} problem(s):\n{lines}", file=sys.stderr, flush=True)
    sys.exit(2)
