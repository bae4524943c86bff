"""The settings of the device and of the process group. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, WholeNumber, option

DeviceName = Literal["auto", "cpu", "cuda", "npu", "xpu"]


@dataclass(frozen=True)
class DeviceConfig(FlagConfig):
    """Device and processes."""

    device: DeviceName = option("auto", "device to train on; auto: an accelerator if there is one, else the CPU")
    distributed_backend: Literal["gloo", "nccl", "hccl", "xccl"] | None = option(
        None, "torch.distributed backend; default: the device's"
    )
    distributed_timeout_minutes: Count = option(
        10, "minutes after which a missing rank or an unfinished collective is an error"
    )
    empty_unused_memory_level: Literal[0, 1, 2] = option(
        0,
        "return cached memory to the driver (torch.cuda.empty_cache): 1: after the last backward of an iteration; 2: "
        "also after the update. On a CPU, return freed blocks to the system at once: 1: blocks above 1 MB; 2: blocks "
        "above 128 KiB",
    )
    check_memory: bool = option(
        True,
        "start even if parameters, gradients and optimizer state need more memory than the device or host has",
        flags=("--no-check-memory",),
    )
    deterministic_mode: bool = option(
        False,
        "repeat the bits of a run: on an accelerator, kernels with one order of sums alone "
        "(torch.use_deterministic_algorithms); a CPU always repeats them",
    )
    local_rank: WholeNumber | None = option(
        None, "rank of the process on its node; set by launchers", flags=("--local-rank", "--local_rank")
    )
