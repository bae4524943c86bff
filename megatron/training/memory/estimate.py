"""The memory of every pipeline stage of a run, before anything is allocated. Pure.

    estimate(RunSizes.of(config, vocab_size, world_size, accelerator=True))     a `RankMemory` for each pipeline rank

Ranks of one pipeline stage hold equally much: tensor-parallel ranks have equal parts, data-parallel ones equal shards.
"""

from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule import SCHEDULES, Schedule
from megatron.training.memory import activations, communication
from megatron.training.memory.elsewhere import bytes_elsewhere
from megatron.training.memory.parameters import plans_of_stage, state_of
from megatron.training.memory.sizes import RunSizes

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
DEVICE = "device"  # the tier of what is computed with
IN_MEMORY = (DEVICE, "host")  # the tiers that are one on a CPU


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of a pipeline stage needs, by tier and kind: what stays, and the peaks of what comes and goes."""

    rank: int  # of the pipeline
    layers: int
    on: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> dict[str, int]:
        """By kind, wherever it lives."""
        return self.within(*self.on)

    @property
    def total(self) -> int:
        """Of all kinds on the device. The peaks need not come at one moment, so it may be a little less."""
        return self.tiers[DEVICE]

    @property
    def state(self) -> int:
        """What stays between the steps, wherever it lives: parameters, gradients, optimizer."""
        return self.state_within(*self.on)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes on each tier."""
        return {tier: sum(kinds.values()) for tier, kinds in self.on.items()}

    def within(self, *tiers: str) -> dict[str, int]:
        """Bytes by kind, of what lives on these tiers."""
        return {kind: sum(self.on.get(tier, {}).get(kind, 0) for tier in tiers) for kind in KINDS}

    def state_within(self, *tiers: str) -> int:
        """What stays between the steps, of what lives on these tiers."""
        held = self.within(*tiers)
        return sum(held[kind] for kind in KINDS[:3])


def estimate(run: RunSizes) -> list[RankMemory]:
    """One entry a pipeline rank."""
    lowered = _lowered(run)
    return [
        RankMemory(
            rank, sum(len(run.layers[stage]) for stage in run.stages_of(rank)), _bytes_of_rank(run, rank, lowered)
        )
        for rank in range(run.p)
    ]


def worst(ranks: list[RankMemory]) -> RankMemory:
    """The one whose device needs most."""
    return max(ranks, key=lambda one: one.total)


def _bytes_of_rank(run: RunSizes, rank: int, lowered: Schedule) -> dict[str, dict[str, int]]:
    stages = run.stages_of(rank)
    plans = [plan for stage in stages for plan in plans_of_stage(run, stage)]
    on = _joined([state_of(run, plan) for plan in plans])
    if run.fixed_order:
        on[DEVICE]["gradients"] += _in_fixed_order(run, [plan.numel for plan in plans])
    tapes = {stage: activations.tape_of_stage(run, stage) for stage in stages}
    on = _joined([on, bytes_elsewhere(run, tapes, lowered[rank])])
    of_stage = {stage: activations.stage_bytes(run, stage) for stage in stages}
    passing = activations.peak_of_rank(lowered[rank], of_stage)
    on[DEVICE]["activations"] = on[DEVICE].get("activations", 0) + passing
    on[DEVICE]["communication"] = communication.peak_of_rank(run, rank, lowered[rank])
    return on


def activations_elsewhere(run: RunSizes, rank: int) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind that a pipeline rank's activations have off the device."""
    tapes = {stage: activations.tape_of_stage(run, stage) for stage in run.stages_of(rank)}
    found = bytes_elsewhere(run, tapes, _lowered(run)[rank])
    return {tier: kinds for tier, kinds in found.items() if tier != DEVICE}


def _in_fixed_order(run: RunSizes, numels: list[int]) -> int:
    """The gradients of each microbatch, and of two from all ranks while those of a buffer are summed; then it is the next one's turn."""
    ranks = run.replicas * run.shards
    gathered = min(2, run.m) * ranks if ranks > 1 else 0
    left = [run.m * sum(numels[at:]) + gathered * numel for at, numel in enumerate(numels)]
    return max(left) * run.layer.grad_bytes


_KIND_OF = {"masters": "optimizer", "moments": "optimizer"}  # here, of a kind of tier_bytes.py


def _joined(found: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The sum of several buffers, which pass through the same slices."""
    on: dict[str, dict[str, int]] = {DEVICE: {}}
    for tiers in found:
        for tier, kinds in tiers.items():
            for kind, size in kinds.items():
                name, held = _KIND_OF.get(kind, kind), on.setdefault(tier, {})
                held[name] = max(held.get(name, 0), size) if name == "slices" else held.get(name, 0) + size
    return on


def _lowered(run: RunSizes) -> Schedule:
    """Every rank's actions. Of more than 2 microbatches a pipeline rank, 4 with chunks, the later ones repeat, but for gpipe, which
    keeps all."""
    enough = (4 if run.chunks > 1 else 2) * run.p
    m = run.m if run.schedule == "gpipe" or run.m < enough + 2 * run.p else enough
    return add_reduce(add_transfers(SCHEDULES[run.schedule](run.p, m, run.chunks)))
