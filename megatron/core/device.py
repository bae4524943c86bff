"""The device that this process computes on, chosen once: the only file (with kernel providers) that knows vendors."""

import ctypes
import socket
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.config import ConfigError, Count, FlagConfig, WholeNumber, knob
from megatron.core.pending import Pending, done

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


@dataclass(frozen=True)
class DeviceConfig(FlagConfig):
    """Device and processes."""

    device: Literal["auto", "cpu", "cuda", "npu", "xpu"] = knob(
        "auto", "device to train on; auto: an accelerator if there is one"
    )
    distributed_backend: Literal["gloo", "nccl", "hccl", "xccl"] | None = knob(
        None, "torch.distributed backend; default: the device's"
    )
    distributed_timeout_minutes: Count = knob(
        10, "minutes until a missing rank or an unfinished collective is an error"
    )
    empty_unused_memory_level: Literal[0, 1, 2] = knob(
        0,
        "return cached memory to the driver (torch.cuda.empty_cache): 1: after the backwards of an iteration; 2: also after "
        "the update; on a CPU: free blocks above 1 MB (1) or 128 KiB (2) at once",
    )
    check_memory: bool = knob(
        True,
        "start even if parameters, gradients and optimizer state exceed the memory of the device or host",
        flags=("--no-check-memory",),
    )
    local_rank: WholeNumber | None = knob(
        None, "rank on this node, as launchers pass it", flags=("--local-rank", "--local_rank")
    )


class Device:
    """One computing device: its torch name, the back end that connects several, memory numbers.

    Local rank k uses visible device k. If only one device is visible, the launcher has already chosen it.
    """

    def __init__(self, name: str = "cpu", local_rank: int = 0):
        self.name = name
        self.module: Any = None if name == "cpu" else torch.get_device_module(name)
        if self.module is not None:
            self.module.set_device(local_rank % self.module.device_count())
        self.torch_device = torch.device(name) if name == "cpu" else torch.device(name, self.module.current_device())
        self._peak_before = 0  # of the time before `restart_peak`

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

    def check_number(self, processes: int) -> None:
        """Raise ConfigError where this many processes of a machine see fewer devices. One visible device may differ by
        process."""
        count = processes if self.module is None else self.module.device_count()
        if processes > count > 1:
            raise ConfigError(
                f"{processes} processes on this machine see {count} devices (--device {self.name}); start at most {count}, "
                "or let them share devices with --distributed-backend gloo"
            )

    @property
    def identity(self) -> str | None:
        """What no other device of any machine is called; None where the maker gives no such name."""
        number = self._property("uuid")
        return None if number is None else f"{socket.gethostname()} {number}"

    @property
    def memory_bytes(self) -> int | None:
        """All memory that the device has of its own; None where it is the host's, or not said."""
        return self._property("total_memory")

    def _property(self, name: str) -> Any:
        """One of torch's properties of an accelerator; None where it has no such."""
        return (
            None if self.module is None else getattr(self.module.get_device_properties(self.torch_device), name, None)
        )

    def prepare(self, *, bf16: bool, empty_level: int = 0) -> None:
        """Make the process ready for a training run; it changes settings of the whole process.

        An accelerator's large pinned memory is not rounded up. On a CPU, empty_level is
        `DeviceConfig.empty_unused_memory_level`, which a C library can only be told once, and with `bf16` the factors of
        float32 matrix products are rounded to bfloat16 from here on, where the CPU has instructions for that. In a --bf16 run
        these factors are widened bfloat16 (weight gradients, `products.py`): every product is exact, summed in float32, and
        takes half the time (13 instead of 28 ms, see `tensor_parallel/linear.py`). Only attention in float32 has others, its
        probabilities, which are rounded to bfloat16 without this too.
        """
        if self.name != "cpu":
            round_no_large_pinned_memory()
            return
        set_malloc(_KEPT_BELOW[empty_level])
        if bf16:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    @property
    def backend(self) -> str:
        return _BACKENDS[self.name]

    def synchronize(self) -> None:
        """Wait until the device has finished what was asked of it, so that a clock read afterwards is honest."""
        if self.module is not None:
            self.module.synchronize()

    def empty_unused(self) -> None:
        """Give back what torch keeps of an accelerator's memory. A CPU's C library does so by itself, or not at all
        (`prepare`)."""
        if self.module is not None:
            self.module.empty_cache()

    def peak_memory_bytes(self) -> int | None:
        """The most memory that tensors have taken since the start; None where the device does not count."""
        return None if self.module is None else max(self._peak_before, self.module.max_memory_allocated())

    def restart_peak(self) -> None:
        """Let `recent_peak_bytes` count from here on."""
        if self.module is not None:
            self._peak_before = self.peak_memory_bytes()
            self.module.reset_peak_memory_stats()

    def recent_peak_bytes(self) -> int | None:
        """The most memory that tensors have taken since `restart_peak`; None where the device does not count."""
        return None if self.module is None else self.module.max_memory_allocated()

    def allocated_bytes(self) -> int | None:
        """What tensors take now; None where the device does not count."""
        return None if self.module is None else self.module.memory_allocated()

    def memory_numbers(self) -> dict[str, float]:
        """What tensors take now, by Megatron's names; nothing where the device does not count."""
        if self.module is None:
            return {}
        stats = self.module.memory_stats()
        stats = stats | {_PEAK: max(self._peak_before, stats.get(_PEAK, 0))}
        return {name: stats[key] for name, key in _MEMORY.items() if key in stats}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense matrix products a second that the maker promises; None where it is not known."""
        return None if self.module is None else peak_flops_of(self.module.get_device_name(), dtype)

    def record_memory_history(self) -> None:
        """Keep a record of every allocation from here on. Raises ConfigError where the device has no such record."""
        record = getattr(getattr(self.module, "memory", None), "_record_memory_history", None)
        if record is None:
            raise ConfigError(
                f"--record-memory-history is about an accelerator's allocator, and {self.name} keeps no such record; leave "
                "it out"
            )
        record()

    def save_memory_history(self, path: str) -> None:
        """Write the record, for pytorch.org/memory_viz."""
        self.module.memory._dump_snapshot(path)


_PEAK = "allocated_bytes.all.peak"
_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": _PEAK,
    "mem-allocated-count": "allocation.all.current",
}
# Dense, from the makers' data sheets, whose larger figures are for matrices half of which is zero. float32 without TF32.
_PEAK_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "H200": {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 66.9e12},
    "H100": {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 66.9e12},
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
}


def peak_flops_of(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device by the name that its driver gives; None for one that we have no figure of."""
    model = next((model for model in _PEAK_FLOPS if model in device_name), None)
    slower = model in ("H100", "H200") and ("PCIe" in device_name or "NVL" in device_name)  # of the same name
    return None if model is None or slower else _PEAK_FLOPS[model].get(dtype)


