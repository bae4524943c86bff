"""The device that this process computes on, chosen once: the only file (with kernel providers) that knows vendors."""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.config import ConfigError, knob

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


@dataclass(frozen=True)
class DeviceConfig:
    """Device and processes."""

    device: Literal["auto", "cpu", "cuda", "npu", "xpu"] = knob(
        "auto", "where to compute; auto takes an accelerator if any"
    )
    distributed_backend: Literal["gloo", "nccl", "hccl", "xccl"] | None = knob(
        None, "torch.distributed back end; the device's own when unset"
    )
    distributed_timeout_minutes: int = knob(10, "minutes after which a collective that never completes is an error")
    local_rank: int | None = knob(
        None, "rank within the node, as launchers pass it", flags=("--local-rank", "--local_rank")
    )

    def __post_init__(self) -> None:
        problems = []
        if self.distributed_timeout_minutes < 1:
            problems.append(
                f"--distributed-timeout-minutes is {self.distributed_timeout_minutes}; it must be at least 1"
            )
        if self.local_rank is not None and self.local_rank < 0:
            problems.append(f"--local-rank is {self.local_rank}; it must not be negative; launchers count from 0")
        if problems:
            raise ConfigError(problems)


class Device:
    """One computing device: its torch name, the back end that connects several, memory numbers."""

    def __init__(self, name: str = "cpu", local_rank: int = 0):
        self.name = name
        self.module: Any = None if name == "cpu" else torch.get_device_module(name)
        if self.module is not None:
            self.module.set_device(local_rank % self.module.device_count())
        self.torch_device = torch.device(name) if name == "cpu" else torch.device(name, self.module.current_device())

    @classmethod
    def select(cls, name: str = "auto", local_rank: int = 0) -> "Device":
        """The device of this name; "auto" is the accelerator that torch sees, else the CPU. Raises ConfigError."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if name == "auto":
            return cls(accelerator.type if accelerator else "cpu", local_rank)
        if name != "cpu" and (accelerator is None or accelerator.type != name):
            found = f"torch sees {accelerator.type}" if accelerator else "torch sees no accelerator here"
            raise ConfigError(f"--device {name} is not available ({found}); use --device auto or --device cpu")
        return cls(name, local_rank)

    def prepare(self, *, bf16: bool) -> None:
        """Make the process ready for a training run, where the device is a CPU. For whoever decides about the whole process.

        With `bf16` float32 matrix products are rounded to bfloat16 factors from here on. Weight gradients are the only such
        products in a --bf16 run, and their float32 factors are widened bfloat16: every product is exact, summed in float32,
        and takes half the time (13 instead of 28 ms, see `tensor_parallel/linear.py`).
        """
        if self.name != "cpu":
            return
        keep_freed_memory()
        if bf16:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    @property
    def backend(self) -> str:
        return _BACKENDS[self.name]

    def synchronize(self) -> None:
        """Wait until the device has finished what was asked of it, so that a clock read afterwards is honest."""
        if self.module is not None:
            self.module.synchronize()

    def peak_memory_bytes(self) -> int | None:
        """The most memory that tensors have taken since the start; None where the device does not count."""
        return None if self.module is None else self.module.max_memory_allocated()


def has_fused_adam(device: torch.device) -> bool:
    """Whether torch updates all of a parameter's Adam state in one pass on this device."""
    return device.type in ("cpu", "cuda", "xpu")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the C library keep the memory that tensors give back, for the next ones. A no-op but with glibc on Linux.

    By default it returns each large block to the system at once, and the next tensor of that size gets pages that have to be
    faulted in and zeroed again: a quarter of the processor time of a step (2 layers of 512, 1024 tokens). Accelerators have
    allocators of torch's own that keep it.
    """
    if not sys.platform.startswith("linux"):
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "gnu_get_libc_version"):
        c_library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        c_library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
