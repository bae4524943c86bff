"""Memory is predicted by running the training step of one rank in this process, on tensors without values.

    dry_run(job, rank)     run the step; return what each pipeline action adds to the memory, and its peak
    alone, build_rank_parts        build the same rank with real tensors, for a measurement (tools/estimate_memory.py --measure)

The model comes from the script's own provider and the step is `train_step` itself. The other ranks are replaced by
`FakeGroup`s, so any layout runs on one process.
"""

import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.base import rank_status
from megatron.core.base.async_handle import AsyncHandle
from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.zero3_param_fetcher import units_of_modules
from megatron.core.offload.activation_offload import HoldsActivations, StageActivations
from megatron.core.offload.checksummed_file import BLOCK
from megatron.core.offload.host_and_file_stores import FileTensor
from megatron.core.offload.optimizer_offload_fraction import SLICE, SLICES_IN_FLIGHT
from megatron.core.offload.tensor_in_memory_or_file import Stored
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh, build_mesh
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.tensor_parallel.broadcast_batch_over_tp import GeneratedBatch
from megatron.core.timers import Timers
from megatron.training.arguments.config import Config
from megatron.training.global_vars import Runtime, acting_as
from megatron.training.make_chunks_optimizer_and_pipeline import (
    ModelProvider,
    build_optimizer,
    build_pipeline,
    make_chunks,
    wrap_in_ddp,
)
from megatron.training.memory.meta_tensor_mode_and_fake_group import META, DoneWork, FakeGroup, ShapesOnly
from megatron.training.memory.track_memory_by_kind import MemoryTracker
from megatron.training.memory.zero_state_bytes_by_tier import Element
from megatron.training.step import train_step

ACTIVATIONS = "activations"
PASSING = ("gradients", ACTIVATIONS, "communication", "slices")  # kinds of memory that an action may change
COMPUTES = (Op.F, Op.B, Op.I, Op.W)


class Job(NamedTuple):
    """A training job: the settings of a run or of `tools/estimate_memory.py`, and the script's functions."""

    runtime: Runtime
    model_provider: ModelProvider
    forward_step: ForwardStep
    accelerator: bool = False
    group_of: GroupRule = default_group


class MemoryDelta(NamedTuple):
    """Bytes that an action adds, by kind."""

    left: Counter[str]  # still there when the action ends
    peak: Counter[str]  # the most inside the action
    away: int = 0  # activations that the action offloads to a tier


@dataclass
class Profile:
    """Memory of one rank's step, action by action."""

    layers: int
    state: dict[str, Counter[str]]  # tier -> kind -> bytes
    start: Counter[str]  # bytes of the PASSING kinds when a step begins
    schedule: Schedule  # all ranks' actions of a whole step
    parameters: int  # elements of its stages, over all tensor-parallel ranks
    tier: str = "host"  # the tier of offloaded activations
    slices: int = 0  # bytes on the host: slices of state in a file while they are read, updated and written
    # (operation, chunk number, microbatch) -> bytes
    changes: dict[tuple[Op, int, int | None], MemoryDelta] = field(default_factory=dict)
    # by chunk number: name of a module -> bytes of activations that its forward of a microbatch leaves
    left_by_module: list[Counter[str]] = field(default_factory=list)
    end: MemoryDelta = MemoryDelta(Counter(), Counter())  # from the last action to the end of the step


# ---------------------------------------------------------------- a rank without the others


def mesh_of(config: Config, world_size: int, rank: int) -> Mesh:
    """Return the mesh of one rank of a job. Its groups are `FakeGroup`s: no other rank takes part."""

    def fake_group(_: str, ranks: tuple[int, ...]) -> FakeGroup:
        return FakeGroup(len(ranks), ranks.index(rank))

    sizes = config.parallel.sizes(world_size, config.data_parallel.num_distributed_optimizer_instances)
    ranks_per_kv_head = config.transformer.ranks_per_kv_head(config.parallel.tensor_model_parallel_size)
    return build_mesh(sizes, rank, fake_group, ranks_per_kv_head, stages=config.stages)


