"""The matrix product of all parallel linear layers; its backward overlaps communication with the weight gradient.

Column-parallel on t ranks, each with out/t output features: weight W_i [out/t, in].

    forward     X [s, b, in] is equal on all ranks; under sequence parallelism a rank has the rows X_i [s/t, b, in], and
                an all-gather makes X of them. Y_i = X W_i^T [s, b, out/t]; this function leaves it on its rank.
    saved       W_i; and X or X_i, or what it is recomputed from, unless W_i is frozen. To save memory the gathered X is
                not, which is why it is gathered again.
    backward    1. under sequence parallelism: start the all-gather of X_i
                2. compute dY_i W_i [s, b, in], and start its sum over the ranks, dX: an all-reduce, or under sequence
                   parallelism a reduce-scatter to dX_i [s/t, b, in]
                3. wait for 1, and compute dW_i = dY_i^T X [out/t, in]: complete, no sum over these ranks follows
                4. wait for 2
So the gather is in flight during the product of 2, and the sum of dX during that of 3. Row-parallel layers use the same
function over no ranks (`linear`): they communicate outside it.

A weight in a gradient buffer has `main_grad`, where its gradient accumulates; only its gradient may be computed later than
in 3. The gradient of other weights goes to autograd.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from megatron.core.ops.cblas_gemm_bf16bf16f32 import addmm_bf16_to_fp32
from megatron.core.ops.cpu_half_precision_matmul import (
    FEATURES_AT_ONCE,
    NATIVE,
    MatmulMode,
    MatmulModes,
    dgrad,
    is_half_precision_on_cpu,
    linear_forward,
    wgrad,
)
from megatron.core.ops.main_grad_interface import grad_was_added, grad_was_deferred, main_grad_and_beta, main_grad_of
from megatron.core.ops.recomputable_tensors import producer_of, request_from_producer, save_or_recompute
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend


class LinearFunction(torch.autograd.Function):
    """The product of a parallel linear layer, with the communication of a column-parallel layer.

    axis: the t tensor-parallel ranks; without sequence parallelism only the backward communicates over it. On an axis of
    one rank nothing does. Every rank of the axis must call, forward and backward. A bias is not part of it.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        store: WeightGradStore | None,
        matmul: MatmulBackend,
        state: nn.Module | None,
    ) -> Tensor:
        """x: [s, b, in], or [s/t, b, in] under sequence parallelism; weight: [out/t, in] -> [s, b, out/t]"""
        # Save for the weight gradient, by the first that applies: what the backend makes of x (such as a quantised x;
        # torch's own products make nothing); the inputs from which x is recomputed, if the producer of x marked it as
        # recomputable; x itself. Under sequence parallelism x is the shard, before it is gathered. For a frozen weight
        # nothing is saved: nobody would read it.
        saved_for_x: tuple[Tensor | None, ...] | None = ()
        ctx.saved_by_backend = False
        ctx.restore_x = ctx.producer = None
        if ctx.needs_input_grad[1]:
            saved_for_x = matmul.save(x, state)
            ctx.saved_by_backend = saved_for_x is not None
        if ctx.saved_by_backend:
            ctx.restore_x = lambda *saved: matmul.restore(saved, state)
        elif ctx.needs_input_grad[1]:
            ctx.restore_x, saved_for_x = save_or_recompute(x)
            ctx.producer = producer_of(x)
        ctx.save_for_backward(weight, *saved_for_x)
        # The parameter itself, for its `main_grad`: under hooks on saved tensors (recomputation, offload) another object
        # comes back, without `main_grad`; the backward takes from that only the values.
        ctx.weight = weight
        ctx.store = store
        ctx.axis = axis
        ctx.sequence_parallel = sequence_parallel
        ctx.matmul = matmul
        ctx.state = state

        gathered_x = collectives.all_gather(x, axis) if sequence_parallel else x  # [s, b, in]
        return matmul.forward(gathered_x, weight, state)  # [s, b, out/t]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [s, b, out/t] -> (gradient of x, shaped as x, None if not needed; of the weight [out/t, in])

        The weight's is None if it is added to `main_grad`, now or later, or if the weight is frozen.
        Saved: the weight for dgrad, and x (or what it is recomputed from) for the weight gradient.
        """
        weight, *saved_for_x = ctx.saved_tensors
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        has_main_grad = main_grad_of(ctx.weight) is not None

        # Is the weight gradient computed here, or later? A pipeline schedule may collect weight gradients to fill its
        # bubble with them (ZB): during its input-gradient half (action I), and only then, the store is collecting.
        # That needs a `main_grad`, since autograd takes the gradient now or never.
        defers_wgrad = needs_wgrad and has_main_grad and ctx.store is not None and ctx.store.is_collecting

        # The producer's own backward reads what x can be recomputed from, but does not make x for itself. On this request
        # it also makes x, in the same pass over memory, and runs the weight gradient with it: later in this same backward,
        # once the producer has got dX. Only on one rank: on more, the weight gradient must run now, to hide the sum of dX.
        # The answer is False if x was not recomputable, or if this backward does not reach the producer.
        producer_runs_wgrad = False
        if needs_dgrad and needs_wgrad and has_main_grad and not defers_wgrad and ctx.axis.size == 1:
            producer_runs_wgrad = request_from_producer(
                ctx.producer, lambda x: accumulate_wgrad(ctx.weight, grad, x, ctx.matmul, ctx.state)
            )

        # restore x: as saved, or recomputed now, also for deferred work; but what a backend saved is restored by the
        # deferred work itself, since it may be smaller
        x = None
        defers_restore = defers_wgrad and ctx.saved_by_backend
        if needs_wgrad and not producer_runs_wgrad and not defers_restore:
            x = ctx.restore_x(*saved_for_x)  # [s, b, in], or [s/t, b, in] under sequence parallelism

        # gather x again: in flight while dgrad is computed; deferred work gathers when it runs, and not here
        gathering = None
        if ctx.sequence_parallel and needs_wgrad and not defers_wgrad:
            gathering = collectives.start_all_gather(x, ctx.axis)  # [s, b, in]

        # dgrad dY_i W_i [s, b, in]; its sum over the ranks is in flight while the weight gradient is computed here, if it
        # is; without dgrad (x needs no gradient) nothing is summed
        summing = None
        if needs_dgrad:
            start_sum = collectives.start_reduce_scatter if ctx.sequence_parallel else collectives.start_all_reduce
            summing = start_sum(ctx.matmul.dgrad(grad, weight, ctx.state), ctx.axis)  # [s, b, in] or [s/t, b, in]

        # wgrad dY_i^T X [out/t, in]: deferred, or computed now
        grad_weight = None
        if defers_wgrad:
            # Kept until then: dY [s, b, out/t], and x as it was saved or recomputed, [s/t, b, in] under sequence
            # parallelism. x is detached, since its graph would keep the stage's input alive until the deferred work runs.
            kept = tuple(saved.detach() for saved in (saved_for_x if defers_restore else (x,)))
            restore = ctx.restore_x if defers_restore else None
            gather_over = ctx.axis if ctx.sequence_parallel else ALONE
            of_product = ctx.matmul, ctx.state
            deferred = partial(_run_deferred_wgrad, ctx.weight, grad, kept, restore, gather_over, *of_product)
            ctx.store.put(deferred)
            grad_was_deferred(ctx.weight)  # ZeRO stage 3 may release the weight now: dgrad has read it
        elif needs_wgrad and not producer_runs_wgrad:
            gathered_x = gathering.wait() if gathering else x  # [s, b, in]
            grad_weight = accumulate_wgrad(ctx.weight, grad, gathered_x, ctx.matmul, ctx.state)  # None: in `main_grad`
            # What was gathered or recomputed is freed while the sum is waited for; an x that was saved as it is stays, in
            # `saved_for_x`. The handle goes too, since it keeps its result alive.
            gathered_x = x = gathering = None

        grad_x = summing.wait() if summing else None  # [s, b, in], or [s/t, b, in] under sequence parallelism
        return grad_x, grad_weight, None, None, None, None, None


@torch.no_grad()
def _run_deferred_wgrad(
    weight: Tensor,
    grad: Tensor,
    kept: tuple[Tensor, ...],
    restore: Callable[..., Tensor] | None,
    gather_over: Axis,
    matmul: MatmulBackend,
    state: nn.Module | None,
) -> None:
    """Gather x over the axis, and accumulate the weight gradient. Every rank of the axis must call.

    The gather is waited for at once: dgrad, which hides it elsewhere, was computed before. gather_over: ALONE without
    sequence parallelism, where nothing is gathered. kept: x, the shard [s/t, b, in] if it is gathered, else [s, b, in];
    or what a backend saved, from which `restore` makes x.
    """
    x = restore(*kept) if restore else kept[0]
    accumulate_wgrad(weight, grad, collectives.all_gather(x, gather_over), matmul, state)


# ---------------------------------------------------------------- torch's products


class TorchMatmul(MatmulBackend):
    """torch's products, native or widened: on a CPU they may be widened in half precision, as `modes` says."""

    def __init__(self, modes: MatmulModes = NATIVE):
        self.modes = modes

    def forward(self, x: Tensor, weight: Tensor, state: nn.Module | None = None) -> Tensor:
        return linear_forward(x, weight, self.modes.forward)

    def add_forward(self, total: Tensor, x: Tensor, weight: Tensor, state: nn.Module | None = None) -> None:
        if self.modes.forward == "native":
            total.addmm_(x, weight.t())
        else:
            super().add_forward(total, x, weight, state)

    def write_forward(self, out: Tensor, x: Tensor, weight: Tensor, state: nn.Module | None = None) -> None:
        if self.modes.forward == "native":
            torch.mm(x, weight.t(), out=out)
        else:
            super().write_forward(out, x, weight, state)

    def rows_of_product(self, rows: int, x: Tensor) -> int:
        """oneDNN, which multiplies half precision on a CPU, compiles a kernel for each shape, about 1 ms: longer than a
        product of 500 rows with [1024, 256] takes. It keeps them, and eight between a power of two and the next are few enough.
        """
        if not is_half_precision_on_cpu(x.dtype, x.device):
            return rows
        step = 1 << max(0, rows.bit_length() - 4)
        return -(-rows // step) * step

    def dgrad(self, grad: Tensor, weight: Tensor, state: nn.Module | None = None) -> Tensor:
        return dgrad(grad, weight, self.modes.backward)

    def write_dgrad(self, out: Tensor, grad: Tensor, weight: Tensor, state: nn.Module | None = None) -> None:
        if self.modes.backward == "native":
            torch.mm(grad, weight, out=out)
        else:
            super().write_dgrad(out, grad, weight, state)

    def wgrad(self, grad: Tensor, x: Tensor, state: nn.Module | None = None) -> Tensor:
        return wgrad(grad, x, self.modes.backward)

    def accumulate_wgrad(
        self, total: Tensor, grad: Tensor, x: Tensor, beta: int, state: nn.Module | None = None
    ) -> None:
        accumulate = _accumulate_for(grad.device, total.dtype, grad.dtype, self.modes.backward)
        accumulate(total, grad, x, beta)


NATIVE_MATMUL = TorchMatmul()


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    store: WeightGradStore | None = None,
    matmul: MatmulBackend = NATIVE_MATMUL,
    state: nn.Module | None = None,
) -> Tensor:
    """Return x W^T, without communication. x: [.., in], weight: [out, in] -> [.., out].

    For row-parallel layers, whose callers sum the result over the ranks, and for layers that are not split.
    store: takes deferred weight gradients. state: of the weight, see `MatmulBackend`.
    """
    return LinearFunction.apply(x, weight, ALONE, False, store, matmul, state)


