"""A step of one rank of any layout in this process alone, counted: its model by the script's own provider, its
neighbours silent.

dry_run(job, pp_rank)      with shapes only: what each action of the pipeline adds, and has at its peak
`alone`, `parts_of`        the same parts with real tensors, for a measurement (tools/estimate_memory.py --measure)
"""

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.base import rank_status
from megatron.core.base.async_handle import AsyncHandle
from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.activation_offload import HoldsActivations, StageActivations
from megatron.core.offload.checksummed_file import BLOCK
from megatron.core.offload.offload_fraction import SLICE, SLICES_IN_FLIGHT
from megatron.core.offload.offload_tiers import FileTensor
from megatron.core.offload.stored_tensor import Stored
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh, build_mesh
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.tensor_parallel.broadcast_batch import GeneratedBatch
from megatron.core.timers import Timers
from megatron.training.arguments.config import Config
from megatron.training.global_vars import Runtime, acting_as
from megatron.training.memory.bytes_by_tier import Element
from megatron.training.memory.memory_tracker import MemoryTracker
from megatron.training.memory.shapes_only import META, Done, ShapesOnly, SilentGroup
from megatron.training.model_chunks import ModelProvider, build_optimizer, build_pipeline, in_buffers, make_chunks
from megatron.training.step import train_step

PASSING = ("gradients", "activations", "communication", "slices")  # kinds that an action may change
COMPUTES = (Op.F, Op.B, Op.I, Op.W)


class Job(NamedTuple):
    """A training job: the settings, from a run or from the flags of `tools/estimate_memory.py`, and the script's
    functions."""

    runtime: Runtime
    model_provider: ModelProvider
    forward_step: ForwardStep
    accelerator: bool = False
    group_of: GroupRule = default_group


class Effect(NamedTuple):
    """Bytes that an action adds, by kind: `left` at its end, `peak` inside it; `away`: offloaded to a tier."""

    left: Counter[str]
    peak: Counter[str]
    away: int = 0


@dataclass
class Profile:
    """One rank's step, action by action. `changes`: by operation, chunk number and microbatch."""

    layers: int
    state: dict[str, Counter[str]]  # tier -> kind -> bytes
    start: Counter[str]  # bytes of the PASSING kinds when a step begins
    schedule: Schedule  # all ranks' actions of a whole step
    parameters: int  # elements of its stages, over all tensor-parallel ranks
    tier: str = "host"  # the tier of offloaded activations
    slices: int = 0  # bytes on the host: slices of state in a file while they are read, updated and written
    changes: dict[tuple[Op, int, int | None], Effect] = field(default_factory=dict)
    end: Effect = Effect(Counter(), Counter())


# ---------------------------------------------------------------- a rank without the others


def mesh_of(config: Config, world_size: int, rank: int) -> Mesh:
    """The mesh of one rank of a job; the other ranks are silent."""
    sizes = config.parallel.sizes(world_size, config.data_parallel.num_distributed_optimizer_instances)
    sharing = config.transformer.ranks_per_kv_head(config.parallel.tensor_model_parallel_size)

    def silent(_: str, ranks: tuple[int, ...]) -> SilentGroup:
        return SilentGroup(len(ranks), ranks.index(rank))

    return build_mesh(sizes, rank, silent, sharing, stages=config.stages)


@contextlib.contextmanager
def alone(runtime: Runtime, mesh: Mesh, **changed: Any) -> Iterator[Runtime]:
    """Within the block, this thread acts as one rank with silent neighbours, and with keys, timers and stores of its own."""
    mine = replace(
        runtime,
        mesh=mesh,
        dropout_keys=DropoutKeys(1),
        weight_grads=WeightGradStore(),
        timers=Timers(),
        held=contextlib.ExitStack(),
        **changed,
    )
    with acting_as(mine):
        yield mine


class RankParts(NamedTuple):
    chunks: dict[int, DistributedDataParallel]
    optimizer: FlatOptimizer
    pipeline: Pipeline

    @property
    def rooms(self) -> list[StageActivations]:
        """The activations of each stage that offloads them."""
        modules = [module for chunk in self.chunks.values() for module in chunk.modules()]
        found = [module.activations for module in modules if isinstance(module, HoldsActivations)]
        return [one for one in found if one.offloaded]

    @property
    def bytes_in_file(self) -> int:
        """Bytes of activations that lie in a file."""
        slots = [slot for one in self.rooms for slot in one.offload_slots(self.pipeline.device).slots]
        return sum(slot.nbytes for slot in slots if isinstance(slot, FileTensor))


def parts_of(runtime: Runtime, job: Job) -> RankParts:
    """A rank's chunks, optimizer and pipeline, built by the code of a run."""
    made = make_chunks(job.model_provider, runtime)
    with torch.no_grad():
        for parameter in (p for chunk in made.values() for p in chunk.parameters()):
            parameter.zero_()  # values are not looked at, and arithmetic on denormal ones is slow
    chunks = in_buffers(made, runtime, job.group_of)
    return RankParts(
        chunks, build_optimizer(chunks, runtime, job.group_of), build_pipeline(chunks, runtime, job.forward_step)
    )


