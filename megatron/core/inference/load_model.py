"""Load a model for generation from a checkpoint of any layout: this rank's stage, or the whole model in one process."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor
from megatron.core.dist_checkpointing.frozen_weights_hash import elements_and_hash
from megatron.core.dist_checkpointing.local_tensor import placed_tensor
from megatron.core.dist_checkpointing.manifest_format import BUFFER
from megatron.core.dist_checkpointing.sharded_module_buffers import (
    buffers_of_model,
    make_absent_buffers,
    saved_buffer_shapes,
    sharded_buffers,
)
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import BUFFERS, FROZEN
from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.common.model_rules import no_experts
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.ops.attention.kernels import attention_function
from megatron.core.ops.cpu_half_precision_matmul import MatmulModes, select_matmul_modes
from megatron.core.parallel.mesh import Mesh, build_mesh
from megatron.core.parallel.rank_grid import AxisSizes
from megatron.core.peft.lora import add_lora
from megatron.core.peft.lora_config import PARTS, LoRAConfig, canonical_name, target_of
from megatron.core.sharding.placement import pieces
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig, expert_parallel_problems, tensor_parallel_problems

_PARAMETERS = "model/"  # the prefix of parameter names in a checkpoint


MODELS: dict[str, type[LanguageModelStage]] = {kind.__name__: kind for kind in (GPTModel, T5Model)}  # that generate


def load_gpt(checkpoint: Checkpoint, config: ModelConfig, **options: Any) -> GPTModel:
    """Load a GPT with `load_model`. A checkpoint without a model name is taken for one."""
    return load_model(GPTModel, checkpoint, config, **options)


def load_t5(checkpoint: Checkpoint, config: ModelConfig, **options: Any) -> T5Model:
    """Load a T5 with `load_model`: encoder and decoder."""
    return load_model(T5Model, checkpoint, config, decoder_seq_length=1, **options)


def load_model(
    kind: type[LanguageModelStage],
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    vocab_size: int,
    positions: int,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    decoder_seq_length: int | None = None,
    lora: LoRAConfig | None = None,
    base: Checkpoint | None = None,
    **context_options: Any,
) -> LanguageModelStage:
    """Return this rank's stage of a model with the checkpoint's weights.

    It is in evaluation mode, without sequence parallelism.

    Reads only the weights. kind: one of MODELS. positions: rows of a learned position embedding. mesh: every rank must
    call; default: the whole model in this process, without torch.distributed. lora: of the checkpoint's
    adapters. base: has the frozen weights of a checkpoint of adapters alone. context_options: further arguments of
    `LayerContext.from_mesh`. Raises ConfigError, CheckpointError, or PeerError if another rank fails.
    """
    saved_model = checkpoint.state.get("model", GPTModel.__name__)
    if saved_model != kind.__name__:
        raise ConfigError(
            f"{checkpoint.folder} contains a {saved_model}, but the model class here is {kind.__name__}, whose "
            "layers would compute something else; give the training script as --model, which builds its own model. If the "
            f'class used in training computes the same as {kind.__name__}, set model_name = "{kind.__name__}" in that class '
            "before training"
        )
    refuse_unusable(checkpoint, config, base)

    # compare the names of parameters before the stage takes memory
    mesh = mesh or single_rank_mesh()
    matmul_modes = matmul_modes_here(config, mesh, device)
    sizes = {"vocab_size": vocab_size, "positions": positions}
    if decoder_seq_length is not None:
        sizes["decoder_seq_length"] = decoder_seq_length
    whole = _build_stage(kind, config, single_rank_mesh(), "meta", matmul_modes, {}, **sizes)
    if lora is not None:
        add_saved_lora(whole, lora, checkpoint)
    check_parameter_names(checkpoint, parameters_of(whole), kind.__name__, base)

    # build this rank's stage
    model = _build_stage(kind, config, mesh, device, matmul_modes, context_options, **sizes)
    if lora is not None:
        add_saved_lora(model, lora, checkpoint)
    return fill_stage(checkpoint, model, mesh, device, base)


def add_saved_lora(stage: nn.Module, lora: LoRAConfig, checkpoint: Checkpoint) -> None:
    """Give a stage the adapters that a checkpoint has, and freeze the rest."""
    factors = [target_of(name.removesuffix(".lora_a")) for name in checkpoint.names if name.endswith(".lora_a")]
    whole = PARTS.keys() & set(factors)  # fused linears with one adapter for all rows
    # the training has found the targets, and other pipeline stages may have them
    add_lora(stage, lora, whole=whole, elsewhere=set(map(canonical_name, lora.lora_target_modules)))


def refuse_unusable(checkpoint: Checkpoint, config: ModelConfig, base: Checkpoint | None = None) -> None:
    """Raise ConfigError for a checkpoint of other attention than a kernel here computes, or without its base."""
    saved_function = checkpoint.state.get(FUNCTIONS, {}).get("attention_backend")
    function = attention_function(config.attention_backend)
    if saved_function not in (None, function):
        raise ConfigError(
            f"{checkpoint.folder} was trained with attention that computes {saved_function!r}, but "
            f"--attention-backend {config.attention_backend} computes {function!r} here; give as --model the training "
            "script, which registers the kernel used in training"
        )
    if FROZEN in checkpoint.state and base is None:
        raise ConfigError(
            f"{checkpoint.folder} holds what was trained alone, without its base; give the base as --pretrained-checkpoint"
        )


def matmul_modes_here(config: ModelConfig, mesh: Mesh, device: torch.device | str) -> MatmulModes:
    """Return how this CPU multiplies in half precision, measured again: the checkpoint may come from another one.

    Every rank must call.
    """
    asked = "measure" if config.cpu_half_products == "auto" else config.cpu_half_products
    matmul_modes, _ = select_matmul_modes(config.params_dtype, device, mesh["world"], requested=asked)
    return matmul_modes


def fill_stage(
    checkpoint: Checkpoint, model: nn.Module, mesh: Mesh, device: torch.device | str, base: Checkpoint | None = None
) -> nn.Module:
    """Fill this rank's stage of a model with the checkpoint's parameters and buffers; return it in evaluation mode.

    base: has the frozen parameters of a checkpoint that holds what was trained alone. Every rank must call. Raises
    ConfigError if the checkpoint was trained on another base.
    """
    tensors = {}
    frozen = {}
    for name, parameter in model.named_parameters():
        parameter.data.zero_()  # checkpoints hold no padding
        placement = parameter.placement
        boxes = pieces(placement, tuple(parameter.shape), mesh)
        of_base = base is not None and not parameter.requires_grad
        (frozen if of_base else tensors)[_PARAMETERS + name] = LocalTensor(
            parameter.data, placement.shape, boxes, is_writer=True
        )
    checkpoint.read_into(tensors, mesh["world"], convert=True, device=device)
    if base is not None:
        _read_base(base, checkpoint, model, frozen, mesh, device)
    _read_buffers(checkpoint, model, mesh, device)
    return model.eval()


def _read_base(
    base: Checkpoint,
    checkpoint: Checkpoint,
    model: nn.Module,
    frozen: dict[str, LocalTensor],
    mesh: Mesh,
    device: torch.device | str,
) -> None:
    """Fill the frozen parameters, and check their hash, which is of their bits in the precision of the training.

    Weights in a narrower precision than that cannot be checked.
    """
    base.read_into(frozen, mesh["world"], convert=True, device=device)
    trained_dtype = ModelConfig(**checkpoint.state["config"]["transformer"]).params_dtype
    own_dtype = model.settings.params_dtype
    if torch.promote_types(own_dtype, trained_dtype) != own_dtype:
        return
    of_name = {_PARAMETERS + name: parameter for name, parameter in model.named_parameters()}
    placed = {
        name: placed_tensor(of_name[name].data.to(trained_dtype), of_name[name].placement, mesh) for name in frozen
    }
    saved = dict(checkpoint.state[FROZEN])
    now = elements_and_hash(placed, mesh["world"], device)
    if now != saved:
        raise ConfigError(
            f"--pretrained-checkpoint {base.folder} is not the base of {checkpoint.folder}: its frozen weights are "
            f"{now['elements']:,} with hash {now['hash']}, those of the base were {saved['elements']:,} with "
            f"hash {saved['hash']}; give the folder that the run began from"
        )


def _read_buffers(checkpoint: Checkpoint, model: nn.Module, mesh: Mesh, device: torch.device | str) -> None:
    """Fill the persistent buffers. Raises ConfigError if the model and the checkpoint have different ones."""
    shapes = saved_buffer_shapes(checkpoint)
    (stage,) = mesh.stages.of_rank(mesh["pp"].rank)
    if BUFFERS not in checkpoint.state:  # of another project, or written before buffers were saved: what is there
        buffers = buffers_of_model({stage: model}, mesh, device)
        tensors = sharded_buffers({stage: model}, mesh, buffers, shapes)
        there = {name: local for name, local in tensors.items() if name in shapes}
        checkpoint.read_into(there, mesh["world"], convert=True, device=device)
        return
    make_absent_buffers([model], checkpoint.state[BUFFERS], device)
    buffers = buffers_of_model({stage: model}, mesh, device)
    if differing := sorted(shapes.keys() ^ {BUFFER + name for name in buffers}):
        raise ConfigError(
            f"{checkpoint.folder} and the {type(model).__name__} here have different buffers: {', '.join(differing[:4])} "
            "are only in one of them; was it written by another model?"
        )
    checkpoint.read_into(sharded_buffers({stage: model}, mesh, buffers, shapes), mesh["world"], device=device)


def layout_problems(
    config: ModelConfig, tensor: int, pipeline: int, expert: int = 1, expert_tensor: int | None = None
) -> list[str]:
    """Return why the model does not fit these sizes. expert_tensor: default: `tensor`."""
    problems = tensor_parallel_problems(config, tensor)
    if config.has_experts:
        problems += expert_parallel_problems(config, expert, expert_tensor or tensor)
    elif expert > 1:
        problems.append(no_experts(expert))
    if pipeline > config.all_layers:
        problems.append(
            f"--pipeline-model-parallel-size is {pipeline}, but the model has {config.all_layers} layers; each stage needs one"
        )
    return problems


def _build_stage(
    kind: type[LanguageModelStage],
    config: ModelConfig,
    mesh: Mesh,
    device: torch.device | str,
    matmul_modes: MatmulModes,
    context_options: dict[str, Any],
    **sizes: int,
) -> LanguageModelStage:
    """Build this rank's stage, with layers split as evenly as possible, whatever the split in training."""
    stages = mesh.stages
    (stage,) = stages.of_rank(mesh["pp"].rank)
    num_stages = stages.last + 1
    return kind(
        config,
        **sizes,
        layers=even_layers(config.all_layers, stage, num_stages),
        context=LayerContext.from_mesh(
            mesh, config.params_dtype, device=device, matmul_modes=matmul_modes, fills=False, **context_options
        ),
        pre_process=stage == 0,
        post_process=stage == stages.last,
    )


