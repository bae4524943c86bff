"""The settings of a transformer: shape, recomputation and offload, loss, precision, and compilation; five configs in one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from megatron.core.compiler import CompileConfig
from megatron.core.config import BelowOne, Count, FlagConfig, NotNegative, Positive, WholeNumber, knob, out_of_range
from megatron.core.transformer.kernels import KERNELS
from megatron.core.transformer.window import (
    keys_before,
    layer_pattern,
    read_pattern,
    read_window,
    window_pair,
    window_problems,
)


@dataclass(frozen=True)
class ShapeConfig(FlagConfig):
    """Layers, widths, and the functions in a layer."""

    num_layers: Count = knob(12, "transformer layers", flags=("--num-layers", "--encoder-num-layers"))
    hidden_size: Count = knob(768, "hidden size")
    num_attention_heads: Count = knob(12, "attention (query) heads")
    ffn_hidden_size: Count | None = knob(None, "MLP hidden size; default: 4 x hidden, or 8/3 x hidden with --swiglu")
    kv_channels: Count | None = knob(None, "head size; default: hidden size / heads")
    group_query_attention: bool = knob(False, "share each key/value head among several query heads")
    num_query_groups: Count = knob(1, "key/value heads, with --group-query-attention")
    max_position_embeddings: Count | None = knob(None, "rows of the learned position table; default: --seq-length")
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = knob(
        "learned_absolute", "position embedding"
    )
    rotary_base: Positive = knob(10000.0, "base of the rotary frequencies")
    rotary_percent: Annotated[float, "(0, 1]"] = knob(1.0, "share of each head that is rotated")
    normalization: Literal["LayerNorm", "RMSNorm"] = knob("LayerNorm", "pre-normalization layer")
    norm_epsilon: NotNegative = knob(1e-5, "epsilon of the norms", flags=("--norm-epsilon", "--layernorm-epsilon"))
    swiglu: bool = knob(False, "SwiGLU MLP instead of GELU")
    add_bias_linear: bool = knob(True, "no biases in linear layers", flags=("--disable-bias-linear",))
    add_qkv_bias: bool = knob(False, "bias in the QKV layer, even with --disable-bias-linear")
    qk_layernorm: bool = knob(False, "normalize query and key heads, as --normalization says")
    untie_embeddings_and_output_weights: bool = knob(False, "separate weight for the output layer")
    make_vocab_size_divisible_by: Count = knob(128, "pad the vocabulary to a multiple of this x tensor-parallel size")
    hidden_dropout: BelowOne = knob(0.1, "dropout after the embedding and each block")
    attention_dropout: BelowOne = knob(0.1, "dropout of attention probabilities")
    init_method_std: NotNegative = knob(0.02, "standard deviation of initial weights")
    window_size: str | None = knob(
        None,
        "L,0: a query sees its own key and L keys before it; --window-size=-1,0: all",
        metavar="L,0",
        read=read_window,
    )
    window_attn_skip_freq: str | None = knob(
        None,
        "N: each Nth layer has no window; or a list with 1 for each layer with a window, 0 for others, such as [1,1,0]*4",
        metavar="N|LIST",
        read=read_pattern,
    )
    attention_backend: str = knob(
        "auto",
        "auto, fused, flash: torch's fused kernel where it applies; tiled: with --compile, for causal attention; "
        "tiled-eager: the same by torch operations, for any mask; unfused, local: the reference, which keeps all scores",
        names=KERNELS,
    )

    def problems(self) -> Iterator[str]:
        if any(out_of_range(self)):
            return
        heads, groups = self.num_attention_heads, self.query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            yield f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads {heads}, or give --kv-channels"
        if self.ffn_size < 1:
            yield f"--swiglu with --hidden-size {self.hidden_size} gives an MLP of width 0; give 24 or more, or --ffn-hidden-size"
        if heads % groups:
            yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one"
        if self.num_query_groups != 1 and not self.group_query_attention:
            yield "--num-query-groups needs --group-query-attention"
        if self.position_embedding_type == "rope" and self.rotary_width % 2:
            yield f"rotary positions need an even width; heads of {self.head_width} x --rotary-percent give {self.rotary_width}"
        yield from window_problems(self.window_size, self.window_attn_skip_freq, self.num_layers)

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads: one per query head, or --num-query-groups."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def keys_before(self, layer: int) -> int | None:
        """Keys before its own that a query of this layer, from 0 over the whole model, sees; None: all."""
        return keys_before(self.window_size, self.window_attn_skip_freq, layer)

    @property
    def parsed_window(self) -> dict[str, Any]:
        """The settings of windows in the types that Megatron's parser gives them: a pair; a number or a list."""
        parsers = {"window_size": window_pair, "window_attn_skip_freq": layer_pattern}
        return {name: parse(given) if (given := getattr(self, name)) else None for name, parse in parsers.items()}

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP. A gated MLP has three matrices instead of two, so its default width is two thirds."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_percent)

    @property
    def output_init_std(self) -> float:
        """Standard deviation for layers that write into the residual stream, which sums 2 x num_layers of them (GPT-2,
        section 2.3)."""
        return self.init_method_std / (2 * self.num_layers) ** 0.5

    def ranks_per_kv_head(self, tensor_parallel_size: int) -> int:
        """Tensor-parallel ranks that share one key/value head: 1, unless there are more ranks than heads."""
        return max(1, tensor_parallel_size // self.query_groups)

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int) -> int:
        """Rows of the embedding table over all ranks, with padding."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple


_RECOMPUTED = ("core_attn", "mlp", "layernorm")
_EXPERTS = "mixture of experts (--num-experts)"
_NOT_HERE = {"moe_act": _EXPERTS, "moe": _EXPERTS, "shared_experts": _EXPERTS, "mla_up_proj": "multi-latent attention"}


@dataclass(frozen=True)
class RecomputeConfig(FlagConfig):
    """Activations: kept for the backward, where, or computed again."""

    recompute_granularity: Literal["full", "selective"] | None = knob(
        None, "activation recomputation in the backward: full: whole layers; selective: --recompute-modules"
    )
    recompute_modules: list[str] = knob(
        ["core_attn"],
        "selective: core_attn (attention scores and softmax), mlp, layernorm (outputs of the norms)",
        metavar="NAME",
    )
    recompute_method: Literal["uniform", "block"] | None = knob(
        None, "full: uniform: keep the input of each group of layers; block: recompute the first layers of each stage"
    )
    recompute_num_layers: Count | None = knob(
        None,
        "layers per group (uniform), or recomputed layers per stage (block)",
        flags=("--recompute-num-layers", "--checkpoint-num-layers"),
    )
    distribute_saved_activations: bool = knob(
        False, "full: shard the saved inputs of recomputed layers over tensor-parallel ranks"
    )
    contiguous_checkpointing: bool = knob(
        False,
        "full: save the inputs of recomputed layers in one preallocated buffer per stage",
        flags=("--contiguous-checkpointing", "--contigious-checkpointing"),
    )
    cpu_offloading_num_layers: WholeNumber = knob(
        0,
        "first layers of each stage whose saved activations are offloaded to host memory, or with --offload-dir to files",
    )
    min_offloaded_tensor_size: WholeNumber = knob(
        2**20, "elements of the smallest tensor offloaded, in layers that are not recomputed"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        full, offloaded = self.recompute_granularity == "full", self.cpu_offloading_num_layers
        if full and self.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        if not full and (self.recompute_method is not None or self.recompute_num_layers is not None):
            yield "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        shares, packs = self.distribute_saved_activations, self.contiguous_checkpointing
        for flag, given in {"--distribute-saved-activations": shares, "--contiguous-checkpointing": packs}.items():
            if given and not full:
                yield f"{flag} applies to the inputs that --recompute-granularity full saves"
        if offloaded > 0 and self.recomputes("layernorm"):
            yield "--recompute-modules layernorm frees what --cpu-offloading-num-layers would move; leave one of them out"
        if offloaded == 0 and self.min_offloaded_tensor_size != 2**20:
            yield "--min-offloaded-tensor-size is about what --cpu-offloading-num-layers moves, which is 0; give that too"
        if self.recompute_modules != ["core_attn"] and self.recompute_granularity != "selective":
            yield "--recompute-modules needs --recompute-granularity selective"
        for name in self.recompute_modules:
            if name in _NOT_HERE:
                yield f"--recompute-modules {name}: there is no {_NOT_HERE[name]} to compute again; leave it out"
            elif name not in _RECOMPUTED:
                yield f"--recompute-modules {name} is not one of {', '.join(_RECOMPUTED)}"

    def recomputes(self, module: str) -> bool:
        """Whether the backward recomputes this part of every layer: core_attn, mlp or layernorm."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules


