"""Checkpoints of an engine: DeepSpeed's folders and names around this project's format, which any layout loads.

save_dir/latest               the tag
save_dir/<tag>/iter_0000012/  weights, optimizer state, buffers and JSON (docs/checkpoint_format.md), no pickle
"""

from pathlib import Path
from typing import Any

from megatron.core import comm
from megatron.core.boxes import whole
from megatron.core.checkpoint import LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.checkpoint.format import CheckpointError
from megatron.core.storage.atomic import atomic_file
from megatron.training.checkpointing import model_tensors, optimizer_tensors, read_tensors

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save(engine: Any, folder: Path, tag: str | None, client_state: Any, *, save_latest: bool) -> None:
    """Write folder/tag. Every rank must call."""
    world = engine.mesh["world"]
    tag = tag or f"global_step{engine.global_steps}"
    tags = comm.all_gather_texts(str(tag), world, engine.device)
    if len(set(tags)) > 1:
        raise CheckpointError(folder, f"ranks give different tags: {', '.join(sorted(set(tags)))}", "give one tag")
    schedule, flat = engine.lr_scheduler, engine.optimizer.flat
    state = {name: getattr(engine, name) for name in _COUNTERS} | {
        "optimizer_steps": flat.step_count,
        "grad_scaler": {} if flat.scaler is None else flat.scaler.state(),
        "rates": engine.optimizer.rates(),
        "schedule": {} if schedule is None else schedule.state_dict(),
        "client_state": dict(client_state),
    }
    engine.chunk.finish_param_gather()
    tensors = _weights(engine) | optimizer_tensors(flat, engine.mesh)
    save_checkpoint(folder / str(tag), engine.global_steps, tensors, state, world, engine.device)
    with comm.together(world, engine.device):
        if save_latest and world.is_first:
            with atomic_file(folder / "latest") as file:
                file.write(str(tag).encode())


def load(
    engine: Any, folder: Path, tag: str | None, *, optimizer: bool, schedule: bool
) -> tuple[str | None, dict[str, Any]]:
    """Fill the engine from folder/tag. Every rank must call. optimizer, schedule: False: not from the checkpoint."""
    world, flat = engine.mesh["world"], engine.optimizer.flat
    with comm.together(world, engine.device):
        latest = folder / "latest"
        found = tag or (latest.read_text() if world.is_first and latest.is_file() else None)
    if not (found := comm.broadcast_text(found, world, engine.device)):
        return None, {}
    checkpoint = open_checkpoint(folder / found, world=world, device=engine.device)
    state = checkpoint.state
    tensors = optimizer_tensors(flat, engine.mesh)
    read_tensors(checkpoint, _weights(engine), tensors, world, engine.device, goes_on=optimizer)
    if optimizer:
        flat.step_count = state["optimizer_steps"]
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        if flat.scaler is not None:
            flat.scaler.load_state(state["grad_scaler"])
    if schedule:
        if engine.lr_scheduler is not None and state["schedule"]:
            engine.lr_scheduler.load_state_dict(state["schedule"])
        for group, rate in zip(engine.optimizer.param_groups, state["rates"]):
            group["lr"] = rate
    return str(checkpoint.folder), state["client_state"]


def _weights(engine: Any) -> dict[str, LocalTensor]:
    """Parameters and buffers by their names in a checkpoint. Every rank has all of a buffer; the first writes its own."""
    found = model_tensors([engine.chunk], engine.mesh)
    saved = engine.module.state_dict(keep_vars=True)
    for name, buffer in engine.module.named_buffers():
        if name in saved and buffer.numel():
            box = whole(tuple(buffer.shape))
            found[f"buffer/{name}"] = LocalTensor(
                buffer, tuple(buffer.shape), [(box, box)], engine.mesh["world"].is_first
            )
    return found
