"""`--compile layers`: a layer as two compiled programs, before its attention and after it.

    before attention   x -> x, norm(x) Wqkv^T + b
    after attention    x, heads -> x + drop(heads Wproj^T + b), then x + drop(W2 f(W1 norm(x)))

A program has the matrix products and the functions between them. Between the two programs runs the attention kernel
that its table chooses for each forward.

As in a `CompiledRegion` both directions are formulas, so what is saved for the backward is declared: the inputs of both
norms, the product before the activation, the heads. The backward recomputes the outputs of norms and activation, in
passes that read their inputs anyway (with `--compile regions` these are passes of their own). The gradient of a matrix
is computed outside the programs, as a linear layer does: unrounded in half precision, into `main_grad` or later by the
schedule that defers it.

Measured on one CPU core, a GPT of 4 layers (h 256, s 128, b 4, float32), three times 25 rounds in turns: 0.94 to 1.00
of the time of regions, and 0.75 of the bytes that autograd saves.

All layers of one shape share the programs. A layer that cannot be compiled whole falls back to `--compile regions`;
`WholeLayerPrograms.fallback_reason` says why.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.ops.compile.compiled_region import Compiled
from megatron.core.ops.dropout_masks import MaskWords, dropped
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.layout_invariant_dropout import HiddenDropout
from megatron.core.ops.region_formula_helpers import sum_over_rows, widen, widened_add_bias
from megatron.core.tensor_parallel.linear_autograd import accumulate_or_defer_wgrad
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import Norm


class WholeLayerPrograms:
    """The two compiled programs of a `TransformerLayer`, run on its parameters, on one tensor-parallel rank."""

    def __init__(self, layer: nn.Module, config: ModelConfig, tp: TensorParallel):
        self.layer = layer
        self.store = tp.weight_grads
        self.regions = config.norm_region, config.activation_region
        self.programs = _programs(*self.regions)
        self.fallback_reason = _unsupported_setting(config, tp) or self._custom_part()  # None: it can be compiled whole

    def can_run(self, cache: object) -> bool:
        """Return whether a forward may run the programs.

        They do not call the layer's parts. So a forward with a cache, or with a user's hook on a part, may not; nor
        that of a layer with cross-attention, which has three blocks.
        """
        if self.fallback_reason or cache is not None or self.layer.cross_attention is not None or self._custom_part():
            return False
        hooks = [hook for part in self._parts() for part_hooks in _hooks_of(part) for hook in part_hooks.values()]
        return all(_may_be_left_out(hook) for hook in hooks)

    def before_attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x, mixed_qkv) of x [s, b, h]; mixed_qkv: [s, b, (n + 2 groups) d], with its bias."""
        norm = self.layer.input_layernorm
        qkv = self.layer.self_attention.linear_qkv
        return _BeforeAttention.apply(self, norm.epsilon, x, norm.weight, norm.bias, qkv.weight, qkv.bias)

    def after_attention(self, x: Tensor, core_attn_out: Tensor) -> Tensor:
        """Return the layer's result [s, b, h]. x: [s, b, h]; core_attn_out: [s, b, n d]."""
        layer = self.layer
        norm = layer.pre_mlp_layernorm
        proj = layer.self_attention.linear_proj
        fc1 = layer.mlp.linear_fc1
        fc2 = layer.mlp.linear_fc2
        numbers = norm.epsilon, layer.attention_dropout.probability, layer.mlp_dropout.probability
        return _AfterAttention.apply(
            self,
            numbers,
            x,
            core_attn_out,
            norm.weight,
            norm.bias,
            *(proj.weight, proj.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias),
            *_mask_words(layer.attention_dropout, x),
            *_mask_words(layer.mlp_dropout, x),
        )

    def accumulate_wgrad(self, matrix: nn.Parameter, grad: Tensor, x: Tensor) -> Tensor | None:
        """Compute the gradient [out, in] of `matrix` in x matrix^T; None if it went to `main_grad` or is deferred.

        matrix: [out, in], grad: [s, b, out], x: [s, b, in].
        """
        return accumulate_or_defer_wgrad(matrix, grad, x, self.store) if matrix.requires_grad else None

    def _parts(self) -> list[nn.Module]:
        """Return the modules that the programs replace, in the order of _OUR_PARTS.

        They are read at each forward, since a script may replace a part of a layer that is built.
        """
        layer = self.layer
        attention = layer.self_attention
        mlp = layer.mlp
        attention_linears = [None, None]
        mlp_linears = [None, None]
        if isinstance(attention, ParallelAttention):
            attention_linears = [attention.linear_qkv, attention.linear_proj]
        if isinstance(mlp, ParallelMLP):
            mlp_linears = [mlp.linear_fc1, mlp.linear_fc2]
        norms = [layer.input_layernorm, layer.pre_mlp_layernorm]
        dropouts = [layer.attention_dropout, layer.mlp_dropout]
        return [attention, mlp, *norms, *attention_linears, *mlp_linears, *dropouts]

    def _custom_part(self) -> str | None:
        """Return which part of the layer is a script's own, None if all are ours."""
        for part, our_class in zip(self._parts(), _OUR_PARTS):
            if type(part) is not our_class or "forward" in vars(part):
                return f"{type(part).__name__} is the script's own, in the place of {our_class.__name__}"
        norm, activation = (REGIONS[name].compiled for name in self.regions)
        layer = self.layer
        has_our_norms = layer.input_layernorm.region == norm and layer.pre_mlp_layernorm.region == norm
        if layer.mlp.activation == activation and has_our_norms:
            return None
        return "a norm's or an activation's function is the script's own"


