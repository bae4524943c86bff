"""Count the memory of one rank of any layout in this process alone, beside what is predicted for it.

    python tools/measure_memory.py --world-size 8 --rank 2 --tensor-model-parallel-size 2 ... flags of pretrain_gpt.py
    python tools/measure_memory.py --model bert ... flags of pretrain_bert.py
    python tools/measure_memory.py --write docs/memory.md     the table of that page anew: some minutes, at most 3 GB

The other ranks are not there: their answers are made up, since how much memory is taken does not depend on what it holds.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import pretrain_bert
import pretrain_gpt
from megatron.core.config import ConfigError
from megatron.core.current_mesh import current, use_mesh
from megatron.core.device import Device
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.mesh import Mesh, build_mesh
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.products import NATIVE, WAYS, Products
from megatron.core.random import DropoutKeys
from megatron.core.tiers.offload_config import make_tier
from megatron.core.tiers.tier import FileTensor
from megatron.core.tokenizers import build_tokenizer
from megatron.core.weight_grads import WeightGradStore
from megatron.training.arguments import parse_args
from megatron.training.chunks import build_optimizer, build_pipeline
from megatron.training.memory.estimate import IN_MEMORY, KINDS, RankMemory, estimate
from megatron.training.memory.of_run import of_rank
from megatron.training.memory.report import amount, table
from megatron.training.memory.sizes import RunSizes
from megatron.training.memory.tracker import MemoryTracker, kept_apart
from megatron.training.runtime import Runtime, set_runtime
from megatron.training.settings.config import Config
from megatron.training.train_step import train_step
from tools.estimate_memory import add_model_flag, check_run

_DEFAULTS = {"tokenizer_type": "NullTokenizer", "train_iters": 1, "lr": 1e-4, "mock_data": True}
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500 "
    "--make-vocab-size-divisible-by 8"
)
LLAMA = (
    "--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention"
)
_MEDIUM = "--hidden-size 768 --num-attention-heads 12 --vocab-size 50256 --seq-length 512 --micro-batch-size 2 --bf16"


class Case(NamedTuple):
    """A rank of a layout to be measured."""

    words: str
    world_size: int = 1
    rank: int = 0
    model: str = "gpt"

    @property
    def shown(self) -> str:
        """The flags of the tool."""
        return self.words if self.model == "gpt" else f"--model {self.model} {self.words}".rstrip()

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.words if self.words.startswith("--num-layers ") else f"{SMALL} {self.words}")


_T2, _P2, _P4 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
_FUSED, _BATCH = "--attention-dropout 0", "--global-batch-size 16"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_PARTS = "--recompute-granularity selective --recompute-modules"
_UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
CASES = [
    Case(""),
    Case(f"{_FUSED} --bf16"),
    Case(f"{_FUSED} --fp16 --fp32-residual-connection"),
    Case("--bf16 --recompute-activations"),
    Case(f"{_FUSED} --reset-attention-mask"),
    Case(
        "--attention-dropout 0 --attention-backend unfused --bf16 --position-embedding-type none --label-smoothing 0.1"
    ),
    Case(f"{_FUSED} {_UNIFORM} 2"),
    Case("--recompute-granularity full --recompute-method block --recompute-num-layers 3 --bf16"),
    Case(f"{LLAMA} --num-query-groups 2"),
    Case(f"{LLAMA} --num-query-groups 2 --bf16 --qk-layernorm"),
    Case(f"{_T2} {_FUSED}", 2),
    Case(f"{_T2} --sequence-parallel --bf16", 2, 1),
    Case(f"--tensor-model-parallel-size 4 {LLAMA} --num-query-groups 2 --sequence-parallel", 4, 3),
    Case(f"{_P4} {_FUSED} {_BATCH}", 4, 1),
    Case(f"{_P4} {_FUSED} {_BATCH} --bf16 --pipeline-schedule gpipe", 4, 3),
    Case(f"{_P4} {_FUSED} {_BATCH} --hidden-dropout 0 --pipeline-schedule zb-h1", 4, 2),
    Case(f"{_P2} {_FUSED} {_BATCH} --num-layers-per-virtual-pipeline-stage 1 --bf16", 2, 0),
    Case(f"{_P2} {_FUSED} {_BATCH} --decoder-first-pipeline-num-layers 1 {_T2}", 4, 0),
    Case(
        f"{_P2} {_FUSED} {_BATCH} --decoder-first-pipeline-num-layers 1 {_T2} --no-scatter-gather-tensors-in-pipeline",
        4,
        2,
    ),
    Case(f"{_FUSED} {_BATCH} --grad-reduce-in-bf16 --bf16", 4, 1),
    Case(f"{_FUSED} {_BATCH} --zero-stage 1 {_OVERLAP} --bf16", 4, 3),
    Case(f"{_FUSED} {_BATCH} --zero-stage 2 --ddp-bucket-size 30000 --overlap-grad-reduce", 4, 0),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 --bf16", 4, 1),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 --untie-embeddings-and-output-weights {_OVERLAP}", 4, 2),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 {_UNIFORM} 2 --overlap-param-gather", 4, 0),
    Case(f"{_P2} {_FUSED} {_BATCH} --zero-stage 3 --pipeline-schedule zb-h1 {_OVERLAP}", 4, 2),
    Case(f"{_P2} {_FUSED} {_BATCH} --zero-stage 3 --num-layers-per-virtual-pipeline-stage 1 {_OVERLAP} --bf16", 4, 2),
    Case(
        f"{_P2} {_T2} {LLAMA} --num-query-groups 1 --sequence-parallel {_BATCH} --zero-stage 2 --num-distributed-optimizer-instances 2 "
        "--bf16 --grad-reduce-in-bf16",
        16,
        8,
    ),
    Case(f"{_FUSED} {_BATCH} --optimizer sgd --zero-stage 1", 4, 0),
    Case(f"{_FUSED} {_BATCH} --fixed-order-grad-reduce", 4, 0),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 --pipeline-schedule zb-h1 --overlap-grad-reduce", 4, 2),
    Case(
        f"{_FUSED} {_BATCH} --zero-stage 3 --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim --bf16",
        4,
        3,
    ),
    Case(f"{_FUSED} {_BATCH} --zero-stage 1 --bf16 --main-grads-dtype bf16", 4, 1),
    Case(
        f"{_FUSED} {_BATCH} --zero-stage 3 --bf16 --main-grads-dtype bf16 --reduce-scatter-with-fp32-accumulation", 4, 2
    ),
    Case(
        f"{_FUSED} {_BATCH} --zero-stage 2 --bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation "
        "--overlap-grad-reduce --ddp-bucket-size 30000",
        4,
        0,
    ),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 --bf16 --poison-released-buffers --overlap-param-gather", 4, 1),
    Case(f"{_FUSED} --bf16 {_PARTS} mlp layernorm"),
    Case(f"{_FUSED} {_BATCH} {_P2} {_T2} --sequence-parallel {_PARTS} core_attn layernorm", 4, 0),
    Case(f"{_FUSED} {_BATCH} {_P2} {_T2} {_UNIFORM} 1 --distribute-saved-activations", 4, 2),
    Case(f"{_FUSED} {_BATCH} --zero-stage 1 --bf16 --reuse-fp32-param", 4, 0),
    Case(f"{_FUSED} {_BATCH} --zero-stage 1 --bf16 --optimizer-cpu-offload", 4, 0),
    Case(f"{_FUSED} {_BATCH} --zero-stage 2 --bf16 --offload-dir state --optimizer-offload-fraction 0.5", 4, 0),
    Case(f"{_FUSED} {_BATCH} --zero-stage 3 --bf16 --offload-dir state --offload-params --overlap-param-gather", 4, 1),
    Case(
        f"{_P2} {_FUSED} {_BATCH} --num-layers-per-virtual-pipeline-stage 1 --zero-stage 1 --bf16 --main-grads-dtype bf16 "
        "--reduce-scatter-with-fp32-accumulation --overlap-grad-reduce --ddp-bucket-size 30000",
        4,
        2,
    ),
    Case(f"{_P2} {_FUSED} {_BATCH} --bf16 --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1000", 4, 0),
    Case(
        f"{_P2} {_FUSED} {_BATCH} {_UNIFORM} 1 --cpu-offloading-num-layers 1 --contiguous-checkpointing --pipeline-schedule zb-h1",
        4,
        1,
    ),
    Case(f"{_T2} {_FUSED} {_UNIFORM} 1 --distribute-saved-activations --contiguous-checkpointing", 2, 1),
    Case(
        f"{_FUSED} {_BATCH} --zero-stage 2 --bf16 {_UNIFORM} 2 --cpu-offloading-num-layers 4 --offload-dir state "
        "--optimizer-offload-fraction 0.3",
        4,
        3,
    ),
    Case(f"--bf16 {_PARTS} core_attn mlp layernorm"),
    Case("", model="bert"),
    Case(f"{_T2} --sequence-parallel {_FUSED} --bf16", 2, 1, "bert"),
    Case(f"{_P4} {_FUSED} {_BATCH} --hidden-dropout 0 --pipeline-schedule zb-h1", 4, 3, "bert"),
    Case(f"{_P2} {_FUSED} {_BATCH} --zero-stage 3 --pipeline-schedule zb-h1 {_OVERLAP} --bf16", 4, 2, "bert"),
    Case(
        f"{_P2} {_T2} {_FUSED} {_BATCH} --bert-no-binary-head {_UNIFORM} 1 --distribute-saved-activations", 4, 0, "bert"
    ),
]
# Too long for a test: GPT-2 with half of its layers (82 M parameters), and deeper ones on many ranks.
LARGE = [
    Case(f"--num-layers 6 {_MEDIUM} {_FUSED}"),
    Case(f"--num-layers 6 {_MEDIUM} {_FUSED} --zero-stage 1 --global-batch-size 32 {_OVERLAP}", 8, 0),
    Case(f"--num-layers 6 {_MEDIUM} {_FUSED} --zero-stage 3 --global-batch-size 32 {_OVERLAP}", 8, 0),
    Case(
        f"--num-layers 24 {_MEDIUM} {LLAMA} --num-query-groups 4 {_T2} --sequence-parallel {_P4} --global-batch-size 32 "
        "--use-distributed-optimizer --recompute-activations",
        16,
        0,
    ),
    Case(
        f"--num-layers 24 {_MEDIUM} {_FUSED} --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 "
        "--global-batch-size 512 --zero-stage 1 --pipeline-schedule zb-h1",
        1024,
        700,
    ),
]


class _Done:
    def wait(self) -> None:
        """There is nobody to wait for."""


class SilentGroup:
    """A communicator whose other ranks say what this one says, or zeros. Takes no memory of its own."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor, op: str) -> _Done:
        return _Done()

    def all_gather(self, out: Tensor, x: Tensor) -> _Done:
        for part in out.view(self.size, -1):
            part.copy_(x.view(-1))
        return _Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> _Done:
        out.view(-1).copy_(x.view(self.size, -1)[0])
        return _Done()

    def all_to_all(self, out: Tensor, x: Tensor) -> _Done:
        out.copy_(x)
        return _Done()

    def broadcast(self, x: Tensor, source: int) -> _Done:
        return _Done() if source == self.rank else self.recv(x, source)

    def send(self, x: Tensor, to: int) -> _Done:
        return _Done()

    def recv(self, x: Tensor, source: int) -> _Done:
        x.zero_()
        return _Done()


