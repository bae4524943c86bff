"""What a run is built of, from its settings and what a script provides: model chunks, optimizer, data."""

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron.core import comm
from megatron.core.config import ConfigError
from megatron.core.datasets.batches import batches
from megatron.core.datasets.index_map import requested_samples
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.grid import Axis
from megatron.core.optimizer.grad_scaler import make_grad_scaler
from megatron.core.optimizer.lr_schedule import AnySchedule, learning_rate_schedule
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.pipeline_parallel.loss import ForwardStep
from megatron.core.pipeline_parallel.pipeline import BatchShape, Pipeline
from megatron.core.pipeline_parallel.transport import TensorSpec
from megatron.core.placement import Constant, Placement
from megatron.core.random import initialize_parameters
from megatron.core.tiers.tier import FileTier
from megatron.core.transformer.transformer import ParallelTransformer
from megatron.training.initialize import as_settings_problem
from megatron.training.memory.offload import Room, check_room, warn_of_room
from megatron.training.runtime import Runtime, get_runtime

DatasetsProvider = Callable[[list[int]], tuple[Any, Any, Any]]
ModelProvider = Callable[..., nn.Module]


def get_model(model_provider: ModelProvider, runtime: Runtime) -> dict[int, DistributedDataParallel]:
    """This rank's model chunks by stage: built, filled with initial weights, in contiguous buffers.

    A provider that takes `vp_stage` is told which chunk it makes; any provider may ask mpu for it.
    """
    mesh, pp, chunks, room = runtime.mesh, runtime.mesh["pp"], {}, Room.now(runtime)
    made: dict[int, nn.Module] = {}
    last_stage = runtime.config.chunks_per_rank * pp.size - 1
    takes_chunk = takes_vp_stage(model_provider, runtime.config.chunks_per_rank)
    for chunk_number in range(runtime.config.chunks_per_rank):
        stage = chunk_number * pp.size + pp.rank
        mesh.virtual_rank = chunk_number
        chunk_argument = {"vp_stage": chunk_number} if takes_chunk else {}
        # On the device, where a module that is told nothing makes its tensors.
        with runtime.device.torch_device, mesh.filling_by_name():
            chunk = model_provider(pre_process=stage == 0, post_process=stage == last_stage, **chunk_argument)
        place_plain_parameters(chunk, runtime.config.transformer.params_dtype, mesh.sequence_parallel)
        if problems := model_problems(chunk, in_pipeline=last_stage > 0):
            raise ConfigError(problems)
        made[stage] = chunk
    if problems := name_problems(made, mesh["pp"], runtime.device.torch_device):
        raise ConfigError(problems)
    check_room(runtime, made.values(), room)
    warn_of_room(runtime, made.values())
    params_tier = runtime.tier if runtime.config.offload.offload_params else None
    for stage, chunk in made.items():
        initialize_parameters(chunk, runtime.config.training.seed, mesh)
        chunks[stage] = DistributedDataParallel(
            chunk, mesh, runtime.config.data_parallel, runtime.weight_grads, tier=params_tier
        )
        if isinstance(runtime.tier, FileTier):  # without, activations go to the host
            for layers in chunk.modules():
                if isinstance(layers, ParallelTransformer):
                    layers.activations.keep_in(runtime.tier)
    return chunks


def takes_vp_stage(model_provider: ModelProvider, chunks: int) -> bool:
    """Whether to tell a provider which of a rank's chunks it makes: by name, or among `**options` where there are several, as Megatron
    tells all."""
    parameters = inspect.signature(model_provider).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "vp_stage" in parameters or (takes_any and chunks > 1)


def name_problems(chunks: dict[int, nn.Module], pp: Axis, device: torch.device | str) -> list[str]:
    """Parameters of different stages under one name: they would start with the same values, and overwrite one another in a
    checkpoint. Every rank of `pp` must call; all get the same answer."""
    mine = {
        str(stage): [
            name
            for name, p in chunk.named_parameters()
            if "embd" not in p.placement.partial_grad  # a tied table is meant to be
        ]
        for stage, chunk in chunks.items()
    }
    stages_of = defaultdict(list)
    for text in comm.all_gather_texts(json.dumps(mine), pp, device):
        for stage, names in json.loads(text).items():
            for name in names:
                stages_of[name].append(int(stage))
    twice = {name: sorted(stages) for name, stages in stages_of.items() if len(stages) > 1}
    if not twice:
        return []
    name, stages = next(iter(twice.items()))
    return [
        f"{len(twice)} parameter name(s) exist in several pipeline stages, for example {name} in stages {', '.join(map(str, stages))}; "
        "name what belongs to a layer by the layer's number over the whole model: nn.ModuleDict({str(first_layer + i): layer ...})"
    ]


def place_plain_parameters(chunk: Any, dtype: torch.dtype, sequence_parallel: bool) -> None:
    """Take in the parameters of torch's own layers that are the same in any layout: those filled with one value, as a norm's.

    Every tensor-parallel rank holds them whole. Under sequence parallelism it has to be said whether the layer stands where the
    sequence is divided: parameter.sequence_parallel = True or False, as in Megatron. What was drawn at random depends on what
    was drawn before it, and so on the layout: it stays without a placement.
    """
    for p in chunk.parameters() if isinstance(chunk, nn.Module) else ():
        said = getattr(p, "sequence_parallel", None if sequence_parallel else False)
        if hasattr(p, "placement") or said is None or not p.numel() or bool((p != p.view(-1)[0]).any()):
            continue
        value, parts = Constant(p.view(-1)[0].item()), ("tp",) if said else ()
        p.data = p.data.to(dtype)
        p.placement = Placement(tuple(p.shape), value, replicated_over=("tp",), partial_grad=parts)


