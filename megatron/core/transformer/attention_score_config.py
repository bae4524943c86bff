"""Attention's scores, and the norms of queries and keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Positive, knob
from megatron.core.transformer.activation_and_norm_config import BlockConfig


@dataclass(frozen=True)
class AttentionConfig(BlockConfig):
    """Scores of attention, and norms of queries and keys."""

    qk_norm_over: Literal["head", "each-head", "width"] = knob(
        "head",
        "--qk-layernorm over: head: each head's width, one weight for all; each-head: a weight for each; width: all heads",
    )
    softmax_scale: Positive | None = knob(
        None, "times the scores of attention; default: 1 / the square root of a head's width"
    )
    scale_attn_by_inverse_layer_idx: bool = knob(False, "divide the scores of layer i, from 1 on, by i")
    attn_logit_softcapping: Positive | None = knob(None, "soft cap c of attention's scores: c tanh(score / c)")
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = knob(
        "vanilla",
        "denominator of attention's softmax: off-by-one: 1 is added; learnable: exp of a parameter of each head (sink)",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.qk_norm_over != "head" and not self.qk_layernorm:
            yield f"--qk-norm-over {self.qk_norm_over} needs --qk-layernorm; give that too, or leave it out"
        if self.qk_norm_over == "width" and self.normalization != "RMSNorm":
            yield f"--qk-norm-over width is built for --normalization RMSNorm, which is {self.normalization}; change one"

    def query_factor(self, layer: int) -> float:
        """Times the queries of a layer, from 0, before scores that are divided by the square root of a head's width."""
        factor = 1.0 if self.softmax_scale is None else self.softmax_scale * self.head_width**0.5
        return factor / (layer + 1) if self.scale_attn_by_inverse_layer_idx else factor
