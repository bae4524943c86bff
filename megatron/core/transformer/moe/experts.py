"""The experts of a rank: all of a layer's in stacked weights, of which a rank has the shards that ep and etp give it.

    linear_fc1.weight [E, 2, f, h]   gate and up of each expert; [E, 1, f, h] if it is not gated
    linear_fc2.weight [E, h, f]

ep divides the experts, etp the hidden features f of each. A parameter's gradient is a sum over all tokens, which the ranks of ep
have brought here; the copies over edp add theirs.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, weight_flops
from megatron.core.ops.cpu_half_precision_matmul import is_half_precision_on_cpu
from megatron.core.ops.decisions_overridable_for_memory_prediction import blocks_to_compute
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.ops.main_grad_interface import grad_was_added, grad_was_deferred, main_grad_and_beta, main_grad_of
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL
from megatron.core.sharding.placement import Constant, InitialValue, Placement
from megatron.core.tensor_parallel.linear_layers import size_per_rank
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.tensor_parallel.stacked_linear import StackedLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.token_dispatcher import EarlierWgrads, ExpertRows
from megatron.core.transformer.recompute_without_rng_state import discard_and_recompute


class GroupedLinear(StackedLinear):
    """Y = X A_e^T + b_e for the rows of each expert e of this rank.

    shape: of the whole weight, [E, out, in] or [E, parts, out, in]. shard: axis -> the dimension that it shards. bias: whether
    each expert has one. grouped: multiply all experts by one call where the device and dtype have it.

    forward(x [rows, in], counts: the rows of each expert here, wgrads: see `StackedLinear`) -> [rows, out]. adds_bias:
    False on ranks whose results are terms of a sum to which another rank adds it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        context: LayerContext,
        init: InitialValue,
        *,
        shard: dict[str, int],
        bias: bool,
        grouped: bool = False,
    ):
        super().__init__()
        tp = context.tp
        ranks = context.experts
        axes = {"ep": ranks.ep, "etp": ranks.etp}
        self.axes = axes
        local = list(shape)
        for name, dim in shard.items():
            local[dim] = size_per_rank(f"dimension {dim} of experts' weights, over {name}", shape[dim], axes[name])
        of_experts = {"reduce_over": EXPERT_DATA_PARALLEL}
        placement = Placement(shape, init, shard=shard, **of_experts)
        self.tp = tp
        self.grouped = grouped and tp.matmul_backend is None
        self.weight = tp.parameter(tuple(local), placement, (ranks.ep, ranks.etp))
        self.weight.num_grads_per_backward = 1  # the terms of several calls count as one, with the last of them
        self.bias = None
        if bias:
            kept = {name: dim for name, dim in shard.items() if dim < len(shape) - 1}
            # a bias that ranks of etp all have is added by the first, so their gradients are terms of a sum
            copies = () if len(kept) == len(shard) else ("etp",)
            of_bias = Placement(
                shape[:-1], Constant(0.0), shard=kept, replicated_over=copies, partial_grad=copies, **of_experts
            )
            self.bias = tp.parameter(tuple(local[:-1]), of_bias, (ranks.ep, ranks.etp))

    def forward(
        self, x: Tensor, counts: Sequence[int], wgrads: EarlierWgrads | None = None, *, adds_bias: bool = True
    ) -> Tensor:
        y = self.product(x, self.weight, counts, wgrads)
        if self.bias is None:
            return y
        biases = self.bias.flatten(1).unbind()  # [out] each
        if not adds_bias:
            biases = [bias * 0 for bias in biases]  # a gradient of zeros: every rank of etp adds one to their sum
        return y + torch.cat([bias.expand(rows, -1) for bias, rows in zip(biases, counts, strict=True)])

    def product(self, x: Tensor, weight: Tensor, counts: Sequence[int], wgrads: EarlierWgrads | None = None) -> Tensor:
        grouped = self.grouped and can_group(x, weight)
        tp = self.tp
        return _GroupedProduct.apply(x, weight, tuple(counts), tp.weight_grads, tp.matmul, grouped, wgrads)

    def count_flops(self, x: LayerInput) -> Flops:
        """x: whose tokens are rows, of whichever experts."""
        return weight_flops(x, self.weight, per_token=math.prod(self.weight.placement.shape[1:]))


