"""The memory of every pipeline stage: what a step adds with each action, summed along the schedule.

    Forecast(job).ranks     a `RankMemory` for each pipeline rank, on every rank of a run
    forecast(job)           the same in a process alone

Ranks of one pipeline stage hold equally much, but for a share of offloaded state, which is rounded up to other
parameters on each.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from megatron.core import comm
from megatron.core.pipeline_parallel.schedule import Op
from megatron.training.memory.dry_run import COMPUTES, PASSING, Job, Profile, dry_run, mesh_of

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
DEVICE = "device"  # the tier of what is computed with
IN_MEMORY = (DEVICE, "host")  # the tiers that are one on a CPU


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of a pipeline stage needs, by tier and kind: what stays, and the peaks of what comes and goes."""

    rank: int  # of the pipeline
    layers: int
    on: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: int = 0  # elements

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


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """The one whose device needs most."""
    return max(ranks, key=lambda one: one.total)


class Forecast:
    """The memory of a run's pipeline ranks, each of which the first rank of the run tries when it is first asked for.

    `problem`: why there is none; a script may do what cannot be done without values.
    """

    def __init__(self, job: Job):
        self.job, self.problem = job, ""
        self._ranks: list[RankMemory] | None = None

    @property
    def ranks(self) -> list[RankMemory]:
        """Every rank must call, alike."""
        if self._ranks is None:
            self._ranks = self._told_to_all()
        return self._ranks

    def _told_to_all(self) -> list[RankMemory]:
        world, found = self.job.runtime.mesh["world"], {}
        if world.is_first:
            try:
                found = {"ranks": [asdict(one) for one in forecast(self.job)]}
            except Exception as error:  # of the script, which may run all the same
                found = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
        text = comm.broadcast_text(json.dumps(found), world, self.job.runtime.device.torch_device)
        found = json.loads(text)
        self.problem = found.get("problem", "")
        return [RankMemory(**one) for one in found.get("ranks", [])]


def forecast(job: Job) -> list[RankMemory]:
    """One entry a pipeline rank. Stages of the same layers are tried once."""
    config, tried = job.runtime.config, {}
    stages, ranks = config.stages, []
    for pp_rank, rank in enumerate(mesh_of(config, job.runtime.world_size, 0)["pp"].ranks):
        mine = stages.of_rank(pp_rank)
        like = tuple((len(config.layer_split[stage]), stage == 0, stage == stages.last) for stage in mine)
        if like not in tried:
            tried[like] = dry_run(job, rank, values=_is_small(job))
        ranks.append(predicted_of(tried[like], pp_rank))
    return ranks


def predicted_of(profile: Profile, pp_rank: int) -> RankMemory:
    """The memory of the pipeline rank that runs the profile's actions as `pp_rank` does."""
    return RankMemory(pp_rank, profile.layers, along(profile, pp_rank), profile.parameters)


_SMALL = 2**21  # elements, below which a step with values takes less time than one with shapes


def _is_small(job: Job) -> bool:
    config = job.runtime.config
    shape, tokens = config.transformer, config.training.micro_batch_size * config.data.seq_length
    width, words = shape.hidden_size, job.runtime.vocab_size_if_any or 0
    layer = 16 * width * (width + tokens) + shape.num_attention_heads * tokens * config.data.seq_length
    return not job.accelerator and shape.num_layers * layer + words * (width + tokens) < _SMALL


def along(profile: Profile, rank: int) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind of a rank that runs its actions of the profile's schedule."""
    actions = profile.schedule[rank]
    chunk_of = {stage: n for n, stage in enumerate(sorted({action.stage for action in actions}))}
    tried = sorted({microbatch for _, _, microbatch in profile.changes if microbatch is not None})
    repeats = any(action.microbatch not in (*tried, None) for action in actions)
    ends = {(action.stage, action.microbatch): action.op for action in actions if action.op in COMPUTES}
    live, peak = Counter(profile.start), Counter(profile.start)
    owed: Counter[tuple[int, int]] = Counter()
    away, most_away = Counter(), Counter()  # by stage, each of which has rooms of its own
    for action in actions:
        op = action.op
        stage, microbatch = action.stage, action.microbatch
        change = profile.changes[op, chunk_of[stage], _stand_in(op, microbatch, tried)]
        for kind in PASSING:
            peak[kind] = max(peak[kind], live[kind] + change.peak[kind])
            live[kind] += change.left[kind]
        if repeats and microbatch is not None:  # nothing stays of a microbatch, whichever stood in for it
            owed[stage, microbatch] += change.left["activations"]
            if ends[stage, microbatch] is op:
                live["activations"] -= owed.pop((stage, microbatch))
        away[stage] += change.away
        most_away[stage] = max(most_away[stage], away[stage])
    for kind in PASSING:
        peak[kind] = max(peak[kind], live[kind] + profile.end.peak[kind])
    return _placed(profile, peak, most_away.total())


def _stand_in(op: Op, microbatch: int | None, tried: Sequence[int]) -> int | None:
    """The microbatch that was run in its stead: forward the last, since the first finds what the step before has
    left; backward the
    first, since the last begins the sums."""
    if microbatch is None or microbatch in tried:
        return microbatch
    return tried[-1] if op is Op.F else tried[0]


def _placed(profile: Profile, peak: Counter[str], away: int) -> dict[str, dict[str, int]]:
    on = {tier: dict(kinds) for tier, kinds in profile.state.items()}
    device, tier = on.setdefault(DEVICE, {}), profile.tier
    for kind in PASSING[:-1]:
        device[kind] = peak[kind]
    if away:
        on.setdefault(tier, {})["activations"] = away
    if slices := max(peak["slices"], profile.slices):
        on.setdefault("host", {})["slices"] = slices
    return on
