"""Build this rank's model chunks, optimizer and pipeline from a script's `model_provider`. No function here communicates."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import make_grad_scaler
from megatron.core.optimizer.param_groups import GroupRule, default_group, without_embedding_decay
from megatron.core.parallel.global_state import defer_initialization, get_global_state
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.sharding.placement import Constant, Placement, placement_of
from megatron.training.arguments.config import Config
from megatron.training.global_vars import Runtime

ModelProvider = Callable[..., nn.Module]
ChunksByStage = dict[int, DistributedDataParallel]


@runtime_checkable
class DeclaresBoundary(Protocol):
    """A model that says which tensors a stage sends to the next; others send their hidden states."""

    def boundary(self, micro_batch_size: int, seq_length: int) -> tuple[TensorSpec, ...]: ...


@runtime_checkable
class TakesInputTensor(Protocol):
    """A model of a pipeline's stage, as Megatron's are."""

    def set_input_tensor(self, x: Any) -> None: ...


def make_chunks(model_provider: ModelProvider, runtime: Runtime) -> dict[int, nn.Module]:
    """This rank's model chunks by stage, uninitialized. Raises ConfigError if a chunk cannot be trained.

    A provider with the parameter `vp_stage` gets the chunk number; any provider may ask mpu for it. One with
    `add_encoder` and
    `add_decoder` is told which of two stacks have layers in the stage.
    """
    stages, config = runtime.mesh.stages, runtime.config
    made: dict[int, nn.Module] = {}
    takes_chunk = takes_vp_stage(model_provider, stages.chunks)
    for chunk_number, stage in enumerate(stages.of_rank(runtime.mesh["pp"].rank)):
        get_global_state().virtual_rank = chunk_number
        chunk_argument = {"vp_stage": chunk_number} if takes_chunk else {}
        chunk_argument |= stacks_of_stage(model_provider, config, stage)
        # torch's own modules create their tensors on the current default device.
        with runtime.device.torch_device, defer_initialization():
            chunk = model_provider(pre_process=stage == 0, post_process=stage == stages.last, **chunk_argument)
        place_plain_parameters(chunk, config.transformer.params_dtype, config.parallel.sequence_parallel_on)
        if problems := model_problems(chunk, in_pipeline=stages.last > 0):
            raise ConfigError(problems)
        made[stage] = chunk
    if shared := tie_embeddings(made):
        refuse_shared_tables(shared, runtime.config.data_parallel)
    return made


def tie_embeddings(made: Mapping[int, nn.Module]) -> list[str]:
    """Store a tied table once on a rank with both the first and the last stage: later chunks use the first chunk's tensor.

    Returns the names of the shared tables."""
    tables: dict[str, nn.Parameter] = {}
    shared = []
    for chunk in made.values():
        for name, table in list(chunk.named_parameters()):
            if _is_shared(table) and tables.setdefault(name, table) is not table:
                *path, attribute = name.split(".")
                owner = chunk.get_submodule(".".join(path))
                delattr(owner, attribute)
                owner.__dict__[attribute] = tables[name]  # unregistered: only the first chunk trains it
                shared.append(name)
    return shared


def _is_shared(parameter: nn.Parameter) -> bool:
    """Whether it is a table of the first and the last stage, by Megatron's attribute."""
    return getattr(parameter, "shared_embedding", False)


def refuse_shared_tables(names: list[str], config: DataParallelConfig) -> None:
    """Raise ConfigError for settings under which only the chunk that holds a parameter may use it."""
    flags = {"--zero-stage 3": config.stage == 3, "--fixed-order-grad-reduce": config.fixed_order_grad_reduce}
    if asked := [flag for flag, is_set in flags.items() if is_set]:
        raise ConfigError(
            f"{', '.join(asked)}: the schedule places the first and the last stage on one rank, where they share {names[0]}; "
            "leave it out, or give --untie-embeddings-and-output-weights"
        )


def in_buffers(made: dict[int, nn.Module], runtime: Runtime, group_of: GroupRule = default_group) -> ChunksByStage:
    """Lay the chunks' parameters out in contiguous buffers."""
    config, chunks = runtime.config, {}
    offload_store = runtime.offload_store if config.offload.offload_params else None
    common = runtime.mesh, config.data_parallel, runtime.weight_grads
    for stage, chunk in made.items():
        whole = config.optimizer.full_matrix_params(
            {name: p.placement for name, p in chunk.named_parameters()}, group_of
        )
        chunks[stage] = DistributedDataParallel(chunk, *common, offload_store=offload_store, unsplit=whole)
    return chunks


def takes_vp_stage(model_provider: ModelProvider, chunks: int) -> bool:
    """Whether to pass `vp_stage` to a provider: if it has that parameter, or takes **kwargs and a rank has several chunks.
    (Megatron passes it to every provider.)"""
    parameters = inspect.signature(model_provider).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "vp_stage" in parameters or (takes_any and chunks > 1)