class ParallelExperts(nn.Module):
    """The experts: W2_e f(W1_e x), or gated W2_e (f(Wg_e x) * (Wu_e x)). forward(`ExpertRows`) -> [rows, h].

    With several ranks of etp it is this rank's term of the results.
    """

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        experts, f, h = config.num_experts, config.expert_ffn_size, config.hidden_size
        activation = activation_of(
            config.activation_region, config.activation_func_clamp_value, config.glu_linear_offset
        )
        self.topk = config.moe_router_topk
        self.etp = context.experts.etp
        self.activation = activation.select(config, context.tp.device)
        # The recomputation of the whole layer makes tensors of its own, which no hook of this forward would fill again.
        self.recomputes_activation = config.recomputes("moe_act") and not config.recomputes("moe")
        linear = partial(
            GroupedLinear,
            context=context,
            shard={"ep": 0, "etp": 2},
            bias=config.has_mlp_bias,
            grouped=config.moe_grouped_gemm,
        )
        self.linear_fc1 = linear((experts, 2 if config.is_gated else 1, f, h), init=config.init)
        self.linear_fc2 = linear((experts, h, f), init=config.output_init)

    def forward(self, rows: ExpertRows) -> Tensor:
        counts = rows.counts
        hidden = self.linear_fc1(rows.x, counts, rows.wgrads)  # [rows, gate | up]
        activations = self.activation(hidden, None)  # [rows, f / etp]
        # the weight gradients of fc2 are never delayed: the activations would be kept for them
        wgrads = None if rows.wgrads is None else EarlierWgrads()
        # ranks of etp have terms of one sum, to which the first adds the bias
        result = self.linear_fc2(activations, counts, wgrads, adds_bias=self.etp.is_first)
        if self.recomputes_activation and result.requires_grad:
            discard_and_recompute(activations, partial(self.activation, hidden, None), until=result)
        return result

    def count_flops(self, x: LayerInput) -> Flops:
        """Of each token the products with its experts, whichever they are. x: whose tokens are rows."""
        flops = Flops()
        for linear in (self.linear_fc1, self.linear_fc2):
            flops += flops_of(linear, x)
            x = x.after(linear)
        return flops


class _GroupedProduct(torch.autograd.Function):
    """The product of each expert's rows with its weight; its weight gradient goes to `main_grad`, now or later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: tuple[int, ...],
        store: WeightGradStore,
        matmul: MatmulBackend,
        grouped: bool,
        wgrads: EarlierWgrads | None = None,
    ) -> Tensor:
        """x: [rows, in], weight: [E, .., in] -> [rows, out]"""
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight = weight  # the parameter itself, for its `main_grad`: hooks on saved tensors return another object
        ctx.rest = counts, store, matmul, grouped, wgrads
        if grouped:
            return grouped_mm(x, weight.flatten(1, -2).transpose(1, 2), counts)
        y = x.new_empty((len(x), weight[0].numel() // weight.shape[-1]))  # [rows, out]
        _write_products(matmul.write_forward, y, x, weight, counts, matmul)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [rows, out] -> the gradient of x [rows, in], and of the weight unless it is in `main_grad`.

        Saved: x, unless the weight is frozen, and the weight for the gradient of x.
        """
        x, weight = ctx.saved_tensors
        counts, store, matmul, grouped, wgrads = ctx.rest
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        if needs_dgrad and grouped:
            grad_x = grouped_mm(grad.contiguous(), weight.flatten(1, -2), counts)
        elif needs_dgrad:
            grad_x = grad.new_empty((len(grad), weight.shape[-1]))  # [rows, in]
            _write_products(matmul.write_dgrad, grad_x, grad, weight, counts, matmul)
        if needs_wgrad and main_grad_of(ctx.weight) is None:
            grad_weight = _wgrad(weight, grad, x, counts, matmul)
        elif needs_wgrad:
            is_last = wgrads is None
            work = partial(_accumulate, ctx.weight, grad, x.detach(), counts, matmul, is_last=is_last)
            if not is_last:
                wgrads.put(id(ctx), partial(_run_or_defer, store, work))
            else:
                _run_or_defer(store, work)
                if store.is_collecting:
                    grad_was_deferred(ctx.weight)
        return grad_x, grad_weight, None, None, None, None, None


def _write_products(
    write: Callable[..., None], out: Tensor, x: Tensor, weight: Tensor, counts: tuple[int, ...], matmul: MatmulBackend
) -> None:
    """Write the product of each expert's rows with its matrix. x: [rows, ..], out: [rows, ..], weight: [E, .., in]"""
    sizes = [matmul.rows_of_product(rows, x) for rows in counts]
    if sizes != list(counts):
        _write_products_of_more_rows(write, out, x, weight, counts, sizes)
        return
    blocks = zip(out.split_with_sizes(counts), x.split_with_sizes(counts), _matrices(weight))
    for part, rows, matrix in blocks_to_compute(blocks, lambda block: len(block[1])):
        if len(rows):
            write(part, rows, matrix, None)


