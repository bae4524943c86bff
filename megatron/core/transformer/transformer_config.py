"""The settings of a transformer: its shape, the activations it saves, its loss and its precision, four configs in one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from megatron.core.config import (
    BelowOne,
    Count,
    FlagConfig,
    NotNegative,
    Positive,
    WholeNumber,
    flag_of,
    knob,
    out_of_range,
)
from megatron.core.transformer.kernels import KERNELS


@dataclass(frozen=True)
class ShapeConfig(FlagConfig):
    """Layers, widths, and the functions that a layer is made of."""

    num_layers: Count = knob(
        12, "transformer layers in the whole model", flags=("--num-layers", "--encoder-num-layers")
    )
    hidden_size: Count = knob(768, "width of the residual stream")
    num_attention_heads: Count = knob(12, "query heads of each layer")
    ffn_hidden_size: Count | None = knob(
        None, "width inside the MLP; 4 x hidden, or 8/3 x hidden with --swiglu, when unset"
    )
    kv_channels: Count | None = knob(None, "width of one head; hidden size / heads when unset")
    group_query_attention: bool = knob(False, "let several query heads share one key and value head")
    num_query_groups: Count = knob(1, "key/value heads, with --group-query-attention")
    max_position_embeddings: Count | None = knob(
        None, "rows of the learned position table; the sequence length when unset"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = knob(
        "learned_absolute", "how positions enter"
    )
    rotary_base: Positive = knob(10000.0, "base of the rotary wavelengths")
    rotary_percent: Annotated[float, "(0, 1]"] = knob(1.0, "share of each head that is rotated")
    normalization: Literal["LayerNorm", "RMSNorm"] = knob("LayerNorm", "normalization before each block")
    norm_epsilon: NotNegative = knob(1e-5, "added to the variance", flags=("--norm-epsilon", "--layernorm-epsilon"))
    swiglu: bool = knob(False, "gated MLP with SiLU instead of GELU")
    add_bias_linear: bool = knob(True, "leave out the biases of linear layers", flags=("--disable-bias-linear",))
    add_qkv_bias: bool = knob(False, "keep the bias of the query/key/value layer, even with --disable-bias-linear")
    qk_layernorm: bool = knob(False, "normalize each query and key head over its width, as --normalization does")
    untie_embeddings_and_output_weights: bool = knob(False, "give the output layer its own weight")
    make_vocab_size_divisible_by: Count = knob(
        128, "pad the vocabulary to a multiple of this times the tensor-parallel size"
    )
    hidden_dropout: BelowOne = knob(0.1, "dropout after the embedding and after each block")
    attention_dropout: BelowOne = knob(0.1, "dropout of attention probabilities")
    init_method_std: NotNegative = knob(0.02, "standard deviation of initial weights")
    attention_backend: str = knob(
        "auto",
        "auto, fused or flash: torch's fused kernel wherever it can do the work; unfused or local: the plain one",
        names=KERNELS,
    )

    def problems(self) -> Iterator[str]:
        if any(out_of_range(self)):
            return
        heads, groups = self.num_attention_heads, self.query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            yield (
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads {heads}; "
                "change one or give --kv-channels"
            )
        if self.ffn_size < 1:
            yield (
                f"--swiglu and --hidden-size {self.hidden_size} make an MLP of width 0, the multiple of 64 below two thirds of 4 x "
                f"{self.hidden_size}; give --ffn-hidden-size, or a --hidden-size of at least 24"
            )
        if heads % groups:
            yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one"
        if self.num_query_groups != 1 and not self.group_query_attention:
            yield "--num-query-groups needs --group-query-attention"
        if self.position_embedding_type == "rope" and self.rotary_width % 2:
            yield f"rotary positions need an even width; heads of {self.head_width} x --rotary-percent give {self.rotary_width}"

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads: one per query head unless groups share them."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP. A gated one has three matrices instead of two, so two thirds of the width by default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_percent)

    @property
    def output_init_std(self) -> float:
        """Of the layers that write into the residual stream, which adds 2 x num_layers of them (GPT-2, section 2.3)."""
        return self.init_method_std / (2 * self.num_layers) ** 0.5

    def ranks_per_kv_head(self, tensor_parallel_size: int) -> int:
        """Tensor-parallel ranks that share one key/value head: one, unless there are more ranks than heads."""
        return max(1, tensor_parallel_size // self.query_groups)

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int) -> int:
        """The rows of the embedding table over all ranks. The padding never takes part in anything."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple


_RECOMPUTED = ("core_attn", "mlp", "layernorm")
_EXPERTS = "mixture of experts (--num-experts)"
_NOT_HERE = {"moe_act": _EXPERTS, "moe": _EXPERTS, "shared_experts": _EXPERTS, "mla_up_proj": "multi-latent attention"}


@dataclass(frozen=True)
class RecomputeConfig(FlagConfig):
    """Activations: kept for the backward, where, or computed again."""

    recompute_granularity: Literal["full", "selective"] | None = knob(
        None,
        "what the backward computes again instead of keeping: whole layers, or the parts that --recompute-modules names",
    )
    recompute_modules: list[str] = knob(
        ["core_attn"],
        "selective: core_attn (attention's scores), mlp, layernorm (the outputs of a layer's norms)",
        metavar="NAME",
    )
    recompute_method: Literal["uniform", "block"] | None = knob(
        None, "full: keep the input of every group of layers, or compute the first layers of each stage again"
    )
    recompute_num_layers: Count | None = knob(
        None,
        "layers in a group (uniform), or first layers of a stage (block)",
        flags=("--recompute-num-layers", "--checkpoint-num-layers"),
    )
    distribute_saved_activations: bool = knob(
        False,
        "full: keep the inputs of recomputed layers in parts over the tensor-parallel ranks, and gather them in the backward",
    )
    contiguous_checkpointing: bool = knob(
        False,
        "full: keep the inputs of recomputed layers in one buffer for each stage, asked for once, instead of wherever there is room",
        flags=("--contiguous-checkpointing", "--contigious-checkpointing"),
    )
    cpu_offloading_num_layers: WholeNumber = knob(
        0,
        "first layers of each stage whose activations wait for the backward in memory of the host, or with --offload-dir in a "
        "file: the inputs of recomputed layers, of others what autograd saves",
    )
    min_offloaded_tensor_size: WholeNumber = knob(
        2**20,
        "elements of the smallest tensor that --cpu-offloading-num-layers moves, of a layer that is not recomputed",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        full, offloaded = self.recompute_granularity == "full", self.cpu_offloading_num_layers
        if full and self.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block"
        if not full and (self.recompute_method is not None or self.recompute_num_layers is not None):
            yield "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        for name in ("distribute_saved_activations", "contiguous_checkpointing"):
            if getattr(self, name) and not full:
                yield f"{flag_of(name)} is about the inputs that --recompute-granularity full keeps"
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
        """Whether the backward computes this part of every layer again: core_attn, mlp or layernorm."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules


@dataclass(frozen=True)
class LossConfig(FlagConfig):
    """The loss of a token."""

    label_smoothing: BelowOne = knob(
        0.0, "share of a token's probability that its loss gives to the other words, in equal parts"
    )
    z_loss_coeff: NotNegative = knob(0.0, "times the squared log-sum-exp of a token's scores is added to its loss")


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class PrecisionConfig(FlagConfig):
    """The dtypes of weights, activations and products."""

    fp32_residual_connection: bool = knob(False, "keep the residual stream in float32, with --bf16 or --fp16")
    bf16: bool = knob(False, "weights and activations in bfloat16, with fp32 master weights and gradients")
    fp16: bool = knob(False, "weights and activations in float16, with fp32 master weights and loss scaling")
    cpu_half_products: Literal["auto", "measure", "native", "widened"] = knob(
        "auto",
        "how a CPU multiplies matrices in the precision of --bf16 or --fp16: native, by its own instructions; widened, in float32, "
        "each result rounded once; measure: of each kind of product whichever it does faster; auto: what the run that it goes on from did, "
        "else measured",
    )
    fp64: bool = knob(False, "everything in float64: slow, for comparing layouts without rounding in the way")

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
        """Of the residual stream, and so of what passes between pipeline stages."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype


@dataclass(frozen=True)
class TransformerConfig(PrecisionConfig, LossConfig, RecomputeConfig, ShapeConfig):
    """Model."""  # a dataclass lists the fields of its last base first, and so do help and manifests


def tensor_parallel_problems(config: ShapeConfig, tensor_parallel_size: int) -> list[str]:
    """Why the layers cannot be divided over so many ranks, if they cannot."""
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
    """Why so many key/value heads cannot be laid on the ranks, if they cannot."""
    if groups % tensor_parallel_size == 0 or tensor_parallel_size % groups == 0:
        return None
    return (
        f"--num-query-groups ({groups}) must be a multiple of --tensor-model-parallel-size ({tensor_parallel_size}), "
        "so that ranks have whole groups, or divide it, so that groups have whole ranks; change one"
    )
