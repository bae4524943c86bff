"""The matrix product of all parallel linear layers; its backward overlaps communication with the weight gradient.

Column-parallel, Y = X A with A = [A_1 .. A_t] split by columns:      backward   dX = sum over ranks of dY_i A_i^T
    the input is replicated, so dX is summed over the axis;
    under sequence parallelism X is sharded: it is gathered in the forward and, to save memory, again in the backward;
    dX is reduce-scattered.
The reduction of dX (and the second gather) are in flight while the weight gradient dA_i = X^T dY_i is computed.

A weight in a gradient buffer has `main_grad`, where its gradient accumulates; the gradient of others goes to autograd.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from megatron.core.ops.cblas_gemm_bf16bf16f32 import add_in_library
from megatron.core.ops.cpu_half_precision_matmul import FEATURES_AT_ONCE, NATIVE, Products, Way, times, times_transposed
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.main_grad_interface import grad_was_added, grad_was_put_off, main_grad_and_beta, main_grad_of
from megatron.core.ops.rematerialize import ask_maker, kept_for, maker_of
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, way: Way = "native") -> Tensor | None:
    """Add grad^T x to `weight.main_grad` and return None; without a buffer, return the product.

    grad: [..., out], x: [..., in], weight: [out, in]. way: that of a CPU, by which half-precision products are faster.
    """
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    main_grad, beta = main_grad_and_beta(weight)
    if main_grad is None:
        return times(grad.t(), x, way)
    _accumulate_for(grad.device, main_grad.dtype, grad.dtype, way)(main_grad, grad, x, beta)
    grad_was_added(weight)
    return None


def weight_gradient_in_time(weight: Tensor, grad: Tensor, x: Tensor, store: WeightGradStore) -> Tensor | None:
    """`weight_gradient`, deferred where the schedule collects it. For layers without communication."""
    if not (store.is_collecting and main_grad_of(weight) is not None):
        return weight_gradient(weight, grad, x)
    store.keep(partial(_write, weight, grad, x.detach(), ALONE, "native"))
    grad_was_put_off(weight)
    return None


def _in_place(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    total.addmm_(grad.t(), x, beta=beta)


def _rounded_once(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """A half-precision total, computed with float32 factors."""
    wide = x.float()
    for part, some in zip(total.split(FEATURES_AT_ONCE), grad.split(FEATURES_AT_ONCE, dim=1)):
        part.copy_(torch.addmm(part.float(), some.t().float(), wide, beta=beta))


def _added_within(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    torch.addmm(total, grad.t(), x, out_dtype=total.dtype, beta=beta, out=total)


def _mixed(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    product = torch.mm(grad.t(), x, out_dtype=total.dtype)
    total.add_(product) if beta else total.copy_(product)


def _widened(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """In blocks of output features and tokens; without blocks, float32 factors of a vocabulary's gradient take hundreds
    of megabytes.

    Blocks of 512 tokens are also a tenth faster on the CPU (1024 or 2048 tokens, 768 to 16384 features).
    """
    x_blocks = x.to(total.dtype).split(_TOKENS_AT_ONCE)
    for part, grad_part in zip(total.split(FEATURES_AT_ONCE), grad.split(FEATURES_AT_ONCE, dim=1)):
        for i, (grad_block, x_block) in enumerate(zip(grad_part.split(_TOKENS_AT_ONCE), x_blocks)):
            part.addmm_(grad_block.t().to(total.dtype), x_block, beta=beta if i == 0 else 1)


_TOKENS_AT_ONCE = 512


@cache
def _accumulate_for(
    device: torch.device, total: torch.dtype, factor: torch.dtype, way: Way = "native"
) -> Callable[..., None]:
    """The function with which this device adds a product of `factor` matrices to a `total` without rounding the
    product.

    Found by trying, once per process. torch has mm(out_dtype=) for bfloat16 and float16 on some devices only (PyTorch
    pull request 150812), and since 2.12 addmm(out_dtype=, out=), which needs no memory for the product. Otherwise the
    factors are widened: exact, but with float32 copies of both while the product is computed. Adding the rounded
    product is never used: it is less exact everywhere, and faster only on CPUs with half-precision matrix units.
    torch 2.13, one thread of a Xeon with AMX, [3072, 1024] x [1024, 768], error relative to the largest element:

                      bfloat16            float16             the same CPU with AMX switched off (AVX512, AVX2)
        rounded       7 ms   3e-3         7 ms   4e-4         126, 380 ms; float16 1200 ms
        widened      26 ms   3e-7        26 ms   6e-7          26,  26 ms; float16   26 ms

    oneDNN can compute float32 products in bfloat16 (torch.backends.mkldnn.matmul.fp32_precision): exact on widened
    bfloat16 factors, 13 ms here. It is a setting of the whole process; a --bf16 run sets it at its start
    (`Device.prepare`). The BLAS in torch's library multiplies bfloat16 factors as they are, exactly too, and faster than
    rounding: [2048, 1024] x [1024, 512] in 3 to 4 ms, rounded 4 to 5, widened in bfloat16 8 (`add_in_library`).
    """
    if total == factor:
        return _in_place if way == "native" else _rounded_once
    if device.type == "meta":  # there are no values to try with; accelerators have this one
        return _mixed
    with torch._C.DisableTorchFunction():  # a mode could take the values away
        return _found_by_trying(device, total, factor, way)


def _found_by_trying(device: torch.device, total: torch.dtype, factor: torch.dtype, way: Way) -> Callable[..., None]:
    of_cpu = _OF_A_CPU.get((device.type, total, factor), ()) if way == "native" else ()
    one = torch.ones((8, 8), dtype=factor, device=device)
    for accumulate in (_added_within, _mixed, *of_cpu):
        added, written = one.to(total), torch.full_like(one, float("nan"), dtype=total)
        try:
            accumulate(added, one, one, 1)
            accumulate(written, one, one, 0)
        except (RuntimeError, TypeError):  # no such kernel, or a torch without the argument
            continue
        if bool(((added == 9) & (written == 8)).all()):
            return accumulate
    return _widened


_OF_A_CPU = {("cpu", torch.float32, torch.bfloat16): (add_in_library,)}


class LinearFunction(torch.autograd.Function):
    """x [s(/t), b, in] -> [s, b, out/t], with the communication of a column-parallel layer; none on an axis of one
    rank."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        store: WeightGradStore | None,
        products: Products,
    ) -> Tensor:
        ctx.again, kept = kept_for(x)
        ctx.maker = maker_of(x)
        ctx.save_for_backward(weight, *kept)
        # save_for_backward returns a new object for the weight; only the object given here has `main_grad`.
        ctx.weight, ctx.store = weight, store
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.way = products.backward
        full = collectives.all_gather(x, axis) if sequence_parallel else x
        return times_transposed(full, weight, products.forward)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        defers = needs_weight and _defers(ctx)
        gathering = summing = None
        waits = needs_x and needs_weight and not defers and _asks(ctx, grad)
        x = ctx.again(*kept) if needs_weight and not waits else None
        grad_weight = None
        if ctx.sequence_parallel and needs_weight and not defers:
            gathering = collectives.start_all_gather(x, ctx.axis)
        if needs_x:
            start = collectives.start_reduce_scatter if ctx.sequence_parallel else collectives.start_all_reduce
            summing = start(times(grad, weight, ctx.way), ctx.axis)
        if defers:
            # x is detached, since its graph would keep the stage's input alive
            gather_over = ctx.axis if ctx.sequence_parallel else ALONE
            ctx.store.keep(partial(_write, ctx.weight, grad, x.detach(), gather_over, ctx.way))
            grad_was_put_off(ctx.weight)
        elif needs_weight and not waits:
            grad_weight = weight_gradient(ctx.weight, grad, gathering.wait() if gathering else x, ctx.way)
        grad_x = summing.wait() if summing else None
        return grad_x, grad_weight, None, None, None, None


def _defers(ctx) -> bool:
    """Whether to defer the weight gradient: the schedule collects it, and the weight has a buffer for it."""
    return ctx.store is not None and ctx.store.is_collecting and main_grad_of(ctx.weight) is not None


def _asks(ctx, grad: Tensor) -> bool:
    """Whether x's maker will give it, and the weight gradient is made then: it goes to a buffer, and hides no
    communication."""
    if ctx.axis.size > 1 or main_grad_of(ctx.weight) is None:
        return False
    return ask_maker(ctx.maker, lambda x: weight_gradient(ctx.weight, grad, x, ctx.way))


@torch.no_grad()
def _write(weight: Tensor, grad: Tensor, x: Tensor, gather_over: Axis, way: Way) -> None:
    weight_gradient(weight, grad, collectives.all_gather(x, gather_over), way)


def linear(x: Tensor, weight: Tensor, *, store: WeightGradStore | None = None, products: Products = NATIVE) -> Tensor:
    """x [.., in] times weight [out, in] transposed -> [.., out], without communication. `store`: takes deferred weight
    gradients."""
    return LinearFunction.apply(x, weight, ALONE, False, store, products)
