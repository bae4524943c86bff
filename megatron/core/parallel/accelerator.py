"""The device of this process: selection, memory statistics, copies to and from the host.

No other file names a vendor, but `device_and_process_group_config`, which has the values of --device.
"""

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.dataclass_flags import ConfigError

_precision_before: list[str] = []  # of float32 products, before a --bf16 run on this CPU; for `Device.restore`
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


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
        self._malloc_threshold: int | None = None  # bytes; set by `prepare` on a CPU
        self._makes_deterministic = False  # `use_deterministic_kernels` has changed torch's setting
        self._usual_bytes: int | None = None  # of this process, after the first step since `return_freed`

    @classmethod
    def select(cls, name: str = "auto", local_rank: int = 0) -> "Device":
        """Return the device of this name; "auto" is an available accelerator, else the CPU.

        Raises ConfigError if there is none.
        """
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if name == "auto":
            return cls(accelerator.type if accelerator else "cpu", local_rank)
        if name != "cpu" and (accelerator is None or accelerator.type != name):
            available = f"torch sees {accelerator.type}" if accelerator else "torch sees no accelerator"
            raise ConfigError(f"--device {name} is not available ({available}); use --device auto or --device cpu")
        return cls(name, local_rank)

    def check_number(self, processes: int) -> None:
        """Raise ConfigError if `processes` of this machine see fewer devices, but more than one.

        With one visible device the launcher may have given each process its own.
        """
        count = processes if self.module is None else self.module.device_count()
        if processes > count > 1:
            raise ConfigError(
                f"{processes} processes on this machine see {count} devices (--device {self.name}); start at most "
                f"{count}, or let them share devices with --distributed-backend gloo"
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
        """Return one of torch's device properties; None if the device does not have it."""
        properties = self.module and self.module.get_device_properties(self.torch_device)
        return getattr(properties, name, None)

    def prepare(self, *, bf16: bool, empty_level: int = 0, ranks: int = 1) -> None:
        """Change settings of the whole process for a training run.

        Accelerator: large pinned buffers are not rounded up to a power of two.

        CPU: sets the malloc thresholds for `empty_level` (`DeviceConfig.empty_unused_memory_level`), and with several
        `ranks` aligns large tensors.

        CPU with `bf16`, if it has the instructions: float32 matrix products round their factors to bfloat16. In a
        --bf16 run these factors are widened bfloat16 (weight gradients), so products stay exact, accumulate in float32,
        and take half the time (13 instead of 28 ms, see `tensor_parallel/linear_autograd.py`). The one exception,
        float32 attention probabilities, is rounded to bfloat16 anyway.
        """
        if self.name != "cpu":
            round_no_large_pinned_memory()
            return
        self._malloc_threshold = _MALLOC_THRESHOLDS[empty_level]
        let_malloc_keep_freed_blocks(self._malloc_threshold)
        if ranks > 1:
            request_huge_page_alignment()
        matmul = torch.backends.mkldnn.matmul
        if bf16 and matmul.fp32_precision != "bf16":
            _precision_before.append(matmul.fp32_precision)
            matmul.fp32_precision = "bf16"

    def use_deterministic_kernels(self) -> str:
        """Compute with kernels that repeat their bits, for the whole process; return the note for the log.

        An accelerator: torch takes deterministic kernels, for attention's backward too, and raises an error that names
        the operation that has none. Products of cuBLAS need a fixed workspace, which an environment variable sets
        before the first product. Raises ConfigError if it has another value. A CPU changes nothing.
        """
        if self.name == "cpu":
            return "no effect here: --deterministic-mode: a CPU adds in one order, and repeats the bits of a run"
        workspace = os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        if self.name == "cuda" and workspace not in (":4096:8", ":16:8"):
            raise ConfigError(
                f"--deterministic-mode needs the environment variable {_CUBLAS_WORKSPACE} to be :4096:8 or :16:8, but it "
                f"is {workspace}; unset it"
            )
        self._makes_deterministic = not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        return (
            "--deterministic-mode: torch.use_deterministic_algorithms; sums over ranks repeat their bits while the layout, "
            "the hosts and NCCL_ALGO stay"
        )

    def restore(self) -> None:
        """Undo what `prepare` and `use_deterministic_kernels` set, for a program that runs on after its training."""
        if self._makes_deterministic:
            torch.use_deterministic_algorithms(False)
        if _precision_before:
            torch.backends.mkldnn.matmul.fp32_precision = _precision_before.pop()

    @property
    def backend(self) -> str:
        return _BACKENDS[self.name]

    def synchronize(self) -> None:
        """Block the host until all queued work is done, as timing needs."""
        if self.module is not None:
            self.module.synchronize()

    def empty_unused(self) -> None:
        """Return torch's cached memory to the driver. On a CPU the malloc thresholds decide (`prepare`)."""
        if self.module is not None:
            self.module.empty_cache()

    @contextlib.contextmanager
    def memory_that_stays(self) -> Iterator[None]:
        """Allocate what lives as long as the run inside: parameters, gradients, optimizer state.

        After `prepare` on a CPU, each block has pages of its own there, and is returned to the system when freed. Steps
        then start from a heap without holes.
        """
        threshold = self._malloc_threshold
        if threshold is None:
            yield
            return
        let_malloc_keep_freed_blocks(_MALLOC_THRESHOLDS[-1])
        try:
            yield
        finally:
            let_malloc_keep_freed_blocks(threshold)

    def return_freed(self) -> None:
        """Return to the system what the model's start or a compilation has freed, on a CPU with glibc.

        The freed memory is in pieces, of which the tensors of a step use some. Call it now and then, not each step,
        which would fault the pages in.
        """
        c_library = _glibc() if self.module is None else None
        if c_library is not None:
            c_library.malloc_trim(0)
            self._usual_bytes = None

    def return_freed_if_grown(self, *, surely: bool = False) -> None:
        """Call `return_freed` if this process has grown by a twelfth since its size was taken, or `surely`.

        Its size is taken in the first step after each return. Call it after each step: a heap in pieces takes new pages
        where none fits. Each of 2 tensor-parallel ranks grew by 20 MiB a step of 0.54 s; a return takes 9 ms.
        """
        if surely:
            self.return_freed()
            return
        process_bytes = _anonymous_bytes() if self.module is None else None
        if process_bytes is None:
            return
        if self._usual_bytes is None:
            self._usual_bytes = process_bytes
        elif process_bytes > self._usual_bytes * 13 / 12:
            self.return_freed()

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory of tensors since the start; None if the device does not count it."""
        return None if self.module is None else max(self._peak_before, self.module.max_memory_allocated())

    def restart_peak(self) -> None:
        """Reset the peak of `recent_peak_bytes`; `peak_memory_bytes` is unchanged."""
        if self.module is not None:
            self._peak_before = self.peak_memory_bytes()
            self.module.reset_peak_memory_stats()

    def recent_peak_bytes(self) -> int | None:
        """Return the peak memory of tensors since `restart_peak`; None if the device does not count it."""
        return None if self.module is None else self.module.max_memory_allocated()

    def allocated_bytes(self) -> int | None:
        """Return the memory of tensors now; None if the device does not count it."""
        return None if self.module is None else self.module.memory_allocated()

    def memory_numbers(self) -> dict[str, float]:
        """Return memory statistics by Megatron's names; empty if the device does not count."""
        if self.module is None:
            return {}
        stats = self.module.memory_stats()
        stats = stats | {_PEAK: max(self._peak_before, stats.get(_PEAK, 0))}
        return {name: stats[key] for name, key in _MEMORY.items() if key in stats}

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the peak FLOP/s of dense matrix products from the data sheet; None if unknown."""
        if self.module is None:
            return None
        return peak_flops_of(self.module.get_device_name(), dtype)

    def record_memory_history(self) -> None:
        """Record every allocation from now on. ConfigError if the device's allocator cannot."""
        record = getattr(getattr(self.module, "memory", None), "_record_memory_history", None)
        if record is None:
            raise ConfigError(
                f"--record-memory-history needs an accelerator's allocator, which {self.name} does not have; leave "
                "it out"
            )
        record()

    def save_memory_history(self, path: str) -> None:
        """Write the record for pytorch.org/memory_viz."""
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
    """Return the peak FLOP/s of a device by its driver's name for it; None if unknown."""
    for model, flops in _PEAK_FLOPS.items():
        if model in device_name:
            is_slower_variant = model in ("H100", "H200") and ("PCIe" in device_name or "NVL" in device_name)
            return None if is_slower_variant else flops.get(dtype)
    return None


_ROUNDING_THRESHOLD = "pinned_max_round_threshold_mb"


def round_no_large_pinned_memory() -> None:
    """Allocate pinned buffers above 16 MB at their exact size, if torch can (PyTorch pull request 171662).

    By default torch rounds them up to a power of two: 5 GB of moments take 8. A threshold set by the user stays.
    """
    try:
        settings = torch._C._accelerator_getAllocatorSettings()
        if _ROUNDING_THRESHOLD not in settings:
            threshold = f"{_ROUNDING_THRESHOLD}:16"
            torch._C._accelerator_setAllocatorSettings(f"{settings},{threshold}" if settings else threshold)
    except (AttributeError, RuntimeError, ValueError):
        return


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return `x`, of any shape, on the device.

    It is copied asynchronously from pinned memory, so that the host does not wait for queued work. The caller may free
    `x` at once. It may overwrite an unpinned `x` at once, a pinned one after the next synchronization.
    """
    if x.device.type != "cpu" or torch.device(device).type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # the allocator reuses the pinned copy only after it is read


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has kernels and memory of its own, apart from the host's."""
    return device.type in _BACKENDS and device.type != "cpu"


def start_to_host(x: torch.Tensor) -> AsyncHandle[torch.Tensor]:
    """Start to copy `x`, of any shape, to pinned host memory; any thread may wait.

    A tensor of no accelerator is returned itself.
    """
    if not is_accelerator(x.device):
        return done(x)
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    arrived = torch.Event(device=x.device)
    arrived.record()

    def finish() -> torch.Tensor:
        arrived.synchronize()
        return copy

    return AsyncHandle(finish)


def lock_pages(x: torch.Tensor, device: torch.device | str) -> Callable[[], None]:
    """Lock the pages of the host tensor `x`, of any shape, in place, so that copies from `device` are asynchronous.

    Returns the function that unlocks them. A no-op for the host's own tensors, and for devices whose libraries do
    not offer it.
    """
    if torch.device(device).type != "cuda":
        return lambda: None
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(x.data_ptr(), x.nbytes, 0))
    return lambda: cudart.cudaHostUnregister(x.data_ptr())


