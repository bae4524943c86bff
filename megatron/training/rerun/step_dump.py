"""The dump of a bad step: all that it takes to compute it again elsewhere, as a checkpoint that any layout reads.

    DIR/iter_0000041/       of the 42nd step: the weights before it, and "batch/<key>" [samples of the step, ...] of its
                            batches
    manifest.json, state    the run's settings and position, and under "bad_step" what was wrong and the numbers to
                            compare with

`tools/replay_step.py DIR` computes the step again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import CheckpointError, LocalTensor, save_checkpoint
from megatron.core.dist_checkpointing.format import ITEM_BYTES
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.core.sharding.boxes import whole
from megatron.core.storage.paths import path_of
from megatron.training.batch_cache import KeptBatches
from megatron.training.checkpointing import save_and_load
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime
from megatron.training.step import StepFigures, StepWork

BATCH = "batch/"  # of the names of a step's batches


def dump_step(runtime: Runtime, state: TrainState, work: StepWork, figures: StepFigures, text: str) -> str:
    """Write the dump below --bad-step-dir; returns a sentence about it. Every rank must call. A failure is told, not
    raised: the
    error that follows matters more."""
    root = path_of(runtime.config.guard.bad_step_dir)
    chunks: Sequence[DistributedDataParallel] = list(work.pipeline.chunks.values())
    tensors, saved = save_and_load.checkpoint_contents(runtime, chunks, work.optimizer, state, {})
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    batches = batch_tensors(work)
    saved["bad_step"] = {
        "text": text,
        "first_sample": work.first_sample,
        "samples": work.num_microbatches * runtime.samples_at_once,
        "micro_batch_size": work.pipeline.batch.micro_batch_size,
        **exact_numbers(figures),
    }
    try:
        folder = save_checkpoint(root, state.iteration, tensors | batches, saved, *_where(runtime), warn=lambda _: None)
    except (OSError, CheckpointError, collectives.PeerError) as error:
        return f"The step could not be written to --bad-step-dir {root}: {error}."
    return f"The step is in {folder}; tools/replay_step.py {root} computes it again."


def _where(runtime: Runtime) -> tuple[Any, Any]:
    return runtime.mesh["world"], runtime.device.torch_device


def exact_numbers(figures: StepFigures) -> dict[str, str]:
    """The numbers of a step that must come again, with all their bits."""
    shared = figures.shared
    return {"loss": float(shared.loss).hex(), "tokens": float(shared.tokens).hex(), "norm": float(figures.norm).hex()}


def batch_tensors(work: StepWork) -> dict[str, LocalTensor]:
    """This rank's rows of the step's batches; {} on ranks that read none, and if batches are no dictionaries of tensors."""
    pipeline: Pipeline = work.pipeline
    reader = work.data_iterators.get(0)  # of the first stage
    kept = reader.kept if isinstance(reader, KeptBatches) else []
    size, samples = pipeline.batch.micro_batch_size, pipeline.mesh.samples
    if not kept or not all(isinstance(batch, dict) for batch in kept):
        return {}
    keys = [key for key, value in kept[0].items() if _has_rows(value, size)]
    total = work.num_microbatches * samples.size * size
    found = {}
    for key in keys:
        rows = torch.cat([batch[key] for batch in kept]).cpu()
        pieces = []
        for number in range(len(kept)):
            first = (number * samples.size + samples.rank) * size
            rest = whole(rows.shape[1:])
            pieces.append((((first, first + size), *rest), ((number * size, (number + 1) * size), *rest)))
        found[BATCH + key] = LocalTensor(rows, (total, *rows.shape[1:]), pieces, is_writer=True)
    return found


def _has_rows(value: Any, size: int) -> bool:
    is_tensor = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
    return is_tensor and str(value.dtype).removeprefix("torch.") in ITEM_BYTES
