"""The settings of a transformer, all in one.

They are its shape, positions, recomputation and offload, loss, precision, and compilation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from megatron.core.base.dataclass_flags import (
    BelowOne,
    Count,
    FlagConfig,
    NotNegative,
    WholeNumber,
    default_of,
    option,
    option_fields,
)
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.transformer.layer_freq_pattern import LONGEST, is_exception, layer_pattern
from megatron.core.transformer.moe.moe_config import OF_EXPERTS, MoEConfig
from megatron.core.transformer.shape_norm_dropout_init_config import ShapeConfig

if TYPE_CHECKING:  # the settings are read without torch, for --help
    import torch

_OF_EXPERTS = ("moe", "moe_act", "shared_experts")
_RECOMPUTED = ("core_attn", "mlp", "layernorm", *_OF_EXPERTS)
_PATTERNS = {"window_attn_skip_freq": 0, "no_rope_freq": 1}  # setting -> the entry of an exception in its list
_NOT_HERE = {"mla_up_proj": "multi-latent attention"}


@dataclass(frozen=True)
class RecomputeConfig(FlagConfig):
    """Activations: kept for the backward, where, or computed again."""

    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "recompute activations in the backward pass: full: of whole layers; selective: of --recompute-modules"
    )
    recompute_modules: list[str] = option(
        ["core_attn"],
        "with --recompute-granularity selective, what to recompute: core_attn (attention scores and softmax), mlp, "
        "layernorm (outputs of the norms), moe (whole mixtures of experts), moe_act (activations of experts), shared_experts",
        metavar="NAME",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "with --recompute-granularity full: uniform: recompute all layers, in groups of which only the "
        "inputs are saved; block: recompute only the first layers of each stage",
    )
    recompute_num_layers: Count | None = option(
        None,
        "with --recompute-method uniform: layers per group; with block: layers to recompute per stage",
        flags=("--recompute-num-layers", "--checkpoint-num-layers"),
    )
    distribute_saved_activations: bool = option(
        False,
        "with --recompute-granularity full: shard the saved inputs of recomputed layers over tensor-parallel ranks",
    )
    contiguous_checkpointing: bool = option(
        False,
        "with --recompute-granularity full: save the inputs of recomputed layers in one preallocated buffer per stage",
        flags=("--contiguous-checkpointing", "--contigious-checkpointing"),
    )
    tiled_mlp: Count = option(
        1,
        "compute the MLP in N tiles of a rank's tokens, and recompute each in the backward: only 1/N of its "
        "activations is in memory at a time",
    )
    tiled_loss: Count = option(
        1,
        "compute output layer and loss in N tiles of a rank's tokens, and recompute each in the backward: only 1/N "
        "of the logits is in memory at a time",
    )
    cpu_offloading_num_layers: WholeNumber = option(
        0,
        "offload the saved activations of the first N layers of each stage, to host memory or with --offload-dir to "
        "files",
    )
    min_offloaded_tensor_size: WholeNumber = option(
        2**20, "offload only activations of at least this many elements, in layers that are not recomputed"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        full = self.recompute_granularity == "full"
        if full and self.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        is_selective = self.recompute_granularity == "selective"
        if is_selective and (self.recompute_method is not None or self.recompute_num_layers is not None):
            yield "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        of_full = {
            "--distribute-saved-activations": self.distribute_saved_activations,
            "--contiguous-checkpointing": self.contiguous_checkpointing,
        }
        for flag, is_set in of_full.items():
            if is_set and not full:
                yield f"{flag} needs --recompute-granularity full; give that too, or leave out {flag}"
        if self.cpu_offloading_num_layers > 0 and self.recomputes("layernorm"):
            yield (
                "--recompute-modules layernorm recomputes tensors that --cpu-offloading-num-layers would "
                "offload; leave one of them out"
            )
        if self.cpu_offloading_num_layers == 0 and self.min_offloaded_tensor_size != 2**20:
            yield (
                "--min-offloaded-tensor-size has no effect, because --cpu-offloading-num-layers is 0 and no layer is "
                "offloaded; give --cpu-offloading-num-layers too"
            )
        if self.recompute_modules != ["core_attn"] and self.recompute_granularity != "selective":
            yield "--recompute-modules needs --recompute-granularity selective"
        if self.tiled_mlp > 1 and self.recomputes("mlp"):
            yield (
                f"--tiled-mlp {self.tiled_mlp} recomputes the MLP, and so does --recompute-modules mlp; leave "
                "one of them out"
            )
        for name in self.recompute_modules:
            if name in _NOT_HERE:
                yield f"--recompute-modules {name} recomputes {_NOT_HERE[name]}, which no model here has; leave it out"
            elif name not in _RECOMPUTED:
                yield f"--recompute-modules {name} is not one of {', '.join(_RECOMPUTED)}"

    def recomputes(self, module: str) -> bool:
        """Return whether the backward recomputes this part of every layer: one of the names of --recompute-modules."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules


