"""Half-precision matrix products on a CPU: native, or with factors widened to float32 and the result rounded once.

Many CPUs have no bfloat16 instructions, and few have float16 instructions. torch then converts inside its kernels or
multiplies
element by element. Milliseconds on one core, 1024 tokens, 512 -> 2048 features (torch 2.13, Zen 5):

                                        forward      input's gradient    attention of 2 x 512 tokens, both directions
    bfloat16, its own instructions      4.7          4.7                 40
        these masked, AVX-512 left      27           27                  56
        all of AVX-512 masked           96           1550                211
    float16                             94           1630                338
    float32, which has no such gap      10 to 22     10 to 22            44

`settle` measures both ways once and takes one decision for all ranks, by the times of the slowest. The ways differ in
the last
bits, so the choice belongs to a run like its precision: checkpoints keep it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis

Way = Literal["native", "widened"]
WAYS: tuple[Way, ...] = ("native", "widened")


@dataclass(frozen=True)
class Products:
    """The way of each kind of product. All are native except half precision on a CPU."""

    forward: Way = "native"  # linear layers and the output layer
    backward: Way = "native"  # their input gradients, and weight gradients that are accumulated in half precision
    attention: Way = "native"

    @classmethod
    def all(cls, way: Way) -> "Products":
        return cls(way, way, way)

    @property
    def widened(self) -> tuple[str, ...]:
        """The kinds of product that are widened."""
        return tuple(kind for kind, way in asdict(self).items() if way == "widened")


NATIVE = Products()
_KINDS = tuple(kind.name for kind in fields(Products))


# ---------------------------------------------------------------- the products of a linear layer


def times_transposed(x: Tensor, weight: Tensor, way: Way) -> Tensor:
    """x W^T. x: [.., in], weight: [out, in] -> [.., out]"""
    rows = x.numel() // max(1, x.shape[-1])
    if way == "native" or rows <= _FEW_ROWS:
        return x @ weight.t()
    y, wide = x.new_empty((*x.shape[:-1], len(weight))), x.float()
    for part, some in zip(y.split(FEATURES_AT_ONCE, dim=-1), weight.split(FEATURES_AT_ONCE)):
        part.copy_(wide @ some.float().t())
    return y


def times(grad: Tensor, weight: Tensor, way: Way) -> Tensor:
    """dY W. grad: [.., out], weight: [out, in] -> [.., in]"""
    if way == "native":
        return grad @ weight
    rows, total = grad.flatten(0, -2), None
    for part, some in zip(rows.split(FEATURES_AT_ONCE, dim=-1), weight.split(FEATURES_AT_ONCE)):
        total = part.float() @ some.float() if total is None else total.addmm_(part.float(), some.float())
    return total.to(grad.dtype).view(*grad.shape[:-1], weight.shape[1])


FEATURES_AT_ONCE = 4096  # bounds the float32 copy of a weight: for a vocabulary it would be hundreds of megabytes
_FEW_ROWS = 4  # in generation the weight is read once per token, and widening it would be most of the work


# ---------------------------------------------------------------- which way is faster


def has_two_ways(dtype: torch.dtype, device: torch.device | str) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"


def settle(
    dtype: torch.dtype,
    device: torch.device | str,
    world: Axis,
    *,
    asked: str = "measure",
    kept: Mapping[str, Any] | None = None,
) -> tuple[Products, str | None]:
    """(the ways for every rank of `world`, a log line or None). Every rank must call.

    asked: a way, "measure", or "auto": the `kept` ways of a checkpoint (`ways_as_json`) for this dtype, else measure.
    """
    name = str(dtype).removeprefix("torch.")
    if not has_two_ways(dtype, device):
        return NATIVE, None
    if asked in WAYS:
        return Products.all(asked), f"products in {name} are {asked}, as --cpu-half-products asks"
    if asked == "auto" and (before := from_json(kept, dtype)) is not None:
        ways = f"{_listed(asdict(before))} (--cpu-half-products measure chooses anew)"
        return before, f"products in {name} as before: {ways}"
    mine = measure(dtype)
    slowest = torch.tensor([[mine[kind][way] for way in WAYS] for kind in _KINDS], dtype=torch.float64)
    collectives.all_reduce(slowest, world, "max")
    found = {kind: dict(zip(WAYS, row)) for kind, row in zip(_KINDS, slowest.tolist())}
    chosen = choose(found)
    times = {kind: ", ".join(f"{way} {1000 * s:.1f} ms" for way, s in of.items()) for kind, of in found.items()}
    said = _listed({kind: f"{way} ({times[kind]})" for kind, way in asdict(chosen).items()})
    return chosen, f"products in {name} as timed on this CPU (processor time): {said}"


def ways_as_json(products: Products, dtype: torch.dtype) -> dict[str, str]:
    return {"dtype": str(dtype), **asdict(products)}


def from_json(kept: Mapping[str, Any] | None, dtype: torch.dtype) -> Products | None:
    """The inverse of `ways_as_json`; None for another dtype, or if `kept` is not its output."""
    if not isinstance(kept, Mapping) or kept.get("dtype") != str(dtype):
        return None
    ways = [kept.get(kind) for kind in _KINDS]
    return Products(*ways) if all(way in WAYS for way in ways) else None


def _listed(of: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {said}" for kind, said in of.items())


def measure(dtype: torch.dtype) -> dict[str, dict[Way, float]]:
    """Processor seconds of each kind of product, each way, in one thread: the best of a few runs.

    Wall-clock time would include other processes. Several threads would count spinning as work: two processes that measured
    at once on two cores chose a way that took 37 times as long.
    """
    x, weight = torch.ones((_ROWS, _WIDTH), dtype=dtype), torch.ones((_WIDTH, _WIDTH), dtype=dtype)
    heads = [torch.ones((1, 2, _ROWS, 64), dtype=dtype, requires_grad=True) for _ in range(3)]

    def attention(way: Way) -> None:
        given = [x.float() for x in heads] if way == "widened" else heads
        functional.scaled_dot_product_attention(*given, is_causal=True).sum().backward()

    runs = {
        "forward": lambda way: times_transposed(x, weight, way),
        "backward": lambda way: (times(x, weight, way), times(x.t(), x, way)),
        "attention": attention,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {kind: _best_of(run) for kind, run in runs.items()}
    finally:
        torch.set_num_threads(threads)


_ROWS, _WIDTH = 128, 512  # large enough to hide the launch of a kernel
_RUNS, _SECONDS = 7, 0.05  # the most runs of each way; a slow way stops earlier, after this time


def _best_of(run: Callable[[Way], None]) -> dict[Way, float]:
    best, spent = dict.fromkeys(WAYS, float("inf")), dict.fromkeys(WAYS, 0.0)
    for way in WAYS:
        run(way)  # warm-up
    for _ in range(_RUNS):
        for way in WAYS:
            if spent[way] < _SECONDS:
                began = time.thread_time()
                run(way)
                seconds = time.thread_time() - began
                best[way], spent[way] = min(best[way], seconds), spent[way] + seconds
    return best


def choose(seconds: Mapping[str, Mapping[Way, float]]) -> Products:
    """Widened if that is clearly faster. If both take about as long, noise must not make runs differ: native."""
    wins = {kind: of["native"] > _CLEARLY * of["widened"] for kind, of in seconds.items()}
    return Products(**{kind: "widened" if clearly else "native" for kind, clearly in wins.items()})


_CLEARLY = 1.5
