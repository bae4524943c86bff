"""Settings of a transformer's shape: layers, widths, and the functions in a layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from megatron.core.base.dataclass_flags import (
    BelowOne,
    ConfigError,
    Count,
    FlagConfig,
    NotNegative,
    WholeNumber,
    option,
    out_of_range,
)
from megatron.core.ops.attention.attention_backend_names import KernelNames
from megatron.core.sharding.placement import Normal, XavierUniform
from megatron.core.transformer.layer_freq_pattern import layer_pattern, read_pattern
from megatron.core.transformer.parse_sliding_window import (
    parse_window_size,
    read_window,
    window_left,
    window_skip_freq_problems,
)


@dataclass(frozen=True)
class ShapeConfig(FlagConfig):
    """Layers, widths, and the functions in a layer."""

    num_layers: Count = option(
        12, "transformer layers; pretrain_t5.py: of the encoder", flags=("--num-layers", "--encoder-num-layers")
    )
    decoder_num_layers: WholeNumber | None = option(
        None, "pretrain_t5.py: decoder layers; 0: as many as encoder layers"
    )
    hidden_size: Count = option(768, "hidden size")
    num_attention_heads: Count = option(12, "attention (query) heads")
    ffn_hidden_size: Count | None = option(None, "MLP hidden size; default: 4 x hidden, or 8/3 x hidden with --swiglu")
    kv_channels: Count | None = option(None, "head size; default: hidden size / heads")
    group_query_attention: bool = option(False, "share each key/value head among several query heads")
    num_query_groups: Count = option(1, "key/value heads, with --group-query-attention")
    max_position_embeddings: Count | None = option(
        None, "rows of the learned position embedding; default: --seq-length"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "pre-normalization layer")
    norm_epsilon: NotNegative = option(1e-5, "epsilon of the norms", flags=("--norm-epsilon", "--layernorm-epsilon"))
    swiglu: bool = option(False, "SwiGLU MLP instead of GELU")
    add_bias_linear: bool = option(True, "no biases in linear layers", flags=("--disable-bias-linear",))
    add_qkv_bias: bool = option(False, "bias in the QKV layer, even with --disable-bias-linear")
    qk_layernorm: bool = option(False, "normalize the query and key heads with the layer of --normalization")
    untie_embeddings_and_output_weights: bool = option(
        False, "do not share the weight of the output layer with the word embedding"
    )
    scale_decoder_outputs: bool = option(
        True,
        "pretrain_t5.py: with tied weights, do not divide the hidden states by sqrt(hidden size) before the output "
        "layer",
        flags=("--no-scale-decoder-outputs",),
    )
    make_vocab_size_divisible_by: Count = option(
        128, "pad the vocabulary to a multiple of this number times the tensor-parallel size"
    )
    pad_vocab_size: bool = option(
        True,
        "do not pad the vocabulary, which then must be a multiple of the tensor-parallel size",
        flags=("--no-pad-vocab-size", "--disable-pad-vocab-size"),
    )
    hidden_dropout: BelowOne = option(
        0.1, "dropout probability after the embedding and after each attention and MLP block"
    )
    attention_dropout: BelowOne = option(0.1, "dropout of attention probabilities")
    init_method_std: NotNegative = option(0.02, "standard deviation of initial weights")
    init_method_xavier_uniform: bool = option(
        False,
        "initialize weight matrices by Xavier's uniform rule with the sizes of the unsharded matrix, in any layout",
    )
    embedding_init_method_std: NotNegative | None = option(
        None,
        "standard deviation of the initial embedding weights, which then have no weight decay; default: "
        "--init-method-std, with weight decay",
    )
    window_size: str | None = option(
        None,
        "sliding window L,0: a query attends to its own position and the L before it; write --window-size=-1,0 for "
        "all positions",
        metavar="L,0",
        read=read_window,
    )
    window_attn_skip_freq: str | None = option(
        None,
        "which layers have no sliding window: N: every Nth layer; or a list with 0 for those layers and 1 for the "
        "others, such as [1,1,0]*4",
        metavar="N|LIST",
        read=read_pattern,
    )
    attention_backend: str = option(
        "auto",
        "auto, fused, flash: torch's fused kernel where it supports the settings; tiled: compiled tiles, which "
        "need --compile and causal attention; tiled-eager: tiles in eager torch, for any mask; unfused, local: the "
        "reference, which stores all attention scores",
        names=KernelNames(),
    )

    def problems(self) -> Iterator[str]:
        if any(out_of_range(self)):
            return
        heads = self.num_attention_heads
        groups = self.query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            yield (
                f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads {heads}; change "
                "one, or give --kv-channels"
            )
        if self.ffn_size < 1:
            yield (
                f"--swiglu with --hidden-size {self.hidden_size} gives an MLP of width 0; give --hidden-size 24 "
                "or more, or --ffn-hidden-size"
            )
        if heads % groups:
            yield f"--num-attention-heads {heads} must be a multiple of --num-query-groups {groups}; change one"
        if self.num_query_groups != 1 and not self.group_query_attention:
            yield "--num-query-groups needs --group-query-attention"
        yield from window_skip_freq_problems(self.window_size, self.window_attn_skip_freq, self.num_layers)

    @property
    def decoder_layers(self) -> int:
        """The layers of the decoder of a model with an encoder and a decoder; 0 for others."""
        if self.decoder_num_layers is None:
            return 0
        return self.decoder_num_layers or self.num_layers

    @property
    def all_layers(self) -> int:
        """The layers of the whole model, which are split over pipeline stages: first the encoder's."""
        return self.num_layers + self.decoder_layers

    @staticmethod
    def function_of_attention(backend: str) -> str | None:
        """Return which function the kernel of --attention-backend computes; None if this script has no such kernel."""
        kernels = import_module("megatron.core.ops.attention.kernels")  # not above: it needs torch, and --help does not
        return kernels.attention_function(backend) if backend in kernels.KERNELS else None

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """The number of key/value heads: one per query head, or --num-query-groups."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def window_left(self, layer: int) -> int | None:
        """Return how many keys before its own a query of this layer sees; None: all of them.

        layer: from 0, over the whole model.
        """
        return window_left(self.window_size, self.window_attn_skip_freq, layer)

    @property
    def parsed_patterns(self) -> dict[str, Any]:
        """The settings of windows in the types of Megatron's parser: a pair; a number or a list."""
        return {
            "window_size": parse_window_size(self.window_size) if self.window_size else None,
            "window_attn_skip_freq": layer_pattern(self.window_attn_skip_freq) if self.window_attn_skip_freq else None,
        }

    @property
    def ffn_size(self) -> int:
        """The width inside the MLP. SwiGLU has three matrices instead of two, so its default width is two thirds."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:
            return int(4 * self.hidden_size * 2 / 3 / 64) * 64  # a multiple of 64
        return 4 * self.hidden_size

    @property
    def init(self) -> Normal | XavierUniform:
        """The initial value of matrices."""
        return XavierUniform() if self.init_method_xavier_uniform else Normal(self.init_method_std)

    @property
    def output_init(self) -> Normal | XavierUniform:
        """The initial value of matrices that write into the residual stream."""
        return XavierUniform() if self.init_method_xavier_uniform else Normal(self.output_init_std)

    @property
    def embedding_init(self) -> Normal | XavierUniform:
        """The initial value of token, position and token type embeddings."""
        std = self.embedding_init_method_std
        return self.init if std is None else Normal(std)

    @property
    def output_init_std(self) -> float:
        """The standard deviation for layers that write into the residual stream, a sum of 2 x num_layers of them.

        Source: GPT-2, section 2.3.
        """
        return self.init_method_std / (2 * self.num_layers) ** 0.5

    def ranks_per_kv_head(self, tensor_parallel_size: int) -> int:
        """Return how many tensor-parallel ranks share one key/value head: 1, unless there are more ranks than heads."""
        return max(1, tensor_parallel_size // self.query_groups)

    def padded_vocab_size(self, vocab_size: int, tensor_parallel_size: int) -> int:
        """Return the rows of the embedding weight over all ranks, with padding.

        Raises ConfigError if there may be no padding, and the ranks do not divide the vocabulary.
        """
        if not self.pad_vocab_size:
            if vocab_size % tensor_parallel_size:
                raise ConfigError(
                    f"--no-pad-vocab-size: the vocabulary of {vocab_size} must be a multiple of "
                    f"--tensor-model-parallel-size ({tensor_parallel_size}); leave out --no-pad-vocab-size or change the size"
                )
            return vocab_size
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple
