"""Saving and loading a nested dict of tensors in one call, for a training loop of one's own.

    save_state_dict(folder, {"model": dict(model.named_parameters()), "step": 3}, mesh)
    state = load_state_dict(folder, {"model": dict(model.named_parameters())}, mesh)       in any layout

A tensor's `placement` says which part of the global tensor this rank holds; a `LocalTensor` or a `TensorWithOwnKey` says
it itself. A tensor without a placement is unsharded and equal on every rank. Everything else must be plain JSON,
equal on every rank.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.load_sharded import open_checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, placed_tensor
from megatron.core.dist_checkpointing.save_sharded import save_checkpoint
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import whole
from megatron.core.sharding.placement import Placement, placement_of

State = dict[str, Any]


class TensorWithOwnKey:
    """A tensor that is saved under its own `key`, whatever its position in the dict."""

    key: str
    data: Tensor

    @property
    def local(self) -> LocalTensor:
        """This rank's part of it: a `LocalTensor` of `data`, in the shape on this rank."""
        raise NotImplementedError


_TENSORS = Tensor | LocalTensor | TensorWithOwnKey


def save_state_dict(
    folder: Path | str, state: State, mesh: Mesh, device: torch.device | str = "cpu", *, iteration: int = 0
) -> Path:
    """Write `state` as a checkpoint below `folder`; return the checkpoint's own folder. Every rank must call.

    A tensor has its shape on this rank, which its placement relates to the global one. Raises CheckpointError for a
    value that is neither tensor nor plain JSON, and RuntimeError for parameters that ZeRO stage 3 has freed.
    """
    return save_checkpoint(folder, iteration, _local_tensors(state, mesh), _json_values(state), mesh["world"], device)


def load_state_dict(folder: Path | str, state: State, mesh: Mesh, device: torch.device | str = "cpu") -> State:
    """Fill `state`'s tensors from the latest checkpoint below `folder`.

    Return them with all values saved beside tensors. Every rank must call. Tensors are filled in place, in their shapes
    on this rank. Raises CheckpointError.
    """
    saved = open_checkpoint(folder, None, mesh["world"], device)
    saved.read_into(_local_tensors(state, mesh), mesh["world"], device=device)
    return _merged(state, saved.state)


def load_whole_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Return all tensors of the latest checkpoint below `folder`, by name: [global shape], on the CPU.

    Any rank may call alone. Raises CheckpointError.
    """
    saved = open_checkpoint(folder)
    tensors = {}
    for name, record in saved.manifest.tensors.items():
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        box = whole(record.shape)
        tensors[name] = LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)
    saved.read_into(tensors)
    return {name: local.tensor for name, local in tensors.items()}


def _local_tensors(state: State, mesh: Mesh, prefix: str = "") -> dict[str, LocalTensor]:
    """Return this rank's part of each tensor, by its path in the dict or its own key."""
    tensors = {}
    for name, value in state.items():
        if isinstance(value, dict):
            tensors |= _local_tensors(value, mesh, f"{prefix}{name}/")
        elif isinstance(value, LocalTensor):
            tensors[prefix + name] = value
        elif isinstance(value, TensorWithOwnKey):
            tensors[value.key] = value.local
        elif isinstance(value, Tensor):
            placement = placement_of(value) or Placement(tuple(value.shape), None, replicated_over=("mp",))
            tensors[prefix + name] = placed_tensor(value.detach(), placement, mesh)
    return tensors


def _json_values(state: State) -> State:
    """Return the state without its tensors."""
    values = {}
    for name, value in state.items():
        if isinstance(value, dict):
            values[name] = _json_values(value)
        elif not isinstance(value, _TENSORS):
            values[name] = value
    return values


def _merged(state: State, values: State) -> State:
    """Return `values` with the tensors of `state`."""
    merged = dict(values)
    for name, value in state.items():
        if isinstance(value, dict):
            merged[name] = _merged(value, values.get(name, {}))
        elif isinstance(value, Tensor):
            merged[name] = value.detach()
        elif isinstance(value, LocalTensor):
            merged[name] = value.tensor
        elif isinstance(value, TensorWithOwnKey):
            merged[name] = value.data
    return merged