@contextlib.contextmanager
def alone(runtime: Runtime, mesh: Mesh, **changed: Any) -> Iterator[Runtime]:
    """Let this thread act, within the block, as the rank of `mesh`, with dropout keys, timers and stores of its own.

    changed: further fields of the runtime to replace, by name.
    """
    rank_runtime = replace(
        runtime,
        mesh=mesh,
        dropout_keys=SampleDropoutKeys(1),
        weight_grads=WeightGradStore(),
        timers=Timers(),
        resources=contextlib.ExitStack(),
        **changed,
    )
    with acting_as(rank_runtime):
        yield rank_runtime


class RankParts(NamedTuple):
    """Model chunks, optimizer and pipeline of a rank."""

    chunks: dict[int, DistributedDataParallel]  # by stage
    optimizer: FlatOptimizer
    pipeline: Pipeline

    @property
    def offloaded_stages(self) -> list[StageActivations]:
        """The activations of each stage that offloads them."""
        offloaded = []
        for chunk in self.chunks.values():
            for module in chunk.modules():
                if isinstance(module, HoldsActivations) and module.activations.offloaded:
                    offloaded.append(module.activations)
        return offloaded

    @property
    def bytes_in_file(self) -> int:
        """Bytes of activations in a file."""
        total = 0
        for activations in self.offloaded_stages:
            for slot in activations.offload_slots(self.pipeline.device).slots:
                if isinstance(slot, FileTensor):
                    total += slot.nbytes
        return total


def build_rank_parts(runtime: Runtime, job: Job) -> RankParts:
    """Build a rank's chunks, optimizer and pipeline by the code of a run. All parameters are zero."""
    modules = make_chunks(job.model_provider, runtime)
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():
                parameter.zero_()  # values are not looked at, and arithmetic on denormal ones is slow
    chunks = wrap_in_ddp(modules, runtime, job.group_of)
    optimizer = build_optimizer(chunks, runtime, job.group_of)
    pipeline = build_pipeline(chunks, runtime, job.forward_step)
    return RankParts(chunks, optimizer, pipeline)


class AnyBatch(GeneratedBatch):
    """A microbatch that has every key a script asks for: [b, s] integers, or the shape that is asked for."""

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.shape = (runtime.config.training.micro_batch_size, runtime.config.data.seq_length)  # [b, s]
        self.vocab_size = runtime.vocab_size_if_any or 1

    def __missing__(self, key: str) -> Tensor:
        """Return the tensor of a key: int64 [b, s]."""
        return self.generate([key], self.shape, torch.int64, "cpu")[0]

    @memory_kind("away")
    def generate(
        self, keys: list[str], shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Return a tensor of `shape` for each key: distinct token ids for tokens, else zeros.

        shape None: [b, s], [b] for the key "is_random", or [b, s + 1] for the single key "text". The ids differ because
        the gradient of a sparse embedding takes memory for each row that occurs.
        """
        if shape is None:
            b, s = self.shape
            # A GPT's script may read inputs and labels from one key, `text`, of s + 1 tokens. BERT has a key for each.
            shape = (b, s + 1) if keys == ["text"] else (b, s)
            if "is_random" in keys:  # of a BERT's samples: one number each
                others = self.generate([key for key in keys if key != "is_random"], shape, dtype, device)
                by_key = iter(others)
                number = torch.zeros(b, dtype=dtype, device=device)  # [b]
                return tuple(number if key == "is_random" else next(by_key) for key in keys)
        packed = torch.zeros((len(keys), *shape), dtype=dtype, device=device)  # [keys, b, s]
        for key, values in zip(keys, packed):
            if key in ("tokens", "text"):
                ids = torch.arange(values.numel(), device=device) % self.vocab_size
                values.copy_(ids.view(shape))
        return packed.unbind()


def batches_of(runtime: Runtime) -> Iterator[AnyBatch]:
    """Yield generated microbatches without end."""
    while True:
        yield AnyBatch(runtime)


class ShapesTier:
    """An offload store without values: "host" or "file". Nothing is copied, read or written."""

    def __init__(self, name: str):
        self.name = name
        self.host_tensors: list[Tensor] = []
        self._file_end = 0  # bytes

    @memory_kind("away")
    def zeros(self, numel: int, dtype: torch.dtype) -> Stored:
        """Return a tensor in this tier: [numel]."""
        if self.name == "file":
            start = self._file_end
            blocks = -(-numel * dtype.itemsize // BLOCK)
            self._file_end += blocks * BLOCK
            return FileTensor(self, start, (numel,), dtype)
        tensor = torch.zeros(numel, dtype=dtype)  # [numel]
        self.host_tensors.append(tensor)
        return tensor

    @memory_kind("slices")
    def start_read(self, start: int, nbytes: int) -> DoneWork:
        """Return bytes [nbytes] in memory of whole blocks, because a file is read in whole blocks."""
        first = start // BLOCK * BLOCK
        last = -(-(start + nbytes) // BLOCK) * BLOCK
        blocks = torch.empty(last - first, dtype=torch.uint8)  # [last - first]
        return DoneWork(blocks[start - first :][:nbytes])  # [nbytes]

    def start_write(self, start: int, values: AsyncHandle[Tensor]) -> DoneWork:
        """Wait for the copy, values [elements], and write nothing."""
        values.wait()
        return DoneWork()

    def side_stream(self, device: torch.device) -> "NoCopies | None":
        return NoCopies() if self.name == "host" and device.type != "cpu" else None

    def close(self) -> None:
        """Do nothing: no memory and no file were taken."""


class NoCopies:
    """The side stream of an offload store without values."""

    def start_copy(self, target: Tensor, source: Tensor) -> AsyncHandle[Tensor]:
        """Return `target`, of the shape of `source`, with no copy made."""
        return AsyncHandle(lambda: target, source)


# ---------------------------------------------------------------- a step with shapes only


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    """Restore the random generators after the block, so that the run draws the same numbers as without a dry run."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def built_without_values(job: Job, rank: int) -> Iterator[tuple[Runtime, dict[int, nn.Module]]]:
    """Build the model chunks of one rank, by stage, on the meta device; within the block this thread acts as that rank."""
    mesh = mesh_of(job.runtime.config, job.runtime.world_size, rank)
    device = Device("cpu")
    if job.accelerator:
        device.torch_device = META
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_state_restored())
        stack.enter_context(rank_status.without_recording_calls())
        runtime = stack.enter_context(alone(job.runtime, mesh, device=device, offload_store=None))
        stack.enter_context(META)
        stack.enter_context(ShapesOnly("accelerator" if job.accelerator else "cpu"))
        yield runtime, make_chunks(job.model_provider, runtime)


