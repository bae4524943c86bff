"""Memory of every pipeline rank is predicted by adding up, along the schedule, what each action of a dry run adds.

    Forecast(job).ranks            a `RankMemory` for each pipeline rank, on every rank of a run
    forecast(job)                  the same in one process
    peak_along_schedule(...)       the sum over one rank's actions

Only one rank of each pipeline stage is predicted. The others need the same, except for a fraction of offloaded state:
each rank rounds it up to whole parameters of its own.
"""

import json
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import megatron
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.schedule.actions import Op
from megatron.training.arguments.config import Config
from megatron.training.memory.dry_run_of_one_rank import (
    COMPUTES,
    PASSING,
    Job,
    Profile,
    dry_run,
    layout_of_layers,
    mesh_of,
)
from megatron.training.memory.meta_tensor_mode_and_fake_group import SizesFromDataError, ValuesWithKnownSizes

KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
STATE = "parameters, gradients and optimizer state"  # the name of the first three kinds in messages
ACTIVATIONS = "activations"
DEVICE = "device"  # the tier that computes
IN_MEMORY = (DEVICE, "host")  # on a CPU, one memory
_NOT_OF_SCRIPTS = (str(Path(megatron.__file__).parent), str(Path(torch.__file__).parent), "<")  # "<": no file
_SMALL = 2**21  # elements; a smaller step runs faster with values than with shapes


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank of a pipeline stage needs: the resident state, and the peak of each other kind."""

    rank: int  # of the pipeline
    layers: int
    by_tier: dict[str, dict[str, int]] = field(default_factory=dict)  # tier -> kind -> bytes
    parameters: int = 0  # elements

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind, on all tiers together."""
        return self.within(*self.by_tier)

    @property
    def total(self) -> int:
        """Bytes on the device. The peaks of the kinds may not coincide, so the true peak may be a little lower."""
        return self.tiers[DEVICE]

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state, on all tiers together."""
        return self.state_within(*self.by_tier)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes by tier, of all kinds together."""
        return {tier: sum(kinds.values()) for tier, kinds in self.by_tier.items()}

    def on_tiers(self, *tiers: str) -> int:
        """Return the bytes of all kinds on these tiers."""
        return sum(self.tiers.get(tier, 0) for tier in tiers)

    def within(self, *tiers: str) -> dict[str, int]:
        """Return the bytes by kind on these tiers."""
        by_kind = {}
        for kind in KINDS:
            by_kind[kind] = sum(self.by_tier.get(tier, {}).get(kind, 0) for tier in tiers)
        return by_kind

    def state_within(self, *tiers: str) -> int:
        """Return the bytes of parameters, gradients and optimizer state on these tiers."""
        by_kind = self.within(*tiers)
        return by_kind["parameters"] + by_kind["gradients"] + by_kind["optimizer"]

    def parts_within(self, *tiers: str) -> dict[str, int]:
        """Return the bytes of state, activations and communication on these tiers, by the names that messages use."""
        by_kind = self.within(*tiers)
        return {
            STATE: self.state_within(*tiers),
            ACTIVATIONS: by_kind[ACTIVATIONS],
            "communication": by_kind["communication"],
        }


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """Return the rank whose device needs most."""
    return max(ranks, key=lambda rank: rank.total)


class Forecast:
    """The predicted memory of a run's pipeline ranks. The first rank predicts it on first use and broadcasts it.

    problem: why `ranks` is empty, for example because the script does something that needs values.
    """

    def __init__(self, job: Job):
        self.job = job
        self.problem = ""
        self._ranks: list[RankMemory] | None = None

    @property
    def ranks(self) -> list[RankMemory]:
        """The prediction, an entry for each pipeline rank; empty if it failed. Every rank must call.

        Raises ConfigError, on all ranks, if the dry run refuses the settings.
        """
        if self._ranks is not None:
            return self._ranks

        # predict, on the first rank
        world = self.job.runtime.mesh["world"]
        message = {}
        if world.is_first:
            try:
                message = {"ranks": [asdict(rank) for rank in forecast(self.job)]}
            except Exception as error:  # in the script; the run itself may succeed
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                message = {"problem": f"{problem}{_line_of_script(error)}"}
                # Settings that a stage or a kernel refuses end the run here, not in its first step. A dry run for an
                # accelerator runs on meta tensors, which kernels may refuse where they accept the accelerator's: its
                # errors say nothing about the settings.
                if isinstance(error, ConfigError) and not self.job.accelerator:
                    message["refused"] = error.problems

        # tell the other ranks
        text = collectives.broadcast_text(json.dumps(message), world, self.job.runtime.device.torch_device)
        message = json.loads(text)
        if "refused" in message:
            raise ConfigError(message["refused"])
        self.problem = message.get("problem", "")
        self._ranks = [RankMemory(**fields) for fields in message.get("ranks", [])]
        return self._ranks


def _line_of_script(error: BaseException) -> str:
    """Return the line of the script's code in which an error arose, to follow its message; "" if it arose elsewhere."""
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_OF_SCRIPTS)
    ]
    return f", in line {lines[-1].lineno} of {lines[-1].filename}" if lines else ""


def forecast(job: Job) -> list[RankMemory]:
    """Predict the memory of each pipeline rank, in this process."""
    return [predicted_of(profile, pp_rank) for pp_rank, profile in enumerate(profiles_of(job))]


