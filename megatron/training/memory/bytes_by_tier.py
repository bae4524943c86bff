"""The bytes of a rank's lasting state in each tier ("device", "host", "file"), from integers."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron.core.offload.offload_fraction import SLICE, SLICES_IN_FLIGHT


@dataclass(frozen=True)
class Element:
    """Bytes of each kind for one trained element."""

    parameter: int
    gradient: int  # as a rank accumulates it
    summed: int  # as it is summed over ranks; the same memory if it is as wide
    master: int  # 0 if the parameter is its own master
    moments: int

    @classmethod
    def of(
        cls, parameter: int, moments: int, *, gradient: int | None = None, splits_masters: bool = False
    ) -> "Element":
        """parameter: bytes in the model's precision; moments: their number; gradient: bytes as accumulated (default: as
        summed); splits_masters: a master keeps only the bytes that the parameter lacks."""
        wide = max(parameter, 4)
        master = 0 if parameter == wide else wide - parameter * splits_masters
        return cls(parameter, gradient or wide, wide, master, wide * moments)


def bytes_by_tier(
    numel: int,
    element: Element,
    *,
    stage: int = 0,
    shards: int = 1,
    outer: int = 1,
    tier: str = "device",
    fraction: float = 1.0,
    offload_params: bool = False,
) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind of `numel` trained elements, without alignment and without whole units in flight.

    {"device": {"parameters": .., "gradients": ..}, "host": {"masters": .., "moments": .., "slices": ..}}

    stage: of ZeRO; shards: ranks that share the state; outer: further ranks that share masters and moments; tier: home of
    `fraction` of masters and moments, and with `offload_params` of the parameters. "slices": host buffers for state in a
    file.
    """
    part = -(-numel // shards) if stage else numel
    updated = -(-part // outer)
    away = 0 if tier == "device" else round(updated * fraction)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    found[tier if offload_params else "device"]["parameters"] = (part if stage == 3 else numel) * element.parameter
    found["device"]["gradients"] = numel * element.gradient if stage < 2 else 0
    if stage > 1 or element.gradient != element.summed:
        found["device"]["gradients"] += part * element.summed
    for where, count in ((tier, away), ("device", updated - away)):
        found[where] += Counter(masters=count * element.master, moments=count * element.moments)
    if tier == "file":
        found["host"]["slices"] = SLICES_IN_FLIGHT * min(SLICE, away) * (element.master + element.moments)
    return {where: dict(+kinds) for where, kinds in found.items() if +kinds}


def amount(size: float) -> str:
    """1536 -> 1.50 KiB"""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size:.0f} B"


def bytes_line(found: dict[str, dict[str, int]]) -> str:
    """`device 1.20 GiB (parameters 0.40 GiB, ...), file 3.10 GiB (...)`"""
    return ", ".join(
        f"{where} {amount(sum(kinds.values()))} ({', '.join(f'{kind} {amount(n)}' for kind, n in kinds.items())})"
        for where, kinds in found.items()
    )
