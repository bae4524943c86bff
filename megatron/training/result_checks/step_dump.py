"""A bad step is written to disk with all that is needed to compute it again, as a checkpoint that any layout reads.

    DIR/iter_0000041/       the 42nd step: the weights before it, and its batches, "batch/<key>" [samples, ...]
    manifest.json, state    the run's settings and position; "bad_step": what was wrong, and the numbers to compare with

`tools/replay_step.py DIR` computes the step again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import CheckpointError, LocalTensor, save_checkpoint
from megatron.core.dist_checkpointing.manifest_format import BUFFER, ITEM_BYTES
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.core.sharding.boxes import whole
from megatron.core.sharding.buffer_placement_and_sync import set_buffer_values
from megatron.core.storage.path_or_url import path_of
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.step import StepFigures, StepWork

BATCH = "batch/"  # prefix of the names of a step's batches


def dump_step_for_replay(runtime: Runtime, state: TrainState, work: StepWork, figures: StepFigures, text: str) -> str:
    """Write the dump below --bad-step-dir, and return a sentence about it. Every rank must call.

    A failure to write is told in that sentence, not raised: the error that follows matters more.
    """
    root = path_of(runtime.config.guard.bad_step_dir)
    chunks: Sequence[DistributedDataParallel] = list(work.pipeline.chunks.values())
    now = [chunk.buffer_values() for chunk in chunks]
    for values in work.buffers_before:  # what the step began with
        set_buffer_values(values)
    tensors, saved_state = save_and_load_run_state.checkpoint_contents(runtime, chunks, work.optimizer, state, {})
    for values in now:
        set_buffer_values(values)
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(("model/", BUFFER))}
    tensors |= batch_tensors(work)
    saved_state["bad_step"] = {
        "text": text,
        "first_sample": work.first_sample,
        "samples": work.num_microbatches * runtime.samples_at_once,
        "micro_batch_size": work.pipeline.batch.micro_batch_size,
        **exact_numbers(figures),
    }
    world = runtime.mesh["world"]
    device = runtime.device.torch_device
    try:
        folder = save_checkpoint(root, state.iteration, tensors, saved_state, world, device, warn=lambda _: None)
    except (OSError, CheckpointError, collectives.PeerError) as error:
        return f"The step could not be written to --bad-step-dir {root}: {error}."
    return f"The step is in {folder}; tools/replay_step.py {root} computes it again."


def exact_numbers(figures: StepFigures) -> dict[str, str]:
    """Return the numbers that the step must have when it is computed again, with all their bits."""
    shared = figures.shared
    return {"loss": float(shared.loss).hex(), "tokens": float(shared.tokens).hex(), "norm": float(figures.norm).hex()}


def batch_tensors(work: StepWork) -> dict[str, LocalTensor]:
    """Return this rank's rows of the step's batches, by name: [samples on this rank, ..] of [samples of the step, ..].

    Empty on ranks that read no batches, and if batches are not dictionaries of tensors. Nothing is communicated.
    """
    pipeline: Pipeline = work.pipeline
    micro_batch_size = pipeline.batch.micro_batch_size
    samples = pipeline.mesh.samples
    iterator = work.data_iterators.get(0)  # of the first stage
    batches = iterator.kept if isinstance(iterator, RewindableBatches) else []
    if not batches or not all(isinstance(batch, dict) for batch in batches):
        return {}

    total = work.num_microbatches * samples.size * micro_batch_size  # samples of the step
    tensors = {}
    for key, value in batches[0].items():
        if not _has_rows(value, micro_batch_size):
            continue
        rows = torch.cat([batch[key] for batch in batches]).cpu()  # [this rank's samples, ...]
        # where each microbatch of this rank is among the step's samples: data-parallel ranks take turns
        pieces = []
        for number in range(len(batches)):
            start = (number * samples.size + samples.rank) * micro_batch_size
            other_dims = whole(rows.shape[1:])
            global_box = ((start, start + micro_batch_size), *other_dims)
            local_box = ((number * micro_batch_size, (number + 1) * micro_batch_size), *other_dims)
            pieces.append((global_box, local_box))
        tensors[BATCH + key] = LocalTensor(rows, (total, *rows.shape[1:]), pieces, is_writer=True)
    return tensors


def _has_rows(value: Any, micro_batch_size: int) -> bool:
    """Whether a value of a batch is a tensor with a row for each sample, of a dtype that a checkpoint can store."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != micro_batch_size:
        return False
    return str(value.dtype).removeprefix("torch.") in ITEM_BYTES
