"""Show what the functions of Megatron and DeepSpeed do here, on a CPU and in seconds. docs/walkthrough.md explains the output.

    python examples/walkthrough.py groups            the groups that initialize_model_parallel makes of 16 ranks, TP 2, PP 4
    python examples/walkthrough.py model --rank 5    one rank's part of the model: its parameters, and how each is sharded
    python examples/walkthrough.py buffers --rank 5  the contiguous buffers of its DistributedDataParallel
    python examples/walkthrough.py step --rank 5     the collectives that it issues in a training step, by phase
    python examples/walkthrough.py zero              what a rank stores in ZeRO 0 to 3, and which hook sends
    torchrun --nproc-per-node 4 examples/walkthrough.py start       processes that join through initialize_megatron
    torchrun --nproc-per-node 2 examples/walkthrough.py engine      DeepSpeed's engine over a plain torch model

The first five need one process: the rank is built by pretrain_gpt.py's own functions, of tensors without values; its peers are
simulated, and their collectives return without communication. Further flags are those of pretrain_gpt.py, and --world-size N:
`step --world-size 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --zero-stage 3`. With --yaml-cfg, --hf-config
or another flag whose file describes a model, that model is shown in its own layout.
"""
# ruff: noqa: E402  (the command is checked before torch is imported, which takes seconds)

import contextlib
import os
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

COMMANDS = ("groups", "model", "buffers", "step", "zero", "start", "engine")


def check_command(arguments: Sequence[str]) -> None:
    """Print the help and exit if it is asked for, or exit with status 2 if the arguments name no command."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        sys.exit()
    if not arguments or arguments[0] not in COMMANDS:
        given = f"{arguments[0]} is none of them" if arguments else "give one"
        print(
            f"walkthrough: the commands are {', '.join(COMMANDS)}; {given}, and --help describes them", file=sys.stderr
        )
        sys.exit(2)


if __name__ == "__main__":
    check_command(sys.argv[1:])

import torch
from torch import nn

from megatron import deepspeed
from megatron.core import mpu
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.tolerate_broken_output import keep_running, print_stderr, until_reader_ends
from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Call, bytes_sent
from megatron.core.parallel.init_and_destroy_distributed import backend_of, launched_world_size
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.pipeline_parallel.schedule.plot import plot_text
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule
from megatron.core.sharding.placement import Placement, partial_axes
from megatron.training import get_args, initialize_megatron
from megatron.training.memory.dry_run_of_one_rank import Job, RankParts, alone, batches_of, build_rank_parts, mesh_of
from megatron.training.memory.meta_tensor_mode_and_fake_group import META, ShapesOnly
from megatron.training.memory.predicted_memory_table import amount, table
from megatron.training.step import train_step
from tools.estimating.job import JobAndArgs, read

# The job that is shown where the flags name no other, by the names of settings.
SMALL = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 127,
    "micro_batch_size": 1,
    "attention_dropout": 0.0,
    "ddp_bucket_size": 16384,
    "overlap_grad_reduce": True,
}
MEGATRON = {
    **SMALL,
    "world_size": 16,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 16,
    "use_distributed_optimizer": True,
}
SHARDED = {**SMALL, "num_layers": 2, "world_size": 4, "global_batch_size": 8}
# Flags whose file or folder describes another model.
OTHER_MODELS = {"--yaml-cfg", "--hf-config", "--pretrained-checkpoint", "--load"}


def read_job(words: Sequence[str], shown: Mapping[str, Any]) -> JobAndArgs:
    """Read the job of a command line, on CPUs: `shown`, with what the flags change, or the one that a file describes."""
    flags = {word.split("=")[0] for word in words}
    defaults = {} if flags & OTHER_MODELS else shown
    return read(words, {**defaults, "device": "cpu"})


# ---------------------------------------------------------------- groups


AXES_OF_MEGATRON = {
    "data_parallel": "dp",
    "tensor model-parallel": "tp",
    "pipeline model-parallel": "pp",
    "model-parallel": "mp",
}
FURTHER_AXES: dict[str, Callable[[Mesh], Axis | None]] = {
    "context-parallel": lambda mesh: mesh["cp"],
    "data- and context-parallel": lambda mesh: mesh.tokens,
    "tensor- and context-parallel": lambda mesh: mesh["tp_cp"],
    "exchange of heads (a2a+p2p)": lambda mesh: mesh.get("cp_heads"),
    "ring of keys (a2a+p2p)": lambda mesh: mesh.get("cp_ring"),
    "key/value head": lambda mesh: mesh.get("kv"),
    "optimizer instance": lambda mesh: mesh.grad_axes(shards=True).shard,
    "replicas of an optimizer instance": lambda mesh: mesh.grad_axes(shards=True).replica,
}


def groups(job: Job) -> None:
    """Print the process groups of all ranks, in the words of the docstring of Megatron's initialize_model_parallel."""
    config = job.runtime.config
    world_size = job.runtime.world_size
    meshes = [mesh_of(config, world_size, rank) for rank in range(world_size)]

    # for each name, the group that each rank is in; of further axes those that have groups of their own
    group_per_rank = {name: [mesh[axis].ranks for mesh in meshes] for name, axis in AXES_OF_MEGATRON.items()}
    for name, axis_of in FURTHER_AXES.items():
        axes = [axis_of(mesh) for mesh in meshes]
        groups_of_axis = [axis.ranks for axis in axes if axis is not None]
        is_shared = max(map(len, groups_of_axis), default=0) > 1
        if is_shared and groups_of_axis not in group_per_rank.values():
            group_per_rank[name] = groups_of_axis
    group_per_rank["embedding"] = [mesh.embedding_ranks for mesh in meshes]

    # the members of a group name the same group: print it once
    for name, all_groups in group_per_rank.items():
        distinct_groups = list(dict.fromkeys(all_groups))
        texts = []
        for group in distinct_groups:
            members = ", ".join(f"g{rank}" for rank in group)
            texts.append(f"[{members}]")
        print(f"{len(distinct_groups)} {name} groups: {', '.join(texts)}")


