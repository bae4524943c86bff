"""Build model chunks, optimizer and data from the settings and a script's providers."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.datasets.data_parallel_sampler_and_loader import batches
from megatron.core.datasets.index_map import requested_samples
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import no_experts
from megatron.core.ops.aux_loss_collector import declared_aux_losses
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.lr_wd_schedule_by_samples import AnySchedule, learning_rate_schedule
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL, Axis
from megatron.core.process_groups_config import OWN_GROUPS
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.training.checkpointing.init_adapters_from_base_weights import initialize_from_weights
from megatron.training.checkpointing.module_buffers import remember_and_warn_of_extra_states
from megatron.training.global_vars import Runtime, get_runtime
from megatron.training.initialize import as_config_error
from megatron.training.make_chunks_optimizer_and_pipeline import (
    ModelProvider,
    build_optimizer,
    make_chunks,
    wrap_in_ddp,
)
from megatron.training.memory.forecast_memory_along_schedule import Forecast
from megatron.training.memory.memory_check import MemoryCapacity, check_capacity, warn_if_over_capacity
from megatron.training.named_and_padded_validation_sets import evaluated_sets
from megatron.training.num_samples import samples_of_whole_set

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]

_AUX_LOSSES = "auxiliary losses"


def build_chunks(
    model_provider: ModelProvider,
    runtime: Runtime,
    group_of: GroupRule = default_group,
    forecast: Forecast | None = None,
) -> dict[int, DistributedDataParallel]:
    """Build this rank's model chunks by stage: initialized, in contiguous buffers. Every rank must call."""
    # create the modules, without values
    room = MemoryCapacity.now(runtime)
    with refuse_together(runtime):
        modules = make_chunks(model_provider, runtime)
    if problems := name_problems(modules, runtime.mesh["pp"], runtime.device.torch_device):
        raise ConfigError(problems)
    ep = runtime.mesh["ep"].size
    if ep > 1 and not has_experts(modules.values(), runtime.mesh["pp"], runtime.device.torch_device):
        raise ConfigError(no_experts(ep))

    # check that the training state fits into memory before the values take any
    check_capacity(runtime, modules.values(), room, forecast)
    if forecast is not None:
        warn_if_over_capacity(runtime, forecast)

    # draw the initial values
    for module in modules.values():
        initialize_parameters(module, runtime.config.training.seed, runtime.mesh)

    # move the parameters into buffers
    with refuse_together(runtime):
        chunks = wrap_in_ddp(modules, runtime, group_of)
    remember_and_warn_of_extra_states(chunks.values(), runtime.mesh["world"], runtime.device.torch_device)
    return chunks


@contextlib.contextmanager
def refuse_together(runtime: Runtime) -> Iterator[None]:
    """Raise on all ranks if some ranks raise ConfigError inside, with one message. Every rank must enter."""
    problem = None
    try:
        yield
    except ConfigError as error:
        problem = error
    with collectives.raise_together(runtime.mesh["world"], runtime.device.torch_device):
        if problem is not None:
            raise problem


