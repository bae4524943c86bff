"""Train one rank of a job in this process with real tensors, and count its memory; its peers are simulated."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.offload.host_and_file_stores import make_offload_store
from megatron.training.global_vars import Runtime
from megatron.training.memory.dry_run_of_one_rank import alone, build_rank_parts, dry_run, mesh_of
from megatron.training.memory.forecast_memory_along_schedule import IN_MEMORY, KINDS, RankMemory, predicted_of
from megatron.training.memory.predicted_memory_table import amount, table
from megatron.training.memory.track_memory_by_kind import MemoryTracker
from megatron.training.step import train_step
from tools.estimating.job import read


class Measured(NamedTuple):
    """Memory of one rank, in bytes."""

    bytes: dict[str, int]  # peak of each kind in a step; the peaks may be at different times
    total: int  # peak of all kinds together in a step
    ever: int  # peak since the model was begun to be built
    in_file: int  # state and activations that are offloaded to a file
    predicted: RankMemory
    experts_are_unbalanced: bool = False  # the rows of this rank's experts are other ones than the prediction assumes


def _batches_of(runtime: Runtime) -> Iterator[dict[str, Tensor]]:
    """Yield random microbatches without end, with the keys that GPT and BERT read; tensors are [b, s] or [b]."""
    shape = (runtime.config.training.micro_batch_size, runtime.config.data.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, runtime.vocab_size, shape, generator=generator)
        zeros = torch.zeros(shape, dtype=torch.int64)
        yield {
            "tokens": tokens,
            "labels": tokens,
            "position_ids": torch.arange(shape[1]).expand(shape),
            "loss_mask": torch.ones(shape),
            "document_ids": zeros,
            "text": tokens,
            "types": zeros,
            "padding_mask": torch.ones(shape, dtype=torch.int64),
            "is_random": zeros[:, 0],
        }


def measure(words: Sequence[str], steps: int = 2) -> Measured:
    """Train --rank of --world-size on the CPU; count the memory of the last of `steps` steps. Raises ConfigError."""
    job, args = read([*words, "--measure", "--device", "cpu"])
    rank = args.rank or 0
    mesh = mesh_of(job.runtime.config, job.runtime.world_size, rank)
    profile = dry_run(job, rank)
    offload_store = make_offload_store(job.runtime.config.offload, rank, torch.device("cpu"))
    try:
        with alone(job.runtime, mesh, offload_store=offload_store) as runtime, MemoryTracker() as tracker:
            parts = build_rank_parts(runtime, job)
            tracker.assign_state(parts.chunks.values(), parts.optimizer)
            peak_of_building = tracker.peak["total"]
            data = _batches_of(runtime) if mesh["tp"].is_first else None
            iterators = dict.fromkeys(parts.chunks, data)
            for _ in range(steps):
                tracker.restart()
                train_step(parts.pipeline, parts.optimizer, iterators, first_sample=0, lr=0.0, check_finite=False)
            in_file = sum(tracker.in_file.values()) + parts.bytes_in_file
    finally:
        if offload_store is not None:
            offload_store.close()
    peak_of_kind = {kind: tracker.peak[kind] for kind in KINDS}
    total = tracker.peak["total"]
    predicted = predicted_of(profile, mesh["pp"].rank)
    transformer = job.runtime.config.transformer
    rows_travel = bool(transformer.num_experts) and mesh["ep_etp"].size > 1
    unbalanced = rows_travel and not transformer.moe_router_force_load_balancing
    return Measured(peak_of_kind, total, max(peak_of_building, total), in_file, predicted, unbalanced)


def measured_report(measured: Measured) -> list[str]:
    """Return the lines of a table with the measurement beside the prediction."""
    predicted = measured.predicted.within(*IN_MEMORY)
    rows = [["", "measured", "predicted"]]
    rows += [[kind, amount(measured.bytes[kind]), amount(predicted[kind])] for kind in KINDS]
    rows.append(["all", amount(measured.total), amount(sum(predicted.values()))])
    rows.append(["since building began", amount(measured.ever), ""])
    if measured.in_file:
        rows.append(["in a file", amount(measured.in_file), amount(measured.predicted.tiers.get("file", 0))])
    lines = [f"stage {measured.predicted.rank}", *table(rows)]
    if measured.experts_are_unbalanced:
        lines += [
            "The prediction assumes balanced experts. Here an untrained router chooses them, and the other ranks, which are",
            "silent, seem to have the tokens of this one; compare with --moe-router-force-load-balancing.",
        ]
    return lines