class AnyBatch(GeneratedBatch):
    """A microbatch with an entry for every key: [b, s] integers, or the shape that `broadcast_batch` asks for."""

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.shape = runtime.config.training.micro_batch_size, runtime.config.data.seq_length
        self.words = runtime.vocab_size_if_any or 1

    def __missing__(self, key: str) -> Tensor:
        return self.generate([key], self.shape, torch.int64, "cpu")[0]

    @memory_kind("away")
    def generate(
        self, keys: list[str], shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Zeros; words that differ, since the rows of a table that occur take room in its gradient."""
        if shape is None:  # of Megatron 2's batches a GPT's has inputs and labels in one, a BERT's not
            shape = self.shape[0], self.shape[1] + (keys == ["text"])
        packed = torch.zeros((len(keys), *shape), dtype=dtype, device=device)
        for key, part in zip(keys, packed):
            if key in ("tokens", "text"):
                part.copy_((torch.arange(part.numel(), device=device) % self.words).view(shape))
        return packed.unbind()


def batches_of(runtime: Runtime) -> Iterator[AnyBatch]:
    while True:
        yield AnyBatch(runtime)


class ShapesTier:
    """A tier without values. `made`: its tensors in host memory."""

    def __init__(self, name: str):
        self.name, self._end = name, 0
        self.made: list[Tensor] = []

    @memory_kind("away")
    def zeros(self, numel: int, dtype: torch.dtype) -> Stored:
        if self.name == "file":
            start, self._end = self._end, self._end + -(-numel * dtype.itemsize // BLOCK) * BLOCK
            return FileTensor(self, start, (numel,), dtype)
        self.made.append(torch.zeros(numel, dtype=dtype))
        return self.made[-1]

    @memory_kind("slices")
    def start_read(self, start: int, nbytes: int) -> Done:
        """Whole blocks, as a file is read."""
        first, last = start // BLOCK * BLOCK, -(-(start + nbytes) // BLOCK) * BLOCK
        return Done(torch.empty(last - first, dtype=torch.uint8)[start - first :][:nbytes])

    def start_write(self, start: int, values: AsyncHandle[Tensor]) -> Done:
        values.wait()
        return Done()

    def side_stream(self, device: torch.device) -> "NoCopies | None":
        return NoCopies() if self.name == "host" and device.type != "cpu" else None

    def close(self) -> None:
        """Nothing was taken."""


class NoCopies:
    """The side stream of a tier without values."""

    def start_copy(self, target: Tensor, source: Tensor) -> AsyncHandle[Tensor]:
        return AsyncHandle(lambda: target, source)


# ---------------------------------------------------------------- a step with shapes only


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """What a script draws inside is drawn again in the run: afterwards the generators are as before."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def dry_run(job: Job, rank: int, *, values: bool = False) -> Profile:
    """The step of one rank. values: with real tensors, on this CPU; else with shapes only, which takes no memory to
    speak of."""
    config = job.runtime.config
    mesh, device = mesh_of(config, job.runtime.world_size, rank), Device("cpu")
    tier = None if config.offload.tier == "device" else ShapesTier(config.offload.tier)
    words = job.runtime.vocab_size_if_any or 2**62
    most_ids = max(-(-words // mesh["tp"].size), config.data.seq_length)  # rows of the tables of words and of positions
    shapes = None if values else ShapesOnly("accelerator" if job.accelerator else "cpu", most_ids)
    if job.accelerator:
        # Code that asks for the device must choose an accelerator's kernels, not this CPU's.
        device.torch_device = META
    with contextlib.ExitStack() as stack:
        stack.enter_context(_drawing_nothing())
        stack.enter_context(rank_status.paused())
        runtime = stack.enter_context(alone(job.runtime, mesh, device=device, offload_store=tier))
        if shapes is not None:
            stack.enter_context(META)
            stack.enter_context(shapes)
        tracker = stack.enter_context(MemoryTracker(shapes_only=not values))
        parts = parts_of(runtime, job)
        for buffer in (buffer for chunk in parts.chunks.values() for buffer in chunk.buffers):
            buffer.keeps_grads = True  # one of the backwards alone runs, and would count for all as their allocation
        rooms = _rooms_in(parts, tier or ShapesTier("host"), shapes)
        tracker.assign_state(parts.chunks.values(), parts.optimizer)
        profile = _described(parts, tracker, tier, config, _microbatches(job.runtime))
        mine, wanted = parts.pipeline.schedule()[mesh["pp"].rank], _to_run(config, mesh, parts.pipeline.batch)
        # Microbatches in the middle repeat the changes of these; `timeline` puts them in.
        mine[:] = [action for action in mine if action.microbatch is None or action.microbatch in wanted]
        sent = config.data_parallel
        # A step leaves to the next one: gathers under way, the order in which gradients come, slots.
        leaves = sent.overlap_param_gather or sent.overlap_grad_reduce or config.transformer.contiguous_checkpointing
        for _ in range(2 if leaves else 1):
            _step(parts, profile, tracker, rooms, runtime)
    return profile


def _described(
    parts: RankParts, tracker: MemoryTracker, tier: "ShapesTier | None", config: Config, microbatches: int
) -> Profile:
    """The profile of a rank before its first step."""
    parts.pipeline.batch = replace(parts.pipeline.batch, num_microbatches=microbatches)
    optimizer, state = config.optimizer, _by_tier(tracker, tier)
    element = Element.of(
        config.transformer.params_dtype.itemsize, len(optimizer.moments), splits_masters=optimizer.reuse_fp32_param
    )
    in_file = state.get("file", {}).get("optimizer", 0)
    return Profile(
        layers=sum(len(config.layer_split[stage]) for stage in parts.chunks),
        state=state,
        start=Counter(),
        schedule=[list(actions) for actions in parts.pipeline.schedule()],
        parameters=_parameters_of(parts),
        tier="file" if config.offload.tier == "file" else "host",
        slices=SLICES_IN_FLIGHT * min(SLICE * (element.master + element.moments), in_file),
    )


def _parameters_of(parts: RankParts) -> int:
    """Elements of the stages' parameters, over all tensor-parallel ranks. A tied table counts on the first stage."""
    placements = [(stage, p.placement) for stage, chunk in parts.chunks.items() for p in chunk.parameters()]
    return sum(math.prod(one.shape) for stage, one in placements if stage == 0 or "embd" not in one.partial_grad)


def _microbatches(runtime: Runtime) -> int:
    """Microbatches to plan: at most 2 per pipeline rank (4 with chunks), as later ones repeat. GPipe keeps all in flight."""
    config, m = runtime.config, max(runtime.batch_sizes.sizes) // runtime.samples_at_once
    p = config.parallel.pipeline_model_parallel_size
    enough = (4 if config.chunks_per_rank > 1 else 2) * p
    return m if config.schedule_name == "gpipe" or m < enough + 2 * p else enough


def _to_run(config: Config, mesh: Mesh, batch: BatchShape) -> set[int]:
    """The microbatches to run. All, if ZeRO units or offloaded activations come and go between actions; else the last,
    which starts the reduction, and under data parallelism the first, which finds the buffers of the last step."""
    if config.data_parallel.stage > 1 or config.transformer.cpu_offloading_num_layers:
        return set(range(batch.num_microbatches))
    return {batch.num_microbatches - 1} | ({0} if mesh.samples.size > 1 else set())


def _rooms_in(parts: RankParts, tier: ShapesTier, shapes: ShapesOnly | None) -> list[Callable[[], int]]:
    """Calls that say how many bytes of activations wait in the tier."""
    for activations in parts.rooms:
        activations.set_store(tier)
        if shapes is not None:
            activations.hooks = shapes.hooks
    return [lambda one=one: one.offload_slots(parts.pipeline.device).bytes_in_use for one in parts.rooms]


def _by_tier(tracker: MemoryTracker, tier: ShapesTier | None) -> dict[str, Counter[str]]:
    """Bytes of resident state: tier -> kind -> bytes."""
    on = {"device": +tracker.live, "file": +tracker.in_file}
    for kind in PASSING[1:]:
        on["device"].pop(kind, None)
    on["device"].pop("other", None)
    if tier is not None and tier.made:
        on["host"] = Counter()
        for x in tier.made:
            on["host"][tracker.kind_of(x)] += x.nbytes
        on["device"] -= on["host"]
    return {name: kinds for name, kinds in on.items() if kinds}


def _step(
    parts: RankParts, profile: Profile, tracker: MemoryTracker, rooms: list[Callable[[], int]], runtime: Runtime
) -> None:
    chunk_of = {stage: number for number, stage in enumerate(parts.chunks)}
    away = lambda: sum(room() for room in rooms)  # noqa: E731

    @contextlib.contextmanager
    def around(action: Action) -> Iterator[None]:
        before, were = tracker.now(), away()
        tracker.restart()
        yield
        change = Effect(_less(tracker.now(), before), _less(tracker.peak, before), away() - were)
        profile.changes[action.op, chunk_of[action.stage], action.microbatch] = change
        last.update(now=tracker.now())
        tracker.restart()

    last: dict[str, Counter[str]] = {}
    profile.start = tracker.now()
    parts.pipeline.around = around
    data = batches_of(runtime) if parts.pipeline.mesh["tp"].is_first else None
    # The update's temporary memory is not counted, except slices of state in a file.
    optimizer = parts.optimizer if runtime.config.offload.tier == "file" else _NoUpdate()
    train_step(parts.pipeline, optimizer, dict.fromkeys(parts.chunks, data), first_sample=0, lr=0.0, check_finite=False)
    profile.end = Effect(Counter(), _less(tracker.peak, last["now"]))


class _NoUpdate:
    """An optimizer that leaves everything as it is."""

    scaler = None

    def clip_factor(self, divisor: float) -> tuple[float, float]:
        return 0.0, 1.0

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing is updated."""


def _less(these: Mapping[str, int], those: Mapping[str, int]) -> Counter[str]:
    return Counter({kind: these.get(kind, 0) - those.get(kind, 0) for kind in PASSING})
