"""One transformer layer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.dropout import HiddenDropout
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.compiled_layer import WholeLayer
from megatron.core.transformer.layer_context import LayerContext, MakePart
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import Norm, make_norm
from megatron.core.transformer.recompute import give_up, recomputed


class ParallelTransformerLayer(nn.Module):
    """x -> x + drop(attention(norm(x))), then x + drop(mlp(norm(x))); other `--norm-placement` have other norms.

    The sums have the dtype of x, the blocks that of their weights: with `--fp32-residual-connection` x is float32.
    `layer` counts from 0 over the whole model. `make_attention` and `make_mlp` build the two blocks; a model passes
    its own with `make_layer=partial(ParallelTransformerLayer, make_mlp=OwnMLP)`.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the shape of x. Per forward:
    two all-reduces of [s, b, h] over tp; under sequence parallelism two all-gathers and two reduce-scatters.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        context: LayerContext,
        *,
        make_attention: MakePart = ParallelAttention,
        make_mlp: MakePart = ParallelMLP,
    ):
        super().__init__()

        def norm(name: str) -> nn.Module | None:
            return make_norm(config, context) if name in config.layer_norms else None

        self.input_layernorm = norm("input_layernorm")
        self.self_attention = make_attention(config, layer, context)
        self.attention_dropout = context.hidden_dropout(config.hidden_dropout, "after attention", layer)
        self.post_self_attn_layernorm = norm("post_self_attn_layernorm")
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        self.mlp = make_mlp(config, layer, context)
        self.post_mlp_layernorm = norm("post_mlp_layernorm")
        self.placement, self.multiplier = config.norm_placement, config.residual_multiplier
        self.adds_to_normed = config.apply_residual_connection_post_layernorm
        self.keys, self.compiled = context.keys, compiles(config, context.tp.device)
        self.recomputes_mlp, self.recomputes_norms = config.recomputes("mlp"), config.recomputes("layernorm")
        self.mlp_dropout = context.hidden_dropout(config.hidden_dropout, "after mlp", layer)
        self.compiled_whole = (
            WholeLayer(self, config, context.tp) if self.compiled and config.compile == "layers" else None
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        if self.compiled_whole is not None and self.compiled_whole.takes(cache):
            x, fused = self.compiled_whole.before(x)
            heads = self.self_attention.heads_of(fused, None, angles)
            return self.compiled_whole.after(x, self.self_attention.of_heads(heads, mask))
        attend = lambda normed: self.self_attention(normed, mask, angles, cache)  # noqa: E731
        mlp = partial(recomputed, self.mlp, self.keys) if self.recomputes_mlp else self.mlp
        if self.placement in ("parallel", "parallel-one-norm"):
            return self._side_by_side(x, attend, mlp)
        x, out = self._of_norm(self.input_layernorm, x, attend)
        x = self._sum(x, out, self.attention_dropout, self.post_self_attn_layernorm)
        x, out = self._of_norm(self.pre_mlp_layernorm, x, mlp)
        return self._sum(x, out, self.mlp_dropout, self.post_mlp_layernorm)

    def _side_by_side(self, x: Tensor, attend: Callable[[Tensor], Tensor], mlp: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_mlp_layernorm is None:
            x, normed = _normed(self.input_layernorm, x)
            attended, out = attend(normed), mlp(normed)
        else:
            x, attended = self._of_norm(self.input_layernorm, x, attend)
            x, out = self._of_norm(self.pre_mlp_layernorm, x, mlp)
        return self._sum(self._sum(x, attended, self.attention_dropout), out, self.mlp_dropout)

    def _sum(self, x: Tensor, out: Tensor, dropout: nn.Module, norm: nn.Module | None = None) -> Tensor:
        """x + drop(out); norm: of the result, or before that of `out`."""
        if norm is not None and self.placement == "post":
            return norm(self._sum(x, out, dropout))
        out = out if norm is None else norm(out)
        out = out if self.multiplier == 1 else out * self.multiplier
        if not (self.compiled and isinstance(dropout, HiddenDropout) and dropout.is_active):
            return x + dropout(out)
        return REGIONS["residual"].compiled(x, out, *dropout.words_for(out), dropout.probability, out.dtype)

    def _of_norm(self, norm: nn.Module | None, x: Tensor, block: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(x, block(norm(x)))"""
        if norm is None:
            return x, block(x)
        x, normed = _normed(norm, x)
        result = block(normed)
        if self.adds_to_normed:
            return normed, result
        if self.recomputes_norms and result.requires_grad:
            give_up(normed, partial(norm, x), until=result)
        return x, result


def _normed(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(x, norm(x)); a compiled norm adds the gradients of both in its own pass."""
    return norm(x, beside_input=True) if isinstance(norm, Norm) and norm.carries else (x, norm(x))


# Megatron's names.
__getattr__, __dir__ = lazy_names(
    __name__, {"megatron.core.classic.layers": "TransformerLayer TransformerLayerSubmodules"}
)