# ---------------------------------------------------------------- one rank of a job, its peers simulated


@contextlib.contextmanager
def one_rank(job: Job, rank: int) -> Iterator[tuple[Mesh, RankParts]]:
    """Build one rank of the job; yield its mesh, and its chunks, optimizer and pipeline.

    Tensors have shapes but no values inside the block, so that a large model takes no memory.
    """
    mesh = mesh_of(job.runtime.config, job.runtime.world_size, rank)
    with alone(job.runtime, mesh) as runtime, META, ShapesOnly("cpu"):
        yield mesh, build_rank_parts(runtime, job)


def buffers_of(parts: RankParts) -> list[ParamAndGradBuffer]:
    """Return the contiguous buffers of all chunks of a rank."""
    return [buffer for chunk in parts.chunks.values() for buffer in chunk.buffers]


def coordinates_as_text(mesh: Mesh) -> str:
    """Return this rank's index on each axis, as in "rank 5: tp 1 of 2, dp 0 of 2, pp 1 of 4"."""
    axes = ("tp", "cp", "dp", "pp") if mesh["cp"].size > 1 else ("tp", "dp", "pp")
    return f"rank {mesh['world'].rank}: " + ", ".join(f"{axis} {mesh[axis].rank} of {mesh[axis].size}" for axis in axes)


def grad_sum_axes(placement: Placement, mesh: Mesh) -> list[str]:
    """Return the names of the axes over which a parameter's gradient is summed.

    These are the axes of its data-parallel replicas, and those whose ranks each compute a partial sum.
    """
    replica_axes = mesh.grad_axes(placement.reduce_over).reduce.name.split(
        "_"
    )  # an axis of data and context ranks has both names
    partial_sum_axes = sorted(partial_axes(placement))
    return [name for name in (*replica_axes, *partial_sum_axes) if mesh[name].size > 1]


def released(buffers: Iterable[ParamAndGradBuffer]) -> dict[str, int]:
    """Elements of each parameter that this rank keeps of a layer that is not in use: in ZeRO 3 its shard."""
    return {
        slot.name: sum(stop - start for start, stop in overlaps(buffer.shard_runs, slot.start, slot.stop))
        for buffer in buffers
        if buffer.params is None
        for slot in buffer.plan.param_ranges
    }