def model_problems(chunk: Any, *, in_pipeline: bool) -> list[str]:
    """Why what a model_provider returned cannot be trained."""
    if not isinstance(chunk, nn.Module):
        return [
            f"model_provider returned {type(chunk).__name__}, not a torch.nn.Module; return the model of this stage"
        ]
    problems = []
    if lost := [name for name, p in chunk.named_parameters() if not hasattr(p, "placement")]:
        problems.append(
            f"parameters without a placement: {', '.join(lost)}. Nothing says which ranks hold what of them: build the model from "
            "megatron.core.tensor_parallel's layers, or set parameter.placement = Placement(shape, init, "
            'replicated_over=("tp",)) where each is created. Of torch\'s own layers those without random values, such as LayerNorm, may '
            "stay as they are; under --sequence-parallel they need parameter.sequence_parallel = True, or False where every rank has "
            "the whole sequence"
        )
    if in_pipeline and not hasattr(chunk, "set_input_tensor"):
        problems.append(
            f"{type(chunk).__name__} has no method set_input_tensor(x), which hands a pipeline stage the output of the one before"
        )
    return problems


def setup_model_and_optimizer(
    model_provider: ModelProvider, model_type: ModelType | None = None, *, group_of: GroupRule = default_group
) -> tuple[list[DistributedDataParallel], FlatOptimizer, AnySchedule]:
    """This rank's model chunks, their optimizer and its learning rates, after `initialize_megatron`. Every rank must call."""
    del model_type  # every model so far passes one tensor between stages
    runtime = get_runtime()
    chunks, optimizer = build_model_and_optimizer(model_provider, runtime, group_of)
    schedule = learning_rate_schedule(runtime.config.learning_rate, runtime.run_length)
    return list(chunks.values()), optimizer, schedule


def build_model_and_optimizer(
    model_provider: ModelProvider, runtime: Runtime, group_of: GroupRule
) -> tuple[dict[int, DistributedDataParallel], FlatOptimizer]:
    """This rank's model chunks by stage, and what updates them. Every rank must call."""
    chunks = get_model(model_provider, runtime)
    return chunks, build_optimizer(chunks, runtime, group_of)


def build_optimizer(
    chunks: dict[int, DistributedDataParallel], runtime: Runtime, group_of: GroupRule = default_group
) -> FlatOptimizer:
    return FlatOptimizer(
        [buffer for chunk in chunks.values() for buffer in chunk.buffers],
        runtime.config.optimizer,
        runtime.mesh,
        group_of=group_of,
        scaler=make_grad_scaler(runtime.config.loss_scaling, fp16=runtime.config.transformer.fp16),
        fixed_order=runtime.config.data_parallel.fixed_order_grad_reduce,
        device=runtime.device.torch_device,
        tier=runtime.tier,
        offload_fraction=runtime.config.offload.optimizer_offload_fraction,
    )


def build_pipeline(chunks: dict[int, DistributedDataParallel], runtime: Runtime, forward_step: ForwardStep) -> Pipeline:
    """What runs the chunks, and the others' by way of the ranks before and after this one."""
    config, tp = runtime.config, runtime.mesh["tp"]
    divided, micro_batch = config.parallel.sequence_parallel_on, config.training.micro_batch_size
    length = config.data.seq_length // (tp.size if divided else 1)
    hidden = TensorSpec((length, micro_batch, config.transformer.hidden_size), config.transformer.residual_dtype)
    sends_parts = config.parallel.scatter_gather_tensors_in_pipeline and not divided
    return Pipeline(
        chunks,
        runtime.mesh,
        BatchShape(micro_batch, runtime.num_microbatches, config.data.seq_length),
        boundary=(hidden,),
        forward_step=forward_step,
        keys=runtime.dropout_keys,
        weight_grads=runtime.weight_grads,
        schedule_name=config.schedule_name,
        copies_over=tp if sends_parts else None,
        device=runtime.device.torch_device,
        poison=config.data_parallel.poison_released_buffers,
    )


def build_train_valid_test_data_iterators(
    provider: DatasetsProvider,
) -> tuple[Iterator | None, Iterator | None, Iterator | None]:
    """This rank's batches of each data set from its beginning, for a loop of a script's own. Every rank must call.

    None for a data set that is not there, and, for all, on ranks that read nothing: those inside a tensor-parallel group.
    """
    runtime = get_runtime()
    samples, micro_batch_size = runtime.mesh.samples, runtime.config.training.micro_batch_size
    datasets = build_run_datasets(provider, runtime)
    reads = runtime.mesh["tp"].is_first
    return tuple(
        batches(dataset, 0, micro_batch_size, samples.rank, samples.size) if reads and dataset is not None else None
        for dataset in datasets
    )


def build_run_datasets(provider: DatasetsProvider, runtime: Runtime) -> tuple[Any, Any, Any]:
    """The provider's data sets, of as many samples as the settings ask for. Every rank must call."""
    training = runtime.config.training
    # By the settings alone, whatever the run goes on from: what a data set holds may depend on how much is asked for.
    train_iters = runtime.config.train_iters(runtime.world_size)
    sizes = requested_samples(train_iters, training.eval_interval, training.eval_iters, runtime.batch_sizes.last)
    sizes[0] = training.train_samples or sizes[0]
    with comm.together(runtime.mesh["world"], runtime.device.torch_device), as_settings_problem():
        return provider(sizes)
