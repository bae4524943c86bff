"""The shape of a transformer: layers, widths, and the functions in a layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.base.dataclass_flags import BelowOne, Count, FlagConfig, NotNegative, WholeNumber, knob, out_of_range
from megatron.core.ops.attention.kernels import KERNELS, attention_function
from megatron.core.sharding.placement import Normal, XavierUniform
from megatron.core.transformer.layer_freq_pattern import layer_pattern, read_pattern
from megatron.core.transformer.sliding_window_config import keys_before, read_window, window_pair, window_problems


@dataclass(frozen=True)
class ShapeConfig(FlagConfig):
    """Layers, widths, and the functions in a layer."""

    num_layers: Count = knob(
        12, "transformer layers; pretrain_t5.py: of the encoder", flags=("--num-layers", "--encoder-num-layers")
    )
    decoder_num_layers: WholeNumber | None = knob(
        None, "pretrain_t5.py: layers of the decoder; 0: as many as of the encoder"
    )
    hidden_size: Count = knob(768, "hidden size")
    num_attention_heads: Count = knob(12, "attention (query) heads")
    ffn_hidden_size: Count | None = knob(None, "MLP hidden size; default: 4 x hidden, or 8/3 x hidden with --swiglu")
    kv_channels: Count | None = knob(None, "head size; default: hidden size / heads")
    group_query_attention: bool = knob(False, "share each key/value head among several query heads")
    num_query_groups: Count = knob(1, "key/value heads, with --group-query-attention")
    max_position_embeddings: Count | None = knob(None, "rows of the learned position table; default: --seq-length")
    normalization: Literal["LayerNorm", "RMSNorm"] = knob("LayerNorm", "pre-normalization layer")
    norm_epsilon: NotNegative = knob(1e-5, "epsilon of the norms", flags=("--norm-epsilon", "--layernorm-epsilon"))
    swiglu: bool = knob(False, "SwiGLU MLP instead of GELU")
    add_bias_linear: bool = knob(True, "no biases in linear layers", flags=("--disable-bias-linear",))
    add_qkv_bias: bool = knob(False, "bias in the QKV layer, even with --disable-bias-linear")
    qk_layernorm: bool = knob(False, "normalize query and key heads, as --normalization says")
    untie_embeddings_and_output_weights: bool = knob(False, "separate weight for the output layer")
    scale_decoder_outputs: bool = knob(
        True,
        "pretrain_t5.py: the word table as output layer takes hidden states as they are, not divided by their width's root",
        flags=("--no-scale-decoder-outputs",),
    )
    make_vocab_size_divisible_by: Count = knob(128, "pad the vocabulary to a multiple of this x tensor-parallel size")
    hidden_dropout: BelowOne = knob(0.1, "dropout after the embedding and each block")
    attention_dropout: BelowOne = knob(0.1, "dropout of attention probabilities")
    init_method_std: NotNegative = knob(0.02, "standard deviation of initial weights")
    init_method_xavier_uniform: bool = knob(
        False, "matrices start by Xavier's uniform rule, of the whole matrix in any layout"
    )
    embedding_init_method_std: NotNegative | None = knob(
        None, "standard deviation of the initial tables, which then have no weight decay; default: as other weights"
    )
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
        yield from window_problems(self.window_size, self.window_attn_skip_freq, self.num_layers)

    @property
    def decoder_layers(self) -> int:
        """Layers of the second stack of a model that has two; 0: there is one stack."""
        return 0 if self.decoder_num_layers is None else self.decoder_num_layers or self.num_layers

    @property
    def all_layers(self) -> int:
        """Layers of the whole model, which pipeline stages share: those of the encoder come first."""
        return self.num_layers + self.decoder_layers

    @staticmethod
    def function_of_attention(backend: str) -> str | None:
        """What the kernel of a value of --attention-backend computes; None if this script has no such kernel."""
        return attention_function(backend) if backend in KERNELS else None

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
    def parsed_patterns(self) -> dict[str, Any]:
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
    def init(self) -> Normal | XavierUniform:
        """The initial value of matrices."""
        return XavierUniform() if self.init_method_xavier_uniform else Normal(self.init_method_std)

    @property
    def output_init(self) -> Normal | XavierUniform:
        """Of those that write into the residual stream."""
        return XavierUniform() if self.init_method_xavier_uniform else Normal(self.output_init_std)

    @property
    def embedding_init(self) -> Normal | XavierUniform:
        """Of the tables of words, positions and token types."""
        std = self.embedding_init_method_std
        return self.init if std is None else Normal(std)

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
