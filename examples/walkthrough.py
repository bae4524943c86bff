"""Shows what stands behind the names of Megatron and DeepSpeed, on a CPU and in seconds. docs/walkthrough.md is the text to it.

    python examples/walkthrough.py groups           the groups that initialize_model_parallel makes of 16 ranks, TP 2, PP 4
    python examples/walkthrough.py model --rank 5   one rank's part of the model: its parameters, and how each is sharded
    python examples/walkthrough.py buffers --rank 5 the contiguous buffers of its DistributedDataParallel
    python examples/walkthrough.py step --rank 5    the calls that it issues in a training step, by phase
    python examples/walkthrough.py zero             ZeRO 0 to 3, or the stage given: what a rank holds, and which hook communicates
    torchrun --nproc-per-node 4 examples/walkthrough.py start       processes that join by initialize_megatron
    torchrun --nproc-per-node 2 examples/walkthrough.py engine      DeepSpeed's engine over a plain torch model

The first five need one process: the rank is real, built by pretrain_gpt.py's own functions, and its neighbours are silent. Further
flags are those of pretrain_gpt.py, and --world-size N: `step --world-size 8 --tensor-model-parallel-size 4 --zero-stage 3`.
"""

import contextlib
import os
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from megatron import deepspeed
from megatron.core import mpu
from megatron.core.base.output_streams import keep_running, until_reader_ends
from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Call, bytes_sent
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.initialize_distributed import backend_of, launched_world_size
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedule.plot import plot_text
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule
from megatron.core.sharding.placement import Placement, partial_axes
from megatron.training import get_args, initialize_megatron
from megatron.training.memory.dry_run import Job, RankParts, alone, batches_of, mesh_of, parts_of
from megatron.training.memory.report import amount, table
from megatron.training.step import train_step
from tools.estimating.job import read

SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 127 --micro-batch-size 1 "
    "--attention-dropout 0 --device cpu --ddp-bucket-size 16384 --overlap-grad-reduce"
)
LAYOUT = "--world-size 16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
MEGATRON = f"{LAYOUT} {SMALL} --global-batch-size 16 --use-distributed-optimizer"
SHARDED = f"--world-size 4 {SMALL} --num-layers 2 --global-batch-size 8"


# ---------------------------------------------------------------- groups


def groups(job: Job) -> None:
    """The groups of every rank's mesh, in the words of Megatron's docstring."""
    config, ranks = job.runtime.config, job.runtime.world_size
    meshes = [mesh_of(config, ranks, rank) for rank in range(ranks)]
    named = {
        "data_parallel": "dp",
        "tensor model-parallel": "tp",
        "pipeline model-parallel": "pp",
        "model-parallel": "mp",
    }
    ranks_of = {name: [mesh[axis].ranks for mesh in meshes] for name, axis in named.items()}
    if meshes[0]["cp"].size > 1:
        ranks_of["context-parallel"] = [mesh["cp"].ranks for mesh in meshes]
    ranks_of["embedding"] = [mesh.embedding_ranks for mesh in meshes]
    for name, of_each_rank in ranks_of.items():
        found = list(dict.fromkeys(of_each_rank))
        shown = ", ".join(f"[{', '.join(f'g{rank}' for rank in group)}]" for group in found)
        print(f"{len(found)} {name} groups: {shown}")


# ---------------------------------------------------------------- one rank of a job, its neighbours silent


@contextlib.contextmanager
def one_rank(job: Job, rank: int) -> Iterator[tuple[Mesh, RankParts]]:
    """A rank's mesh, and its chunks, optimizer and pipeline."""
    mesh = mesh_of(job.runtime.config, job.runtime.world_size, rank)
    with alone(job.runtime, mesh) as runtime:
        yield mesh, parts_of(runtime, job)


def buffers_of(parts: RankParts) -> list[ParamAndGradBuffer]:
    return [buffer for chunk in parts.chunks.values() for buffer in chunk.buffers]