def finish_copies(device: torch.device | str) -> None:
    """Wait until copies from `device` to the host have arrived."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def has_fused_adam(device: torch.device) -> bool:
    """Return whether torch has a fused Adam for this device."""
    return device.type != "npu"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has units for bfloat16.

    On a CPU without them such products are slower than float32's.
    """
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextlib.contextmanager
def float32_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Compute products of float32 matrices inside with float32 factors, or with TF32 where the device has it.

    tf32: whether TF32 factors are allowed; a CPU has none.
    """
    if device.type not in _FLOAT32_PRODUCTS:
        yield
        return
    settings = _FLOAT32_PRODUCTS[device.type]
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if tf32 and device.type != "cpu" else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


_FLOAT32_PRODUCTS = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Freed blocks of at least so many bytes are returned to the system, by `empty_unused_memory_level`.
_MALLOC_THRESHOLDS = (2**31 - 1, 1 << 20, 1 << 17)


def let_malloc_keep_freed_blocks(threshold: int) -> None:
    """Let malloc keep freed blocks smaller than `threshold` bytes for reuse. A no-op unless on Linux with glibc.

    By default glibc returns each large block to the system, and the next tensor faults in zeroed pages again: a
    quarter of the processor time of a step (2 layers of 512, 1024 tokens). Kept blocks fragment memory, so the level
    lowers the threshold.

    Where kernels have one thread, all threads share one heap: else what a thread of gloo frees would be kept for that
    thread alone. Several threads of a kernel would wait for one another: bfloat16 attention with its backward (2 x 512
    tokens, 8 heads of 64) took 25 ms on two threads of a Xeon with AMX, and 11 with a heap for each.
    """
    c_library = _glibc()
    if c_library is None:
        return
    c_library.mallopt(_M_MMAP_THRESHOLD, threshold)
    c_library.mallopt(_M_TRIM_THRESHOLD, threshold)
    if torch.get_num_threads() == 1:
        c_library.mallopt(_M_ARENA_MAX, 1)


def request_huge_page_alignment() -> None:
    """Make torch align tensors of 2 MB and more to pages, and ask for huge pages.

    It has no effect once torch has made a tensor.

    Aligned to 64 bytes, glibc allocates a little more and frees the rest: pieces so small that a thread keeps them for
    its next small object. A tensor that is freed then leaves a hole too small for the next one of its size, and the
    heap grows with every step: a rank of ZeRO stage 3 with 27.6 million parameters took 1.2 GiB after 4 steps and 2.9
    after 32, with this alignment 0.9 and 1.3. Tensor parallelism grew too; one process did not, and would take 4 % more
    for whole pages.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _anonymous_bytes() -> int | None:
    """Return the resident memory of this process without that of files; None unless on Linux."""
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
