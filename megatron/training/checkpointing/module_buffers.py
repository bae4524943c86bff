"""Persistent buffers of modules in a run's checkpoints, and extra states, which checkpoints do not hold.

    at the start    a WARNING names the modules with an extra state (`get_extra_state`)
    at a save       `buffer/<name>` holds each buffer, and the state's "buffers" names them all; "lost_buffers" names extra
                    states that have changed since the model was built, and so does a WARNING
    at a load       other buffers than the model's are refused by name. A checkpoint from before buffers were saved has no
                    "buffers": a WARNING names those that start at their initial values

`sharding/buffer_placement_and_sync.py` says how a buffer is sharded, and how its copies agree.
"""

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor
from megatron.core.dist_checkpointing.manifest_format import BUFFER
from megatron.core.dist_checkpointing.sharded_module_buffers import (
    buffers_of_model,
    copy_buffers_to_later_stages,
    make_absent_buffers,
    saved_buffer_shapes,
    sharded_buffers,
)
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import BUFFERS, first_names, lost_buffers
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.ops.tensor_hash import tensor_hash
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.buffer_placement_and_sync import persistent_buffers
from megatron.training.checkpointing.non_persistent_checkpoint import RankCheckpoint
from megatron.training.global_vars import print_rank_0

_EXTRA_STATE = "_extra_state"  # the end of torch's name for what `get_extra_state` returns
Chunks = Sequence[DistributedDataParallel]
Digests = dict[str, str]


# ---------------------------------------------------------------- buffers


def _by_stage(chunks: Chunks, mesh: Mesh) -> dict[int, nn.Module]:
    """Return this rank's modules by their pipeline stages."""
    stages = mesh.stages.of_rank(mesh["pp"].rank)
    return {stage: chunk.module for stage, chunk in zip(stages, chunks, strict=True)}


def buffers_to_save(
    chunks: Chunks, mesh: Mesh, device: torch.device | str
) -> tuple[dict[str, LocalTensor], dict[str, list[Any]]]:
    """Return (this rank's part of each buffer by its name in a checkpoint, [dtype, shape] of every rank's by name).

    Every rank must call.
    """
    by_stage = _by_stage(chunks, mesh)
    buffers = buffers_of_model(by_stage, mesh, device)
    records = {name: [buffer.dtype, buffer.shape] for name, buffer in buffers.items()}
    return sharded_buffers(by_stage, mesh, buffers), records


def load_buffers(
    chunks: Chunks,
    mesh: Mesh,
    checkpoint: Checkpoint | RankCheckpoint,
    source: str,
    device: torch.device | str,
    *,
    begin: tuple[str, ...] = (),
) -> None:
    """Fill the model's buffers; raise ConfigError if the checkpoint has others. Every rank must call.

    source: the checkpoint's flag and folder. A buffer that a forward makes (None so far) gets the saved shape. begin:
    ends of the names of buffers that the checkpoint may lack, which keep their initial values.
    """
    by_stage = _by_stage(chunks, mesh)
    saved = checkpoint.state.get(BUFFERS)
    make_absent_buffers(by_stage.values(), saved or {}, device)
    buffers = buffers_of_model(by_stage, mesh, device)
    if saved is None:
        # of another project, or from before buffers were saved: it may hold some
        shapes = saved_buffer_shapes(checkpoint) if isinstance(checkpoint, Checkpoint) else {}
        tensors = sharded_buffers(by_stage, mesh, buffers, shapes)
        there = {name: local for name, local in tensors.items() if name in shapes}
        if shapes:
            checkpoint.read_into(there, mesh["world"], convert=True, device=device)
        restart = _names_that_restart(by_stage.values(), mesh["pp"], device)
        known = {name for name in buffers if name in restart or name.endswith(begin)}
        if absent := [name for name in buffers if BUFFER + name not in shapes and name not in known]:
            print_rank_0(
                f"WARNING: {source} holds no values of these buffers, as before buffers of models were saved and as other "
                f"projects' folders; they start at their initial values: {first_names(absent)}"
            )
        return
    new = {name for name in buffers.keys() - saved.keys() if name.endswith(begin)}
    if lacking := sorted(buffers.keys() - saved.keys() - new):
        raise ConfigError(
            f"{source} lacks buffers of this run's model: {first_names(lacking)}; it was written by another model. Load it with "
            "that model, or register what the constructor makes again with persistent=False"
        )
    if unknown := sorted(saved.keys() - buffers.keys()):
        raise ConfigError(
            f"{source} contains buffers that this run's model lacks: {first_names(unknown)}; it was written by another "
            "model, or with other model flags"
        )
    # a rank's part of a local copy is for this layout alone, so its buffers have as many values
    shapes = saved_buffer_shapes(checkpoint) if isinstance(checkpoint, Checkpoint) else {}
    tensors = sharded_buffers(by_stage, mesh, buffers, shapes)
    tensors = {name: local for name, local in tensors.items() if name.removeprefix(BUFFER) not in new}
    checkpoint.read_into(tensors, mesh["world"], convert=True, device=device)
    copy_buffers_to_later_stages(by_stage, shapes)


