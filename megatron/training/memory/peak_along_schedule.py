"""The memory of every pipeline rank: the bytes that each action adds, summed along the schedule.

    Forecast(job).ranks     a `RankMemory` for each pipeline rank, on every rank of a run
    forecast(job)           the same in one process

The ranks of a pipeline stage need equally much, except for a fraction of offloaded state: each rank rounds it up to whole
parameters of its own.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.schedule.actions import Op
from megatron.training.arguments.config import Config
from megatron.training.memory.dry_run import COMPUTES, PASSING, Job, Profile, dry_run, mesh_of

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
STATE, ACTIVATIONS = "parameters, gradients and optimizer state", "activations"
DEVICE = "device"  # the tier that computes
IN_MEMORY = (DEVICE, "host")  # on a CPU, one memory
_SMALL = 2**21  # elements; a smaller step runs faster with values than with shapes


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of a pipeline stage needs, by tier and kind: resident state, and the peak of each other kind."""

    rank: int  # of the pipeline
    layers: int
    on: dict[str, dict[str, int]] = field(default_factory=dict)
    parameters: int = 0  # elements

    @property
    def bytes(self) -> dict[str, int]:
        """By kind, on all tiers."""
        return self.within(*self.on)

    @property
    def total(self) -> int:
        """On the device. The peaks of the kinds may not coincide, so the true peak may be a little lower."""
        return self.tiers[DEVICE]

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state, on all tiers."""
        return self.state_within(*self.on)

    @property
    def tiers(self) -> dict[str, int]:
        """By tier."""
        return {tier: sum(kinds.values()) for tier, kinds in self.on.items()}

    def on_tiers(self, *tiers: str) -> int:
        """All kinds on these tiers."""
        return sum(self.tiers.get(tier, 0) for tier in tiers)

    def within(self, *tiers: str) -> dict[str, int]:
        """By kind, on these tiers."""
        return {kind: sum(self.on.get(tier, {}).get(kind, 0) for tier in tiers) for kind in KINDS}

    def state_within(self, *tiers: str) -> int:
        """Parameters, gradients and optimizer state on these tiers."""
        return sum(list(self.within(*tiers).values())[:3])

    def parts_within(self, *tiers: str) -> dict[str, int]:
        """State, activations and communication on these tiers, by the names that messages use."""
        held = self.within(*tiers)
        return {STATE: self.state_within(*tiers)} | {kind: held[kind] for kind in (ACTIVATIONS, "communication")}


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank whose device needs most."""
    return max(ranks, key=lambda one: one.total)


class Forecast:
    """The memory of a run's pipeline ranks. The first rank of the run predicts it on first use and tells the others.

    problem: why `ranks` is empty; a script may do something that cannot run without values.
    """

    def __init__(self, job: Job):
        self.job, self.problem = job, ""
        self._ranks: list[RankMemory] | None = None

    @property
    def ranks(self) -> list[RankMemory]:
        """Every rank must call."""
        if self._ranks is None:
            world, found = self.job.runtime.mesh["world"], {}
            if world.is_first:
                try:
                    found = {"ranks": [asdict(one) for one in forecast(self.job)]}
                except Exception as error:  # in the script; the run itself may succeed
                    found = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
                    # Settings that a stage or a kernel refuses end the run here, not in its first step. The device of
                    # shapes is not the run's accelerator, so what is refused for it says nothing.
                    if isinstance(error, ConfigError) and not self.job.accelerator:
                        found["refused"] = error.problems
            text = collectives.broadcast_text(json.dumps(found), world, self.job.runtime.device.torch_device)
            found = json.loads(text)
            if "refused" in found:
                raise ConfigError(found["refused"])
            self.problem = found.get("problem", "")
            self._ranks = [RankMemory(**one) for one in found.get("ranks", [])]
        return self._ranks


