"""The functions between the products of a layer: activation, norms and their places, biases, multipliers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Positive, knob
from megatron.core.transformer.position_config import PositionConfig

_BEFORE, _AFTER = ("input_layernorm", "pre_mlp_layernorm"), ("post_self_attn_layernorm", "post_mlp_layernorm")
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

    activation: Literal["gelu-tanh", "gelu", "quick-gelu", "relu", "squared-relu", "silu"] = knob(
        "gelu-tanh", "activation of the MLP; gelu: by the error function; quick-gelu: x sigmoid(1.702 x)"
    )
    gated: bool = knob(False, "gated MLP, with three matrices: W2 (activation(Wg x) * (Wu x)); GeGLU with gelu-tanh")
    activation_func_clamp_value: Positive | None = knob(
        None, "gated MLP: bound Wg x from above, and Wu x on both sides, by this"
    )
    glu_linear_offset: float = knob(0.0, "gated MLP: added to Wu x")
    apply_layernorm_1p: bool = knob(False, "norms multiply by 1 + weight, with weights that start at 0")
    norm_bias: bool = knob(True, "LayerNorm without a bias")
    norm_placement: str = knob(
        "pre",
        "pre: x + A(N x), then x + M(N x); branch: x + N(A x); sandwich: x + N(A(N x)); post: N(x + A x), as "
        "BERT; parallel: "
        "x + A(N1 x) + M(N2 x); parallel-one-norm: x + A y + M y with y = N x",
        names=NORM_PLACEMENTS,
    )
    apply_residual_connection_post_layernorm: bool = knob(
        False, "--norm-placement pre: the blocks' results are added to the norm's result, instead of its input"
    )
    add_attention_output_bias: bool = knob(False, "bias in attention's output layer, even with --disable-bias-linear")
    add_mlp_bias: bool = knob(False, "biases in the MLP, even with --disable-bias-linear")
    add_output_bias: bool = knob(False, "bias of the scores, one for each word")
    embedding_multiplier: Positive = knob(1.0, "times the words' embeddings, rounded to their dtype")
    residual_multiplier: Positive = knob(1.0, "times the result of each block before it is added")
    logit_multiplier: Positive = knob(1.0, "times the scores of the words")
    final_logit_softcapping: Positive | None = knob(None, "soft cap c of the words' scores: c tanh(score / c)")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.swiglu and (self.gated or self.activation != "gelu-tanh"):
            yield f"--swiglu is --gated --activation silu, and --activation is {self.activation}; leave one of them out"
        of_gates = {
            "--activation-func-clamp-value": self.activation_func_clamp_value is not None,
            "--glu-linear-offset": self.glu_linear_offset != 0,
        }
        for flag in (flag for flag, given in of_gates.items() if given and not self.is_gated):
            yield f"{flag} is about a gated MLP; give --gated or --swiglu too, or leave it out"
        if not self.norm_bias and self.normalization != "LayerNorm":
            yield f"--no-norm-bias: {self.normalization} has no bias; give --normalization LayerNorm, or leave it out"
        if self.apply_residual_connection_post_layernorm and self.norm_placement != "pre":
            yield (
                "--apply-residual-connection-post-layernorm is about --norm-placement pre, and that is "
                f"{self.norm_placement}; leave one of them out"
            )

    @property
    def is_gated(self) -> bool:
        return self.swiglu or self.gated

    @property
    def activation_region(self) -> str:
        """The name of the MLP's function in REGIONS, but for its bounds and its offset."""
        return "gated_silu" if self.swiglu else f"gated_{self.activation}" if self.gated else self.activation

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The names of a layer's norms."""
        return NORM_PLACEMENTS[self.norm_placement]

    @property
    def norm_region(self) -> str:
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
