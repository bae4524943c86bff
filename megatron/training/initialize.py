"""From the command line to a `Runtime`: parse, check, join the other processes, agree."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from megatron.core import comm, parallel_state
from megatron.core.config import ConfigError
from megatron.core.deferred import WeightGradStore
from megatron.core.device import Device, DeviceConfig
from megatron.core.random import DropoutKeys
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.tokenizers import Tokenizer
from megatron.training.arguments import Arguments, ArgumentsError, ExtraArgs, parse_args
from megatron.training.config import Config, check, problems_of_rest
from megatron.training.runtime import Runtime, print_rank_0, set_runtime


@dataclass(frozen=True)
class Settings:
    """What one rank knows before it meets the others."""

    config: Config
    args: Arguments
    notes: list[str]
    device: Device
    tokenizer: Tokenizer


def initialize_megatron(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> Runtime:
    """Everything that precedes the model. Every rank must call.

    The ranks may have been started with different settings, some of which cannot work: the first thing they do together is to
    agree. Raises ConfigError on a rank whose settings are wrong and PeerError on the others, before any group is made.
    """
    settings, problem = None, None
    try:
        settings = read_settings(extra_args_provider, args_defaults, argv)
    except ConfigError as error:
        if parallel_state.launched_world_size() == 1:
            raise
        problem = error
    device, device_config = (settings.device, settings.config.device) if settings else (Device.select(), DeviceConfig())
    parallel_state.start_distributed(
        device_config.distributed_backend or device.backend, device_config.distributed_timeout_minutes
    )
    agree_on_settings(settings, problem, device)
    config = settings.config
    mesh = parallel_state.initialize_model_parallel(
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        config.chunks_per_rank if config.chunks_per_rank > 1 else None,
        num_distributed_optimizer_instances=config.data_parallel.num_distributed_optimizer_instances,
        ranks_per_kv_head=config.transformer.ranks_per_kv_head(config.parallel.tensor_model_parallel_size),
        distributed_timeout_minutes=config.device.distributed_timeout_minutes,
        order=config.parallel.order,
    )
    keys = DropoutKeys(config.training.seed)
    runtime = Runtime(config, settings.args, mesh, device, settings.tokenizer, keys, WeightGradStore())
    set_runtime(runtime)
    announce(runtime, settings.notes)
    return runtime


def read_settings(
    extra_args_provider: ExtraArgs | None, args_defaults: Mapping[str, Any] | None, argv: Sequence[str] | None
) -> Settings:
    """The command line, checked, and what follows from it on this rank alone. Raises ConfigError with all problems."""
    world_size = parallel_state.launched_world_size()
    try:
        config, args, notes = parse_args(argv, extra_args_provider, args_defaults)
    except ArgumentsError as error:
        raise ConfigError(error.problems + problems_of_rest(error.parts, world_size)) from None
    check(config, world_size)
    local_rank = config.device.local_rank
    device = Device.select(
        config.device.device, parallel_state.launched_local_rank() if local_rank is None else local_rank
    )
    device.prepare(bf16=config.transformer.bf16)
    with as_settings_problem():
        tokenizer = build_tokenizer(config.tokenizer)
    return Settings(config, args, notes, device, tokenizer)


@contextlib.contextmanager
def as_settings_problem() -> Iterator[None]:
    """What a file that the user named makes fail is a problem with the settings: said once, without a traceback."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def agree_on_settings(settings: Settings | None, problem: ConfigError | None, device: Device) -> None:
    """Stop every rank if some cannot start, or were started with other settings: they would hang, or train a wrong model."""
    world = parallel_state.world_axis()
    with comm.together(world, device.torch_device):
        if problem is not None:
            raise problem
    shared = {name: part for name, part in settings.config.as_json().items() if name != "device"}
    mine = comm.fingerprint(f"{shared} {settings.tokenizer.vocab_size}")
    ends = torch.tensor([mine, -mine], dtype=torch.int64, device=device.torch_device)
    comm.all_reduce(ends, world, "max")
    if ends[0].item() != -ends[1].item():
        raise ConfigError(
            "the ranks were started with different settings or vocabularies; start all with the same ones"
        )


def announce(runtime: Runtime, notes: Sequence[str]) -> None:
    """Say, once, what is about to run."""
    config, mesh = runtime.config, runtime.mesh
    layout = ", ".join(f"{name} {mesh[name].size}" for name in ("tp", "pp", "dp"))
    sizes = [size // runtime.samples_at_once for size in runtime.batch_sizes.sizes]
    ramp = f"{sizes[0]} to " if len(sizes) > 1 else ""
    print_rank_0(
        f"{runtime.world_size} rank(s) on {runtime.device.name}: {layout}; "
        f"{ramp}{runtime.num_microbatches} microbatch(es) of {config.training.micro_batch_size} per rank and step"
    )
    if changed := config.changed_lines():
        print_rank_0("settings that are not the default:\n" + "\n".join(changed))
    for note in notes:
        print_rank_0(note)


def stop_with(error: ConfigError | comm.PeerError) -> NoReturn:
    """Print what is wrong, once, leave the job in order and end the process. Every rank calls, with its own error."""
    if parallel_state.launched_rank() == 0:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        lines = "\n".join(f"  - {problem}" for problem in problems)
        print(f"cannot start, {len(problems)} problem(s):\n{lines}", file=sys.stderr, flush=True)
    parallel_state.stop_distributed()
    sys.exit(2)