# ---------------------------------------------------------------- the weight gradient


def accumulate_wgrad(
    weight: Tensor, grad: Tensor, x: Tensor, matmul: MatmulBackend = NATIVE_MATMUL, state: nn.Module | None = None
) -> Tensor | None:
    """Add the weight gradient grad^T x to `weight.main_grad` and return None; without a buffer, return it.

    With a buffer it reports the gradient, which may start the reduction of the weight's bucket over the data-parallel
    ranks, and in ZeRO stage 3 may release the weight.

    grad: [.., out], x: [.., in], weight: [out, in]. state: of the weight, see `MatmulBackend`.
    """
    grad = grad.flatten(0, -2)  # [tokens, out]
    x = x.flatten(0, -2)  # [tokens, in]
    main_grad, beta = main_grad_and_beta(weight)
    if main_grad is None:
        return matmul.wgrad(grad, x, state)
    matmul.accumulate_wgrad(main_grad, grad, x, beta, state)
    grad_was_added(weight)
    return None


def accumulate_or_defer_wgrad(weight: Tensor, grad: Tensor, x: Tensor, store: WeightGradStore) -> Tensor | None:
    """Do as `accumulate_wgrad`, deferred where the schedule collects weight gradients; then the result is None.

    grad: [.., out], x: [.., in], weight: [out, in]. For layers without communication.
    """
    if not (store.is_collecting and main_grad_of(weight) is not None):
        return accumulate_wgrad(weight, grad, x)
    store.put(partial(_run_deferred_wgrad, weight, grad, (x.detach(),), None, ALONE, NATIVE_MATMUL, None))
    grad_was_deferred(weight)
    return None


