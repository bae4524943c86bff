"""Predictions as text: a table with one line for each pipeline stage, and the same as JSON."""

from collections.abc import Sequence
from typing import Any

from megatron.training.memory.bytes_by_tier import amount
from megatron.training.memory.dry_run import Job
from megatron.training.memory.peak_along_schedule import DEVICE, KINDS, RankMemory, worst

GIB = 2**30
TIERS = (DEVICE, "host", "file")
_PLACE = {"host": "host memory", "file": "a file"}
_NAME = {"optimizer": "masters and moments", "slices": "slices on their way"}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]


def stage_table(ranks: Sequence[RankMemory], shown: Sequence[int] | None = None) -> list[str]:
    """One line for each pipeline rank in `shown` (default: all); the rank whose device needs most is marked."""
    most = worst(ranks).rank
    tiers = [tier for tier in TIERS if any(tier in one.on for one in ranks)]
    rows = [["stage", "layers", *KINDS, *(["total"] if tiers == [DEVICE] else tiers), ""]]
    for one in ranks:
        if shown is None or one.rank in shown:
            mark = "<- most" if one.rank == most and len(ranks) > 1 else ""
            sizes = [*(one.bytes[kind] for kind in KINDS), *(one.tiers.get(tier, 0) for tier in tiers)]
            rows.append([str(one.rank), str(one.layers), *map(amount, sizes), mark])
    return [*table(rows), *_elsewhere(worst(ranks))]


def _elsewhere(one: RankMemory) -> list[str]:
    """The kinds in tiers other than the device."""
    lines = []
    for tier in TIERS[1:]:
        if held := [f"{_NAME.get(kind, kind)} {amount(size)}" for kind, size in one.on.get(tier, {}).items() if size]:
            lines.append(f"in {_PLACE[tier]}: {', '.join(held)}")
    return lines


def full_report(job: Job, ranks: list[RankMemory]) -> list[str]:
    """The output of `tools/estimate_memory.py`."""
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
    """The log at the start of a run: the first and last two stages, and the one that needs most; all below 9 stages."""
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
