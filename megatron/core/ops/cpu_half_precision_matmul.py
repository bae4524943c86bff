"""Matrix products of linear layers, and how a CPU computes them in half precision.

Half-precision products are native, or widened: factors are cast to float32 and the result is rounded once. Many CPUs
have no bfloat16 instructions, and few have float16 instructions. torch then converts inside its kernels or multiplies
element by element. Milliseconds on one core, 1024 tokens, 512 -> 2048 features (torch 2.13, Zen 5):

                                        forward      dgrad               attention of 2 x 512 tokens, both directions
    bfloat16, its own instructions      4.7          4.7                 40
        these masked, AVX-512 left      27           27                  56
        all of AVX-512 masked           96           1550                211
    float16                             94           1630                338
    float32, which has no such gap      10 to 22     10 to 22            44

`select_matmul_modes` measures both modes once and takes one decision for all ranks, by the times of the slowest. The
modes differ in the last bits, so the choice belongs to a run like its precision: checkpoints keep it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis

MatmulMode = Literal["native", "widened"]
MATMUL_MODES: tuple[MatmulMode, ...] = ("native", "widened")


@dataclass(frozen=True)
class MatmulModes:
    """The mode of each kind of matrix product. All are native except half precision on a CPU."""

    forward: MatmulMode = "native"  # linear layers and the output layer
    backward: MatmulMode = "native"  # their dgrad, and their wgrad where it is accumulated in half precision
    attention: MatmulMode = "native"

    @classmethod
    def all(cls, mode: MatmulMode) -> "MatmulModes":
        return cls(mode, mode, mode)

    @property
    def widened(self) -> tuple[str, ...]:
        """The kinds of product that are widened."""
        return tuple(kind for kind, mode in asdict(self).items() if mode == "widened")


NATIVE = MatmulModes()
_KINDS = tuple(kind.name for kind in fields(MatmulModes))


# ---------------------------------------------------------------- the products of a linear layer


def linear_forward(x: Tensor, weight: Tensor, mode: MatmulMode) -> Tensor:
    """Return Y = X W^T. x: [.., in], weight: [out, in] -> [.., out], in the dtype of x."""
    rows = x.numel() // max(1, x.shape[-1])
    if mode == "native" or rows <= _FEW_ROWS:
        return x @ weight.t()
    y = x.new_empty((*x.shape[:-1], len(weight)))  # [.., out]
    wide_x = x.float()
    for y_part, weight_part in zip(y.split(FEATURES_AT_ONCE, dim=-1), weight.split(FEATURES_AT_ONCE)):
        y_part.copy_(wide_x @ weight_part.float().t())  # rounded here, once
    return y


def dgrad(grad: Tensor, weight: Tensor, mode: MatmulMode) -> Tensor:
    """Return dX = dY W, the gradient of a linear layer's input. grad: [.., out], weight: [out, in] -> [.., in]"""
    if mode == "native":
        return grad @ weight
    grad_rows = grad.flatten(0, -2)  # [tokens, out]
    total = None  # [tokens, in], float32
    for grad_part, weight_part in zip(grad_rows.split(FEATURES_AT_ONCE, dim=-1), weight.split(FEATURES_AT_ONCE)):
        if total is None:
            total = grad_part.float() @ weight_part.float()
        else:
            total.addmm_(grad_part.float(), weight_part.float())
    return total.to(grad.dtype).view(*grad.shape[:-1], weight.shape[1])  # [.., in]


def wgrad(grad: Tensor, x: Tensor, mode: MatmulMode) -> Tensor:
    """Return dW = dY^T X, the gradient of a linear layer's weight. grad: [tokens, out], x: [tokens, in] -> [out, in]"""
    return dgrad(grad.t(), x, mode)


FEATURES_AT_ONCE = 4096  # bounds the float32 copy of a weight: for a vocabulary it would be hundreds of megabytes
_FEW_ROWS = 4  # in generation the weight is read once per token, and widening it would be most of the work


# ---------------------------------------------------------------- which mode is faster