# Accumulators: total = beta total + grad^T x. total: [out, in], grad: [tokens, out], x: [tokens, in].


def _addmm(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    total.addmm_(grad.t(), x, beta=beta)


def _addmm_rounded_once(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """Accumulate into a half-precision total with float32 factors: the sum is rounded once."""
    wide_x = x.float()
    for total_part, grad_part in zip(total.split(FEATURES_AT_ONCE), grad.split(FEATURES_AT_ONCE, dim=1)):
        total_part.copy_(torch.addmm(total_part.float(), grad_part.t().float(), wide_x, beta=beta))


def _addmm_out_dtype(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    torch.addmm(total, grad.t(), x, out_dtype=total.dtype, beta=beta, out=total)


def _mm_out_dtype(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    product = torch.mm(grad.t(), x, out_dtype=total.dtype)
    if beta:
        total.add_(product)
    else:
        total.copy_(product)


def _widened(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """Accumulate factors that are widened in blocks of output features and tokens.

    Without blocks, float32 factors of a vocabulary's gradient take hundreds of megabytes. Blocks of 512 tokens are also
    a tenth faster on the CPU (1024 or 2048 tokens, 768 to 16384 features).
    """
    x_blocks = x.to(total.dtype).split(_TOKENS_AT_ONCE)
    for total_part, grad_part in zip(total.split(FEATURES_AT_ONCE), grad.split(FEATURES_AT_ONCE, dim=1)):
        for i, (grad_block, x_block) in enumerate(zip(grad_part.split(_TOKENS_AT_ONCE), x_blocks)):
            total_part.addmm_(grad_block.t().to(total.dtype), x_block, beta=beta if i == 0 else 1)


_TOKENS_AT_ONCE = 512


@cache
def _accumulate_for(
    device: torch.device, total: torch.dtype, factor: torch.dtype, mode: MatmulMode = "native"
) -> Callable[..., None]:
    """Return the accumulator with which this device adds a product of `factor` matrices to a `total`.

    It does not round the product. It is found by trying, once per process. torch has mm(out_dtype=) for bfloat16 and
    float16 on some devices only (PyTorch pull request 150812), and since 2.12 addmm(out_dtype=, out=), which needs no
    memory for the product. Otherwise the factors are widened: exact, but with float32 copies of both while the product
    is computed. Adding the rounded product is never used: it is less exact everywhere, and faster only on CPUs with
    half-precision matrix units.
    torch 2.13, one thread of a Xeon with AMX, [3072, 1024] x [1024, 768], error relative to the largest element:

                      bfloat16            float16             the same CPU with AMX switched off (AVX512, AVX2)
        rounded       7 ms   3e-3         7 ms   4e-4         126, 380 ms; float16 1200 ms
        widened      26 ms   3e-7        26 ms   6e-7          26,  26 ms; float16   26 ms

    oneDNN can compute float32 products in bfloat16 (torch.backends.mkldnn.matmul.fp32_precision): exact on widened
    bfloat16 factors, 13 ms here. It is a setting of the whole process; a --bf16 run sets it at its start
    (`Device.prepare`). The BLAS in torch's library multiplies bfloat16 factors as they are, exactly too, and faster
    than rounding: [2048, 1024] x [1024, 512] in 3 to 4 ms, rounded 4 to 5, widened in bfloat16 8:
    see `addmm_bf16_to_fp32`.
    """
    if total == factor:
        return _addmm if mode == "native" else _addmm_rounded_once
    if device.type == "meta":  # there are no values to try with; accelerators have this one
        return _mm_out_dtype
    with torch._C.DisableTorchFunction():  # a mode could take the values away
        return _first_that_works(device, total, factor, mode)


def _first_that_works(
    device: torch.device, total: torch.dtype, factor: torch.dtype, mode: MatmulMode
) -> Callable[..., None]:
    candidates = [_addmm_out_dtype, _mm_out_dtype]
    if mode == "native" and (device.type, total, factor) == ("cpu", torch.float32, torch.bfloat16):
        candidates.append(addmm_bf16_to_fp32)
    ones = torch.ones((8, 8), dtype=factor, device=device)
    for accumulate in candidates:
        added = ones.to(total)
        overwritten = torch.full_like(ones, float("nan"), dtype=total)
        try:
            accumulate(added, ones, ones, 1)
            accumulate(overwritten, ones, ones, 0)
        except (RuntimeError, TypeError):  # no such kernel, or a torch without the argument
            continue
        if bool(((added == 9) & (overwritten == 8)).all()):
            return accumulate
    return _widened
