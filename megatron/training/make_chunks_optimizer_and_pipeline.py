"""Build this rank's model chunks, optimizer and pipeline from a script's `model_provider`.

No function here communicates.
"""

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
from megatron.core.parallel.global_state import defer_weight_initialization, get_global_state
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
    """Return this rank's model chunks by stage, uninitialized. Raises ConfigError if a chunk cannot be trained.

    A provider with the parameter `vp_stage` gets the chunk number; any provider may ask mpu for it. A provider with
    `add_encoder` and `add_decoder` is told which of two stacks have layers in the stage.
    """
    stages = runtime.mesh.stages
    config = runtime.config
    passes_vp_stage = should_pass_vp_stage(model_provider, stages.chunks)
    chunks: dict[int, nn.Module] = {}
    for chunk_number, stage in enumerate(stages.of_rank(runtime.mesh["pp"].rank)):
        # call the provider; its parameters stay uninitialized, since their values are drawn later, independent of the layout
        get_global_state().virtual_rank = chunk_number
        arguments = add_encoder_decoder_kwargs(model_provider, config, stage)
        if passes_vp_stage:
            arguments["vp_stage"] = chunk_number
        # torch's own modules create their tensors on the current default device
        with runtime.device.torch_device, defer_weight_initialization():
            chunk = model_provider(pre_process=stage == 0, post_process=stage == stages.last, **arguments)

        # check that it can be trained
        place_constant_parameters(chunk, config.transformer.params_dtype, config.parallel.sequence_parallel_on)
        if problems := model_problems(chunk, in_pipeline=stages.last > 0):
            raise ConfigError(problems)
        chunks[stage] = chunk

    # a rank with the first and the last stage stores a tied embedding once
    shared = tie_embeddings(chunks)
    if shared:
        refuse_shared_embeddings(shared, config.data_parallel)
    return chunks


def tie_embeddings(chunks: Mapping[int, nn.Module]) -> list[str]:
    """Store a tied embedding once on a rank with both the first and the last stage.

    Later chunks use the first's tensor.

    Returns the names of the shared embedding weights.
    """
    embeddings: dict[str, nn.Parameter] = {}  # the first chunk's, by name
    shared = []
    for chunk in chunks.values():
        for name, parameter in list(chunk.named_parameters()):
            if not _is_shared(parameter):
                continue
            first = embeddings.setdefault(name, parameter)
            if first is parameter:
                continue
            *path, attribute = name.split(".")
            owner = chunk.get_submodule(".".join(path))
            delattr(owner, attribute)
            owner.__dict__[attribute] = first  # unregistered: only the first chunk trains it
            shared.append(name)
    return shared


def _is_shared(parameter: nn.Parameter) -> bool:
    """Whether it is an embedding weight of the first and the last stage, by Megatron's attribute."""
    return getattr(parameter, "shared_embedding", False)


def refuse_shared_embeddings(names: list[str], config: DataParallelConfig) -> None:
    """Raise ConfigError for settings under which only the chunk that owns a parameter may use it."""
    flags = []
    if config.stage == 3:
        flags.append("--zero-stage 3")
    if config.fixed_order_grad_reduce:
        flags.append("--fixed-order-grad-reduce")
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: not possible with this schedule, which places the first and the last stage on one "
            f"rank, where they share {names[0]}; leave it out, or give --untie-embeddings-and-output-weights"
        )


def wrap_in_ddp(
    modules: Mapping[int, nn.Module], runtime: Runtime, group_of: GroupRule = default_group
) -> ChunksByStage:
    """Wrap each chunk in a DistributedDataParallel, which moves its parameters into contiguous buffers.

    modules: by stage.
    """
    config = runtime.config
    offload_store = runtime.offload_store if config.offload.offload_params else None
    chunks = {}
    for stage, module in modules.items():
        placements = {name: p.placement for name, p in module.named_parameters()}
        chunks[stage] = DistributedDataParallel(
            module,
            runtime.mesh,
            config.data_parallel,
            runtime.weight_grads,
            offload_store=offload_store,
            unsplit=config.optimizer.full_matrix_params(placements, group_of),
        )
    return chunks


def should_pass_vp_stage(model_provider: ModelProvider, chunks: int) -> bool:
    """Whether to pass `vp_stage` to a provider.

    It gets it if it has that parameter, or takes **kwargs and a rank has several chunks. (Megatron passes it to
    every provider.)
    """
    parameters = inspect.signature(model_provider).parameters
    if "vp_stage" in parameters:
        return True
    takes_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_kwargs and chunks > 1


def add_encoder_decoder_kwargs(model_provider: ModelProvider, config: Config, stage: int) -> dict[str, bool]:
    """Return which stacks of an encoder and a decoder have layers in a stage.

    They are for a provider with parameters for them, as Megatron's have. The last stage always has the decoder's end.
    Empty for a model with one stack.
    """
    if not config.transformer.decoder_layers:
        return {}
    encoder_layers = config.transformer.num_layers  # layers are numbered through: the encoder's, then the decoder's
    layers = config.layer_split[stage]
    stacks = {
        "add_encoder": any(layer < encoder_layers for layer in layers),
        "add_decoder": stage == config.stages.last or any(layer >= encoder_layers for layer in layers),
    }
    parameters = inspect.signature(model_provider).parameters
    return {name: has_layers for name, has_layers in stacks.items() if name in parameters}