def has_experts(chunks: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> bool:
    """Return whether a stage of the pipeline has parameters of experts. Every rank of pp must call."""
    found = any(p.placement.reduce_over == EXPERT_DATA_PARALLEL for chunk in chunks for p in chunk.parameters())
    return bool(collectives.all_reduce(torch.tensor([int(found)], device=device), pp, "max").item())


def name_problems(chunks: dict[int, nn.Module], pp: Axis, device: torch.device | str) -> list[str]:
    """Return the problems of names: parameters that occur in several stages, auxiliary losses that do not in all.

    Those parameters would get equal initial values and overwrite each other in a checkpoint; a rank that does not know
    an auxiliary loss would not join in its sums.
    """
    # the names of this rank by stage, without tied embeddings, which belong to two stages
    rank_names = defaultdict(list)
    for stage, chunk in chunks.items():
        for name, p in chunk.named_parameters():
            if "embd" not in p.placement.partial_grad:
                rank_names[stage].append(name)

    # the auxiliary losses that this rank declares, under a key that no stage has
    problems = []
    try:
        for aux_losses in declared_aux_losses(chunks.values()):
            rank_names[_AUX_LOSSES] = list(aux_losses.names)
    except ValueError as error:
        problems.append(str(error))

    # the stages of each name, over all ranks
    stages_of = defaultdict(list)
    aux_losses_of_ranks = []
    for text in collectives.all_gather_texts(json.dumps(rank_names), pp, device):
        gathered = json.loads(text)
        aux_losses_of_ranks.append(gathered.pop(_AUX_LOSSES, []))
        for stage, names in gathered.items():
            for name in names:
                stages_of[name].append(int(stage))

    if any(names != aux_losses_of_ranks[0] for names in aux_losses_of_ranks):
        problems.append(
            f"the pipeline's ranks declare different auxiliary losses: {' and '.join(map(str, aux_losses_of_ranks))}; "
            "declare the same names in the model provider of every stage, whatever layers it has: "
            "parts['context'].aux_losses.declare(...)"
        )
    repeated = {name: sorted(stages) for name, stages in stages_of.items() if len(stages) > 1}
    if not repeated:
        return problems
    name, stages = next(iter(repeated.items()))
    return [
        *problems,
        f"{len(repeated)} parameter name(s) exist in several pipeline stages, for example {name} in stages "
        f"{', '.join(map(str, stages))}; name layers by their number over the whole model: "
        "nn.ModuleDict({str(first_layer + i): layer ...})",
    ]


@accepts_defaults_only(no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0, checkpointing_context=None)
def setup_model_and_optimizer(
    model_provider_func: ModelProvider, model_type: ModelType | None = None, *, group_of: GroupRule = default_group
) -> tuple[list[DistributedDataParallel], FlatOptimizer, AnySchedule]:
    """Build the model chunks, the optimizer and the learning rate schedule of this rank, after `initialize_megatron`.

    Every rank must call.
    """
    del model_type  # a model's `boundary` says which tensors pass between stages
    runtime = get_runtime()
    chunks = build_chunks(model_provider_func, runtime, group_of)
    schedule = learning_rate_schedule(runtime.config.learning_rate, runtime.run_length)
    with refuse_together(runtime):
        optimizer = build_optimizer(chunks, runtime, group_of)
    initialize_from_weights(runtime, list(chunks.values()), optimizer)
    return list(chunks.values()), optimizer, schedule


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: DatasetsProvider,
) -> tuple[Iterator | None, Iterator | None, Iterator | None]:
    """Return this rank's batches of each data set from its start, for a script's own loop. Every rank must call.

    None for a missing data set; a list for several validation sets. Only the first rank of a tensor-parallel group
    reads data; on the others all three are None.
    """
    runtime = get_runtime()
    training = runtime.config.training
    data = runtime.config.data

    # the number of samples to request; it follows from the settings alone, not from a checkpoint, since a data set's order
    # may depend on it
    train_iters = runtime.config.train_iters(runtime.world_size)
    eval_size = runtime.config.eval_batch_size(runtime.world_size)
    sizes = requested_samples(
        train_iters,
        training.eval_interval,
        training.eval_iters,
        runtime.batch_sizes.last,
        eval_batch_size=eval_size,
        start_eval_at_iter=training.start_eval_at_iter,
    )
    sizes[0] = training.train_samples or sizes[0]
    if data.full_validation:
        sizes[1] = samples_of_whole_set(data, training.eval_iters * eval_size)

    # the data sets
    with collectives.raise_together(runtime.mesh["world"], runtime.device.torch_device), as_config_error():
        datasets = build_train_valid_test_datasets_provider(sizes)
        sets = evaluated_sets("valid", datasets[1], data, runtime.config.eval_samples_at_once(runtime.world_size))
    if not runtime.mesh["tp"].is_first:
        return None, None, None

    def iterate(dataset: Any, micro_batch_size: int = runtime.config.eval_micro_batch_size) -> Iterator | None:
        if dataset is None:
            return None
        samples = runtime.mesh.samples
        return batches(dataset, 0, micro_batch_size, samples.rank, samples.size)

    # the iterators
    valid = None
    if isinstance(datasets[1], list):
        valid = [iterate(evaluated.samples) for evaluated in sets]
    elif sets:
        valid = iterate(sets[0].samples)
    return iterate(datasets[0], training.micro_batch_size), valid, iterate(datasets[2])


@accepts_defaults_only(wrap_with_ddp=True, config=None, pg_collection=OWN_GROUPS)
def get_model(
    model_provider_func: ModelProvider, model_type: ModelType = ModelType.encoder_or_decoder
) -> list[nn.Module]:
    """Build this rank's chunks in order, wrapped in DistributedDataParallel, after `initialize_megatron`.

    Every rank must call.
    """
    del model_type  # a model's `boundary` says which tensors pass between stages
    runtime = get_runtime()
    chunks = list(build_chunks(model_provider_func, runtime).values())
    initialize_from_weights(runtime, chunks, optimizer=None)
    return chunks