def _may_be_left_out(hook: Any) -> bool:
    """Return whether a hook declares that it does nothing but what reading the parameters does as well."""
    return getattr(hook, "may_be_left_out", False)


_OUR_PARTS = (
    *(ParallelAttention, ParallelMLP, Norm, Norm),
    *(ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, RowParallelLinear),
    *(HiddenDropout, HiddenDropout),
)


def _unsupported_setting(config: ModelConfig, tp: TensorParallel) -> str | None:
    """Return which setting prevents a layer from being two programs, None if none does."""
    if tp.axis.size > 1:
        return f"the collectives of {tp.axis.size} tensor-parallel ranks lie inside a layer"
    if recomputed_modules := [name for name in ("mlp", "layernorm") if config.recomputes(name)]:
        return f"--recompute-modules {' '.join(recomputed_modules)} recomputes what lies inside a program"
    if config.tiled_mlp > 1:
        return "--tiled-mlp cuts what lies inside a program into tiles"
    adds_to_norm_output = config.apply_residual_connection_post_layernorm
    if config.norm_placement != "pre" or adds_to_norm_output or config.residual_multiplier != 1:
        return "a program is for --norm-placement pre and plain sums"
    if config.activation_func_clamp_value is not None or config.glu_linear_offset:
        return "the gates of the MLP are bounded or shifted (--activation-func-clamp-value, --glu-linear-offset)"
    if tp.matmul_backend is not None:
        return f"its products are those of {type(tp.matmul_backend).__name__}"
    if "widened" in (tp.matmul_modes.forward, tp.matmul_modes.backward):
        return f"this CPU widens products in {str(tp.dtype).removeprefix('torch.')}, block by block"
    return None


def _hooks_of(part: nn.Module) -> tuple[dict, ...]:
    return part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks


def _mask_words(dropout: HiddenDropout, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the words from which the dropout mask of x is computed; None without dropout."""
    return dropout.words_for(x) if dropout.is_active else (None, None)


class _BeforeAttention(torch.autograd.Function):
    """Compute x -> x, norm(x) matrix^T + vector, of x [s, b, h]."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: WholeLayerPrograms,
        epsilon: float,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        matrix: Tensor,
        vector: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x: [s, b, h]. matrix, vector: weight and bias of `linear_qkv`. -> x, mixed_qkv [s, b, (n + 2 groups) d]"""
        mixed_qkv, *statistics = layer.programs.before(x, norm_weight, norm_bias, matrix, vector, epsilon)
        ctx.save_for_backward(x, norm_weight, norm_bias, matrix, vector, *statistics)
        ctx.layer = layer
        ctx.matrix = matrix  # the parameter itself: saved tensors come back as other objects, without `main_grad`
        return x, mixed_qkv

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_qkv: Tensor) -> tuple[Tensor | None, ...]:
        """grad_x: [s, b, h], grad_qkv: [s, b, (n + 2 groups) d] -> the gradients of x and of the parameters.

        Saved: the inputs and the norm's statistics, from which norm(x) is recomputed, the matrix's gradient needing it.
        """
        grads = _BeforeGrads(*ctx.layer.programs.before_backward(grad_x, grad_qkv, *ctx.saved_tensors))
        grad_matrix = ctx.layer.accumulate_wgrad(ctx.matrix, grad_qkv, grads.normed)
        return None, None, grads.x, grads.norm_weight, grads.norm_bias, grad_matrix, grads.vector


class _AfterAttention(torch.autograd.Function):
    """Compute x [s, b, h], heads [s, b, n d] -> the layer's result [s, b, h]."""

    @staticmethod
    def forward(
        ctx: Any, layer: WholeLayerPrograms, numbers: tuple, x: Tensor, heads: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        """x: [s, b, h]. heads: [s, b, n d]. -> [s, b, h]

        numbers: epsilon of the norm, probabilities of both dropouts. parameters: weight and bias of the norm; matrix
        and vector of linear_proj, linear_fc1, linear_fc2; two words for each of the two dropout masks.
        """
        out, *intermediates = layer.programs.after(x, heads, *numbers, *parameters)
        ctx.save_for_backward(heads, *parameters, *intermediates)
        ctx.layer = layer
        ctx.matrices = parameters[2:8:2]  # the parameters themselves, which have `main_grad`
        ctx.probabilities = numbers[1:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [s, b, h] -> the gradients of x, heads and the parameters.

        Saved: the heads, the parameters, the norm's input and statistics, the product before the activation. Both
        factors of each matrix's gradient come from the program: the gradient of its product, and its input, of which
        the outputs of norm and activation are recomputed.
        """
        heads, *saved = ctx.saved_tensors
        grads = _AfterGrads(*ctx.layer.programs.after_backward(grad, *ctx.probabilities, *saved))
        grad_fc2_out = grad if grads.fc2_out is None else grads.fc2_out
        grad_proj_out = grads.x if grads.proj_out is None else grads.proj_out
        proj, fc1, fc2 = ctx.matrices
        grad_proj = ctx.layer.accumulate_wgrad(proj, grad_proj_out, heads)
        grad_fc1 = ctx.layer.accumulate_wgrad(fc1, grads.fc1_out, grads.normed)
        grad_fc2 = ctx.layer.accumulate_wgrad(fc2, grad_fc2_out, grads.activated)
        return (
            *(None, None),  # layer, numbers
            *(grads.x, grads.heads, grads.norm_weight, grads.norm_bias),
            *(grad_proj, grads.proj_vector, grad_fc1, grads.fc1_vector, grad_fc2, grads.fc2_vector),
            *(None, None, None, None),  # words of the masks
        )


class _BeforeGrads(NamedTuple):
    """The gradients before attention, each shaped as its tensor; and `normed` [s, b, h].

    normed: the input of the matrix product, from which the matrix's gradient is computed.
    """

    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    vector: Tensor | None
    normed: Tensor


class _AfterGrads(NamedTuple):
    """The gradients after attention, each shaped as its tensor; and the factors of the matrices' gradients.

    The heads, the input of linear_proj, are not among these factors: the backward has saved them.
    """

    x: Tensor
    heads: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    proj_vector: Tensor | None  # of the biases
    fc1_vector: Tensor | None
    fc2_vector: Tensor | None
    proj_out: Tensor | None  # of the matrix products; None: equal to that of x
    fc1_out: Tensor
    fc2_out: Tensor | None  # None: equal to that of the layer's result
    normed: Tensor  # input of fc1
    activated: Tensor  # input of fc2


# ---------------------------------------------------------------- the formulas


class _Programs(NamedTuple):
    """The compiled formulas of both directions, before and after attention."""

    before: Compiled
    before_backward: Compiled
    after: Compiled
    after_backward: Compiled


def _linear(x: Tensor, matrix: Tensor, vector: Tensor | None) -> Tensor:
    return x @ matrix.t() if vector is None else x @ matrix.t() + vector


def _add_residual(x: Tensor, out: Tensor, vector: Tensor | None, words: tuple, probability: float) -> Tensor:
    """Return x + dropout(out + vector), computed in float32 or wider."""
    wide = widened_add_bias(out, vector)
    if words[0] is not None:
        wide = dropped(wide, MaskWords(*words), probability)
    return (x + wide).to(torch.promote_types(x.dtype, out.dtype))


def _add_residual_backward(grad: Tensor, like: Tensor, words: tuple, probability: float) -> Tensor:
    """Return the gradient of `out` in the dtype of `like`; `grad` itself if it is the same."""
    if words[0] is None:
        return grad.to(like.dtype)
    return dropped(widen(grad), MaskWords(*words), probability).to(like.dtype)


@cache
def _programs(normalization: str, activation: str) -> _Programs:
    """Return the compiled formulas of layers with this norm and activation. Both are keys of REGIONS."""
    norm = REGIONS[normalization].forward.formula
    norm_backward = REGIONS[normalization].backward.formula
    recompute_norm = REGIONS[normalization].recompute_output
    act = REGIONS[activation].forward.formula
    act_backward = REGIONS[activation].backward.formula

    def before(x, weight, bias, matrix, vector, epsilon):
        normed, *statistics = norm(x, weight, bias, epsilon)
        return _linear(normed, matrix, vector), *statistics

    def before_backward(grad_x, grad_qkv, x, weight, bias, matrix, vector, *statistics):
        *norm_grads, _ = norm_backward(grad_x, grad_qkv @ matrix, x, weight, bias, *statistics)
        return _BeforeGrads(*norm_grads, sum_over_rows(grad_qkv, vector), recompute_norm(x, weight, bias, *statistics))

    def after(x, heads, epsilon, p, mlp_p, weight, bias, proj, proj_vector, fc1, fc1_vector, fc2, fc2_vector, *words):
        middle = _add_residual(x, heads @ proj.t(), proj_vector, words[:2], p)
        normed, *statistics = norm(middle, weight, bias, epsilon)
        fc1_out = normed @ fc1.t()
        (activated,) = act(fc1_out, fc1_vector)
        out = _add_residual(middle, activated @ fc2.t(), fc2_vector, words[2:], mlp_p)
        return out, middle, fc1_out, *statistics

    def after_backward(grad, p, mlp_p, weight, bias, proj, proj_vector, fc1, fc1_vector, fc2, fc2_vector, *saved):
        words = saved[:4]
        middle, fc1_out = saved[4:6]
        statistics = saved[6:]
        # MLP
        grad_fc2_out = _add_residual_backward(grad, fc2, words[2:], mlp_p)
        grad_fc1_out, grad_fc1_vector = act_backward(grad_fc2_out @ fc2, fc1_out, fc1_vector)
        norm_grads = norm_backward(grad, grad_fc1_out @ fc1, middle, weight, bias, *statistics)
        grad_middle, grad_weight, grad_bias = norm_grads[:3]
        # output projection of attention
        grad_proj_out = _add_residual_backward(grad_middle, proj, words[:2], p)
        return _AfterGrads(
            x=grad_middle,
            heads=grad_proj_out @ proj,
            norm_weight=grad_weight,
            norm_bias=grad_bias,
            proj_vector=sum_over_rows(grad_proj_out, proj_vector),
            fc1_vector=grad_fc1_vector,
            fc2_vector=sum_over_rows(grad_fc2_out, fc2_vector),
            proj_out=None if grad_proj_out is grad_middle else grad_proj_out,
            fc1_out=grad_fc1_out,
            fc2_out=None if grad_fc2_out is grad else grad_fc2_out,
            normed=recompute_norm(middle, weight, bias, *statistics),
            activated=act(fc1_out, fc1_vector)[0],
        )

    return _Programs(Compiled(before), Compiled(before_backward), Compiled(after), Compiled(after_backward))
