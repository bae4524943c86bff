"""Predictions are printed as a table with one line for each pipeline stage, or as JSON."""

from collections.abc import Sequence
from typing import Any

from megatron.core.parallel.rank_grid import ORDER
from megatron.training.memory.dry_run_of_one_rank import Job
from megatron.training.memory.forecast_memory_along_schedule import DEVICE, KINDS, RankMemory, worst
from megatron.training.memory.zero_state_bytes_by_tier import amount

GIB = 2**30
TIERS = (DEVICE, "host", "file")
_PLACE = {"host": "host memory", "file": "a file"}
_NAME = {"optimizer": "masters and moments", "slices": "slices on their way"}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as aligned lines; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]


def stage_table(ranks: Sequence[RankMemory], shown: Sequence[int] | None = None) -> list[str]:
    """Return one line for each pipeline rank in `shown` (default: all); the rank whose device needs most is marked."""
    most = worst(ranks).rank
    tiers = [tier for tier in TIERS if any(tier in rank.by_tier for rank in ranks)]
    totals = ["total"] if tiers == [DEVICE] else tiers
    rows = [["stage", "layers", *KINDS, *totals, ""]]
    for rank in ranks:
        if shown is not None and rank.rank not in shown:
            continue
        mark = "<- most" if rank.rank == most and len(ranks) > 1 else ""
        sizes = [rank.bytes[kind] for kind in KINDS] + [rank.tiers.get(tier, 0) for tier in tiers]
        rows.append([str(rank.rank), str(rank.layers), *map(amount, sizes), mark])
    return [*table(rows), *_other_tiers(worst(ranks))]


def _other_tiers(rank: RankMemory) -> list[str]:
    """Return a line with the kinds in each tier other than the device."""
    lines = []
    for tier in TIERS[1:]:
        sizes = [f"{_NAME.get(kind, kind)} {amount(size)}" for kind, size in rank.by_tier.get(tier, {}).items() if size]
        if sizes:
            lines.append(f"in {_PLACE[tier]}: {', '.join(sizes)}")
    return lines


def full_report(job: Job, ranks: list[RankMemory]) -> list[str]:
    """Return the output of `tools/estimate_memory.py`."""
    config = job.runtime.config
    most = worst(ranks)
    p = len(ranks)
    t = config.parallel.tensor_model_parallel_size
    d = config.data_parallel_size(job.runtime.world_size)
    mesh = job.runtime.mesh
    further = [name for name in ORDER.split("-") if name not in ("tp", "pp", "dp") and mesh[name].size > 1]
    further_axes = "".join(f", {name} {mesh[name].size}" for name in further)
    m = max(job.runtime.batch_sizes.sizes) // job.runtime.samples_at_once
    tokens = f"{config.training.micro_batch_size} x {config.data.seq_length} tokens"
    all_ranks = sum(rank.total for rank in ranks) * job.runtime.world_size // p
    return [
        f"{sum(rank.parameters for rank in ranks):,} parameters; {job.runtime.world_size:,} rank(s): tp {t}, pp {p}, "
        f"dp {d}{further_axes}; {m} microbatch(es) of {tokens}, {config.schedule_name}, "
        f"ZeRO stage {config.data_parallel.stage}; kernels of {'an accelerator' if job.accelerator else 'a CPU'}",
        *stage_table(ranks),
        f"worst rank: stage {most.rank}, {most.total:,} bytes = {most.total / GIB:.3f} GiB, of which "
        f"{most.state_within(DEVICE):,} stay between steps",
        f"all ranks: {all_ranks:,} bytes = {all_ranks / GIB:.3f} GiB",
    ]


def abridged_stage_table(ranks: list[RankMemory]) -> list[str]:
    """Return the log lines at the start of a run.

    Up to 8 stages are all shown; of more, the first two, the last two, and the stage that needs most.
    """
    last = len(ranks) - 1
    most = worst(ranks).rank
    shown = range(last + 1) if last < 8 else sorted({0, 1, most, last - 1, last})
    return ["memory of a rank, predicted:", *("  " + line for line in stage_table(ranks, shown))]


def as_json(job: Job, ranks: list[RankMemory]) -> dict[str, Any]:
    """Return the prediction for `tools/estimate_memory.py --json`."""
    most = worst(ranks)
    return {
        "world_size": job.runtime.world_size,
        "worst_stage": most.rank,
        "worst_total_bytes": most.total,
        "stages": [
            {"stage": rank.rank, "layers": rank.layers, **rank.bytes, "total": rank.total, "tiers": rank.by_tier}
            for rank in ranks
        ],
    }