@dataclass(frozen=True)
class LossConfig(FlagConfig):
    """The loss of a token."""

    label_smoothing: BelowOne = option(
        0.0, "label smoothing, in training only: probability spread evenly over the other tokens of the vocabulary"
    )
    z_loss_coeff: NotNegative = option(
        0.0, "coefficient of the z-loss, the squared log-sum-exp of the logits; applies in training only"
    )


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}  # torch's names


@dataclass(frozen=True)
class PrecisionConfig(FlagConfig):
    """The dtypes of weights, activations and products."""

    fp32_residual_connection: bool = option(False, "keep the residual stream in fp32, with --bf16 or --fp16")
    bf16: bool = option(False, "train in bfloat16, with fp32 master weights and gradients")
    fp16: bool = option(False, "train in float16, with fp32 master weights and loss scaling")
    cpu_half_products: Literal["auto", "measure", "native", "widened"] = option(
        "auto",
        "how a CPU multiplies bf16 or fp16 matrices: native: in that dtype; widened: in fp32, with the result "
        "rounded once; measure: time both, and use the faster for each kind of product; auto: what the resumed run "
        "used, else measure",
    )
    fp64: bool = option(False, "train in float64: slow; to compare layouts without rounding errors")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        dtypes = [f"--{name}" for name in _DTYPES if getattr(self, name)]
        if len(dtypes) > 1:
            yield f"{' and '.join(dtypes)} exclude each other; give only one of them"
        if self.fp32_residual_connection and not (self.bf16 or self.fp16):
            yield "--fp32-residual-connection needs --bf16 or --fp16; in fp32 the residual is not rounded anyway"

    @property
    def params_dtype(self) -> "torch.dtype":
        torch = import_module("torch")  # not above: --help reads the settings without torch, which takes seconds
        for name, dtype in _DTYPES.items():
            if getattr(self, name):
                return getattr(torch, dtype)
        return torch.float32

    @property
    def residual_dtype(self) -> "torch.dtype":
        """The dtype of the residual stream, and so of the tensors between pipeline stages."""
        return import_module("torch").float32 if self.fp32_residual_connection else self.params_dtype


@dataclass(frozen=True)
class ModelConfig(CompileConfig, PrecisionConfig, LossConfig, RecomputeConfig, MoEConfig):
    """Model."""  # a dataclass lists the fields of its last base first, and so do help and manifests

    def recomputes(self, module: str) -> bool:
        return super().recomputes(module) or (module == "moe" and self.moe_layer_recompute)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.has_experts and (names := {*_OF_EXPERTS} & {*self.recompute_modules}):
            yield (
                f"--recompute-modules {' '.join(sorted(names))} recomputes experts, and the model has none; leave it out, or "
                "give --num-experts"
            )
        if self.moe_layer_recompute and self.recompute_granularity == "full":
            yield (
                "--moe-layer-recompute recomputes the experts, which --recompute-granularity full does with the whole layer; "
                "leave one of them out"
            )
        # a norm's output can be discarded if one block alone reads it
        if self.recomputes("layernorm"):
            conflict = None
            if self.apply_residual_connection_post_layernorm:
                conflict = "--apply-residual-connection-post-layernorm"
            elif self.norm_placement not in ("pre", "sandwich", "parallel"):
                conflict = f"--norm-placement {self.norm_placement}"
            if conflict is not None:
                yield (
                    f"--recompute-modules layernorm saves no memory with {conflict}, where more than one layer "
                    "reads the output of a norm; leave one of them out"
                )