def model(job: Job, rank: int) -> None:
    """Print the parameters of each chunk that `model_provider` builds: full and local shape, sharding, gradient sum."""
    with one_rank(job, rank) as (mesh, parts):
        for stage, chunk in parts.chunks.items():
            print(
                f"{coordinates_as_text(mesh)}; stage {stage} of {mesh.stages.last + 1}: {type(chunk.module).__name__}"
            )
            rows = [["parameter", "in the model", "here", "sharded over", "gradient summed over"]]
            kept = released(chunk.buffers)
            for name, parameter in chunk.module.named_parameters():
                placement = parameter.placement
                full_shape = str(tuple(placement.shape))
                local_shape = str(tuple(parameter.shape))
                shards = [f"{axis} (dim {dim})" for axis, dim in placement.shard.items() if mesh[axis].size > 1]
                if name in kept:
                    local_shape += f", {kept[name]:,} kept"
                    shard_axis = mesh.grad_axes(placement.reduce_over, shards=True).shard
                    if shard_axis.size > 1:
                        shards.append(f"{shard_axis.name} (elements)")
                sums = " ".join(grad_sum_axes(placement, mesh)) or "-"
                rows.append([name, full_shape, local_shape, " ".join(shards) or "-", sums])
            print("\n".join(table(rows)))


def buffers(job: Job, rank: int) -> None:
    """Print the layout of `DistributedDataParallel`: which elements belong to which parameter, bucket and shard."""
    with one_rank(job, rank) as (mesh, parts):
        print(coordinates_as_text(mesh))
        for buffer in buffers_of(parts):
            axes = buffer.axes
            print(
                f"buffer of {buffer.plan.numel:,} x {str(buffer.dtype).removeprefix('torch.')}, gradients "
                f"{str(buffer.grad_dtype).removeprefix('torch.')}, summed over ranks {list(axes.reduce.ranks)}"
            )
            for number, bucket in enumerate(buffer.plan.buckets):
                print(f"  bucket {number}: elements {bucket.start:,} to {bucket.stop:,}")
                for param_range in buffer.plan.param_ranges:
                    if param_range.name in bucket.names:
                        print(f"    {param_range.start:>8,} {param_range.stop:>8,}  {param_range.name}")
            owned_elements = ", ".join(f"{start:,} to {stop:,}" for start, stop in buffer.owned_runs)
            print(f"  this rank updates elements {owned_elements}: shard {axes.shard.rank} of {axes.shard.size}")


# ---------------------------------------------------------------- a step


class CollectivesByPhase:
    """Counts the collectives of a training step by phase.

    It is given to `train_step` as its timers, whose names are the phases outside of the pipeline, and to the pipeline
    as the context manager that is entered for each action (forward, backward, ...).
    """

    def __init__(self, calls: list[Call]):
        self.calls = calls  # all collectives since the start of the step, appended by the ledger
        self.counts: dict[str, Counter[tuple]] = {}  # phase -> (op, axis, bytes passed, bytes sent) -> number of calls

    def __call__(self, name: str) -> contextlib.AbstractContextManager:
        """Return the context manager of a timer. Within forward-backward the pipeline's actions are counted instead."""
        return self.phase(name) if name != "forward-backward" else contextlib.nullcontext()

    @contextlib.contextmanager
    def phase(self, name: object) -> Iterator[None]:
        """Count the collectives of the block. name: a text, or an action of the pipeline, counted by its operation."""
        num_before = len(self.calls)
        yield
        operation = getattr(name, "op", name)
        counts = self.counts.setdefault(getattr(operation, "name", operation), Counter())
        counts.update((call.op, call.axis, call.bytes, bytes_sent(call)) for call in self.calls[num_before:])


def second_step(job: Job, mesh: Mesh, parts: RankParts) -> CollectivesByPhase:
    """Train two steps and return the collectives of the second: in the first, buckets learn the order of gradients."""
    data = batches_of(job.runtime) if mesh["tp"].is_first else None
    for _ in range(2):
        with mesh.ledger.record() as calls:
            phases = CollectivesByPhase(calls)
            parts.pipeline.around = phases.phase
            iterators = dict.fromkeys(parts.chunks, data)
            train_step(
                parts.pipeline, parts.optimizer, iterators, first_sample=0, lr=1e-3, check_finite=False, timers=phases
            )
    return phases


