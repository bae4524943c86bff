"""Measure mixtures of experts: a training step against transformers' Mixtral, a layer against a dense MLP, EP against ZeRO, in one run.

    python benchmarks/experts.py                                              all three, some minutes on two quiet cores
    python benchmarks/experts.py --dtype bfloat16                             on a CPU with instructions for it
    python benchmarks/experts.py --works model --experts 64 --width 64        many small experts
    python benchmarks/experts.py --rounds 2 --steps 1                         whether it runs

    model    one process trains a Mixtral: ours, and transformers' with each implementation of experts that it has for a CPU
    layer    forward and backward of a layer of experts, and of a dense MLP as wide as a token's experts together; also of the
             experts alone, without router and dispatch, the least that such a layer takes
    ranks    two processes over gloo, one thread each, train the model of ours: EP 2, and ZeRO 1 with all experts on both

Contenders of a work take turns of `--steps` steps, `--rounds` times; the order rotates. All compute with the tokens of
--batch x --sequence (of `ranks`, half on each), and a model trains with AdamW and clips the norm to 1. In bfloat16 ours has
float32 gradients and optimizer state, as --bf16 has; theirs has float32 weights under autocast, or ("pure") everything in bfloat16.

Ours runs with the process settings that a training run makes (`Device.prepare`: malloc keeps freed memory). Each contender of `model` has
a process of its own; theirs runs with the settings that torch starts with, and ("same malloc") with ours.

Prints milliseconds a step by the clock and by processor time (median, fastest, slowest), and ratios of medians to the last
contender: below 1 is faster. `model` needs `pip install transformers`; without it ours is measured alone.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import mesh_override
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.experts import ParallelExperts
from megatron.core.transformer.moe.moe_layer import ParallelMoE
from megatron.core.transformer.moe.token_dispatcher import ExpertRows
from megatron.training.step import train_step

LR, CLIP, DECAY = 1e-4, 1.0, 0.01
RANKS = 2
HEADS, GROUPS = 4, 2
THEIR_EXPERTS = ("eager", "grouped_mm")  # batched_mm copies the weights of two experts for each token: gigabytes
Step = Callable[[], object]
Turn = Callable[
    [int], tuple[float, float]
]  # a number of steps -> milliseconds a step, by the clock and of processor time


def config_of(options: argparse.Namespace, **changes: object) -> ModelConfig:
    """Return the Mixtral that is measured."""
    settings = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": options.width,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_experts": options.experts,
        "moe_router_topk": options.topk,
        "moe_token_dispatcher_type": "alltoall",
        "bf16": options.dtype == "bfloat16",
    }
    return ModelConfig(**(settings | changes))


def batches(options: argparse.Namespace, rank: int, ranks: int) -> Iterator[Tensor]:
    """Yield random tokens [b, s + 1] of this rank, the same for every contender."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, options.vocab, (options.batch // ranks, options.sequence + 1), generator=generator)


# ---------------------------------------------------------------- contenders


def forward(data: Iterator[Tensor], model: nn.Module, positions: Tensor) -> tuple[Tensor, Callable]:
    """Run one microbatch; return the losses [b, s] and the loss function, as Megatron's forward_step does."""
    tokens = next(data)  # [b, s + 1]
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])  # [b, s]

    def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        report = {"loss": torch.stack((losses.detach().sum(), losses.new_tensor(losses.numel())))}
        return losses.sum(), torch.tensor(float(losses.numel())), report

    return losses, loss_func


def ours(options: argparse.Namespace, mesh: Mesh, config: ModelConfig, *, stage: int = 0) -> tuple[Step, int]:
    """Return a step of our trainer, and the parameters of this rank."""
    ranks, keys = mesh["dp"].size, SampleDropoutKeys(1)
    model = GPTModel(
        config,
        vocab_size=options.vocab,
        positions=options.sequence,
        layers=range(config.num_layers),
        context=LayerContext.from_mesh(mesh, config.params_dtype, keys, fills=False),
    )
    initialize_parameters(model, 1, mesh)
    parameters = sum(p.numel() for p in model.parameters())
    overlap = {"overlap_grad_reduce": ranks > 1, "overlap_param_gather": stage > 0}
    chunk = DistributedDataParallel(model, mesh, DataParallelConfig(zero_stage=stage, **overlap))
    adam = FlatOptimizer(chunk.buffers, OptimizerConfig(clip_grad=CLIP, weight_decay=DECAY), mesh)
    rows = options.batch // ranks
    positions = torch.arange(options.sequence).expand(rows, -1)
    pipeline = Pipeline(
        {0: chunk},
        mesh,
        BatchShape(rows, 1, options.sequence),
        boundary=(),
        keys=keys,
        forward_step=partial(forward, positions=positions),
    )
    data = {0: batches(options, mesh["dp"].rank, ranks)}

    def step() -> None:
        with mesh_override(mesh):  # contenders have different ones
            train_step(pipeline, adam, data, first_sample=0, lr=LR)

    return step, parameters


