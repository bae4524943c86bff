"""How many bytes of lasting state a rank has in each tier, and how they are shown. Pure.

Tiers are "device", "host" and "file"; which of them is used is for the settings to say.
"""

from dataclasses import dataclass

from megatron.core.tiers.plan import AHEAD, SLICE


@dataclass(frozen=True)
class Element:
    """Bytes that one trained element takes of each kind."""

    parameter: int
    gradient: int  # as a rank adds it up
    summed: int  # as it is summed over ranks: the same memory, where it is as wide
    master: int  # 0 where the parameter is its own
    moments: int

    @classmethod
    def of(
        cls, parameter: int, moments: int, *, gradient: int | None = None, splits_masters: bool = False
    ) -> "Element":
        """parameter: bytes of one in the model's precision; moments: how many the optimizer keeps; gradient: bytes
        of one that a rank
        adds up, those of its sum when None; splits_masters: of a master only what the parameter lacks is kept."""
        wide = max(parameter, 4)
        master = wide - parameter if splits_masters else wide
        return cls(parameter, gradient or wide, wide, master if parameter < wide else 0, wide * moments)


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
    """Of `numel` trained elements of a rank's model chunks, the bytes of each kind in each tier: lasting state,
    without alignment.

    {"device": {"parameters": .., "gradients": ..}, "host": {"masters": .., "moments": .., "slices": ..}}

    stage: ZeRO's; shards: over how many ranks things are divided; outer: over how many more masters and moments are; tier: where
    `fraction` of masters and moments live, and with `offload_params` the parameters. What is whole for a while in
    ZeRO stages 2 and 3 is not counted. "slices" are the buffers on
    the host that state in a file passes through.
    """
    part = -(-numel // shards) if stage else numel
    updated = -(-part // outer)
    away = 0 if tier == "device" else round(updated * fraction)
    params = part if stage == 3 else numel
    grads = 0 if stage > 1 else numel * element.gradient
    if stage > 1 or element.gradient != element.summed:
        grads += part * element.summed
    found: dict[str, dict[str, int]] = {"device": {}, "host": {}, "file": {}}

    def add(where: str, kind: str, nbytes: int) -> None:
        if nbytes:
            found[where][kind] = found[where].get(kind, 0) + nbytes

    add(tier if offload_params else "device", "parameters", params * element.parameter)
    add("device", "gradients", grads)
    for where, count in ((tier, away), ("device", updated - away)):
        add(where, "masters", count * element.master)
        add(where, "moments", count * element.moments)
    if tier == "file" and away:
        add("host", "slices", AHEAD * min(SLICE, away) * (element.master + element.moments))
    return {where: kinds for where, kinds in found.items() if kinds}


def show_bytes(nbytes: int) -> str:
    """`1.5 GiB`"""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def bytes_line(found: dict[str, dict[str, int]]) -> str:
    """`device 1.2 GiB (parameters 0.4, ...), file 3.1 GiB (...)`"""
    return ", ".join(
        f"{where} {show_bytes(sum(kinds.values()))} ({', '.join(f'{kind} {show_bytes(n)}' for kind, n in kinds.items())})"
        for where, kinds in found.items()
    )