def _names_that_restart(modules: Iterable[nn.Module], pp: Axis, device: torch.device | str) -> set[str]:
    """Return the buffers of all pipeline stages that have their initial values between steps. Every rank must call."""
    own = [buffer.name for module in modules for buffer in persistent_buffers(module) if buffer.declared.restarts]
    return {name for text in collectives.all_gather_texts(json.dumps(own), pp, device) for name in json.loads(text)}


# ---------------------------------------------------------------- extra states


def remember_and_warn_of_extra_states(
    chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str
) -> None:
    """Remember the first extra states of modules; warn of them, since a checkpoint lacks them. Every rank must call."""
    with collectives.raise_together(world, device):
        for chunk in chunks:
            chunk.extra_states_at_start = extra_state_digests(chunk.module)
    names = _names_on_any_rank((name for chunk in chunks for name in chunk.extra_states_at_start or {}), world, device)
    if names:
        print_rank_0(
            f"WARNING: this model has extra states, which checkpoints do not hold: {first_names(names)}. A run that resumes "
            "begins with the model's own. Keep such state in buffers, which are saved"
        )


def changed_extra_states(
    chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str
) -> list[str]:
    """Return the names, on any rank, of extra states that have changed since the model was built; a WARNING names them.

    Every rank must call.
    """
    own_names: list[str] = []
    with collectives.raise_together(world, device):
        for chunk in chunks:
            before = chunk.extra_states_at_start or {}
            now = extra_state_digests(chunk.module)
            own_names += [name for name in before | now if before.get(name) != now.get(name)]
    names = _names_on_any_rank(own_names, world, device)
    if names:
        print_rank_0(
            f"WARNING: this save lacks extra states that have changed since the model was built: {first_names(names)}; a "
            "run that resumes from it begins with the model's own. Keep such state in buffers, which are saved"
        )
    return names


def warn_of_lost_buffers(state: Mapping[str, Any], source: str) -> None:
    """Warn of a checkpoint that lacks buffers or extra states that had changed. source: its flag and folder."""
    if lost := lost_buffers(state):
        print_rank_0(
            f"WARNING: {source} lacks state of the model that had changed when it was saved: {first_names(lost)}; it starts "
            "at its initial values, so the model may compute something else"
        )


def extra_state_digests(module: nn.Module) -> Digests:
    """Return a digest of each module's extra state, by its name in `state_dict`. Empty ones are left out."""
    saved = module.state_dict(keep_vars=True)
    values = {name: value for name, value in saved.items() if name.endswith(_EXTRA_STATE)}
    return {name: digest(value) for name, value in values.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and not value.numel())


def digest(value: Any) -> str:
    """Return a text that is equal for values that are equal bit by bit.

    value: a tensor of any shape, whose digest begins with its dtype and shape, or a module's extra state with
    any tensors inside.
    """
    if isinstance(value, Tensor):
        return _digest_of_leaf(value)
    leaves, structure = tree_flatten(value)
    parts = [str(structure), *map(_digest_of_leaf, leaves)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _digest_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        real = torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf
        return f"{leaf.dtype} {tuple(leaf.shape)} {int(tensor_hash(real.to_dense()).item())}"
    if isinstance(leaf, io.BytesIO):
        leaf = leaf.getvalue()
    if isinstance(leaf, bytes | bytearray):
        return hashlib.sha256(leaf).hexdigest()
    return repr(leaf)


def _names_on_any_rank(own_names: Iterable[str], world: Axis, device: torch.device | str) -> list[str]:
    """Return the names of all ranks, sorted. Every rank must call."""
    texts = collectives.all_gather_texts(json.dumps(sorted(set(own_names))), world, device)
    return sorted({name for text in texts for name in json.loads(text)})
