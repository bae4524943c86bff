"""One rank of a job, trained in this process with real tensors and counted; its neighbours are silent."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.offload.state_offload_config import make_offload_store
from megatron.training.global_vars import Runtime
from megatron.training.memory.dry_run import alone, dry_run, mesh_of, parts_of
from megatron.training.memory.memory_tracker import MemoryTracker
from megatron.training.memory.peak_along_schedule import IN_MEMORY, KINDS, RankMemory, predicted_of
from megatron.training.memory.report import amount, table
from megatron.training.step import train_step
from tools.estimating.job import read


class Measured(NamedTuple):
    """Bytes of one rank: the peaks of a step, by kind and of all kinds together, and the peak since building began."""

    bytes: dict[str, int]
    total: int
    ever: int
    in_file: int  # state and activations in a file
    predicted: RankMemory


def _batches_of(runtime: Runtime) -> Iterator[dict[str, Tensor]]:
    """Random microbatches without end, with the keys of both scripts."""
    shape = (runtime.config.training.micro_batch_size, runtime.config.data.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, runtime.vocab_size, shape, generator=generator)
        zeros, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(shape[1]).expand(shape)}
        batch |= {"loss_mask": torch.ones(shape), "document_ids": zeros, "text": tokens, "types": zeros}
        yield batch | {"padding_mask": ones, "is_random": zeros[:, 0]}


def measure(words: Sequence[str], steps: int = 2) -> Measured:
    """Train --rank of --world-size for some steps on the CPU, and count the last step. Raises ConfigError."""
    job, args = read([*words, "--measure", "--device", "cpu"])
    rank = args.rank or 0
    mesh, profile = mesh_of(job.runtime.config, args.world_size, rank), dry_run(job, rank)
    offload_store = make_offload_store(job.runtime.config.offload, rank, torch.device("cpu"))
    try:
        with alone(job.runtime, mesh, offload_store=offload_store) as runtime, MemoryTracker() as tracker:
            parts = parts_of(runtime, job)
            tracker.assign_state(parts.chunks.values(), parts.optimizer)
            ever, data = tracker.peak["total"], _batches_of(runtime)
            iterators = dict.fromkeys(parts.chunks, data if mesh["tp"].is_first else None)
            for _ in range(steps):
                tracker.restart()
                train_step(parts.pipeline, parts.optimizer, iterators, first_sample=0, lr=0.0, check_finite=False)
            in_file = sum(tracker.in_file.values()) + parts.bytes_in_file
    finally:
        if offload_store is not None:
            offload_store.close()
    kinds, total = {kind: tracker.peak[kind] for kind in KINDS}, tracker.peak["total"]
    return Measured(kinds, total, max(ever, total), in_file, predicted_of(profile, mesh["pp"].rank))


def measured_report(got: Measured) -> list[str]:
    """The measurement beside the prediction."""
    expected = got.predicted.within(*IN_MEMORY)
    rows = [["", "measured", "predicted"]]
    rows += [[kind, amount(got.bytes[kind]), amount(expected[kind])] for kind in KINDS]
    rows += [["all", amount(got.total), amount(sum(expected.values()))], ["since building began", amount(got.ever), ""]]
    if got.in_file:
        rows.append(["in a file", amount(got.in_file), amount(got.predicted.tiers.get("file", 0))])
    return [f"stage {got.predicted.rank}", *table(rows)]