def dry_run(job: Job, rank: int, *, values: bool = False, by_module: bool = False) -> Profile:
    """Run the training step of one rank in this process, and return the memory of each of its actions.

    values: use real tensors on this CPU; else only shapes, which take almost no memory. by_module: fill `left_by_module`.
    """
    # the rank: its mesh, its device, and an offload store without values
    config = job.runtime.config
    mesh = mesh_of(config, job.runtime.world_size, rank)
    device = Device("cpu")
    if job.accelerator:
        # Code that asks for the device must choose an accelerator's kernels, not this CPU's.
        device.torch_device = META
    store = None if config.offload.tier == "device" else ShapesTier(config.offload.tier)

    # tensors without values
    shapes = None
    if not values:
        vocab_size = job.runtime.vocab_size_if_any or 2**62
        token_rows = -(-vocab_size // mesh["tp"].size)
        most_ids = max(token_rows, config.data.seq_length)  # rows of the token and of the position embedding
        shapes = ShapesOnly("accelerator" if job.accelerator else "cpu", most_ids)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_state_restored())
        stack.enter_context(rank_status.without_recording_calls())
        runtime = stack.enter_context(alone(job.runtime, mesh, device=device, offload_store=store))
        if shapes is not None:
            stack.enter_context(META)
            stack.enter_context(shapes)
        tracker = stack.enter_context(MemoryTracker(shapes_only=not values))

        # build the rank
        parts = build_rank_parts(runtime, job)
        for chunk in parts.chunks.values():
            for buffer in chunk.buffers:
                # The first backward allocates a lazy gradient buffer. Only some of the backwards are run, and their
                # results stand for the others, which would be charged with that allocation too.
                buffer.keeps_grads = True
        offloaded_stages = parts.offloaded_stages
        activation_store = store or ShapesTier("host")  # also where only activations are offloaded
        for activations in offloaded_stages:
            activations.set_store(activation_store)
            if shapes is not None:
                activations.hooks = shapes.hooks
        tracker.assign_state(parts.chunks.values(), parts.optimizer)

        # describe the state before the first step, with the schedule of the whole step
        parts.pipeline.batch = replace(parts.pipeline.batch, num_microbatches=_planned_microbatches(job.runtime))
        state = _state_by_tier(tracker, store)
        element = Element.of(
            config.transformer.params_dtype.itemsize,
            len(config.optimizer.moments),
            splits_masters=config.optimizer.reuse_fp32_param,
        )
        optimizer_bytes_in_file = state.get("file", {}).get("optimizer", 0)
        profile = Profile(
            layers=sum(len(config.layer_split[stage]) for stage in parts.chunks),
            state=state,
            start=Counter(),
            schedule=[list(actions) for actions in parts.pipeline.schedule()],
            parameters=_parameters_of(parts),
            tier="file" if config.offload.tier == "file" else "host",
            slices=SLICES_IN_FLIGHT * min(SLICE * (element.master + element.moments), optimizer_bytes_in_file),
        )

        # keep only the microbatches to run in this rank's actions; the forecast repeats them for the others
        actions = parts.pipeline.schedule()[mesh["pp"].rank]
        microbatches = _microbatches_to_run(config, mesh, parts.pipeline.batch)
        actions[:] = [action for action in actions if action.microbatch is None or action.microbatch in microbatches]

        # Run one step, or two where a step finds something of the step before: parameter gathers under way, the order
        # in which gradients arrive, memory for checkpointed activations, what modules made at its end. The second step
        # overwrites the profile of the first, and its memory is that of every later step.
        first_step_differs = (
            config.data_parallel.overlap_param_gather
            or config.data_parallel.overlap_grad_reduce
            or config.transformer.contiguous_checkpointing
            or any(chunk.buffer_sync is not None for chunk in parts.chunks.values())
        )
        left = None
        if by_module:
            left = LeftByModule([chunk.module for chunk in parts.chunks.values()], tracker)
            profile.left_by_module = left.by_chunk
        for _ in range(2 if first_step_differs else 1):
            _run_step(parts, profile, tracker, offloaded_stages, runtime, left)
    return profile


