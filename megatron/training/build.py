"""Build model chunks, optimizer and data from the settings and a script's providers."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.datasets.data_loader import batches
from megatron.core.datasets.index_map import requested_samples
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.lr_schedule import AnySchedule, learning_rate_schedule
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.training.checkpointing.unsaved_buffers import note_buffers
from megatron.training.global_vars import Runtime, get_runtime
from megatron.training.initialize import as_settings_problem
from megatron.training.memory.memory_check import Room, check_room, warn_of_room
from megatron.training.memory.peak_along_schedule import Forecast
from megatron.training.model_chunks import ModelProvider, build_optimizer, in_buffers, make_chunks
from megatron.training.num_samples import whole_set
from megatron.training.validation_sets import sets_of

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]


def built_chunks(
    model_provider: ModelProvider,
    runtime: Runtime,
    group_of: GroupRule = default_group,
    forecast: Forecast | None = None,
) -> dict[int, DistributedDataParallel]:
    """This rank's model chunks by stage: initialized, in contiguous buffers. Every rank must call."""
    room = Room.now(runtime)
    with refused_alike(runtime):
        made = make_chunks(model_provider, runtime)
    if problems := name_problems(made, runtime.mesh["pp"], runtime.device.torch_device):
        raise ConfigError(problems)
    check_room(runtime, made.values(), room, forecast)
    if forecast is not None:
        warn_of_room(runtime, forecast)
    for chunk in made.values():
        initialize_parameters(chunk, runtime.config.training.seed, runtime.mesh)
    with refused_alike(runtime):
        chunks = in_buffers(made, runtime, group_of)
    note_buffers(chunks.values(), runtime.mesh["world"], runtime.device.torch_device)
    return chunks


@contextlib.contextmanager
def refused_alike(runtime: Runtime) -> Iterator[None]:
    """A ConfigError of some stages only ends all ranks, with one message. Every rank must enter."""
    problem = None
    try:
        yield
    except ConfigError as error:
        problem = error
    with collectives.raise_together(runtime.mesh["world"], runtime.device.torch_device):
        if problem is not None:
            raise problem


def name_problems(chunks: dict[int, nn.Module], pp: Axis, device: torch.device | str) -> list[str]:
    """Parameter names that occur in several stages: those parameters would get equal initial values and overwrite each
    other in a
    checkpoint. Every rank of `pp` must call; all get the same answer."""
    mine = defaultdict(list)
    for stage, chunk in chunks.items():  # tied tables are left out: they belong to two stages
        mine[stage] += [name for name, p in chunk.named_parameters() if "embd" not in p.placement.partial_grad]
    stages_of = defaultdict(list)
    for text in collectives.all_gather_texts(json.dumps(mine), pp, device):
        for stage, names in json.loads(text).items():
            for name in names:
                stages_of[name].append(int(stage))
    twice = {name: sorted(stages) for name, stages in stages_of.items() if len(stages) > 1}
    if not twice:
        return []
    name, stages = next(iter(twice.items()))
    return [
        f"{len(twice)} parameter name(s) exist in several pipeline stages, for example {name} in stages "
        f"{', '.join(map(str, stages))}; name layers by their number over the whole model: "
        "nn.ModuleDict({str(first_layer + i): layer ...})"
    ]


@accepts_defaults_only(no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0, checkpointing_context=None)
def setup_model_and_optimizer(
    model_provider_func: ModelProvider, model_type: ModelType | None = None, *, group_of: GroupRule = default_group
) -> tuple[list[DistributedDataParallel], FlatOptimizer, AnySchedule]:
    """(model chunks, optimizer, learning rate schedule) of this rank, after `initialize_megatron`. Every rank must call."""
    del model_type  # a model's `boundary` says which tensors pass between stages
    runtime = get_runtime()
    chunks = built_chunks(model_provider_func, runtime, group_of)
    schedule = learning_rate_schedule(runtime.config.learning_rate, runtime.run_length)
    with refused_alike(runtime):
        return list(chunks.values()), build_optimizer(chunks, runtime, group_of), schedule


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: DatasetsProvider,
) -> tuple[Iterator | None, Iterator | None, Iterator | None]:
    """This rank's batches of each data set from the start, for a script's own loop. Every rank must call.

    None for a missing data set; a list for several validation sets. Only the first rank of a tensor-parallel group reads
    data;
    on the others all three are None.
    """
    runtime = get_runtime()
    training, samples = runtime.config.training, runtime.mesh.samples
    # From the settings alone, not from a checkpoint: a data set's order may depend on the number of samples requested.
    train_iters = runtime.config.train_iters(runtime.world_size)
    sizes = requested_samples(train_iters, training.eval_interval, training.eval_iters, runtime.batch_sizes.last)
    sizes[0] = training.train_samples or sizes[0]
    data, where = runtime.config.data, (training.micro_batch_size, samples.rank, samples.size)
    if data.full_validation:
        sizes[1] = whole_set(data, training.eval_iters * runtime.batch_sizes.last)
    with collectives.raise_together(runtime.mesh["world"], runtime.device.torch_device), as_settings_problem():
        datasets = build_train_valid_test_datasets_provider(sizes)
        found = [of.samples for of in sets_of("valid", datasets[1], data, runtime.samples_at_once)]
    if not runtime.mesh["tp"].is_first:
        return None, None, None
    iterate = lambda one: None if one is None else batches(one, 0, *where)  # noqa: E731
    valid = [iterate(one) for one in found] if isinstance(datasets[1], list) else iterate(found[0] if found else None)
    return iterate(datasets[0]), valid, iterate(datasets[2])


@accepts_defaults_only(wrap_with_ddp=True, config=None, pg_collection=None)
def get_model(
    model_provider_func: ModelProvider, model_type: ModelType = ModelType.encoder_or_decoder
) -> list[nn.Module]:
    """This rank's chunks in order, wrapped in their buffers, after `initialize_megatron`. Every rank must call."""
    del model_type  # a model's `boundary` says which tensors pass between stages
    return list(built_chunks(model_provider_func, get_runtime()).values())
