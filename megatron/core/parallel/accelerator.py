"""The device of this process: selection, memory statistics, copies to and from the host. The only file that names
vendors."""

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.base.async_handle import Pending, done
from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, WholeNumber, knob

_products_before: list[str] = []  # precision before a --bf16 run on this CPU, of float32 products; for `restore`
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
DeviceName = Literal["auto", "cpu", "cuda", "npu", "xpu"]


@dataclass(frozen=True)
class DeviceConfig(FlagConfig):
    """Device and processes."""

    device: DeviceName = knob("auto", "device to train on; auto: an accelerator if there is one")
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
    """One device: its torch name, its communication backend, its memory statistics.

    Local rank k uses visible device k. If only one device is visible, the launcher has already chosen it.
    """

    def __init__(self, name: str = "cpu", local_rank: int = 0):
        self.name = name
        self.module: Any = None if name == "cpu" else torch.get_device_module(name)
        if self.module is not None:
            self.module.set_device(local_rank % self.module.device_count())
        self.torch_device = torch.device(name) if name == "cpu" else torch.device(name, self.module.current_device())
        self._peak_before = 0  # peak before the last `restart_peak`
        self._kept_below: int | None = None  # bytes, of malloc; set by `prepare` on a CPU
        self._usual: int | None = None  # bytes of this process after the first step since `return_freed`

    @classmethod
    def select(cls, name: str = "auto", local_rank: int = 0) -> "Device":
        """The device of this name; "auto" is an available accelerator, else the CPU. ConfigError if it is not available."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if name == "auto":
            return cls(accelerator.type if accelerator else "cpu", local_rank)
        if name != "cpu" and (accelerator is None or accelerator.type != name):
            found = f"torch sees {accelerator.type}" if accelerator else "torch sees no accelerator"
            raise ConfigError(f"--device {name} is not available ({found}); use --device auto or --device cpu")
        return cls(name, local_rank)

    def check_number(self, processes: int) -> None:
        """Raises ConfigError if `processes` of this machine see fewer devices, but more than one: with one visible
        device the
        launcher may have given each process its own."""
        count = processes if self.module is None else self.module.device_count()
        if processes > count > 1:
            raise ConfigError(
                f"{processes} processes on this machine see {count} devices (--device {self.name}); start at most {count}, "
                "or let them share devices with --distributed-backend gloo"
            )

    @property
    def identity(self) -> str | None:
        """Host name and device UUID, unique in a cluster; None if the device has no UUID."""
        number = self._property("uuid")
        return None if number is None else f"{socket.gethostname()} {number}"

    @property
    def memory_bytes(self) -> int | None:
        """The device's own memory; None for the CPU, or if torch does not report it."""
        return self._property("total_memory")

    def _property(self, name: str) -> Any:
        """One of torch's device properties; None if the device does not have it."""
        properties = self.module and self.module.get_device_properties(self.torch_device)
        return getattr(properties, name, None)

    def prepare(self, *, bf16: bool, empty_level: int = 0, ranks: int = 1) -> None:
        """Changes settings of the whole process for a training run.

        Accelerator: large pinned buffers are not rounded up to a power of two. CPU: sets the malloc thresholds for
        `empty_level` (`DeviceConfig.empty_unused_memory_level`), and with several `ranks` aligns large tensors. CPU with
        `bf16`,
        if it has the instructions: float32 matrix products round their factors to bfloat16. In a --bf16 run these
        factors are
        widened bfloat16 (weight gradients), so products stay exact, accumulate in float32, and take half the
        time (13 instead of 28 ms, see `tensor_parallel/linear_autograd.py`). The one exception, float32 attention
        probabilities, is
        rounded to bfloat16 anyway.
        """
        if self.name != "cpu":
            round_no_large_pinned_memory()
            return
        self._kept_below = _KEPT_BELOW[empty_level]
        set_malloc(self._kept_below)
        if ranks > 1:
            align_to_pages()
        matmul = torch.backends.mkldnn.matmul
        if bf16 and matmul.fp32_precision != "bf16":
            _products_before.append(matmul.fp32_precision)
            matmul.fp32_precision = "bf16"

    def restore(self) -> None:
        """Ends what `prepare` set for float32 products: a program that goes on after its --bf16 run computes them as
        before."""
        if _products_before:
            torch.backends.mkldnn.matmul.fp32_precision = _products_before.pop()

    @property
    def backend(self) -> str:
        return _BACKENDS[self.name]

    def synchronize(self) -> None:
        """Blocks the host until all queued work is done, as timing needs."""
        if self.module is not None:
            self.module.synchronize()

    def empty_unused(self) -> None:
        """Returns torch's cached memory to the driver. On a CPU the malloc thresholds decide (`prepare`)."""
        if self.module is not None:
            self.module.empty_cache()

    @contextlib.contextmanager
    def memory_that_stays(self) -> Iterator[None]:
        """Inside, what lives as long as the run is allocated: parameters, gradients, optimizer state. After `prepare` on
        a CPU,
        each block has pages of its own there, and goes back to the system when freed. Steps then find a heap without
        holes."""
        if (kept := self._kept_below) is None:
            yield
            return
        set_malloc(_KEPT_BELOW[-1])
        try:
            yield
        finally:
            set_malloc(kept)

    def return_freed(self) -> None:
        """Gives memory that the model's start or a compilation has freed back to the system, on a CPU with glibc: it lies in
        pieces, of which the tensors of a step use some. Call it now and then, not each step, which would fault the pages
        in."""
        if self.module is None and (c_library := _glibc()) is not None:
            c_library.malloc_trim(0)
            self._usual = None

    def return_freed_if_grown(self, *, surely: bool = False) -> None:
        """`return_freed`, if this process holds a twelfth more than after the first step since the last return, or `surely`.

        Call it after each step: a heap in pieces takes new pages where none fits. Each of 2 tensor-parallel ranks grew
        by 20 MiB
        a step of 0.54 s; a return takes 9 ms."""
        if surely:
            self.return_freed()
            return
        if self.module is not None or (held := _anonymous_bytes()) is None:
            return
        if self._usual is None:
            self._usual = held
        elif held > self._usual * 13 / 12:
            self.return_freed()

    def peak_memory_bytes(self) -> int | None:
        """Peak memory of tensors since the start; None if the device does not count it."""
        return None if self.module is None else max(self._peak_before, self.module.max_memory_allocated())

    def restart_peak(self) -> None:
        """Resets the peak of `recent_peak_bytes`; `peak_memory_bytes` is unchanged."""
        if self.module is not None:
            self._peak_before = self.peak_memory_bytes()
            self.module.reset_peak_memory_stats()

    def recent_peak_bytes(self) -> int | None:
        """Peak memory of tensors since `restart_peak`; None if the device does not count it."""
        return None if self.module is None else self.module.max_memory_allocated()

    def allocated_bytes(self) -> int | None:
        """Memory of tensors now; None if the device does not count it."""
        return None if self.module is None else self.module.memory_allocated()

    def memory_numbers(self) -> dict[str, float]:
        """Memory statistics by Megatron's names; empty if the device does not count."""
        if self.module is None:
            return {}
        stats = self.module.memory_stats()
        stats = stats | {_PEAK: max(self._peak_before, stats.get(_PEAK, 0))}
        return {name: stats[key] for name, key in _MEMORY.items() if key in stats}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Peak FLOP/s of dense matrix products from the data sheet; None if unknown."""
        return None if self.module is None else peak_flops_of(self.module.get_device_name(), dtype)

    def record_memory_history(self) -> None:
        """Records every allocation from now on. ConfigError if the device's allocator cannot."""
        record = getattr(getattr(self.module, "memory", None), "_record_memory_history", None)
        if record is None:
            lacks = f"{self.name} has none; omit the flag"
            raise ConfigError(f"--record-memory-history needs an accelerator's allocator; {lacks}")
        record()

    def save_memory_history(self, path: str) -> None:
        """Writes the record for pytorch.org/memory_viz."""
        self.module.memory._dump_snapshot(path)


_PEAK = "allocated_bytes.all.peak"
_MEMORY = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": _PEAK,
    "mem-allocated-count": "allocation.all.current",
}
# Dense figures of the data sheets; their larger figures are for 2:4 sparsity. float32 without TF32.
_PEAK_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "H200": {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 66.9e12},
    "H100": {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 66.9e12},
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
}


def peak_flops_of(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device by its driver's name for it; None if unknown."""
    model = next((model for model in _PEAK_FLOPS if model in device_name), None)
    slower = model in ("H100", "H200") and ("PCIe" in device_name or "NVL" in device_name)  # slower variants
    return None if model is None or slower else _PEAK_FLOPS[model].get(dtype)


_ROUNDS_UP_TO = "pinned_max_round_threshold_mb"


def round_no_large_pinned_memory() -> None:
    """Allocates pinned buffers above 16 MB at their exact size, if torch can (PyTorch pull request 171662).

    By default torch rounds them up to a power of two: 5 GB of moments take 8. A threshold set by the user stays."""
    try:
        settings = torch._C._accelerator_getAllocatorSettings()
        if _ROUNDS_UP_TO not in settings:
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"{_ROUNDS_UP_TO}:16"))))
    except (AttributeError, RuntimeError, ValueError):
        return


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`x` on the device, copied asynchronously from pinned memory, so that the host does not wait for queued work.

    The caller may free `x` at once. It may overwrite an unpinned `x` at once, a pinned one after the next synchronization.
    """
    if x.device.type != "cpu" or torch.device(device).type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # the allocator reuses the pinned copy only after it is read


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has kernels and memory of its own, apart from the host's."""
    return device.type in _BACKENDS and device.type != "cpu"


def start_to_host(x: torch.Tensor) -> Pending[torch.Tensor]:
    """Starts to copy `x` to pinned host memory; any thread may wait. A tensor of no accelerator is returned itself."""
    if not is_accelerator(x.device):
        return done(x)
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    there.copy_(x, non_blocking=True)
    arrived = torch.Event(device=x.device)
    arrived.record()

    def result() -> torch.Tensor:
        arrived.synchronize()
        return there

    return Pending(result)


def lock_pages(x: torch.Tensor, device: torch.device | str) -> Callable[[], None]:
    """Locks the pages of the host tensor `x` where it lies, so that copies from `device` are asynchronous; returns what
    unlocks
    them. Nothing to do for the host's own tensors, and for devices whose libraries do not offer it."""
    if torch.device(device).type != "cuda":
        return lambda: None
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(x.data_ptr(), x.nbytes, 0))
    return lambda: cudart.cudaHostUnregister(x.data_ptr())


def finish_copies(device: torch.device | str) -> None:
    """Waits until copies from `device` to the host have arrived."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def has_fused_adam(device: torch.device) -> bool:
    """Whether torch has a fused Adam for this device."""
    return device.type != "npu"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for products in bfloat16. On a CPU without them such products are slower than
    float32's."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextlib.contextmanager
def float32_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Inside, products of float32 matrices have float32 factors, or factors in TF32 where the device has it."""
    if device.type not in _FLOAT32_PRODUCTS:
        yield
        return
    settings = _FLOAT32_PRODUCTS[device.type]
    before, settings.fp32_precision = settings.fp32_precision, "tf32" if tf32 and device.type != "cpu" else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


_FLOAT32_PRODUCTS = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_M_ARENA_MAX = -8
_KEPT_BELOW = (2**31 - 1, 1 << 20, 1 << 17)  # by level: freed blocks of at least so many bytes go back to the system


def set_malloc(threshold: int) -> None:
    """Lets malloc keep freed blocks smaller than `threshold` bytes for reuse. A no-op unless on Linux with glibc.

    By default glibc returns each large block to the system, and the next tensor faults in zeroed pages again: a quarter of
    the processor time of a step (2 layers of 512, 1024 tokens). Kept blocks fragment memory, so the level lowers the
    threshold.
    Where kernels have one thread, all threads share one heap: what a thread of gloo frees would else wait for that
    thread alone.
    Several threads of a kernel would wait for one another: bfloat16 attention with its backward (2 x 512 tokens, 8 heads
    of 64)
    took 25 ms on two threads of a Xeon with AMX, and 11 with a heap for each.
    """
    if (c_library := _glibc()) is not None:
        c_library.mallopt(_M_MMAP_THRESHOLD, threshold)
        c_library.mallopt(_M_TRIM_THRESHOLD, threshold)
        if torch.get_num_threads() == 1:
            c_library.mallopt(_M_ARENA_MAX, 1)


def align_to_pages() -> None:
    """Has torch align tensors of 2 MB and more to pages, and ask for huge ones. No effect once torch has made a tensor.

    Aligned to 64 bytes, glibc asks for a little more and frees what is over: pieces so small that a thread keeps them
    for its
    next small object. A tensor that is freed then leaves a hole too small for the next one of its size, and the heap
    grows with
    every step: a rank of ZeRO stage 3 with 27.6 million parameters took 1.2 GiB after 4 steps and 2.9 after 32, so
    aligned 0.9
    and 1.3. Tensor parallelism grew too; one process did not, and would take 4 % more for whole pages.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _anonymous_bytes() -> int | None:
    """Resident memory of this process that is no file's; None unless on Linux."""
    try:
        with open("/proc/self/statm") as file:
            resident, shared = (int(pages) for pages in file.read().split()[1:3])
    except OSError:
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    c_library = ctypes.CDLL(None)
    return c_library if hasattr(c_library, "gnu_get_libc_version") else None
