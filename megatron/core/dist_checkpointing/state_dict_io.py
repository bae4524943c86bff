"""A nested dict of tensors saved and loaded in one call, for a loop of one's own.

    save_state_dict(folder, {"model": dict(model.named_parameters()), "step": 3}, mesh)
    state = load_state_dict(folder, {"model": dict(model.named_parameters())}, mesh)       in any layout

A tensor's `placement` says which part of the whole this rank holds; a `LocalTensor` or a `KeyedTensor` says it itself. One
without a placement is whole and equal on every rank, as is all that is no tensor, which must be plain JSON.
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


class KeyedTensor:
    """A tensor that is stored under a name of its own, in the place of those on the way to it."""

    key: str
    data: Tensor

    @property
    def local(self) -> LocalTensor:
        raise NotImplementedError


_KINDS = Tensor | LocalTensor | KeyedTensor


def save_state_dict(
    folder: Path | str, state: State, mesh: Mesh, device: torch.device | str = "cpu", *, iteration: int = 0
) -> Path:
    """Write `state` as a checkpoint below `folder`; returns the checkpoint's own folder. Every rank must call.

    Raises CheckpointError for what is neither tensor nor plain JSON, and RuntimeError for parameters that ZeRO stage 3 has
    released.
    """
    return save_checkpoint(folder, iteration, _tensors(state, mesh), _rest(state), mesh["world"], device)


def load_state_dict(folder: Path | str, state: State, mesh: Mesh, device: torch.device | str = "cpu") -> State:
    """What the latest checkpoint below `folder` has under the names of `state`'s tensors, which are filled in place, and all
    that was saved beside tensors. Every rank must call."""
    saved = open_checkpoint(folder, None, mesh["world"], device)
    saved.read_into(_tensors(state, mesh), mesh["world"], device=device)
    return _joined(state, saved.state)


def load_whole_tensors(folder: Path | str) -> dict[str, Tensor]:
    """All tensors of the latest checkpoint below `folder`, whole, on the CPU, by name. Any rank may call alone."""
    saved, tensors = open_checkpoint(folder), {}
    for name, record in saved.manifest.tensors.items():
        tensor, box = torch.empty(record.shape, dtype=getattr(torch, record.dtype)), whole(record.shape)
        tensors[name] = LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)
    saved.read_into(tensors)
    return {name: local.tensor for name, local in tensors.items()}


def _tensors(state: State, mesh: Mesh, prefix: str = "") -> dict[str, LocalTensor]:
    """This rank's part of each tensor, by the names on the way to it."""
    parts = {}
    for name, value in state.items():
        if isinstance(value, dict):
            parts |= _tensors(value, mesh, f"{prefix}{name}/")
        elif isinstance(value, LocalTensor):
            parts[prefix + name] = value
        elif isinstance(value, KeyedTensor):
            parts[value.key] = value.local
        elif isinstance(value, Tensor):
            placement = placement_of(value) or Placement(tuple(value.shape), None, replicated_over=("mp",))
            parts[prefix + name] = placed_tensor(value.detach(), placement, mesh)
    return parts


def _rest(state: State) -> State:
    """What is no tensor."""
    rest = {name: value for name, value in state.items() if not isinstance(value, _KINDS)}
    return {name: _rest(value) if isinstance(value, dict) else value for name, value in rest.items()}


def _joined(state: State, rest: State) -> State:
    """The tensors of `state`, and `rest`."""
    result = dict(rest)
    for name, value in state.items():
        if isinstance(value, dict):
            result[name] = _joined(value, rest.get(name, {}))
        elif isinstance(value, LocalTensor):
            result[name] = value.tensor
        elif isinstance(value, _KINDS):
            result[name] = value.detach() if isinstance(value, Tensor) else value.data
    return result
