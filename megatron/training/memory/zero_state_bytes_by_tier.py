"""Bytes of a rank's resident state in each tier ("device", "host", "file") are computed from integers."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron.core.offload.optimizer_offload_fraction import SLICE, SLICES_IN_FLIGHT


@dataclass(frozen=True)
class Element:
    """Bytes of each kind for one element."""

    parameter: int
    gradient: int  # as a rank accumulates it
    summed: int  # as it is summed over ranks; the same memory if it is as wide
    master: int  # 0 if the parameter is its own master
    moments: int

    @classmethod
    def of(
        cls, parameter: int, moments: int, *, gradient: int | None = None, splits_masters: bool = False
    ) -> "Element":
        """Return the bytes of an element that is trained with masters and moments in float32 or more.

        parameter: bytes in the model's precision. moments: their number.
        gradient: bytes as accumulated (default: as summed over ranks).
        splits_masters: a master keeps only the bytes that the parameter lacks.
        """
        full = max(parameter, 4)
        if parameter == full:
            master = 0
        elif splits_masters:
            master = full - parameter
        else:
            master = full
        return cls(parameter, gradient or full, full, master, full * moments)

    @classmethod
    def frozen(cls, parameter: int) -> "Element":
        """Return the bytes of an element that is not trained. parameter: bytes in the model's precision."""
        return cls(parameter, gradient=0, summed=0, master=0, moments=0)


def predicted_bytes_by_tier(
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
    """Return the bytes by tier and kind of `numel` elements, without alignment and gathered parameters.

    {"device": {"parameters": .., "gradients": ..}, "host": {"masters": .., "moments": .., "slices": ..}}

    stage: of ZeRO.
    shards: ranks that share the state.
    outer: further ranks that share masters and moments.
    tier: where `fraction` of masters and moments is kept, and with `offload_params` the parameters.
    "slices": host buffers for state in a file.
    """
    shard = -(-numel // shards) if stage else numel  # elements
    updated = -(-shard // outer)  # elements whose masters and moments this rank keeps
    offloaded = 0 if tier == "device" else round(updated * fraction)
    by_tier: dict[str, Counter[str]] = defaultdict(Counter)

    # parameters
    parameters = shard if stage == 3 else numel
    by_tier[tier if offload_params else "device"]["parameters"] = parameters * element.parameter

    # gradients: all of them below ZeRO 2, and this rank's shard if it is not a part of those
    by_tier["device"]["gradients"] = numel * element.gradient if stage < 2 else 0
    if stage > 1 or element.gradient != element.summed:
        by_tier["device"]["gradients"] += shard * element.summed

    # masters and moments
    by_tier[tier] += Counter(masters=offloaded * element.master, moments=offloaded * element.moments)
    resident = updated - offloaded
    by_tier["device"] += Counter(masters=resident * element.master, moments=resident * element.moments)
    if tier == "file":
        by_tier["host"]["slices"] = SLICES_IN_FLIGHT * min(SLICE, offloaded) * (element.master + element.moments)

    return {name: dict(+kinds) for name, kinds in by_tier.items() if +kinds}


def amount(size: float) -> str:
    """Return a number of bytes in words: 1536 -> 1.50 KiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size:.0f} B"


def bytes_line(by_tier: dict[str, dict[str, int]]) -> str:
    """Return `device 1.20 GiB (parameters 0.40 GiB, ...), file 3.10 GiB (...)`."""
    tiers = []
    for tier, kinds in by_tier.items():
        listed = ", ".join(f"{kind} {amount(size)}" for kind, size in kinds.items())
        tiers.append(f"{tier} {amount(sum(kinds.values()))} ({listed})")
    return ", ".join(tiers)
