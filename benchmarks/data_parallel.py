"""Measure a training step on data-parallel ranks, against torch's own wrappers of the same model, in one run.

    python benchmarks/data_parallel.py                                two processes over gloo, one thread each, a minute or two
    python benchmarks/data_parallel.py --layers 8 --hidden 512 --limit-seconds 600

    ours 0        ZeRO stage 0                      ddp       torch.nn.parallel.DistributedDataParallel
    ours 3        ZeRO stage 3                      fsdp2     torch's fully_shard on every layer and on the whole

Each contender has a GPTModel of its own with the same weights, trains on the same batches in float32 with AdamW (torch's fused
one) and clips the norm to 1. Communication overlaps with the backward, by default or by our two flags. fully_shard frees a
layer's parameters after its forward, which is its default, as our stage 3 does. The contenders take turns of `--steps` steps,
`--rounds` times or as often as there is time; the order rotates. Prints milliseconds a step of each contender by the clock, and
by processor time of one rank, which tells more on a busy machine (median, and the fastest and slowest turn), and the ratio of
medians of ours to torch's: below 1 is faster.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.step import train_step

LR = 1e-4
CLIP = 1.0
DECAY = 0.01
PAIRS = (("ours 0", "ddp"), ("ours 3", "fsdp2"))
Step = Callable[[], float]  # one step; its loss on this rank


def build_model(options: argparse.Namespace, mesh: Mesh) -> tuple[GPTModel, SampleDropoutKeys]:
    """Build the model; its weights are the same for every contender."""
    config = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.hidden // 64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    keys = SampleDropoutKeys(1)
    model = GPTModel(
        config,
        vocab_size=options.vocab,
        positions=options.sequence,
        layers=range(options.layers),
        context=LayerContext.from_mesh(mesh, config.params_dtype, keys, fills=False),
    )
    initialize_parameters(model, 1, mesh)
    return model, keys


def batches(options: argparse.Namespace, rank: int) -> Iterator[Tensor]:
    """Yield random tokens [b, s + 1], the same for every contender."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(0, options.vocab, (options.batch, options.sequence + 1), generator=generator)


def forward(data: Iterator[Tensor], model: nn.Module, positions: Tensor) -> tuple[Tensor, Callable]:
    """Run one microbatch; return the losses [b, s] and the loss function, as Megatron's forward_step does."""
    tokens = next(data)  # [b, s + 1]
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])  # [b, s]

    def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss_sum = losses.sum()
        report = {"loss": torch.stack((losses.detach().sum(), losses.new_tensor(losses.numel())))}
        return loss_sum, torch.tensor(float(losses.numel())), report

    return losses, loss_func


def ours(options: argparse.Namespace, mesh: Mesh, *, stage: int) -> Step:
    """Return a step of our trainer at a ZeRO stage."""
    model, keys = build_model(options, mesh)
    config = DataParallelConfig(
        zero_stage=stage, overlap_grad_reduce=True, overlap_param_gather=stage > 0, ddp_bucket_size=6_000_000
    )
    chunk = DistributedDataParallel(model, mesh, config)
    adam = FlatOptimizer(chunk.buffers, OptimizerConfig(clip_grad=CLIP, weight_decay=DECAY), mesh)
    positions = torch.arange(options.sequence).expand(options.batch, -1)
    pipeline = Pipeline(
        {0: chunk},
        mesh,
        BatchShape(options.batch, 1, options.sequence),
        boundary=(),
        keys=keys,
        forward_step=partial(forward, positions=positions),
    )
    data = {0: batches(options, mesh["dp"].rank)}
    return lambda: train_step(pipeline, adam, data, first_sample=0, lr=LR).losses["loss"]