def is_half_precision_on_cpu(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether there is a choice of modes: everywhere else products are native."""
    return dtype in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"


def select_matmul_modes(
    dtype: torch.dtype,
    device: torch.device | str,
    world: Axis,
    *,
    requested: str = "measure",
    saved: Mapping[str, Any] | None = None,
) -> tuple[MatmulModes, str | None]:
    """Return (the modes of every rank of `world`, a log line or None). Every rank must call.

    requested: a mode, "measure", or "auto": the `saved` modes of a checkpoint (`modes_as_json`) if they are for this
    dtype, else measure.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if not is_half_precision_on_cpu(dtype, device):
        return NATIVE, None
    if requested in MATMUL_MODES:
        note = f"products in {dtype_name} are {requested}, as --cpu-half-products asks"
        return MatmulModes.all(requested), note
    if requested == "auto" and (saved_modes := modes_from_json(saved, dtype)) is not None:
        listed = _listed(asdict(saved_modes))
        note = f"products in {dtype_name} as before: {listed} (--cpu-half-products measure chooses anew)"
        return saved_modes, note

    # Measure on each rank, and decide by the slowest rank's times, so that all ranks decide alike.
    seconds_here = measure(dtype)
    slowest = torch.tensor(
        [[seconds_here[kind][mode] for mode in MATMUL_MODES] for kind in _KINDS], dtype=torch.float64
    )  # [kinds, modes]
    collectives.all_reduce(slowest, world, "max")
    seconds = {kind: dict(zip(MATMUL_MODES, row)) for kind, row in zip(_KINDS, slowest.tolist())}
    modes = choose(seconds)

    described = {}
    for kind, mode in asdict(modes).items():
        timed = ", ".join(f"{each} {1000 * s:.1f} ms" for each, s in seconds[kind].items())
        described[kind] = f"{mode} ({timed})"
    return modes, f"products in {dtype_name} as timed on this CPU (processor time): {_listed(described)}"


def modes_as_json(modes: MatmulModes, dtype: torch.dtype) -> dict[str, str]:
    """Return what a checkpoint keeps of the modes."""
    return {"dtype": str(dtype), **asdict(modes)}


def modes_from_json(saved: Mapping[str, Any] | None, dtype: torch.dtype) -> MatmulModes | None:
    """Invert `modes_as_json`; None if `saved` is for another dtype or is not its output."""
    if not isinstance(saved, Mapping) or saved.get("dtype") != str(dtype):
        return None
    modes = [saved.get(kind) for kind in _KINDS]
    if any(mode not in MATMUL_MODES for mode in modes):
        return None
    return MatmulModes(*modes)


def _listed(described: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {text}" for kind, text in described.items())


def measure(dtype: torch.dtype) -> dict[str, dict[MatmulMode, float]]:
    """Return the processor seconds of each kind of product in each mode, in one thread: the best of a few runs.

    Wall-clock time would include other processes. Several threads would count spinning as work: two processes that
    measured at once on two cores chose a mode that took 37 times as long.
    """
    x = torch.ones((_ROWS, _WIDTH), dtype=dtype)
    weight = torch.ones((_WIDTH, _WIDTH), dtype=dtype)
    qkv = [torch.ones((1, 2, _ROWS, 64), dtype=dtype, requires_grad=True) for _ in range(3)]

    def attention(mode: MatmulMode) -> None:
        inputs = [heads.float() for heads in qkv] if mode == "widened" else qkv
        functional.scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()

    runs = {
        "forward": lambda mode: linear_forward(x, weight, mode),
        "backward": lambda mode: (dgrad(x, weight, mode), wgrad(x, x, mode)),
        "attention": attention,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {kind: _best_of(run) for kind, run in runs.items()}
    finally:
        torch.set_num_threads(threads)


_ROWS, _WIDTH = 128, 512  # large enough to hide the launch of a kernel
_RUNS, _SECONDS = 7, 0.05  # the most runs of each mode; a slow mode stops earlier, after this time


def _best_of(run: Callable[[MatmulMode], None]) -> dict[MatmulMode, float]:
    best = dict.fromkeys(MATMUL_MODES, float("inf"))
    total = dict.fromkeys(MATMUL_MODES, 0.0)
    for mode in MATMUL_MODES:
        run(mode)  # warm-up
    for _ in range(_RUNS):
        for mode in MATMUL_MODES:
            if total[mode] < _SECONDS:
                began = time.thread_time()
                run(mode)
                seconds = time.thread_time() - began
                best[mode] = min(best[mode], seconds)
                total[mode] += seconds
    return best


def choose(seconds: Mapping[str, Mapping[MatmulMode, float]]) -> MatmulModes:
    """Widen the kinds for which that is clearly faster.

    If both take about as long, noise must not make runs differ: native.
    """
    modes = {}
    for kind, seconds_of in seconds.items():
        is_clearly_faster = seconds_of["native"] > _CLEARLY * seconds_of["widened"]
        modes[kind] = "widened" if is_clearly_faster else "native"
    return MatmulModes(**modes)


_CLEARLY = 1.5