def step(job: Job, rank: int) -> None:
    """Print the schedule of the pipeline, and the collectives of one rank's training step."""
    with one_rank(job, rank) as (mesh, parts):
        config = job.runtime.config
        pipeline = parts.pipeline
        microbatches = pipeline.batch.num_microbatches
        print(f"{coordinates_as_text(mesh)}; {config.schedule_name}, {microbatches} microbatches")
        print(plot_text(make_schedule(config.schedule_name, mesh["pp"].size, microbatches, config.stages.chunks)))
        actions = " ".join(map(str, pipeline.schedule()[mesh["pp"].rank]))
        print("\n" + textwrap.fill(f"this rank: {actions}", 118))
        rows = [["\nphase or action", "calls", "", "axis", "handed in", "sent"]]
        for phase, counts in second_step(job, mesh, parts).counts.items():
            for (op, axis, size, sent), num_calls in counts.items():
                rows.append([phase, str(num_calls), op, axis, amount(size), amount(int(num_calls * sent))])
                phase = ""  # the name stands in the first row of a phase alone
        print("\n".join(table(rows)))


# ---------------------------------------------------------------- ZeRO


def resident_elements(buffers: Iterable[ParamAndGradBuffer]) -> dict[str, int]:
    """Count the elements that a rank stores between steps: parameters, gradients, each optimizer moment."""
    counts = Counter()
    for buffer in buffers:
        shard_numel = sum(stop - start for start, stop in buffer.shard_runs)
        updated_numel = sum(stop - start for start, stop in buffer.owned_runs)
        # A buffer that is None exists only while it is needed; between steps the rank has its shard.
        counts["parameters"] += shard_numel if buffer.params is None else buffer.plan.numel
        counts["gradients"] += shard_numel if buffer.grads is None else buffer.plan.numel
        counts["of each moment"] += updated_numel
    return dict(counts)


def counts_as_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def hook_of_caller() -> str:
    """Return the outermost function of core/distributed behind this collective, else the function that issued it."""
    frame = sys._getframe(1)
    hook = None
    while frame is not None:
        file = frame.f_code.co_filename
        is_plumbing = file.endswith(("core/parallel/collectives.py", "walkthrough.py"))
        if "core/distributed/" in file or (hook is None and not is_plumbing):
            hook = frame.f_code.co_qualname
        elif hook is not None and file != contextlib.__file__:  # a frame of contextlib may separate two of ours
            break
        frame = frame.f_back
    # A nested function of a hook is one that the forward registers and the backward calls.
    outer, nested, _ = hook.partition(".<locals>")
    return f"{outer}, in the backward" if nested else outer


def record_by_hook(mesh: Mesh) -> dict[tuple[str, str], list[int]]:
    """Record every further collective of the rank in the returned dict: (hook, op) -> bytes of each call."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    note = mesh.ledger.note

    def note_with_hook(call: Call) -> None:
        sizes[hook_of_caller(), call.op].append(call.bytes)
        note(call)

    mesh.ledger.note = note_with_hook
    return sizes


def stages_to_show(words: Sequence[str]) -> Iterable[int]:
    """Return the ZeRO stage that the flags choose, by whichever flag, or all stages."""
    config = read_job(words, SHARDED).job.runtime.config.data_parallel
    is_chosen = (
        config.use_distributed_optimizer
        or config.zero_stage is not None
        or bool(config.data_parallel_sharding_strategy)
    )
    return [config.stage] if is_chosen else range(4)


def zero(words: Sequence[str]) -> None:
    """Print what a rank stores in each ZeRO stage, and the hook that issues each data-parallel collective of a step."""
    for stage in stages_to_show(words):
        job, args = read_job([*words, "--zero-stage", str(stage)], SHARDED)
        rank = args.rank or 0
        with one_rank(job, rank) as (mesh, parts):
            counts = resident_elements(buffers_of(parts))
            second_step(job, mesh, parts)  # the buckets learn the order of gradients
            sizes_by_hook = record_by_hook(mesh)
            second_step(job, mesh, parts)  # trains two steps, both recorded
        microbatches = parts.pipeline.batch.num_microbatches
        print(f"ZeRO {stage}, rank {rank} of {job.runtime.world_size} keeps elements: {counts_as_text(counts)}")
        rows = [[f"  in a step of {microbatches} microbatches, hook", "calls", "", "handed in"]]
        for (hook, op), sizes in sizes_by_hook.items():
            calls_per_step = len(sizes) // 2
            bytes_per_step = sum(sizes) // 2
            rows.append(["  " + hook, str(calls_per_step), op, amount(bytes_per_step)])
        print("\n".join([*table(rows), ""]))


# ---------------------------------------------------------------- processes


def start(words: Sequence[str]) -> None:
    """Initialize by Megatron's functions and print, on rank 0, each rank's groups. Every rank must call."""
    defaults = {**SMALL, "global_batch_size": 4, "tensor_model_parallel_size": 2, "device": "cpu"}
    defaults |= {"mock_data": True, "tokenizer_type": "NullTokenizer", "train_iters": 1, "lr": 1e-3}
    runtime = initialize_megatron(args_defaults=defaults, argv=words)
    tensor_ranks = list(runtime.mesh["tp"].ranks)
    data_ranks = list(runtime.mesh.samples.ranks)
    print_in_rank_order(
        f"rank {runtime.mesh['world'].rank} of {get_args().world_size}, {backend_of(mpu.get_data_parallel_group())}: "
        f"tensor-parallel rank {mpu.get_tensor_model_parallel_rank()} of {tensor_ranks}, "
        f"data-parallel rank {mpu.get_data_parallel_rank()} of {data_ranks}",
        runtime.mesh["world"],
    )


def print_in_rank_order(text: str, world: Axis | None = None) -> None:
    """Print the text of every rank, on rank 0. Every rank must call. world: default: DeepSpeed's world group."""
    world = world or deepspeed.comm.cdb.world
    texts = collectives.all_gather_texts(text, world, "cpu")
    if world.is_first:
        print("\n".join(texts), flush=True)