def forecast(job: Job) -> list[RankMemory]:
    """One entry for each pipeline rank. Stages with the same layers share a dry run."""
    config, tried = job.runtime.config, {}
    stages, ranks = config.stages, []
    for pp_rank, rank in enumerate(mesh_of(config, job.runtime.world_size, 0)["pp"].ranks):
        mine = stages.of_rank(pp_rank)
        # Layers of one stage cost the same as those of another; the ends add a table and a loss.
        like = tuple((_layers_like(config, stage), stage == 0, stage == stages.last) for stage in mine)
        if like not in tried:
            tried[like] = dry_run(job, rank, values=_is_small(job))
        ranks.append(predicted_of(tried[like], pp_rank))
    return ranks


def _layers_like(config: Config, stage: int) -> tuple[int, int, bool]:
    """What tells the layers of two stages apart: how many, how many of an encoder, and whether its end is among them."""
    layers, model = config.layer_split[stage], config.transformer
    return (
        len(layers),
        sum(layer < model.num_layers for layer in layers),
        model.decoder_layers > 0 and model.num_layers - 1 in layers,
    )


def predicted_of(profile: Profile, pp_rank: int) -> RankMemory:
    """The memory of pipeline rank `pp_rank` if its actions are those of the profile."""
    return RankMemory(pp_rank, profile.layers, along(profile, pp_rank), profile.parameters)


def _is_small(job: Job) -> bool:
    config = job.runtime.config
    shape, tokens = config.transformer, config.training.micro_batch_size * config.data.seq_length
    width, words = shape.hidden_size, job.runtime.vocab_size_if_any or 0
    layer = 16 * width * (width + tokens) + shape.num_attention_heads * tokens * config.data.seq_length
    return not job.accelerator and shape.num_layers * layer + words * (width + tokens) < _SMALL


def along(profile: Profile, rank: int) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind of pipeline rank `rank`, whose actions stand in the profile's schedule."""
    actions = profile.schedule[rank]
    chunk_of = {stage: n for n, stage in enumerate(sorted({action.stage for action in actions}))}
    tried = sorted({microbatch for _, _, microbatch in profile.changes if microbatch is not None})
    repeats = any(action.microbatch not in (*tried, None) for action in actions)
    ends = {(action.stage, action.microbatch): action.op for action in actions if action.op in COMPUTES}
    live, peak = Counter(profile.start), Counter(profile.start)
    owed: Counter[tuple[int, int]] = Counter()
    away, most_away = Counter(), Counter()  # by stage: each has its own slots in the tier
    for action in actions:
        stage, microbatch = action.stage, action.microbatch
        change = profile.changes[action.op, chunk_of[stage], _stand_in(action.op, microbatch, tried)]
        for kind in PASSING:
            peak[kind] = max(peak[kind], live[kind] + change.peak[kind])
            live[kind] += change.left[kind]
        # A microbatch leaves nothing behind. Its stand-ins may differ by a few bytes, which would add up.
        if repeats and microbatch is not None:
            owed[stage, microbatch] += change.left[ACTIVATIONS]
            if ends[stage, microbatch] is action.op:
                live[ACTIVATIONS] -= owed.pop((stage, microbatch))
        away[stage] += change.away
        most_away[stage] = max(most_away[stage], away[stage])
    for kind in PASSING:
        peak[kind] = max(peak[kind], live[kind] + profile.end.peak[kind])
    return _placed(profile, peak, most_away.total())


def _stand_in(op: Op, microbatch: int | None, tried: Sequence[int]) -> int | None:
    """The microbatch whose dry run counts for this one: the last for a forward, since the first finds buffers of the step
    before; the first for a backward, since the last begins the reduction of gradients."""
    if microbatch is None or microbatch in tried:
        return microbatch
    return tried[-1] if op is Op.F else tried[0]


def _placed(profile: Profile, peak: Counter[str], away: int) -> dict[str, dict[str, int]]:
    """Resident state and peaks, by tier."""
    on = {tier: dict(kinds) for tier, kinds in profile.state.items()}
    on.setdefault(DEVICE, {}).update({kind: peak[kind] for kind in PASSING[:-1]})
    if away:
        on.setdefault(profile.tier, {})[ACTIVATIONS] = away
    if slices := max(peak["slices"], profile.slices):
        on.setdefault("host", {})["slices"] = slices
    return on