@dataclass(frozen=True)
class LossConfig(FlagConfig):
    """The loss of a token."""

    label_smoothing: BelowOne = knob(0.0, "label smoothing: share of the probability spread over the other words")
    z_loss_coeff: NotNegative = knob(0.0, "coefficient of the z-loss: squared log-sum-exp of the logits")


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class PrecisionConfig(FlagConfig):
    """The dtypes of weights, activations and products."""

    fp32_residual_connection: bool = knob(False, "keep the residual stream in fp32, with --bf16 or --fp16")
    bf16: bool = knob(False, "train in bfloat16, with fp32 master weights and gradients")
    fp16: bool = knob(False, "train in float16, with fp32 master weights and loss scaling")
    cpu_half_products: Literal["auto", "measure", "native", "widened"] = knob(
        "auto",
        "matrix products of --bf16 or --fp16 on a CPU: native; widened: in fp32, rounded once; measure: the faster per kind; "
        "auto: the resumed run's choice, else measure",
    )
    fp64: bool = knob(False, "train in float64: slow; for comparing layouts without rounding")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if len(given := [f"--{name}" for name in _DTYPES if getattr(self, name)]) > 1:
            yield f"{' and '.join(given)} exclude each other; give one"
        if self.fp32_residual_connection and not (self.bf16 or self.fp16):
            yield "--fp32-residual-connection needs --bf16 or --fp16; without them the residual is not rounded"

    @property
    def params_dtype(self) -> torch.dtype:
        return next((dtype for name, dtype in _DTYPES.items() if getattr(self, name)), torch.float32)

    @property
    def residual_dtype(self) -> torch.dtype:
        """dtype of the residual stream, and so of the tensors between pipeline stages."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype


@dataclass(frozen=True)
class ModelConfig(CompileConfig, PrecisionConfig, LossConfig, RecomputeConfig, ShapeConfig):
    """Model."""  # a dataclass lists the fields of its last base first, and so do help and manifests


def tensor_parallel_problems(config: ShapeConfig, tensor_parallel_size: int) -> list[str]:
    """The reasons why this tensor-parallel size does not divide the layers."""
    parts = {"--num-attention-heads": config.num_attention_heads, "ffn hidden size": config.ffn_size}
    problems = [
        f"{what} ({size}) must be a multiple of --tensor-model-parallel-size ({tensor_parallel_size}); change one"
        for what, size in parts.items()
        if size % tensor_parallel_size
    ]
    if config.group_query_attention and (problem := query_group_problem(config.num_query_groups, tensor_parallel_size)):
        problems.append(problem)
    return problems


def query_group_problem(groups: int, tensor_parallel_size: int) -> str | None:
    """The reason why key/value heads and ranks do not divide each other, None if they do."""
    if groups % tensor_parallel_size == 0 or tensor_parallel_size % groups == 0:
        return None
    return (
        f"--num-query-groups ({groups}) must be a multiple of --tensor-model-parallel-size ({tensor_parallel_size}), "
        "so that ranks have whole groups, or divide it, so that groups have whole ranks; change one"
    )