def engine(words: Sequence[str]) -> None:
    """Train a plain torch model with `deepspeed.initialize`, in each ZeRO stage. Every rank must call."""
    if words:
        raise ConfigError("engine takes no flags; edit its config")
    deepspeed.init_distributed(verbose=False)
    print_in_rank_order(f"cdb: {deepspeed.comm.cdb}")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    for stage in range(4):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        ds_engine, *_ = deepspeed.initialize(model=layers, config={**config, "zero_optimization": {"stage": stage}})
        generator = torch.Generator().manual_seed(ds_engine.global_rank)
        batches = torch.randn(4, 4, 16, generator=generator)  # [microbatches of two steps, b, input features]
        losses, lines = zip(*(micro_step(ds_engine, batch) for batch in batches))
        elements = counts_as_text(resident_elements(ds_engine.chunk.buffers))
        print_in_rank_order(
            f"ZeRO {stage}, rank {ds_engine.global_rank} keeps elements: {elements}; loss {losses[-1]:.6f}"
        )
        if ds_engine.global_rank == 0:
            for lines_of_microbatch in lines[2:]:  # the two microbatches of the second step
                print("\n".join(lines_of_microbatch), flush=True)


def micro_step(ds_engine: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> tuple[float, list[str]]:
    """Train one microbatch; return its loss, and for each line of a DeepSpeed script the collectives that it issues.

    batch: [b, input features].
    """
    with ds_engine.mesh.ledger.record() as calls:
        phases = CollectivesByPhase(calls)
        with phases.phase("engine(batch)"):
            loss = ds_engine(batch).square().mean()  # []
        with phases.phase("engine.backward(loss)"):
            ds_engine.backward(loss)
        with phases.phase("engine.step()"):
            ds_engine.step()
    lines = []
    for name, counts in phases.counts.items():
        calls_by_op = Counter()
        for (op, *_), num_calls in counts.items():
            calls_by_op[op] += num_calls
        summary = ", ".join(f"{num_calls} x {op}" for op, num_calls in calls_by_op.items())
        lines.append(f"    {name:<22} {summary or 'no call'}")
    return loss.item(), lines


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, with the other arguments as its flags; return the exit status."""
    name, *words = arguments
    command = globals()[name]
    try:
        if name in ("zero", "start", "engine"):
            command(words)
            return 0
        job, args = read_job(words, MEGATRON)
        if name == "groups":
            command(job)
        else:
            command(job, args.rank or 0)
    except ConfigError as error:
        problems = "\n".join(f"  - {problem}" for problem in error.problems)
        print_stderr(f"cannot show {name}, {len(error.problems)} problem(s):\n{problems}")
        return 2
    return 0


if __name__ == "__main__":
    if launched_world_size() > 1:  # a rank must not exit early when its output is closed: the others wait for it
        keep_running()
        sys.exit(main(sys.argv[1:]))
    else:
        sys.exit(until_reader_ends(lambda: main(sys.argv[1:])))
