"""Measure the limits of a device: its fastest matrix products and copies."""

import math
import time
from collections.abc import Callable

import torch

from megatron.core.parallel.accelerator import Device

SHAPES = ((2048, 768, 3072), (1024, 1024, 1024), (2048, 2048, 2048), (2048, 4096, 1024))
LARGE_SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (8192, 4096, 16384))  # accelerators only
COPY_BYTES = 2**28  # larger than most caches


def measure_ceilings(device: Device) -> dict[str, float]:
    """Return the ceilings of the device.

    bf16_tflops, fp32_tflops: of matrix products, the best of several shapes. copy_gb_per_s: bytes read plus bytes
    written.
    """
    shapes = SHAPES if device.name == "cpu" else SHAPES + LARGE_SHAPES
    ceilings = {
        "bf16_tflops": max(_tflops(shape, torch.bfloat16, device) for shape in shapes),
        "fp32_tflops": max(_tflops(shape, torch.float32, device) for shape in shapes),
    }
    source = torch.ones(COPY_BYTES // 4, device=device.torch_device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return ceilings | {"copy_gb_per_s": 2 * COPY_BYTES / seconds / 1e9}


def _tflops(shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> float:
    """Measure the TFLOP/s of [m, k] @ [k, n], for shape (m, k, n)."""
    m, k, n = shape
    a = torch.randn((m, k), device=device.torch_device).to(dtype)
    b = torch.randn((k, n), device=device.torch_device).to(dtype)
    out = torch.empty((m, n), dtype=dtype, device=device.torch_device)
    return 2 * math.prod(shape) / _best_seconds(lambda: torch.mm(a, b, out=out), device) / 1e12


def _best_seconds(run: Callable[[], object], device: Device, at_least: float = 0.3) -> float:
    """Return the seconds of the fastest run within about `at_least` seconds, after a warm-up run."""
    run()
    best = float("inf")
    end = time.perf_counter() + at_least
    while time.perf_counter() < end:
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