def mesh_of(config: Config, world_size: int, rank: int) -> Mesh:
    """The axes of one rank of a job whose others are not there."""
    parallel = config.parallel
    sizes = parallel.sizes(world_size, config.data_parallel.num_distributed_optimizer_instances)
    sharing = config.transformer.ranks_per_kv_head(parallel.tensor_model_parallel_size)

    def group(name: str, ranks: tuple[int, ...]) -> SilentGroup:
        return SilentGroup(len(ranks), ranks.index(rank))

    mesh = build_mesh(sizes, rank, group, sharing, stages=config.stages)
    return mesh


def batches_of(config: Config, vocab_size: int, model: str) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end."""
    shape = (config.training.micro_batch_size, config.data.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, vocab_size, shape, generator=generator)
        if model == "bert":
            zeros, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
            batch = {"text": tokens, "types": zeros, "labels": tokens, "loss_mask": ones, "padding_mask": ones}
            yield batch | {"is_random": zeros[:, 0]}
            continue
        positions = torch.arange(shape[1]).expand(shape)
        batch = {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": torch.ones(shape)}
        yield batch | {"document_ids": torch.zeros(shape, dtype=torch.int64)}


@dataclass(frozen=True)
class Measured:
    """One rank of a layout."""

    run: RunSizes
    stage: int  # of the pipeline
    bytes: dict[str, int]  # the peak of each kind in a step
    total: int  # the peak of all together in a step
    ever: int  # and that of the whole time, while the model was built too
    in_file: int  # state that takes none of it

    @property
    def predicted(self) -> RankMemory:
        return estimate(self.run)[self.stage]

    @property
    def expected(self) -> dict[str, int]:
        """By kind, what is predicted for the memory of this machine."""
        return self.predicted.within(*IN_MEMORY)


SCRIPTS = {"gpt": pretrain_gpt, "bert": pretrain_bert}


def measure(words: Sequence[str], world_size: int, rank: int, model: str = "gpt", steps: int = 2) -> Measured:
    """Train this rank for some steps, and count in the last of them. Raises ConfigError."""
    config, args, _ = parse_args([*words, "--device", "cpu"], None, _DEFAULTS)
    check_run(config, world_size, model)
    if not 0 <= rank < world_size:
        raise ConfigError(f"--rank is {rank}; there are ranks 0 to {world_size - 1}")
    mesh = mesh_of(config, world_size, rank)
    tokenizer = build_tokenizer(config.tokenizer)
    tier = make_tier(config.offload, rank, torch.device("cpu"))
    way = config.transformer.cpu_half_products  # what is measured depends on the flags, not on this CPU
    products = Products.all(way) if way in WAYS else NATIVE
    runtime = Runtime(
        config, args, mesh, Device("cpu"), tokenizer, DropoutKeys(1), WeightGradStore(), tier=tier, products=products
    )
    use_mesh(mesh)
    here = current()
    here.sequence_parallel = config.parallel.sequence_parallel_on
    set_runtime(runtime, this_thread_only=True)
    try:
        with MemoryTracker() as tracker:
            chunks = dict(_chunks_of(runtime, SCRIPTS[model]))
            optimizer = build_optimizer(chunks, runtime)
            pipeline = build_pipeline(chunks, runtime, SCRIPTS[model].forward_step)
            tracker.assign_state(chunks.values(), optimizer)
            ever = tracker.peak["total"]
            data = batches_of(config, tokenizer.vocab_size, model)
            for _ in range(steps):
                tracker.restart()
                train_step(
                    pipeline,
                    optimizer,
                    dict.fromkeys(chunks, data if mesh["tp"].is_first else None),
                    first_sample=0,
                    lr=0.0,
                    check_finite=False,
                )
            in_file = bytes_in_file(chunks.values(), optimizer)
    finally:
        if tier is not None:
            tier.close()
        use_mesh(None)
        set_runtime(None, this_thread_only=True)
    run = of_rank(
        RunSizes.of(
            config,
            tokenizer.vocab_size,
            world_size,
            accelerator=False,
            threads=torch.get_num_threads(),
            model=model,
            widened=products.widened,
        ),
        mesh,
    )
    kinds, total = {kind: tracker.peak[kind] for kind in KINDS}, tracker.peak["total"]
    return Measured(run, mesh["pp"].rank, kinds, total, max(ever, total), in_file)


def bytes_in_file(chunks: Iterable[DistributedDataParallel], optimizer: FlatOptimizer) -> int:
    """Of the state of a rank, and of its activations."""
    held = [tensor for chunk in chunks for buffer in chunk.buffers for tensor in buffer.held_params.tensors]
    held += [tensor for shards in optimizer.moments.values() for shard in shards for tensor in shard.tensors]
    for buffer, master in zip(optimizer.buffers, optimizer.masters):
        held += map(kept_apart, master.tensors) if buffer.is_half_precision else ()
    of_layers = [chunk.module.language_model.decoder.activations for chunk in chunks]
    rooms = [one.room(torch.device("cpu")) for one in of_layers if one.offloaded]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, FileTensor)) + sum(
        slot.nbytes for room in rooms for slot in room.slots if isinstance(slot, FileTensor)
    )


def _chunks_of(runtime: Runtime, script: ModuleType) -> Iterator[tuple[int, DistributedDataParallel]]:
    mesh, config = runtime.mesh, runtime.config
    for number, stage in enumerate(mesh.stages.of_rank(mesh["pp"].rank)):
        current().virtual_rank = number
        model = script.model_provider(stage == 0, stage == mesh.stages.last, number)
        for parameter in model.parameters():
            parameter.data.zero_()  # no weight matters, but a chance one may be no number
        tier = runtime.tier if config.offload.offload_params else None
        yield stage, DistributedDataParallel(model, mesh, config.data_parallel, runtime.weight_grads, tier=tier)


# ---------------------------------------------------------------- what is printed

BEGIN, END = (
    "<!-- measured: python tools/measure_memory.py --write docs/memory.md -->",
    "<!-- end of what was measured -->",
)


def rows_of(cases: Sequence[Case]) -> Iterator[list[str]]:
    """A row of a Markdown table for each case."""
    for case in cases:
        got = measure(case.arguments, case.world_size, case.rank, case.model)
        expected = got.expected
        print(f"measured {case.words}", file=sys.stderr, flush=True)
        cells = [beside(got.bytes[kind], expected[kind]) for kind in KINDS]
        yield [
            f"`{case.shown or 'no more flags'}`",
            f"{case.rank} of {case.world_size}",
            *cells,
            beside(got.total, sum(expected.values())),
        ]


def beside(measured: int, predicted: int) -> str:
    """What was measured, and by how much the prediction is off."""
    if measured == predicted:
        return f"{amount(measured)} ="
    return f"{amount(measured)} {predicted / measured - 1:+.1%}" if measured else f"0 B, not {amount(predicted)}"


def section(cases: Sequence[Case]) -> str:
    """The table between the markers."""
    head = ["flags", "rank", *KINDS, "all"]
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2), *rows_of(cases)]
    return "\n".join([BEGIN, "", *(f"| {' | '.join(cells)} |" for cells in lines), "", END])


def write_into(path: Path, text: str) -> None:
    """Put the section in the place of the one that is there."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(before + text + rest.split(END)[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the job (default: 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the one that is measured (default: 0)")
    add_model_flag(parser)
    parser.add_argument(
        "--write", metavar="FILE", help="measure the cases of docs/memory.md and put their table into FILE"
    )
    own, words = parser.parse_known_args(arguments)
    torch.set_num_threads(1)
    try:
        if own.write:
            write_into(Path(own.write), section([*CASES, *LARGE]))
            return 0
        got = measure(words, own.world_size, own.rank, own.model)
    except ConfigError as error:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot measure, {len(error.problems)} problem(s):\n{lines}", file=sys.stderr)
        return 2
    expected = got.expected
    rows = [["", "measured", "predicted"]]
    rows += [[kind, amount(got.bytes[kind]), amount(expected[kind])] for kind in KINDS]
    rows += [["all", amount(got.total), amount(sum(expected.values()))], ["while built too", amount(got.ever), ""]]
    if got.in_file:
        rows.append(["in a file", amount(got.in_file), amount(got.predicted.tiers["file"])])
    print("\n".join([f"stage {got.stage}", *table(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