def theirs(options: argparse.Namespace, implementation: str, *, pure: bool = False) -> tuple[Step, int]:
    """Return a step of transformers' Mixtral, and its parameters. pure: all in bfloat16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=options.sequence,
        num_local_experts=options.experts,
        num_experts_per_tok=options.topk,
        use_cache=False,
    )
    config._experts_implementation = implementation
    model = MixtralForCausalLM(config).train()
    if pure:
        model.bfloat16()
    casts = options.dtype == "bfloat16" and not pure
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)
    data = batches(options, 0, 1)

    def step() -> None:
        tokens = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        adam.zero_grad()
        loss.item()  # ours reports its loss too

    return step, sum(p.numel() for p in parameters)


def layer(options: argparse.Namespace, kind: type[nn.Module], config: ModelConfig) -> Step:
    """Return the forward and backward of one layer, with the gradients of its inputs and weights."""
    mesh, keys = single_rank_mesh(), SampleDropoutKeys(1)
    context = LayerContext.from_mesh(mesh, config.params_dtype, keys, fills=False)
    module = kind(config, context) if kind is ProductsOfExperts else kind(config, 0, context)
    initialize_parameters(module, 1, mesh)
    chunk = DistributedDataParallel(module, mesh)
    shape = options.sequence, options.batch, options.hidden
    if kind is ProductsOfExperts:
        shape = options.topk * options.sequence * options.batch, options.hidden
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(shape, generator=generator).to(config.params_dtype) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        chunk.zero_grad_buffer()
        chunk(x).backward(grad)
        chunk.finish_grad_sync()

    return step


class ProductsOfExperts(ParallelExperts):
    """A layer of experts without its router: x [rows, h], equally many of each expert, as they lie."""

    def forward(self, x: Tensor) -> Tensor:
        experts = len(self.linear_fc1.weight)
        return super().forward(ExpertRows(x, (len(x) // experts,) * experts))


def contender(name: str, options: argparse.Namespace) -> tuple[Step, int]:
    """Prepare this process for a contender of `model`, and return a step of it and its parameters."""
    if name.startswith("ours") or name.endswith("same malloc"):
        prepare(options)
    if name.startswith("ours"):
        return ours(options, single_rank_mesh(), config_of(options, moe_grouped_gemm="grouped" in name))
    implementation = next(one for one in THEIR_EXPERTS if f", {one}" in name)
    return theirs(options, implementation, pure=", pure" in name)


def names_of_model(options: argparse.Namespace) -> list[str]:
    names = ["ours", "ours, grouped GEMM"]
    if find_spec("transformers"):
        kinds = ("", ", pure") if options.dtype == "bfloat16" else ("",)
        names += [
            f"transformers, {one}{kind}{malloc}"
            for one in THEIR_EXPERTS
            for kind in kinds
            for malloc in ("", ", same malloc")
        ]
    return [name for name in names if options.contenders is None or name in options.contenders]


def prepare(options: argparse.Namespace, ranks: int = 1) -> None:
    """Set this process up as a training run does."""
    Device("cpu").prepare(bf16=options.dtype == "bfloat16", ranks=ranks)


# ---------------------------------------------------------------- measurements


def timed(step: Step, number: int) -> tuple[float, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(number):
        step()
    cpu, clock = time.process_time() - cpu_start, time.perf_counter() - start
    return 1000 / number * clock, 1000 / number * cpu


def run_worker(options: argparse.Namespace) -> None:
    """Take the steps that standard input asks for, a number a line; print the parameters first, then the times."""
    step, parameters = contender(options.worker, options)
    print(json.dumps(parameters), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(step, int(line))), flush=True)


class Worker:
    """A contender in a process of its own."""

    def __init__(self, name: str):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self) -> object:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit status {self.process.wait()}: {' '.join(self.process.args)}")
        return json.loads(line)

    def steps(self, number: int) -> tuple[float, float]:
        print(number, file=self.process.stdin, flush=True)
        return tuple(self.read())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace, contenders: dict[str, Turn]) -> dict[str, list]:
    """Return (milliseconds, of processor time) a step of each turn."""
    for turn in contenders.values():
        turn(1)  # a warm-up
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(options.rounds):
        for name in order:
            times[name].append(contenders[name](options.steps))
        order = order[1:] + order[:1]
    return times


def table(title: str, times: dict[str, list], compared: Iterable[tuple[str, str]]) -> str:
    """Return the milliseconds of each contender, and ratios. compared: pairs of contenders."""
    columns = "".join(f" {name:>8}" for name in ("median", "fastest", "slowest"))
    lines = [title, f"{'':38}{'ms a step':>27}   {'of processor time':>27}", f"{'':38}{columns}   {columns}"]
    for name, turns in times.items():
        clock, cpu = zip(*turns)
        lines.append(f"{name:38}{median_and_range(clock)}   {median_and_range(cpu)}")
    for name, other in compared:
        by_clock, by_cpu = (ratio_of_medians(times[name], times[other], of) for of in (0, 1))
        lines.append(f"{name} / {other}: {by_clock}; by processor time {by_cpu}")
    return "\n".join([*lines, ""])


def median_and_range(numbers: tuple[float, ...]) -> str:
    return "".join(f" {value:8.1f}" for value in (statistics.median(numbers), min(numbers), max(numbers)))


def ratio_of_medians(ours: list[tuple], other: list[tuple], of: int) -> str:
    """Return the ratio of medians, with the range of the ratios of turns."""
    a, b = [turn[of] for turn in ours], [turn[of] for turn in other]
    ratios = [x / y for x, y in zip(a, b)]
    ratio = statistics.median(a) / statistics.median(b)
    return f"{ratio:.3f} (by turn {min(ratios):.2f} to {max(ratios):.2f})"


def measure_model(options: argparse.Namespace) -> str:
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in names_of_model(options):
            workers[name] = Worker(name)
            stack.callback(workers[name].close)
        sizes = {name: worker.read() for name, worker in workers.items()}
        assert len(set(sizes.values())) == 1, f"the models differ: {sizes}"
        times = measure(options, {name: worker.steps for name, worker in workers.items()})
    compared: list[tuple[str, str]] = []
    for last in ("", ", same malloc"):
        of_theirs = [
            name for name in times if name.startswith("transformers") and name.endswith("malloc") == bool(last)
        ]
        best = min(of_theirs, key=lambda name: statistics.median(clock for clock, _ in times[name]), default="ours")
        compared += [(name, best) for name in times if name.startswith("ours") and name != best]
    return table(f"model: {sizes['ours']:,} parameters, {options.threads} threads; {work_of(options)}", times, compared)


def measure_layer(options: argparse.Namespace) -> str:
    dense = config_of(options, ffn_hidden_size=options.topk * options.width, num_experts=None)
    name_of_dense = f"dense, width {options.topk * options.width}"
    prepare(options)
    steps = {
        "experts": layer(options, ParallelMoE, config_of(options)),
        "experts, grouped GEMM": layer(options, ParallelMoE, config_of(options, moe_grouped_gemm=True)),
        "experts alone, rows in order": layer(options, ProductsOfExperts, config_of(options)),
        name_of_dense: layer(options, ParallelMLP, dense),
    }
    times = measure(options, {name: partial(timed, step) for name, step in steps.items()})
    compared = [(name, name_of_dense) for name in steps if name != name_of_dense]
    return table(f"layer: {options.threads} threads; {work_of(options)}", times, compared)


def work_of(options: argparse.Namespace) -> str:
    return (
        f"{options.dtype}, {options.experts} experts of width {options.width}, top {options.topk}, hidden size {options.hidden}, "
        f"{options.batch} x {options.sequence} tokens; {options.rounds} turns of {options.steps} steps"
    )


def timed_together(step: Step, number: int) -> tuple[float, float]:
    """`timed`, from when all ranks begin until all are done."""

    def steps() -> None:
        for _ in range(number):
            step()
        dist.barrier()

    dist.barrier()
    clock, cpu = timed(steps, 1)
    return clock / number, cpu / number


def run_rank(options: argparse.Namespace) -> None:
    """Measure one model with experts on different ranks, and with all experts on both."""
    torch.set_num_threads(1)
    parallel_state.start_distributed("gloo", 2)
    prepare(options, RANKS)
    contenders = {}
    balanced = {"moe_router_force_load_balancing": options.balanced}
    for name, ep in {"EP 2": 2, "ZeRO 1": 1}.items():
        mesh = parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
        step, _ = ours(options, mesh, config_of(options, **balanced), stage=1)
        contenders[name] = partial(timed_together, step)
        parallel_state.destroy_model_parallel()
    times = measure(options, contenders)
    if dist.get_rank() == 0:
        print(table(f"ranks: {RANKS} of one thread; {work_of(options)}", times, [("EP 2", "ZeRO 1")]))
    parallel_state.stop_distributed()


def start_ranks() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(RANKS):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=env))
    return max(rank.wait() for rank in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=("model", "layer", "ranks"), default=["model", "layer", "ranks"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--balanced", action="store_true", help="of `ranks`: experts take tokens in turn")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of an expert")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, over all ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--threads", type=int, default=2, help="of the works of one process")
    parser.add_argument("--contenders", nargs="+", help="of `model`: only these")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    torch.set_num_threads(options.threads)
    if options.worker:
        run_worker(options)
        return 0
    for work, measured in {"model": measure_model, "layer": measure_layer}.items():
        if work in options.works:
            print(measured(options), flush=True)
    return start_ranks() if "ranks" in options.works else 0


if __name__ == "__main__":
    sys.exit(main())