def place_of(mesh: Mesh) -> str:
    """rank 5: tp 1 of 2, dp 0 of 2, pp 1 of 4"""
    names = ("tp", "cp", "dp", "pp") if mesh["cp"].size > 1 else ("tp", "dp", "pp")
    return f"rank {mesh['world'].rank}: " + ", ".join(f"{n} {mesh[n].rank} of {mesh[n].size}" for n in names)


def summed_over(placement: Placement, mesh: Mesh) -> list[str]:
    """The axes over which a parameter's gradient is summed: those of its data-parallel replicas, and those with partial sums."""
    replicas = mesh.grad_axes(placement.reduce_over).reduce.name.split("_")  # its parts: data, context
    return [name for name in (*replicas, *sorted(partial_axes(placement))) if mesh[name].size > 1]


def released(buffers: Iterable[ParamAndGradBuffer]) -> dict[str, int]:
    """Elements of each parameter that this rank keeps of a layer that is not in use: in ZeRO 3 its shard."""
    return {
        slot.name: sum(stop - start for start, stop in overlaps(buffer.shard_runs, slot.start, slot.stop))
        for buffer in buffers
        if buffer.params is None
        for slot in buffer.plan.param_ranges
    }


def model(job: Job, rank: int) -> None:
    """The parameters of `model_provider`'s chunk, with the facts of their placements."""
    with one_rank(job, rank) as (mesh, parts):
        for stage, chunk in parts.chunks.items():
            print(f"{place_of(mesh)}; stage {stage} of {mesh.stages.last + 1}: {type(chunk.module).__name__}")
            rows = [["parameter", "in the model", "here", "sharded over", "gradient summed over"]]
            kept = released(chunk.buffers)
            for name, parameter in chunk.module.named_parameters():
                where, here = parameter.placement, str(tuple(parameter.shape))
                shards = [f"{axis} (dim {dim})" for axis, dim in where.shard.items() if mesh[axis].size > 1]
                if name in kept:
                    here += f", {kept[name]:,} kept"
                    replicas = mesh.grad_axes(where.reduce_over, shards=True).shard
                    shards += [f"{replicas.name} (elements)"] if replicas.size > 1 else []
                sums = " ".join(summed_over(where, mesh)) or "-"
                rows.append([name, str(tuple(where.shape)), here, " ".join(shards) or "-", sums])
            print("\n".join(table(rows)))


def buffers(job: Job, rank: int) -> None:
    """The layout of `DistributedDataParallel`: which elements belong to which parameter, bucket and shard."""
    with one_rank(job, rank) as (mesh, parts):
        print(place_of(mesh))
        for buffer in buffers_of(parts):
            axes = buffer.axes
            print(
                f"buffer of {buffer.plan.numel:,} x {str(buffer.dtype).removeprefix('torch.')}, gradients "
                f"{str(buffer.grad_dtype).removeprefix('torch.')}, summed over ranks {list(axes.reduce.ranks)}"
            )
            for number, bucket in enumerate(buffer.plan.buckets):
                print(f"  bucket {number}: elements {bucket.start:,} to {bucket.stop:,}")
                for slot in (slot for slot in buffer.plan.param_ranges if slot.name in bucket.names):
                    print(f"    {slot.start:>8,} {slot.stop:>8,}  {slot.name}")
            held = ", ".join(f"{start:,} to {stop:,}" for start, stop in buffer.owned_runs)
            print(f"  this rank updates elements {held}: shard {axes.shard.rank} of {axes.shard.size}")


# ---------------------------------------------------------------- a step


class Phases:
    """The timers of `train_step`, which name its phases; and its actions."""

    def __init__(self, calls: list[Call]):
        self.calls, self.of = calls, dict[str, Counter[tuple]]()

    def __call__(self, name: str) -> contextlib.AbstractContextManager:
        return self.within(name) if name != "forward-backward" else contextlib.nullcontext()

    @contextlib.contextmanager
    def within(self, name: object) -> Iterator[None]:
        before = len(self.calls)
        yield
        name = getattr(name, "op", name)  # an action by its operation
        found = self.of.setdefault(getattr(name, "name", name), Counter())
        found.update((call.op, call.axis, call.bytes, bytes_sent(call)) for call in self.calls[before:])


