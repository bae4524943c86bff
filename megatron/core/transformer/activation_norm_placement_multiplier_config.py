"""Settings of the functions between a layer's matrix products.

They are its activation, norms and their places, biases, and multipliers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Positive, option
from megatron.core.transformer.position_config import PositionConfig

_BEFORE = ("input_layernorm", "pre_mlp_layernorm")
_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
# The norms of a layer, by --norm-placement.
NORM_PLACEMENTS = {
    "pre": _BEFORE,
    "branch": _AFTER,
    "sandwich": (*_BEFORE, *_AFTER),
    "post": _AFTER,
    "parallel": _BEFORE,
    "parallel-one-norm": _BEFORE[:1],
}


@dataclass(frozen=True)
class BlockConfig(PositionConfig):
    """Activation, norms and biases of a layer."""

    activation: Literal["gelu-tanh", "gelu", "quick-gelu", "relu", "squared-relu", "silu"] = option(
        "gelu-tanh", "activation of the MLP; gelu: exact, with erf; quick-gelu: x sigmoid(1.702 x)"
    )
    gated: bool = option(
        False,
        "gated MLP with three matrices: W2 (activation(Wg x) * (Wu x)); with --activation gelu-tanh this is GeGLU",
    )
    activation_func_clamp_value: Positive | None = option(
        None,
        "in a gated MLP: clamp the gate Wg x to at most this value, and the linear part Wu x to between "
        "minus and plus this value",
    )
    glu_linear_offset: float = option(0.0, "in a gated MLP: add this to the linear part Wu x")
    apply_layernorm_1p: bool = option(False, "norms multiply by 1 + weight, where the weight is initialized to 0")
    norm_bias: bool = option(True, "LayerNorm without a bias")
    norm_placement: str = option(
        "pre",
        "where the norms N are, around attention A and MLP M: pre: x + A(N x), then x + M(N x); branch: x + N(A x); "
        "sandwich: x + N(A(N x)); post: N(x + A x), as BERT; parallel: x + A(N1 x) + M(N2 x); parallel-one-norm: x + "
        "A y + M y with y = N x",
        names=NORM_PLACEMENTS,
    )
    apply_residual_connection_post_layernorm: bool = option(
        False,
        "with --norm-placement pre: add a block's result to the output of its norm instead of to the input of its norm",
    )
    add_attention_output_bias: bool = option(False, "bias in attention's output layer, even with --disable-bias-linear")
    add_mlp_bias: bool = option(False, "biases in the MLP, even with --disable-bias-linear")
    add_output_bias: bool = option(False, "bias of the logits, one for each token of the vocabulary")
    embedding_multiplier: Positive = option(
        1.0, "multiply token embeddings by this number, which is first rounded to their dtype"
    )
    residual_multiplier: Positive = option(
        1.0, "multiply the result of each attention and MLP block by this before adding it to the residual stream"
    )
    logit_multiplier: Positive = option(1.0, "multiply the logits by this")
    final_logit_softcapping: Positive | None = option(None, "soft-cap c of the logits: c tanh(logit / c)")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.swiglu and (self.gated or self.activation != "gelu-tanh"):
            yield (
                f"--swiglu means --gated --activation silu, but --activation is {self.activation}; leave one of "
                "them out"
            )
        gate_options = {
            "--activation-func-clamp-value": self.activation_func_clamp_value is not None,
            "--glu-linear-offset": self.glu_linear_offset != 0,
        }
        for flag, is_set in gate_options.items():
            if is_set and not self.is_gated:
                yield f"{flag} needs a gated MLP; give --gated or --swiglu too, or leave it out"
        if not self.norm_bias and self.normalization != "LayerNorm":
            yield (
                f"--no-norm-bias: {self.normalization} has no bias; give --normalization LayerNorm, or leave out "
                "--no-norm-bias"
            )
        if self.apply_residual_connection_post_layernorm and self.norm_placement != "pre":
            yield (
                f"--apply-residual-connection-post-layernorm needs --norm-placement pre, not {self.norm_placement}; "
                "leave one of them out"
            )

    @property
    def is_gated(self) -> bool:
        return self.swiglu or self.gated

    @property
    def activation_region(self) -> str:
        """The key of the MLP's activation in REGIONS, without its clamp value and offset."""
        if self.swiglu:
            return "gated_silu"
        return f"gated_{self.activation}" if self.gated else self.activation

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The names of a layer's norms."""
        return NORM_PLACEMENTS[self.norm_placement]

    @property
    def norm_region(self) -> str:
        """The key of the norm in REGIONS."""
        return self.normalization + ("1p" if self.apply_layernorm_1p else "")

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_proj_bias(self) -> bool:
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.add_bias_linear or self.add_mlp_bias