def stacks_of_stage(model_provider: ModelProvider, config: Config, stage: int) -> dict[str, bool]:
    """Which stacks of an encoder and a decoder have layers in a stage, for a provider that has parameters for it, as
    Megatron's
    have. The last stage has the decoder's end in any case."""
    parameters, encoder = inspect.signature(model_provider).parameters, config.transformer.num_layers
    if not config.transformer.decoder_layers:
        return {}
    layers, is_last = config.layer_split[stage], stage == config.stages.last
    found = {
        "add_encoder": any(i < encoder for i in layers),
        "add_decoder": is_last or any(i >= encoder for i in layers),
    }
    return {name: has for name, has in found.items() if name in parameters}


def place_plain_parameters(chunk: Any, dtype: torch.dtype, sequence_parallel: bool) -> None:
    """Set the placement of constant parameters of torch's own layers, such as a norm's: whole on every tensor-parallel rank.

    Under sequence parallelism the script must set parameter.sequence_parallel, as in Megatron: True if the layer works
    on a part
    of the sequence, else False. Randomly drawn parameters get no placement, as their values would depend on the layout.
    """
    for p in chunk.parameters() if isinstance(chunk, nn.Module) else ():
        said = _is_sequence_parallel(p)
        if said is None and not sequence_parallel:
            said = False
        if placement_of(p) is not None or said is None or not p.numel() or bool((p != p.view(-1)[0]).any()):
            continue
        value, parts = Constant(p.view(-1)[0].item()), ("tp",) if said else ()
        p.data = p.data.to(dtype)
        p.placement = Placement(tuple(p.shape), value, replicated_over=("tp",), partial_grad=parts)


def _is_sequence_parallel(parameter: nn.Parameter) -> bool | None:
    """What a script says of its parameter, by Megatron's attribute; None: nothing."""
    return getattr(parameter, "sequence_parallel", None)


def model_problems(chunk: Any, *, in_pipeline: bool) -> list[str]:
    """The reasons why a model_provider's result cannot be trained."""
    if not isinstance(chunk, nn.Module):
        kind = type(chunk).__name__
        return [f"model_provider returned {kind}, not a torch.nn.Module; return the model of this stage"]
    problems = []
    if lost := [name for name, p in chunk.named_parameters() if placement_of(p) is None]:
        problems.append(
            f"parameters without a placement: {', '.join(lost)}. A placement says which ranks hold which part: build the model "
            "from megatron.core.tensor_parallel's layers, or set parameter.placement = Placement(shape, init, "
            'replicated_over=("tp",)) where the parameter is created. Layers of torch with constant initial values, such as '
            "LayerNorm, need none; under --sequence-parallel they need parameter.sequence_parallel = True, or "
            "False if every "
            "rank has the whole sequence"
        )
    if in_pipeline and not isinstance(chunk, TakesInputTensor):
        problems.append(
            f"{type(chunk).__name__} has no method set_input_tensor(x), which gives a pipeline stage the previous stage's output"
        )
    return problems


def build_optimizer(chunks: ChunksByStage, runtime: Runtime, group_of: GroupRule = default_group) -> FlatOptimizer:
    if runtime.config.transformer.embedding_init_method_std is not None:
        group_of = without_embedding_decay(group_of)
    return FlatOptimizer(
        [buffer for chunk in chunks.values() for buffer in chunk.buffers],
        runtime.config.optimizer,
        runtime.mesh,
        group_of=group_of,
        scaler=make_grad_scaler(runtime.config.loss_scaling, fp16=runtime.config.transformer.fp16),
        fixed_order=runtime.config.data_parallel.fixed_order_grad_reduce,
        device=runtime.device.torch_device,
        offload_store=runtime.offload_store,
        offload_fraction=runtime.config.offload.optimizer_offload_fraction,
    )


def build_pipeline(chunks: ChunksByStage, runtime: Runtime, forward_step: ForwardStep) -> Pipeline:
    """The pipeline that runs this rank's chunks and exchanges tensors with the neighbouring stages."""
    config, tp = runtime.config, runtime.mesh["tp"]
    tokens = config.data.seq_length // runtime.mesh.sequence.size  # of a sample on this rank
    batch = BatchShape(config.training.micro_batch_size, runtime.num_microbatches, tokens)
    sends_parts = config.parallel.scatter_gather_tensors_in_pipeline and not config.parallel.sequence_parallel_on
    return Pipeline(
        chunks,
        runtime.mesh,
        batch,
        boundary=boundary_of([chunk.module for chunk in chunks.values()], runtime),
        forward_step=forward_step,
        keys=runtime.dropout_keys,
        weight_grads=runtime.weight_grads,
        schedule_name=config.schedule_name,
        copies_over=tp if sends_parts else None,
        device=runtime.device.torch_device,
        poison=config.data_parallel.poison_released_buffers,
    )


def boundary_of(models: Iterable[nn.Module], runtime: Runtime) -> tuple[TensorSpec, ...]:
    """Specs of the tensors between two stages: the model's boundary(micro_batch_size, seq_length), else its hidden states.

    Tensor-parallel ranks hold equal copies of these tensors, or parts of them under sequence parallelism.
    """
    config = runtime.config
    shape = config.training.micro_batch_size, config.data.seq_length
    declared = [model.boundary(*shape) for model in models if isinstance(model, DeclaresBoundary)]
    return declared[0] if declared else (runtime.layer_context.hidden_states(config.transformer, *shape),)