def torchs(options: argparse.Namespace, mesh: Mesh, *, shards: bool) -> Step:
    """Return a step with torch's wrapper: fully_shard if `shards`, else DistributedDataParallel."""
    model, _ = build_model(options, mesh)
    if shards:
        for layer in model.language_model.decoder.layers.values():
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(wrapped.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LR, fused=True)
    positions = torch.arange(options.sequence).expand(options.batch, -1)
    data = batches(options, mesh["dp"].rank)

    def step() -> float:
        losses, _ = forward(data, wrapped, positions)
        loss = losses.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        adam.zero_grad()
        total = loss.detach().clone()  # ours reports the mean over ranks too
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return step


def run_rank(options: argparse.Namespace) -> None:
    """Build all contenders, check that they train alike, and measure them in turns."""
    torch.set_num_threads(1)
    parallel_state.start_distributed("gloo", 2)
    mesh = parallel_state.initialize_model_parallel()
    make = {
        "ours 0": partial(ours, stage=0),
        "ddp": partial(torchs, shards=False),
        "ours 3": partial(ours, stage=3),
        "fsdp2": partial(torchs, shards=True),
    }
    steps = {name: build(options, mesh) for name, build in make.items()}

    # two steps as a warm-up, in which all must have the same losses
    losses = {name: [step() for _ in range(2)] for name, step in steps.items()}
    for name, own_losses in losses.items():
        assert all(abs(a - b) < 1e-3 for a, b in zip(own_losses, losses["ddp"])), f"{name} trains otherwise: {losses}"

    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    start_of_all = time.monotonic()
    is_late = torch.zeros(1)
    for _ in range(options.rounds):
        is_late[0] = time.monotonic() - start_of_all > options.limit_seconds
        dist.broadcast(is_late, 0)  # all ranks stop after the same turn
        if is_late.item():
            break
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            cpu_start = time.process_time()
            for _ in range(options.steps):
                steps[name]()
            cpu[name].append((time.process_time() - cpu_start) / options.steps * 1000)
            dist.barrier()
            times[name].append((time.perf_counter() - start) / options.steps * 1000)
        order = order[1:] + order[:1]
    if mesh["dp"].is_first:
        print_table(options, times, cpu, sum(p.numel() for p in build_model(options, mesh)[0].parameters()))
    parallel_state.stop_distributed()


def print_table(options: argparse.Namespace, times: dict[str, list[float]], cpu: dict, parameters: int) -> None:
    """Print the milliseconds of each contender, by the clock and by processor time, and the ratios."""
    turns = len(next(iter(times.values())))
    print(
        f"{parameters:,} parameters, {options.ranks} ranks of {options.batch} x {options.sequence} tokens, {turns} turns of "
        f"{options.steps} steps"
    )
    columns = ("median", "fastest", "slowest")
    print(f"{'':8} {'ms a step':>29}   {'of processor time':>29}")
    print(f"{'':8}" + "".join(f" {column:>9}" for column in columns) + "  " + "".join(f" {c:>9}" for c in columns))
    for name in times:
        print(f"{name:8}{median_and_range(times[name])}  {median_and_range(cpu[name])}")
    for our_name, torch_name in PAIRS:
        by_clock = ratio_of_medians(times[our_name], times[torch_name])
        by_cpu = ratio_of_medians(cpu[our_name], cpu[torch_name])
        print(f"{our_name} / {torch_name}: {by_clock}; by processor time {by_cpu}")


def median_and_range(numbers: list[float]) -> str:
    return "".join(f" {value:9.1f}" for value in (statistics.median(numbers), min(numbers), max(numbers)))


def ratio_of_medians(ours: list[float], other: list[float]) -> str:
    """Return the ratio of medians, with the range of the ratios of turns."""
    ratios = [a / b for a, b in zip(ours, other)]
    ratio = statistics.median(ours) / statistics.median(other)
    return f"{ratio:.3f} (by turn {min(ratios):.2f} to {max(ratios):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank and step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit-seconds", type=float, default=130.0, help="begin no turn after so long")
    parser.add_argument("--steps", type=int, default=4, help="of one turn")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(options.ranks)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
