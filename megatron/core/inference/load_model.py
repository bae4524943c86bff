"""A model for generation from a checkpoint that any layout wrote: this rank's stage, or all of it in one process."""

from typing import Any

import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry import FUNCTIONS
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor
from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.ops.attention.kernels import attention_function
from megatron.core.ops.cpu_half_precision_matmul import Products, settle
from megatron.core.parallel.grid import AxisSizes
from megatron.core.parallel.mesh import Mesh, build_mesh
from megatron.core.sharding.placement import pieces
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig, tensor_parallel_problems

_PARAMETERS = "model/"  # what precedes a parameter's name in a checkpoint


MODELS: dict[str, type[LanguageModelStage]] = {kind.__name__: kind for kind in (GPTModel, T5Model)}  # that generate


def load_gpt(checkpoint: Checkpoint, config: ModelConfig, **options: Any) -> GPTModel:
    """`load_model` of a GPT. A checkpoint without a model name is taken for one."""
    return load_model(GPTModel, checkpoint, config, **options)


def load_t5(checkpoint: Checkpoint, config: ModelConfig, **options: Any) -> T5Model:
    """`load_model` of a T5: both stacks."""
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
    **of_context: Any,
) -> LanguageModelStage:
    """This rank's stage of the model of `config` with the checkpoint's weights, in evaluation mode, without sequence
    parallelism.

    Reads only the weights. kind: one of MODELS. Every rank of `mesh` must call; default: the whole model in this process,
    without torch.distributed. of_context: further arguments of `LayerContext.on`. Raises ConfigError, CheckpointError, or
    PeerError if another rank fails.
    """
    theirs = checkpoint.state.get("model", GPTModel.__name__)
    if theirs != kind.__name__:
        raise ConfigError(
            f"{checkpoint.folder} holds a {theirs}, and what generates here is a {kind.__name__}: its layers would compute "
            f"something else. A class that computes what {kind.__name__} does says so when it trains: model_name = "
            f'"{kind.__name__}"'
        )
    before = checkpoint.state.get(FUNCTIONS, {}).get("attention_backend")
    if before not in (None, now := attention_function(config.attention_backend)):
        raise ConfigError(
            f"{checkpoint.folder} was trained by attention that computes {before!r}, and --attention-backend "
            f"{config.attention_backend} computes {now!r} here; give the script that trained, which adds its kernel, by --model"
        )
    mesh = mesh or lone_mesh()
    # Measured anew: the checkpoint may come from another CPU.
    asked = config.cpu_half_products
    products, _ = settle(config.params_dtype, device, mesh["world"], asked="measure" if asked == "auto" else asked)
    sizes = {"vocab_size": vocab_size, "positions": positions}
    sizes |= {} if decoder_seq_length is None else {"decoder_seq_length": decoder_seq_length}
    model = _stage(kind, config, mesh, device, products, of_context, **sizes)
    _check_same_parameters(checkpoint, _stage(kind, config, lone_mesh(), "meta", products, {}, **sizes))
    wanted = {}
    for name, parameter in model.named_parameters():
        parameter.data.zero_()  # checkpoints hold no padding
        placement = parameter.placement
        boxes = pieces(placement, tuple(parameter.shape), mesh)
        wanted[_PARAMETERS + name] = LocalTensor(parameter.data, placement.shape, boxes, is_writer=True)
    checkpoint.read_into(wanted, mesh["world"], convert=True, device=device)
    return model.eval()


def layout_problems(config: ModelConfig, tensor: int, pipeline: int) -> list[str]:
    """Why the model does not fit these tensor and pipeline parallel sizes."""
    problems = tensor_parallel_problems(config, tensor)
    if pipeline > config.all_layers:
        has = f"the model has {config.all_layers} layers; each stage needs one"
        problems.append(f"--pipeline-model-parallel-size is {pipeline}, but {has}")
    return problems


def _stage(
    kind: type[LanguageModelStage],
    config: ModelConfig,
    mesh: Mesh,
    device: torch.device | str,
    products: Products,
    of_context: dict[str, Any],
    **sizes: int,
) -> LanguageModelStage:
    """This rank's stage, with layers split as evenly as possible, whatever the split in training."""
    stages, n = mesh.stages, config.all_layers
    (stage,) = stages.of_rank(mesh["pp"].rank)
    size = stages.last + 1
    return kind(
        config,
        **sizes,
        layers=range(stage * n // size, (stage + 1) * n // size),
        context=LayerContext.on(mesh, config.params_dtype, device=device, products=products, fills=False, **of_context),
        pre_process=stage == 0,
        post_process=stage == stages.last,
    )


def lone_mesh() -> Mesh:
    """A mesh of one rank, without communicators."""

    def no_group(name: str, ranks: tuple[int, ...]) -> None:
        raise AssertionError(f"axis {name} of a lone process has ranks {ranks}")

    return build_mesh(AxisSizes(), 0, no_group)


def _check_same_parameters(checkpoint: Checkpoint, whole: LanguageModelStage) -> None:
    """Raises ConfigError unless the model and the checkpoint have the same parameters."""
    wanted = {_PARAMETERS + name for name, _ in whole.named_parameters()}
    saved = {name for name in checkpoint.names if name.startswith(_PARAMETERS)}
    if differing := sorted(saved ^ wanted):
        shown = [f"{name} (not in the {'checkpoint' if name in wanted else 'model'})" for name in differing[:4]]
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise ConfigError(
            f"{checkpoint.folder} does not hold a {type(whole).__name__} of its own settings; parameters that only one of the "
            f"two has: {', '.join(shown)}{more}; was it written by another kind of model?"
        )
