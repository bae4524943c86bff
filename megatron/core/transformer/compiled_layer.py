"""`--compile layers`: a layer as two compiled programs, before its attention and after it.

    before   x -> x, norm(x) Wqkv^T + b
    after    x, heads -> x + drop(heads Wproj^T + b), then x + drop(W2 f(W1 norm(x)))

A program has the products and all that lies between them. The attention between the two is the kernel that its table chooses
for each forward. As in a `Region` both directions are formulas, so what waits for the backward is declared: the inputs
of both
norms, the product before the activation, the heads. The backward makes the results of norms and activation again, in passes
that read their inputs anyway; with regions in passes of their own. The gradient of a matrix is no part of a program: it goes
where a linear layer's goes, unrounded in half precision, to `main_grad` or to the schedule that defers it.

All layers of one shape share the programs. A layer in whose way something stands, which `WholeLayer.why_in_parts` names,
runs
as with `--compile regions`.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.ops.compile.compiled_region import Compiled
from megatron.core.ops.dropout import HiddenDropout
from megatron.core.ops.dropout_masks import MaskWords, dropped
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.region_formula_helpers import of_rows, plus_bias, wide_of
from megatron.core.tensor_parallel.linear_autograd import weight_gradient_in_time
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import Norm


class WholeLayer:
    """The programs of a `ParallelTransformerLayer`, on its parameters."""

    def __init__(self, layer: nn.Module, config: ModelConfig, tp: TensorParallel):
        self.layer, self.store = layer, tp.weight_grads
        self.regions = config.norm_region, config.activation_region
        self.programs = _programs(*self.regions)
        self.why_in_parts = _why_in_parts(config, tp) or self._of_the_script()

    def takes(self, cache: object) -> bool:
        """Whether a forward may take the programs: it calls none of the parts, whom a cache or somebody's hook may
        wait for."""
        if self.why_in_parts or cache is not None or self._of_the_script():
            return False
        hooks = (hook for part in self._parts() for held in _hooks_of(part) for hook in held.values())
        return all(_may_be_left_out(hook) for hook in hooks)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x, the product of q, k and v)"""
        norm, qkv = self.layer.input_layernorm, self.layer.self_attention.linear_qkv
        return _Before.apply(self, norm.epsilon, x, norm.weight, norm.bias, qkv.weight, qkv.bias)

    def after(self, x: Tensor, heads: Tensor) -> Tensor:
        """The layer's result. heads: what attention gives, [s, b, n d]."""
        layer, mlp = self.layer, self.layer.mlp
        norm, linears = layer.pre_mlp_layernorm, (layer.self_attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
        of_linears = (p for linear in linears for p in (linear.weight, linear.bias))
        dropouts = layer.attention_dropout, layer.mlp_dropout
        words = (word for dropout in dropouts for word in _words(dropout, x))
        numbers = norm.epsilon, *(dropout.probability for dropout in dropouts)
        return _After.apply(self, numbers, x, heads, norm.weight, norm.bias, *of_linears, *words)

    def of_matrix(self, matrix: nn.Parameter, grad: Tensor, x: Tensor) -> Tensor | None:
        """The gradient of a matrix in x matrix^T; None once it is where it belongs."""
        return weight_gradient_in_time(matrix, grad, x, self.store) if matrix.requires_grad else None

    def _parts(self) -> list[nn.Module]:
        """What the programs take over, as it is now: a script may replace a part of a layer that is built."""
        layer, attention = self.layer, self.layer.self_attention
        mlp = layer.mlp
        norms = [layer.input_layernorm, layer.pre_mlp_layernorm]
        of_attention = of_mlp = [None, None]
        if isinstance(attention, ParallelAttention):
            of_attention = [attention.linear_qkv, attention.linear_proj]
        if isinstance(mlp, ParallelMLP):
            of_mlp = [mlp.linear_fc1, mlp.linear_fc2]
        return [attention, mlp, *norms, *of_attention, *of_mlp, layer.attention_dropout, layer.mlp_dropout]

    def _of_the_script(self) -> str | None:
        for part, ours in zip(self._parts(), _OURS):
            if type(part) is not ours or "forward" in vars(part):
                return f"{type(part).__name__} is the script's own, in the place of {ours.__name__}"
        norm, activation = (REGIONS[name].compiled for name in self.regions)
        layer = self.layer
        if (
            layer.mlp.activation == activation
            and layer.input_layernorm.region == layer.pre_mlp_layernorm.region == norm
        ):
            return None
        return "a norm's or an activation's function is the script's own"


def _may_be_left_out(hook: Any) -> bool:
    """Whether a hook says that it does nothing that the parameters' use would not do."""
    return getattr(hook, "may_be_left_out", False)


_OURS = (
    *(ParallelAttention, ParallelMLP, Norm, Norm),
    *(ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, RowParallelLinear),
    *(HiddenDropout, HiddenDropout),
)


def _why_in_parts(config: ModelConfig, tp: TensorParallel) -> str | None:
    """What of the settings stands in the way of a layer as two programs, None if nothing does."""
    if tp.axis.size > 1:
        return f"the collectives of {tp.axis.size} tensor-parallel ranks lie inside a layer"
    if given_up := [name for name in ("mlp", "layernorm") if config.recomputes(name)]:
        return f"--recompute-modules {' '.join(given_up)} recomputes what lies inside a program"
    if config.tiled_mlp > 1:
        return "--tiled-mlp cuts what lies inside a program into tiles"
    if (
        config.norm_placement != "pre"
        or config.apply_residual_connection_post_layernorm
        or config.residual_multiplier != 1
    ):
        return "a program is for --norm-placement pre and plain sums"
    if config.activation_func_clamp_value is not None or config.glu_linear_offset:
        return "the gates of the MLP are bounded or shifted (--activation-func-clamp-value, --glu-linear-offset)"
    if "widened" in (tp.products.forward, tp.products.backward):
        return f"this CPU widens products in {str(tp.dtype).removeprefix('torch.')}, block by block"
    return None


def _hooks_of(part: nn.Module) -> tuple[dict, ...]:
    return part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks


def _words(dropout: HiddenDropout, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return dropout.words_for(x) if dropout.is_active else (None, None)


class _Before(torch.autograd.Function):
    """x -> x, norm(x) times a linear layer's matrix, plus its vector."""

    @staticmethod
    def forward(ctx: Any, layer: WholeLayer, epsilon: float, x: Tensor, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        """given: weight and bias of the norm, matrix and vector."""
        fused, *kept = layer.programs.before(x, *given, epsilon)
        ctx.save_for_backward(x, *given, *kept)
        ctx.layer, ctx.matrix = layer, given[2]  # as given: only this object has `main_grad`
        return x, fused

    @staticmethod
    def backward(ctx: Any, carried: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        made = _BeforeGrads(*ctx.layer.programs.before_backward(carried, grad, *ctx.saved_tensors))
        return None, None, *made[:3], ctx.layer.of_matrix(ctx.matrix, grad, made.normed), made.vector


class _After(torch.autograd.Function):
    """x, heads -> the layer's result.

    numbers: epsilon of the norm, probabilities of both dropouts. given: weight and bias of the norm, matrix and vector
    of three
    linear layers, the words of two masks.
    """

    @staticmethod
    def forward(ctx: Any, layer: WholeLayer, numbers: tuple, x: Tensor, heads: Tensor, *given: Tensor | None) -> Tensor:
        out, *kept = layer.programs.after(x, heads, *numbers, *given)
        ctx.save_for_backward(heads, *given, *kept)
        ctx.layer, ctx.matrices = layer, given[2:8:2]
        ctx.probabilities = numbers[1:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, *saved = ctx.saved_tensors
        made = _AfterGrads(*ctx.layer.programs.after_backward(grad, *ctx.probabilities, *saved))
        by_out = grad if made.by_out is None else made.by_out
        by_proj = made.x if made.by_proj is None else made.by_proj
        factors = (by_proj, heads), (made.by_inner, made.normed), (by_out, made.activated)
        of_matrices = [ctx.layer.of_matrix(matrix, *pair) for matrix, pair in zip(ctx.matrices, factors)]
        of_linears = (x for both in zip(of_matrices, made[4:7]) for x in both)
        return None, None, *made[:4], *of_linears, None, None, None, None


class _BeforeGrads(NamedTuple):
    """Gradients, and the input of the product, of whose matrix the gradient is made."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    vector: Tensor | None
    normed: Tensor


class _AfterGrads(NamedTuple):
    """Gradients, and beside the heads both factors of the gradients of matrices."""

    x: Tensor
    heads: Tensor
    weight: Tensor
    bias: Tensor | None
    of_proj: Tensor | None  # of the vectors
    of_fc1: Tensor | None
    of_fc2: Tensor | None
    by_proj: Tensor | None  # of products; None: that of x
    by_inner: Tensor
    by_out: Tensor | None  # None: that of the layer's result
    normed: Tensor
    activated: Tensor


# ---------------------------------------------------------------- the formulas


class _Programs(NamedTuple):
    before: Compiled
    before_backward: Compiled
    after: Compiled
    after_backward: Compiled


def _product(x: Tensor, matrix: Tensor, vector: Tensor | None) -> Tensor:
    return x @ matrix.t() if vector is None else x @ matrix.t() + vector


def _sum(x: Tensor, out: Tensor, vector: Tensor | None, words: tuple, probability: float) -> Tensor:
    """x + drop(out + vector)"""
    wide = plus_bias(out, vector)
    wide = wide if words[0] is None else dropped(wide, MaskWords(*words), probability)
    return (x + wide).to(torch.promote_types(x.dtype, out.dtype))


def _sum_backward(grad: Tensor, like: Tensor, words: tuple, probability: float) -> Tensor:
    """The gradient of `out`; `grad` itself if that is the same."""
    if words[0] is None:
        return grad.to(like.dtype)
    return dropped(wide_of(grad), MaskWords(*words), probability).to(like.dtype)


@cache
def _programs(normalization: str, activation: str) -> _Programs:
    """The formulas with a norm and an activation: rows of REGIONS."""
    norm, norm_backward = (f.formula for f in (REGIONS[normalization].forward, REGIONS[normalization].backward))
    active, active_backward = (f.formula for f in (REGIONS[activation].forward, REGIONS[activation].backward))
    normed_again = REGIONS[normalization].again

    def before(x, weight, bias, matrix, vector, epsilon):
        normed, *kept = norm(x, weight, bias, epsilon)
        return _product(normed, matrix, vector), *kept

    def before_backward(carried, grad, x, weight, bias, matrix, vector, *kept):
        *of_norm, _ = norm_backward(carried, grad @ matrix, x, weight, bias, *kept)
        return _BeforeGrads(*of_norm, of_rows(grad, vector), normed_again(x, weight, bias, *kept))

    def after(x, heads, epsilon, p, later_p, weight, bias, proj, of_proj, fc1, of_fc1, fc2, of_fc2, *words):
        middle = _sum(x, heads @ proj.t(), of_proj, words[:2], p)
        normed, *kept = norm(middle, weight, bias, epsilon)
        inner = normed @ fc1.t()
        (activated,) = active(inner, of_fc1)
        return _sum(middle, activated @ fc2.t(), of_fc2, words[2:], later_p), middle, inner, *kept

    def after_backward(grad, p, later_p, weight, bias, proj, of_proj, fc1, of_fc1, fc2, of_fc2, *others):
        words, kept = others[:4], others[6:]
        middle, inner = others[4:6]
        by_out = _sum_backward(grad, fc2, words[2:], later_p)
        by_inner, by_of_fc1 = active_backward(by_out @ fc2, inner, of_fc1)
        by_middle, *of_norm = norm_backward(grad, by_inner @ fc1, middle, weight, bias, *kept)[:3]
        by_proj = _sum_backward(by_middle, proj, words[:2], p)
        return _AfterGrads(
            *(by_middle, by_proj @ proj, *of_norm),
            *(of_rows(by_proj, of_proj), by_of_fc1, of_rows(by_out, of_fc2)),
            by_proj=None if by_proj is by_middle else by_proj,
            by_inner=by_inner,
            by_out=None if by_out is grad else by_out,
            normed=normed_again(middle, weight, bias, *kept),
            activated=active(inner, of_fc1)[0],
        )

    return _Programs(*map(Compiled, (before, before_backward, after, after_backward)))