_ROUNDS_UP_TO = "pinned_max_round_threshold_mb"


def round_no_large_pinned_memory() -> None:
    """Let pinned memory of more than 16 MB be as large as asked for, where torch knows how (PyTorch pull request 171662).

    Else it is rounded up to a power of two, and 5 GB of moments take 8. A threshold that the user has set stays."""
    try:
        settings = torch._C._accelerator_getAllocatorSettings()
        if _ROUNDS_UP_TO not in settings:
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"{_ROUNDS_UP_TO}:16"))))
    except (AttributeError, RuntimeError, ValueError):
        return


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`x` on the device. The host does not wait: an accelerator copies from the host's memory by itself, after the work queued
    before.

    A plain copy would wait until all of that is done, and then the device for the host. `x` may be dropped at once, and changed
    too unless it is pinned: then when the host has next waited for the device.
    """
    if x.device.type != "cpu" or torch.device(device).type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # the allocator lends that memory again once it is read


def start_to_host(x: torch.Tensor) -> Pending[torch.Tensor]:
    """Begin to copy `x` into memory of the host; any thread may wait for it. What is there already is given as it is."""
    if x.device.type == "cpu":
        return done(x)
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x, non_blocking=True)
    arrived = torch.Event(device=x.device)
    arrived.record()

    def result() -> torch.Tensor:
        arrived.synchronize()
        return there

    return Pending(result)


def has_fused_adam(device: torch.device) -> bool:
    """Whether torch updates all of a parameter's Adam state in one pass on this device."""
    return device.type in ("cpu", "cuda", "xpu")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BELOW = (2**31 - 1, 1 << 20, 1 << 17)  # bytes from which on a freed block goes back to the system, by level


def set_malloc(threshold: int) -> None:
    """Let the C library keep the memory of tensors smaller than this for the next ones. A no-op unless with glibc on Linux.

    By default it returns each large block to the system at once, and the next tensor of that size gets pages that have to be
    faulted in and zeroed again: a quarter of the processor time of a step (2 layers of 512, 1024 tokens). What it keeps lies in
    pieces between what is in use, which a process short of memory cannot afford. Accelerators have allocators of torch's own.
    """
    if not sys.platform.startswith("linux"):
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "gnu_get_libc_version"):
        c_library.mallopt(_M_MMAP_THRESHOLD, threshold)
        c_library.mallopt(_M_TRIM_THRESHOLD, threshold)
