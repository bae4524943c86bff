"""The settings of offload. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.base.dataclass_flags import FlagConfig, Share, option


@dataclass(frozen=True)
class OffloadConfig(FlagConfig):
    """Offload."""

    optimizer_cpu_offload: bool = option(
        False, "keep optimizer state in host memory and update it there, slice by slice"
    )
    optimizer_offload_fraction: Share = option(
        1.0, "share of the optimizer state to offload, rounded up to complete parameters"
    )
    offload_dir: str | None = option(
        None,
        "keep optimizer state in files under this folder (a fast local disk), one folder per rank, deleted at exit",
        metavar="DIR",
    )
    offload_params: bool = option(
        False, "offload the parameter shards too; needs --zero-stage 3 and --optimizer-cpu-offload or --offload-dir"
    )

    def problems(self) -> Iterator[str]:
        fraction = self.optimizer_offload_fraction
        if self.optimizer_cpu_offload and self.offload_dir is not None:
            yield "--optimizer-cpu-offload and --offload-dir exclude each other; give only one of them"
        if fraction != 1 and self.tier == "device":
            yield "--optimizer-offload-fraction needs --offload-dir DIR or --optimizer-cpu-offload"
        if self.offload_params and self.tier == "device":
            yield "--offload-params needs --offload-dir DIR or --optimizer-cpu-offload"
        elif self.offload_params and 0 <= fraction < 1:
            share = f"--optimizer-offload-fraction is {fraction}"
            yield f"--offload-params offloads all parameters, but {share}; leave one of them out"

    @property
    def tier(self) -> str:
        """The tier of memory that holds the state: "file", "host", or "device" without offload."""
        if self.offload_dir is not None:
            return "file"
        return "host" if self.optimizer_cpu_offload else "device"