def tensor_parallel_problems(config: ShapeConfig, tensor_parallel_size: int) -> list[str]:
    """Return the reasons why this tensor-parallel size does not divide the layers."""
    sizes = {"--num-attention-heads": config.num_attention_heads}
    if config.has_dense_mlp:
        sizes["ffn hidden size"] = config.ffn_size
    problems = [
        f"{name} ({size}) must be a multiple of --tensor-model-parallel-size ({tensor_parallel_size}); change one"
        for name, size in sizes.items()
        if size % tensor_parallel_size
    ]
    if config.group_query_attention and (problem := query_group_problem(config.num_query_groups, tensor_parallel_size)):
        problems.append(problem)
    return problems


def expert_parallel_problems(config: MoEConfig, expert: int, expert_tensor: int) -> list[str]:
    """Return the reasons why these expert- and expert-tensor-parallel sizes do not divide the experts."""
    problems = []
    if config.num_experts % expert:
        problems.append(
            f"--num-experts ({config.num_experts}) must be a multiple of --expert-model-parallel-size ({expert}); change one"
        )
    if config.expert_ffn_size % expert_tensor:
        problems.append(
            f"the hidden size of an expert ({config.expert_ffn_size}, --moe-ffn-hidden-size) must be a multiple of "
            f"--expert-tensor-parallel-size ({expert_tensor}); change one"
        )
    return problems


def canonical_layer_pattern(name: str, value: Any, layers: Any) -> Any:
    """Return the setting `name` in one spelling, so that two values can be compared.

    A pattern N becomes the list of each layer, and a pattern without an exception None. Other settings, and values that
    are no pattern, are returned as they are. layers: of the model.
    """
    marked = _PATTERNS.get(name)
    if marked is None or not isinstance(value, str):
        return value
    is_number = value.isdecimal() and len(value) < 20 and int(value) > 0
    if is_number and isinstance(layers, int) and layers <= LONGEST:
        entries = [marked if is_exception(value, layer, marked=marked) else 1 - marked for layer in range(layers)]
        value = str(entries).replace(" ", "")
    has_no_exception = value.startswith("[") and str(marked) not in value
    return None if has_no_exception else value


def canonical_expert_settings(settings: Mapping[str, Any], ffn_size: int) -> dict[str, Any]:
    """Return what settings of a model say of its experts, in one spelling, so that two models can be compared.

    Of a model without experts its settings of experts are defaults, since it reads none of them. ffn_size: the width of
    its dense MLPs.
    """
    experts = settings.get("num_experts")
    layers = settings.get("num_layers")
    if experts in (None, 0, 1):
        return {field.name: default_of(field) for field in option_fields(ModelConfig) if field.name in OF_EXPERTS}
    if type(experts) is not int or experts < 2 or type(layers) is not int or not 0 < layers <= LONGEST:
        return {}
    pattern = layer_pattern(settings.get("moe_layer_freq") or "1")
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(layers)]
    canonical: dict[str, Any] = {
        "moe_ffn_hidden_size": settings.get("moe_ffn_hidden_size") or ffn_size,
        "moe_layer_freq": str(pattern).replace(" ", ""),
    }
    if all(pattern):
        canonical["ffn_hidden_size"] = None  # no layer has a dense MLP
    if settings.get("moe_router_group_topk") in (None, settings.get("moe_router_num_groups")):
        canonical |= dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"))  # any group may be chosen from
    if settings.get("moe_router_score_function", "softmax") != "softmax":
        canonical["moe_router_pre_softmax"] = False  # there is no softmax
    if settings.get("moe_router_topk_scaling_factor") == 1:
        canonical["moe_router_topk_scaling_factor"] = None
    if settings.get("moe_shared_expert_intermediate_size") is None:
        canonical["moe_shared_expert_gate"] = False
    return canonical


def query_group_problem(groups: int, tensor_parallel_size: int) -> str | None:
    """Return why key/value heads and ranks do not divide each other, None if they do."""
    if groups % tensor_parallel_size == 0 or tensor_parallel_size % groups == 0:
        return None
    return (
        f"--num-query-groups ({groups}) must be a multiple of --tensor-model-parallel-size ({tensor_parallel_size}), "
        "so that ranks have whole groups, or divide it, so that groups have whole ranks; change one"
    )
