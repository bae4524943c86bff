"""Measure an optimizer's step, AdamW's and Muon's, on the same model in one process, in turns.

    python benchmarks/optimizer_step.py                                  the quickstart's model, 1.0 million parameters
    python benchmarks/optimizer_step.py --layers 8 --hidden 512 --vocab 16384
    python benchmarks/optimizer_step.py --ranks 2                        Muon's on two data-parallel ranks at ZeRO stage 0

The optimizers of a run, on gradients that are drawn at random; no model is run. Prints milliseconds of processor time a step of one thread
(median, fastest, slowest of the rounds) of AdamW, and of Muon with its steps in bfloat16 (medium) and in float32 (highest), and the
floating-point operations of Muon's products: 5 steps of 2 r^2 (2 c + r) each for a matrix of r rows and c >= r columns.

With --ranks each rank is a process with one thread, and messages go through gloo: Muon's step where owners share the matrices and send
the results, against every rank repeating all steps, by the clock of the first rank.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core import parallel_state
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.gather_full_matrices_over_tp import MatrixOwners, full_matrices_over_tp
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import default_group
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig

SETTINGS = {
    "AdamW": {},
    "Muon, medium": {"optimizer": "muon"},
    "Muon, highest": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"},
}


def make_optimizer(options: argparse.Namespace, mesh: Mesh, settings: dict) -> FlatOptimizer:
    config = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.hidden // 32,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
    )
    context = LayerContext.from_mesh(mesh, config.params_dtype, SampleDropoutKeys(1), fills=False)
    model = GPTModel(config, vocab_size=options.vocab, positions=128, layers=range(options.layers), context=context)
    initialize_parameters(model, 1, mesh)
    given = OptimizerConfig(**settings)
    whole = given.full_matrix_params({name: p.placement for name, p in model.named_parameters()}, default_group)
    optimizer = FlatOptimizer(DistributedDataParallel(model, mesh, unsplit=whole).buffers, given, mesh)
    for buffer in optimizer.buffers:
        for gradients in buffer.sums.tensors:
            gradients.normal_(std=1e-3)
    return optimizer


def operations(optimizer: FlatOptimizer, mesh: Mesh) -> int:
    """Return the floating-point operations of the matrix products of Muon's update."""
    total, config = 0, optimizer.config
    for parameters in (buffer.parameters for buffer in optimizer.buffers):
        whole = config.full_matrix_params({name: p.placement for name, p in parameters.items()}, default_group)
        for name, tensor in full_matrices_over_tp({name: parameters[name] for name in whole}, mesh, "cpu").items():
            for part in tensor.matrices(parameters[name]):
                rows, columns = sorted(part.flatten(0, -2).shape)
                total += config.muon_num_ns_steps * 2 * rows**2 * (2 * columns + rows)
    return total


def run_alone(options: argparse.Namespace) -> None:
    mesh = parallel_state.initialize_model_parallel()
    optimizers = {name: make_optimizer(options, mesh, settings) for name, settings in SETTINGS.items()}
    print(f"{operations(optimizers['Muon, medium'], mesh) / 1e9:.2f} GFLOP in Muon's products")
    show(in_turns(optimizers, options.rounds, time.process_time))


def run_rank(options: argparse.Namespace) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = parallel_state.initialize_model_parallel()
    optimizers, alone = {}, MatrixOwners()
    for name in ("Muon, medium", "Muon, highest"):
        optimizers[f"{name}, shared"] = make_optimizer(options, mesh, SETTINGS[name])
        optimizers[f"{name}, repeated"] = repeating = make_optimizer(options, mesh, SETTINGS[name])
        for whole in repeating._whole_tensors.values():
            whole.owners = alone
    times = in_turns(optimizers, options.rounds, time.perf_counter, meet=lambda: collectives.barrier(mesh["dp"]))
    if mesh["dp"].is_first:
        show(times)


def in_turns(
    optimizers: dict[str, FlatOptimizer],
    rounds: int,
    clock: Callable[[], float],
    meet: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Measure steps of all optimizers in turns; return the milliseconds of each step, by optimizer."""
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds + 1):  # the first is a warm-up
        for name, optimizer in optimizers.items():
            meet()
            start = clock()
            optimizer.step(1e-3)
            times[name].append(1000 * (clock() - start))
    return {name: spent[1:] for name, spent in times.items()}


def show(times: dict[str, list[float]]) -> None:
    for name, spent in times.items():
        print(f"{name:24} {statistics.median(spent):8.2f} ms ({min(spent):.2f}-{max(spent):.2f})")


def start_ranks(number: int) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environments = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
    command = [sys.executable, *sys.argv]
    running = [
        subprocess.Popen(command, env=os.environ | {name: str(value) for name, value in env.items()})
        for env in environments
    ]
    return max(process.wait() for process in running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "hidden": 128, "vocab": 2048, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, each a process with one thread")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ranks > 1 and "RANK" not in os.environ:
        return start_ranks(options.ranks)
    (run_rank if options.ranks > 1 else run_alone)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