def profiles_of(job: Job, *, by_module: bool = False) -> list[Profile]:
    """Return the profile of each pipeline rank. Ranks with the same layers share a dry run.

    by_module: fill `left_by_module`.
    """
    config = job.runtime.config
    ranks = mesh_of(config, job.runtime.world_size, 0)["pp"].ranks

    # ranks whose settings say the same of their layers, and of these, those whose layers are built the same
    keys = [tuple(_stage_settings(config, stage) for stage in config.stages.of_rank(pp)) for pp in range(len(ranks))]
    num_alike = Counter(keys)
    profiles: dict[tuple, Profile] = {}
    result = []
    for key, rank in zip(keys, ranks):
        built = layout_of_layers(job, rank) if num_alike[key] > 1 else ()
        if (key, built) not in profiles:
            profiles[key, built] = _profile(job, rank, by_module)
        result.append(profiles[key, built])
    return result


def _profile(job: Job, rank: int, by_module: bool) -> Profile:
    """Run the dry run of a rank, with values if that is faster and the model's sizes do not depend on them."""
    if _is_small(job):
        try:
            with ValuesWithKnownSizes():
                return dry_run(job, rank, values=True, by_module=by_module)
        except SizesFromDataError:
            pass
    return dry_run(job, rank, by_module=by_module)


def _stage_settings(config: Config, stage: int) -> tuple:
    """Return what the settings say of a stage's memory: its layers, what surrounds them, and what the layers do not show.

    How many layers there are and how many of them are encoder layers, whether the stage is the first, the last or ends the
    encoder; for each layer its window, and how it sees keys of other ranks.
    """
    layers = config.layer_split[stage]
    model = config.transformer
    encoder_layers = sum(layer < model.num_layers for layer in layers)
    ends_encoder = model.decoder_layers > 0 and model.num_layers - 1 in layers
    of_layers = tuple((model.window_left(layer), config.parallel.comm_type_of_layer(layer)) for layer in layers)
    return len(layers), encoder_layers, ends_encoder, stage == 0, stage == config.stages.last, of_layers


def _is_small(job: Job) -> bool:
    """Whether a step is so small that it runs faster with real values on this CPU than with shapes only."""
    config = job.runtime.config
    model = config.transformer
    s = config.data.seq_length
    tokens = config.training.micro_batch_size * s
    h = model.hidden_size
    v = job.runtime.vocab_size_if_any or 0
    layer = 16 * h * (h + tokens) + model.num_attention_heads * tokens * s  # weights, activations, attention scores
    return not job.accelerator and model.num_layers * layer + v * (h + tokens) < _SMALL


def predicted_of(profile: Profile, pp_rank: int) -> RankMemory:
    """Return the memory of pipeline rank `pp_rank`, if its actions cost what they cost in the profile."""
    return RankMemory(pp_rank, profile.layers, peak_along_schedule(profile, pp_rank), profile.parameters)


def peak_along_schedule(profile: Profile, pp_rank: int) -> dict[str, dict[str, int]]:
    """Return the memory of pipeline rank `pp_rank`, tier -> kind -> bytes: resident state, and the peak of other kinds.

    The dry run ran only some microbatches of the schedule. Each of the others costs what one of these cost.
    """
    actions = profile.schedule[pp_rank]
    stages = sorted({action.stage for action in actions})
    chunk_of = {stage: number for number, stage in enumerate(stages)}
    measured = sorted({microbatch for _, _, microbatch in profile.changes if microbatch is not None})
    has_unmeasured = any(action.microbatch not in (*measured, None) for action in actions)

    # the last computation of each microbatch on each stage: after it, all its activations are freed
    last_op: dict[tuple[int, int | None], Op] = {}
    for action in actions:
        if action.op in COMPUTES:
            last_op[action.stage, action.microbatch] = action.op

    live = Counter(profile.start)  # kind -> bytes
    peak = Counter(profile.start)
    activations: Counter[tuple[int, int]] = Counter()  # (stage, microbatch) -> bytes that are not freed yet
    offloaded: Counter[int] = Counter()  # stage -> bytes; each stage has its own slots in the tier
    most_offloaded: Counter[int] = Counter()
    for action in actions:
        stage = action.stage
        microbatch = action.microbatch
        representative = _representative(action.op, microbatch, measured)
        change = profile.changes[action.op, chunk_of[stage], representative]
        for kind in PASSING:
            peak[kind] = max(peak[kind], live[kind] + change.peak[kind])
            live[kind] += change.left[kind]
        # A microbatch frees all that it has saved. But where its forward is represented by another microbatch than its
        # backward, these may differ by a few bytes, which would add up over the microbatches: take the rest off.
        if has_unmeasured and microbatch is not None:
            activations[stage, microbatch] += change.left[ACTIVATIONS]
            if last_op[stage, microbatch] is action.op:
                live[ACTIVATIONS] -= activations.pop((stage, microbatch))
        offloaded[stage] += change.away
        most_offloaded[stage] = max(most_offloaded[stage], offloaded[stage])
    for kind in PASSING:
        peak[kind] = max(peak[kind], live[kind] + profile.end.peak[kind])

    # resident state, with the peaks of the kinds that come and go
    by_tier = {tier: dict(kinds) for tier, kinds in profile.state.items()}
    by_tier.setdefault(DEVICE, {}).update({kind: peak[kind] for kind in PASSING if kind != "slices"})
    if most_offloaded.total():
        by_tier.setdefault(profile.tier, {})[ACTIVATIONS] = most_offloaded.total()
    slices = max(peak["slices"], profile.slices)
    if slices:
        by_tier.setdefault("host", {})["slices"] = slices
    return by_tier


def _representative(op: Op, microbatch: int | None, measured: Sequence[int]) -> int | None:
    """Return the microbatch of the dry run that stands for this one.

    A forward is represented by the last microbatch, since the first finds buffers of the step before; a backward by
    the first, since the last starts the gradient reduction.
    """
    if microbatch is None or microbatch in measured:
        return microbatch
    return measured[-1] if op is Op.F else measured[0]
