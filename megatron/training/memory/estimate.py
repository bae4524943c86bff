"""The memory of every pipeline stage of a run, before anything is allocated. Pure.

    estimate(RunSizes.of(config, vocab_size, world_size, accelerator=True))     a `RankMemory` for each pipeline rank

Ranks of one pipeline stage hold equally much: tensor-parallel ranks have equal parts, data-parallel ones equal shards.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule import SCHEDULES, Schedule
from megatron.core.pipeline_parallel.stage import loop_placement
from megatron.training.memory import activations, communication
from megatron.training.memory.parameters import owned_numel, plans_of_stage
from megatron.training.memory.sizes import RunSizes

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
DEVICE = "device"  # the tier of what is computed with

# kind of memory -> the tier that it lives on; what offloads says of its kinds where they are
TierOf = Callable[[str], str]


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of a pipeline stage needs, by kind: what stays, and the peaks of what comes and goes."""

    rank: int  # of the pipeline
    layers: int
    bytes: dict[str, int] = field(default_factory=dict)
    tier_of: TierOf = lambda kind: DEVICE

    @property
    def total(self) -> int:
        """Of all kinds and tiers. The peaks need not come at one moment, so it may be a little less."""
        return sum(self.bytes.values())

    @property
    def state(self) -> int:
        """What stays between the steps: parameters, gradients, optimizer."""
        return sum(self.bytes[kind] for kind in KINDS[:3])

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes on each tier."""
        of: dict[str, int] = {}
        for kind, size in self.bytes.items():
            of[self.tier_of(kind)] = of.get(self.tier_of(kind), 0) + size
        return of


def estimate(run: RunSizes, tier_of: TierOf = lambda kind: DEVICE) -> list[RankMemory]:
    """One entry a pipeline rank."""
    lowered = _lowered(run)
    return [
        RankMemory(
            rank,
            sum(len(run.layers[stage]) for stage in run.stages_of(rank)),
            _bytes_of_rank(run, rank, lowered),
            tier_of,
        )
        for rank in range(run.p)
    ]


def worst(ranks: list[RankMemory]) -> RankMemory:
    """The one that needs most."""
    return max(ranks, key=lambda one: one.total)


def _bytes_of_rank(run: RunSizes, rank: int, lowered: Schedule) -> dict[str, int]:
    sizes, stages = run.layer, run.stages_of(rank)
    plans = [plan for stage in stages for plan in plans_of_stage(run, stage)]
    whole, owned = sum(plan.numel for plan in plans), sum(map(owned_numel, plans))
    held = sum(plan.numel // (run.shards if run.zero_stage > 0 else 1) for plan in plans)
    grads = held * sizes.grad_bytes if run.zero_stage > 1 else whole * sizes.main_grad_bytes
    if run.zero_stage < 2 and sizes.main_grad_bytes != sizes.grad_bytes:
        grads += held * sizes.grad_bytes  # its sums
    if run.fixed_order:  # those of each microbatch, and of two from all ranks
        ranks = run.replicas * run.shards
        among = min(2, run.m) * ranks * max(plan.numel for plan in plans) if ranks > 1 else 0
        grads += (run.m * whole + among) * sizes.grad_bytes
    of_stage = {stage: activations.stage_bytes(run, stage) for stage in stages}
    values = (
        (held if run.zero_stage == 3 else whole) * sizes.param_bytes,
        grads,
        owned * sizes.grad_bytes * (run.moments + sizes.is_half),
        activations.peak_of_rank(lowered[rank], of_stage),
        communication.peak_of_rank(run, rank, lowered[rank]),
    )
    return dict(zip(KINDS, values))


def _lowered(run: RunSizes) -> Schedule:
    """Every rank's actions. Of more than 2 microbatches a pipeline rank the later ones repeat, but for gpipe, which keeps all."""
    m = run.m if run.schedule == "gpipe" or run.m < 4 * run.p else 2 * run.p
    return add_reduce(add_transfers(SCHEDULES[run.schedule](run.p, m, run.chunks), loop_placement(run.p)))
