"""Predictions as text: a table with a line for each pipeline stage, and the same as JSON. Pure."""

from collections.abc import Sequence
from typing import Any

from megatron.training.memory.dry_run import Job
from megatron.training.memory.timeline import DEVICE, KINDS, RankMemory, worst

GIB = 2**30
TIERS = (DEVICE, "host", "file")
_PLACE = {"host": "host memory", "file": "a file"}
_NAME = {"optimizer": "masters and moments", "slices": "slices on their way"}


def amount(size: float) -> str:
    """1536 -> 1.50 KiB"""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines, the first cell to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]
        ).rstrip()
        for cells in rows
    ]


def stage_table(ranks: Sequence[RankMemory], shown: Sequence[int] | None = None) -> list[str]:
    """A line for each pipeline rank (of those `shown`), the worst marked."""
    most = worst(list(ranks)).rank
    tiers = [tier for tier in TIERS if any(tier in one.on for one in ranks)]
    rows = [["stage", "layers", *KINDS, *(["total"] if tiers == [DEVICE] else tiers), ""]]
    for one in ranks:
        if shown is None or one.rank in shown:
            mark = "<- most" if one.rank == most and len(ranks) > 1 else ""
            cells = [amount(one.bytes[kind]) for kind in KINDS]
            sums = [amount(one.tiers.get(tier, 0)) for tier in tiers]
            rows.append([str(one.rank), str(one.layers), *cells, *sums, mark])
    return [*table(rows), *_elsewhere(worst(list(ranks)))]


def _elsewhere(one: RankMemory) -> list[str]:
    """What does not live on the device."""
    held = {tier: {kind: size for kind, size in one.on.get(tier, {}).items() if size} for tier in TIERS[1:]}
    return [
        f"in {_PLACE[tier]}: " + ", ".join(f"{_NAME.get(kind, kind)} {amount(size)}" for kind, size in kinds.items())
        for tier, kinds in held.items()
        if kinds
    ]


def full_report(job: Job, ranks: list[RankMemory]) -> list[str]:
    """What `tools/estimate_memory.py` prints."""
    config, most = job.runtime.config, worst(ranks)
    p, t = len(ranks), config.parallel.tensor_model_parallel_size
    m = max(job.runtime.batch_sizes.sizes) // job.runtime.samples_at_once
    tokens = f"{config.training.micro_batch_size} x {config.data.seq_length} tokens"
    everyone = sum(one.total for one in ranks) * job.runtime.world_size // p
    return [
        f"{sum(one.parameters for one in ranks):,} parameters; {job.runtime.world_size:,} rank(s): tp {t}, pp {p}, "
        f"dp {config.data_parallel_size(job.runtime.world_size)}; {m} microbatch(es) of {tokens}, {config.schedule_name}, "
        f"ZeRO stage {config.data_parallel.stage}; kernels of {'an accelerator' if job.accelerator else 'a CPU'}",
        *stage_table(ranks),
        f"worst rank: stage {most.rank}, {most.total:,} bytes = {most.total / GIB:.3f} GiB, of which "
        f"{most.state_within(DEVICE):,} stay between steps",
        f"all ranks: {everyone:,} bytes = {everyone / GIB:.3f} GiB",
    ]


def short_report(ranks: list[RankMemory]) -> list[str]:
    """What the start of a run prints: the first stages, the last, and the one that needs most."""
    last, most = len(ranks) - 1, worst(ranks).rank
    shown = range(last + 1) if last < 8 else sorted({0, 1, most, last - 1, last})
    return ["memory of a rank, predicted:", *("  " + line for line in stage_table(ranks, shown))]


def as_json(job: Job, ranks: list[RankMemory]) -> dict[str, Any]:
    most = worst(ranks)
    return {
        "world_size": job.runtime.world_size,
        "worst_stage": most.rank,
        "worst_total_bytes": most.total,
        "stages": [
            {"stage": one.rank, "layers": one.layers, **one.bytes, "total": one.total, "tiers": one.on} for one in ranks
        ],
    }