def one_step(job: Job, mesh: Mesh, parts: RankParts) -> Phases:
    """Train a step, the second one: buckets learn their order in the first."""
    data = batches_of(job.runtime) if mesh["tp"].is_first else None
    for _ in range(2):
        with mesh.ledger.record() as calls:
            parts.pipeline.around = (phases := Phases(calls)).within
            iterators = dict.fromkeys(parts.chunks, data)
            train_step(
                parts.pipeline, parts.optimizer, iterators, first_sample=0, lr=1e-3, check_finite=False, timers=phases
            )
    return phases


def step(job: Job, rank: int) -> None:
    """The schedule of the pipeline, and the ledger of one rank's step."""
    with one_rank(job, rank) as (mesh, parts):
        config, pipeline = job.runtime.config, parts.pipeline
        microbatches = pipeline.batch.num_microbatches
        print(f"{place_of(mesh)}; {config.schedule_name}, {microbatches} microbatches")
        print(plot_text(make_schedule(config.schedule_name, mesh["pp"].size, microbatches, config.stages.chunks)))
        actions = " ".join(map(str, pipeline.schedule()[mesh["pp"].rank]))
        print("\n" + textwrap.fill(f"this rank: {actions}", 118))
        rows = [["\nphase or action", "calls", "", "axis", "handed in", "sent"]]
        for phase, calls in one_step(job, mesh, parts).of.items():
            for (op, axis, size, sent), times in calls.items():
                rows.append([phase, str(times), op, axis, amount(size), amount(int(times * sent))])
                phase = ""
        print("\n".join(table(rows)))


# ---------------------------------------------------------------- ZeRO


def held_by(buffers: Iterable[ParamAndGradBuffer]) -> dict[str, int]:
    """Elements that a rank keeps between steps."""
    found = Counter()
    for buffer in buffers:
        shard, owned = (sum(stop - start for start, stop in runs) for runs in (buffer.shard_runs, buffer.owned_runs))
        found["parameters"] += shard if buffer.params is None else buffer.plan.numel
        found["gradients"] += shard if buffer.grads is None else buffer.plan.numel
        found["of each moment"] += owned
    return dict(found)


def in_words(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in held.items())


def hook_of_caller() -> str:
    """The function of core/distributed by which a call was asked for, or the function that made the call itself."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if "core/distributed/" in file or (
            found is None and not file.endswith(("core/parallel/collectives.py", "walkthrough.py"))
        ):
            found = name
        elif found is not None and file != contextlib.__file__:  # a decorator's own frame stands between two of ours
            break
        frame = frame.f_back
    hook, inside, _ = found.partition(".<locals>")  # a function that a forward hook leaves to the backward
    return f"{hook}, in the backward" if inside else hook


def by_hook(mesh: Mesh) -> dict[tuple[str, str], list[int]]:
    """Filled from now on: (hook, call) -> bytes of each call that the rank issues."""
    calls: dict[tuple[str, str], list[int]] = defaultdict(list)
    note = mesh.ledger.note
    mesh.ledger.note = lambda call: (calls[hook_of_caller(), call.op].append(call.bytes), note(call))
    return calls


def stages_to_show(words: Sequence[str]) -> Iterable[int]:
    """The ZeRO stage that the flags ask for, in whatever words, or all."""
    given = read([*SHARDED.split(), *words]).job.runtime.config.data_parallel
    asks = given.use_distributed_optimizer, given.zero_stage is not None, given.data_parallel_sharding_strategy
    return [given.stage] if any(asks) else range(4)


def zero(words: Sequence[str]) -> None:
    """Who holds what in a stage, and the hook behind each data-parallel call of a step."""
    for stage in stages_to_show(words):
        job, args = read([*SHARDED.split(), *words, "--zero-stage", str(stage)])
        rank = args.rank or 0
        with one_rank(job, rank) as (mesh, parts):
            held = held_by(buffers_of(parts))
            one_step(job, mesh, parts)
            calls = by_hook(mesh)
            one_step(job, mesh, parts)
        microbatches = parts.pipeline.batch.num_microbatches
        print(f"ZeRO {stage}, rank {rank} of {job.runtime.world_size} keeps elements: {in_words(held)}")
        head = [f"  in a step of {microbatches} microbatches, hook", "calls", "", "handed in"]
        rows = [["  " + hook, str(len(sizes) // 2), op, amount(sum(sizes) // 2)] for (hook, op), sizes in calls.items()]
        print("\n".join([*table([head, *rows]), ""]))


# ---------------------------------------------------------------- processes


def start(words: Sequence[str]) -> None:
    """Join the job by Megatron's names. Every rank says where it is, and rank 0 prints that in the order of ranks."""
    flags = f"{SMALL} --global-batch-size 4 --tensor-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer "
    runtime = initialize_megatron(argv=[*f"{flags} --train-iters 1 --lr 1e-3".split(), *words])
    tensor, data = list(runtime.mesh["tp"].ranks), list(runtime.mesh.samples.ranks)
    say_in_order(
        f"rank {runtime.mesh['world'].rank} of {get_args().world_size}, {backend_of(mpu.get_data_parallel_group())}: "
        f"tensor-parallel rank {mpu.get_tensor_model_parallel_rank()} of {tensor}, "
        f"data-parallel rank {mpu.get_data_parallel_rank()} of {data}",
        runtime.mesh["world"],
    )