def _write_products_of_more_rows(
    write: Callable[..., None], out: Tensor, x: Tensor, weight: Tensor, counts: tuple[int, ...], sizes: list[int]
) -> None:
    """Do as `_write_products`, by products of `sizes` rows, each at least those of its expert.

    More rows than an expert has are those of the experts behind it, whose own products overwrite them; behind the last experts
    there are none, so the last rows of all are taken, and only the expert's are kept.
    """

    def rows_in_memory(block: tuple) -> int:
        start, rows, size, _ = block
        is_copied = rows < size <= len(x) < start + size
        return size * (2 if is_copied else 1)

    blocks = zip(accumulate(counts, initial=0), counts, sizes, _matrices(weight))
    for start, rows, size, matrix in blocks_to_compute(blocks, rows_in_memory):
        if size > len(x):
            size = rows
        if rows == 0:
            continue
        if start + size <= len(x):
            write(out[start : start + size], x[start : start + size], matrix, None)
        else:
            product = out.new_empty((size, out.shape[1]))  # of the last `size` rows
            write(product, x[-size:], matrix, None)
            first = start - (len(x) - size)  # the expert's first row among them
            out[start : start + rows].copy_(product[first : first + rows])


def grouped_mm(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x @ matrices[e] for the rows of each expert e. x: [rows, in], matrices: [E, in, out] -> [rows, out]"""
    ends = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)  # [E]
    return functional.grouped_mm(x, matrices, offs=ends)


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch multiplies the rows of all experts by one call, for these dtypes, widths and this device.

    Its kernels take no float64, and rows whose bytes are a multiple of 16.
    """
    if is_half_precision_on_cpu(x.dtype, x.device):  # it loops over the experts there, without `rows_of_product`
        return False
    if len(x) == 0:
        return False
    widths = x.shape[-1], weight[0].numel() // weight.shape[-1]
    return (
        x.dtype == weight.dtype
        and _has_grouped_mm(x.device, x.dtype)
        and all(width * x.element_size() % 16 == 0 for width in widths)
    )


@cache
def _has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a small grouped product runs and is right, found by trying, once per process.

    Only what torch raises for a dtype or device that it does not support is no: a call that does not fit its signature
    is an error of ours, which must not look like a missing kernel.
    """
    counts = (4, 12)
    with torch._C.DisableTorchFunction():
        ones = torch.ones((16, 16), dtype=dtype, device=device)
        matrices = ones.expand(2, 16, 16).contiguous()
        try:
            products = grouped_mm(ones, matrices, counts), grouped_mm(ones, matrices.transpose(1, 2), counts)
            return all(bool((product == 16).all()) for product in products)
        except RuntimeError:
            return False


def _matrices(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the matrix [out, in] of each expert of a weight [E, .., in]."""
    return weight.flatten(1, -2).unbind()


@torch.no_grad()
def _wgrad(weight: Tensor, grad: Tensor, x: Tensor, counts: tuple[int, ...], matmul: MatmulBackend) -> Tensor:
    """Return each expert's gradient grad^T x, of the weight's shape; that of an expert without rows is zeros."""
    parts = [matmul.wgrad(part, rows, None) for part, rows in zip(grad.split(counts), x.split(counts))]
    return torch.stack(parts).view(weight.shape)


def _run_or_defer(store: WeightGradStore, work: Callable[[], None]) -> None:
    """Compute a weight gradient now, or leave it to the bubble that the schedule collects such work for."""
    if store.is_collecting:
        store.put(work)
    else:
        work()


@torch.no_grad()
def _accumulate(
    weight: Tensor, grad: Tensor, x: Tensor, counts: tuple[int, ...], matmul: MatmulBackend, *, is_last: bool
) -> None:
    """Add each expert's gradient grad^T x to `weight.main_grad`; that of an expert without rows is zeros.

    grad: [rows, out], x: [rows, in], counts: the rows of each expert. is_last: it completes the gradient of this backward.
    """
    main_grad, beta = main_grad_and_beta(weight)
    totals = main_grad.view(len(weight), -1, weight.shape[-1]).unbind()
    blocks = list(zip(totals, grad.split_with_sizes(counts), x.split_with_sizes(counts), counts, strict=True))
    if not beta:
        for total, _, _, rows in blocks:
            if not rows:
                total.zero_()
    for total, part, inputs, rows in blocks_to_compute(blocks, lambda block: block[3]):
        if rows:
            matmul.accumulate_wgrad(total, part, inputs, beta, None)
    if is_last:
        grad_was_added(weight)


__getattr__ = names_of_megatron(__name__)
