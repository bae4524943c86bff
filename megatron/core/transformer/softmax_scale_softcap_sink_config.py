"""Settings of attention scores, and of the norms of queries and keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Positive, option
from megatron.core.transformer.activation_norm_placement_multiplier_config import BlockConfig


@dataclass(frozen=True)
class AttentionConfig(BlockConfig):
    """Scores of attention, and norms of queries and keys."""

    qk_norm_over: Literal["head", "each-head", "width"] = option(
        "head",
        "what --qk-layernorm normalizes: head: each head, with one weight for all heads; each-head: each head, with "
        "a weight of its own; width: all heads together",
    )
    softmax_scale: Positive | None = option(None, "multiply attention scores by this; default: 1 / sqrt(head size)")
    scale_attn_by_inverse_layer_idx: bool = option(
        False, "divide the attention scores of layer i by i; layers are counted from 1"
    )
    attn_logit_softcapping: Positive | None = option(None, "soft-cap c of the attention scores: c tanh(score / c)")
    clip_qkv: Positive | None = option(
        None, "clamp queries, keys and values to [-X, X], before rotary positions and after --qk-layernorm"
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = option(
        "vanilla",
        "term added to the softmax's denominator (attention sink): vanilla: none; off-by-one: 1; learnable: exp of a "
        "parameter of each head",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.qk_norm_over != "head" and not self.qk_layernorm:
            yield f"--qk-norm-over {self.qk_norm_over} needs --qk-layernorm; give both, or leave out --qk-norm-over"
        if self.qk_norm_over == "width" and self.normalization != "RMSNorm":
            yield f"--qk-norm-over width needs --normalization RMSNorm, not {self.normalization}; change one"

    def query_factor(self, layer: int) -> float:
        """Return the factor of a layer's queries; kernels divide scores by the square root of a head's width after it.

        layer: from 0, over the whole model.
        """
        factor = 1.0
        if self.softmax_scale is not None:
            factor = self.softmax_scale * self.head_width**0.5
        if self.scale_attn_by_inverse_layer_idx:
            factor /= layer + 1
        return factor