def layout_of_layers(job: Job, rank: int) -> tuple:
    """Return what distinguishes the layers of a rank's stages, as they are built: the classes of all modules in order, and
    the shape and the dtype of each parameter, and whether it is trained."""
    with built_without_values(job, rank) as (_, chunks):
        modules = []
        for chunk in chunks.values():
            for module in chunk.modules():
                own = [(tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters(recurse=False)]
                modules.append((type(module), tuple(own)))
    return tuple(modules)


class LeftByModule:
    """Bytes of activations that the forward of a microbatch leaves, by the module that allocated them.

    Modules are those that ZeRO stage 3 gathers one after the other (`units_of_modules`), such as a layer; a module's bytes
    are without those of modules below it. The last microbatch of a step counts.
    """

    def __init__(self, chunks: Iterable[nn.Module], tracker: MemoryTracker):
        self.by_chunk: list[Counter[str]] = []  # name of a module -> bytes
        self._tracker = tracker
        self._callers: list[object] = []  # labels of the modules whose forwards have begun
        for number, chunk in enumerate(chunks):
            left = Counter(dict.fromkeys(units_of_modules(chunk).values(), 0))
            self.by_chunk.append(left)
            for name in left:
                module = chunk.get_submodule(name)
                module.register_forward_pre_hook(partial(self._enter, (number, name)))
                module.register_forward_hook(self._leave)

    def _enter(self, label: tuple[int, str], module: nn.Module, inputs: Any) -> None:
        self._callers.append(self._tracker.label)
        self._tracker.label = label

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tracker.label = self._callers.pop()

    @contextlib.contextmanager
    def counting(self, number: int) -> Iterator[None]:
        """Count what the forward of chunk `number`, in this block, leaves."""
        self._callers = []
        self._tracker.start_labels()
        yield
        left = self.by_chunk[number]
        for name in left:
            left[name] = self._tracker.labelled(ACTIVATIONS, (number, name))
        self._tracker.start_labels()


def _parameters_of(parts: RankParts) -> int:
    """Count the elements of the stages' parameters, over all tensor-parallel ranks.

    A tied embedding has a copy on the first and on the last stage; it counts on the first.
    """
    total = 0
    for stage, chunk in parts.chunks.items():
        for parameter in chunk.parameters():
            is_tied = "embd" in parameter.placement.partial_grad
            if stage == 0 or not is_tied:
                total += math.prod(parameter.placement.shape)
    return total


def _planned_microbatches(runtime: Runtime) -> int:
    """Return the number of microbatches in the schedule: at most 2 per pipeline rank, or 4 with several chunks.

    Later ones repeat. GPipe plans all of them, because all are in flight at once.
    """
    config = runtime.config
    m = max(runtime.batch_sizes.sizes) // runtime.samples_at_once
    # chunks take turns after as many microbatches as there are stages, or after a group of the user's size
    at_once = config.parallel.microbatch_group_size_per_vp_stage or config.parallel.pipeline_model_parallel_size
    per_rank = 4 if config.chunks_per_rank > 1 else 2
    if config.schedule_name == "gpipe" or m < (per_rank + 2) * at_once:
        return m
    return per_rank * at_once


def _microbatches_to_run(config: Config, mesh: Mesh, batch: BatchShape) -> set[int]:
    """Return the microbatches to run, by number.

    All of them, if ZeRO 2 or 3 or activation offload allocates and frees between actions. Else the last, which starts
    the gradient reduction, and with data parallelism the first, which finds the buffers of the step before.
    """
    if config.data_parallel.stage > 1 or config.transformer.cpu_offloading_num_layers:
        return set(range(batch.num_microbatches))
    microbatches = {batch.num_microbatches - 1}
    if mesh.samples.size > 1:
        microbatches.add(0)
    return microbatches


def _state_by_tier(tracker: MemoryTracker, store: ShapesTier | None) -> dict[str, Counter[str]]:
    """Return the bytes of resident state: tier -> kind -> bytes."""
    by_tier = {"device": +tracker.live, "file": +tracker.in_file}
    for kind in (*PASSING[1:], "other"):  # gradients have resident buffers; the other kinds come and go
        by_tier["device"].pop(kind, None)
    if store is not None and store.host_tensors:
        # The tracker counts host tensors as the device's: both are on this process's one device.
        by_tier["host"] = Counter()
        for tensor in store.host_tensors:
            by_tier["host"][tracker.kind_of(tensor)] += tensor.nbytes
        by_tier["device"] -= by_tier["host"]
    return {tier: kinds for tier, kinds in by_tier.items() if kinds}


def _run_step(
    parts: RankParts,
    profile: Profile,
    tracker: MemoryTracker,
    offloaded_stages: list[StageActivations],
    runtime: Runtime,
    left: LeftByModule | None = None,
) -> None:
    """Run one training step and write what each action added into the profile."""
    chunk_of = {stage: number for number, stage in enumerate(parts.chunks)}

    def offloaded_bytes() -> int:
        return sum(stage.offload_slots(parts.pipeline.device).bytes_in_use for stage in offloaded_stages)

    after_last_action: Counter[str] = Counter()

    @contextlib.contextmanager
    def measure(action: Action) -> Iterator[None]:
        nonlocal after_last_action
        before = tracker.now()
        offloaded_before = offloaded_bytes()
        tracker.restart()
        counts = left is not None and action.op is Op.F
        with left.counting(chunk_of[action.stage]) if counts else contextlib.nullcontext():
            yield
        after_last_action = tracker.now()
        profile.changes[action.op, chunk_of[action.stage], action.microbatch] = MemoryDelta(
            left=_difference(after_last_action, before),
            peak=_difference(tracker.peak, before),
            away=offloaded_bytes() - offloaded_before,
        )
        tracker.restart()

    profile.start = tracker.now()
    parts.pipeline.around = measure
    batches = batches_of(runtime) if parts.pipeline.mesh["tp"].is_first else None
    # The update's temporary memory is not counted, except slices of state in a file.
    optimizer = parts.optimizer if runtime.config.offload.tier == "file" else _NoUpdate()
    data = dict.fromkeys(parts.chunks, batches)
    train_step(parts.pipeline, optimizer, data, first_sample=0, lr=0.0, check_finite=False)
    profile.end = MemoryDelta(Counter(), _difference(tracker.peak, after_last_action))


class _NoUpdate:
    """An optimizer that changes nothing."""

    scaler = None

    def clip_factor(self, divisor: float) -> tuple[float, float]:
        return 0.0, 1.0

    def step(self, *_: Any, **__: Any) -> None:
        """Update nothing."""


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> Counter[str]:
    return Counter({kind: after.get(kind, 0) - before.get(kind, 0) for kind in PASSING})