def say_in_order(text: str, world: Axis | None = None) -> None:
    world = world or deepspeed.comm.cdb.world
    texts = collectives.all_gather_texts(text, world, "cpu")
    if world.is_first:
        print("\n".join(texts), flush=True)


def engine(words: Sequence[str]) -> None:
    """A plain torch model under `deepspeed.initialize`, in each ZeRO stage. Every rank must call."""
    if words:
        sys.exit("engine takes no flags; edit its config")
    deepspeed.init_distributed(verbose=False)
    say_in_order(f"cdb: {deepspeed.comm.cdb}")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    for stage in range(4):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        made, *_ = deepspeed.initialize(model=layers, config={**config, "zero_optimization": {"stage": stage}})
        batches = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(made.global_rank))
        losses, lines = zip(*(micro_step(made, batch) for batch in batches))
        elements = in_words(held_by(made.chunk.buffers))
        say_in_order(f"ZeRO {stage}, rank {made.global_rank} keeps elements: {elements}; loss {losses[-1]:.6f}")
        if made.global_rank == 0:
            print("\n".join(line for some in lines[2:] for line in some), flush=True)  # of the second step


def micro_step(made: deepspeed.DeepSpeedEngine, batch: torch.Tensor) -> tuple[float, list[str]]:
    """The loss, and the data-parallel calls behind each line of a script of DeepSpeed."""
    with made.mesh.ledger.record() as calls:
        phases = Phases(calls)
        with phases.within("engine(batch)"):
            loss = made(batch).square().mean()
        with phases.within("engine.backward(loss)"):
            made.backward(loss)
        with phases.within("engine.step()"):
            made.step()
    lines = []
    for name, of_phase in phases.of.items():
        found = Counter()
        for (op, *_), times in of_phase.items():
            found[op] += times
        lines.append(f"    {name:<22} {', '.join(f'{times} x {op}' for op, times in found.items()) or 'no call'}")
    return loss.item(), lines


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in ("groups", "model", "buffers", "step", "zero", "start", "engine"):
        sys.exit(__doc__)
    name, *words = arguments
    show = globals()[name]
    if name in ("zero", "start", "engine"):
        show(words)
        return
    job, args = read([*MEGATRON.split(), *words])
    show(job) if name == "groups" else show(job, args.rank or 0)


if __name__ == "__main__":
    if launched_world_size() > 1:  # the other ranks need this one to the end
        keep_running()
        main(sys.argv[1:])
    else:
        sys.exit(until_reader_ends(lambda: main(sys.argv[1:])))