def place_constant_parameters(chunk: Any, dtype: torch.dtype, sequence_parallel: bool) -> None:
    """Set the placement of constant parameters of torch's own layers, such as a norm's.

    They are whole on every tensor-parallel rank.

    Under sequence parallelism the script must set parameter.sequence_parallel, as in Megatron: True if the layer
    works on a part of the sequence, else False. Randomly drawn parameters get no placement, as their values would
    depend on the layout.
    """
    if not isinstance(chunk, nn.Module):
        return
    for p in chunk.parameters():
        if placement_of(p) is not None:
            continue

        # whether the gradient of a tensor-parallel rank is a part, which is summed over the ranks
        is_partial = _is_sequence_parallel(p)
        if is_partial is None:
            if sequence_parallel:
                continue  # unknown: `model_problems` reports it
            is_partial = False

        # only constants
        if p.numel() == 0:
            continue
        first_element = p.view(-1)[0]
        if bool((p != first_element).any()):
            continue
        value = first_element.item()
        p.data = p.data.to(dtype)
        p.placement = Placement(
            tuple(p.shape), Constant(value), replicated_over=("tp",), partial_grad=("tp",) if is_partial else ()
        )


def _is_sequence_parallel(parameter: nn.Parameter) -> bool | None:
    """Return Megatron's attribute, which a script may set on its parameter; None if it is not set."""
    return getattr(parameter, "sequence_parallel", None)


def model_problems(chunk: Any, *, in_pipeline: bool) -> list[str]:
    """Return the reasons why a model_provider's result cannot be trained."""
    if not isinstance(chunk, nn.Module):
        kind = type(chunk).__name__
        return [f"model_provider returned {kind}, not a torch.nn.Module; return the model of this stage"]
    problems = []
    unplaced = [name for name, p in chunk.named_parameters() if placement_of(p) is None]
    if unplaced:
        problems.append(
            f"parameters without a placement: {', '.join(unplaced)}. A placement says which ranks hold which part: build the "
            "model from megatron.core.tensor_parallel's layers, or set parameter.placement = Placement(shape, init, "
            'replicated_over=("tp",)) where the parameter is created. Layers of torch with constant initial values, such as '
            "LayerNorm, need none; under --sequence-parallel they need parameter.sequence_parallel = True, or "
            "False if every rank has the whole sequence"
        )
    if in_pipeline and not isinstance(chunk, TakesInputTensor):
        problems.append(
            f"{type(chunk).__name__} has no method set_input_tensor(x), which gives a pipeline stage the previous stage's output"
        )
    return problems


def build_optimizer(chunks: ChunksByStage, runtime: Runtime, group_of: GroupRule = default_group) -> FlatOptimizer:
    """Build the optimizer over the buffers of all chunks of this rank."""
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


def build_pipeline(
    chunks: ChunksByStage, runtime: Runtime, forward_step: ForwardStep, micro_batch_size: int | None = None
) -> Pipeline:
    """Build the pipeline that runs this rank's chunks and exchanges tensors with the neighbouring stages.

    micro_batch_size: default: that of training.
    """
    config = runtime.config
    tokens = config.data.seq_length // runtime.mesh.sequence.size  # of a sample on this rank
    micro_batch_size = micro_batch_size or config.training.micro_batch_size
    batch = BatchShape(micro_batch_size, runtime.num_microbatches, tokens)

    # without sequence parallelism all tensor-parallel ranks have equal outputs, of which each may send a part
    copies_over = None
    if config.parallel.scatter_gather_tensors_in_pipeline and not config.parallel.sequence_parallel_on:
        copies_over = runtime.mesh["tp"]
    return Pipeline(
        chunks,
        runtime.mesh,
        batch,
        boundary=boundary_of([chunk.module for chunk in chunks.values()], runtime, micro_batch_size),
        forward_step=forward_step,
        keys=runtime.dropout_keys,
        weight_grads=runtime.weight_grads,
        schedule_name=config.schedule_name,
        microbatch_group=config.parallel.microbatch_group_size_per_vp_stage,
        copies_over=copies_over,
        device=runtime.device.torch_device,
        poison=config.data_parallel.poison_released_buffers,
    )


def boundary_of(
    models: Iterable[nn.Module], runtime: Runtime, micro_batch_size: int | None = None
) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors between two stages.

    They are those of the model's boundary(micro_batch_size, seq_length), else its hidden states, [s, b, h] or
    [s/t, b, h].

    Tensor-parallel ranks hold equal copies of these tensors, or parts of them under sequence parallelism.
    """
    config = runtime.config
    micro_batch_size = micro_batch_size or config.training.micro_batch_size
    seq_length = config.data.seq_length
    for model in models:
        if isinstance(model, DeclaresBoundary):
            return model.boundary(micro_batch_size, seq_length)
    return (runtime.layer_context.hidden_states(config.transformer, micro_batch_size, seq_length),)