def even_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage, divided as evenly as possible: all stages need not have as many."""
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


def single_rank_mesh() -> Mesh:
    """Return a mesh of one rank, without communicators."""

    def no_group(name: str, ranks: tuple[int, ...]) -> None:
        raise AssertionError(f"axis {name} of a single process has the ranks {ranks}")

    return build_mesh(AxisSizes(), 0, no_group)


def parameters_of(model: nn.Module) -> list[tuple[str, bool]]:
    """Return (name, whether it is trained) of the parameters of a model or stage."""
    return [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]


def check_parameter_names(
    checkpoint: Checkpoint, parameters: Iterable[tuple[str, bool]], kind: str, base: Checkpoint | None = None
) -> None:
    """Raise ConfigError unless a model and the checkpoint have the same parameters.

    parameters: (name, whether it is trained) of the whole model. kind: the model's name, for the message. base: has those
    that are not trained.
    """
    parameters = list(parameters)
    if base is not None:
        try:
            _check_names(base, [name for name, is_trained in parameters if not is_trained], kind)
        except ConfigError as error:
            raise ConfigError(f"--pretrained-checkpoint is not the base of {checkpoint.folder}: {error}") from None
        parameters = [(name, is_trained) for name, is_trained in parameters if is_trained]
    _check_names(checkpoint, [name for name, _ in parameters], kind)


def _check_names(checkpoint: Checkpoint, names: list[str], kind: str) -> None:
    of_model = {_PARAMETERS + name for name in names}
    of_checkpoint = {name for name in checkpoint.names if name.startswith(_PARAMETERS)}
    differing = sorted(of_checkpoint ^ of_model)
    if not differing:
        return
    shown = [f"{name} (not in the {'checkpoint' if name in of_model else 'model'})" for name in differing[:4]]
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    raise ConfigError(
        f"{checkpoint.folder} does not match the {kind} that its settings describe; parameters that "
        f"only one of them has: {', '.join(shown)}{more}; was it written by another model? If a script built that, give the "
        "training script as --model"
    )
