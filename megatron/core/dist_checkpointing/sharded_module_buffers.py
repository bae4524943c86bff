"""Persistent buffers of modules, by the names of a checkpoint: `buffer/<name>`, in their own dtypes.

`sharding/buffer_placement_and_sync.py` says which buffers are saved, and how each is sharded.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, placed_tensor
from megatron.core.dist_checkpointing.manifest_format import BUFFER
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import Box
from megatron.core.sharding.buffer_placement_and_sync import PersistentBuffer, persistent_buffers


class BufferInModel(NamedTuple):
    """What all ranks know of a buffer."""

    stages: list[int]  # the pipeline stages that have a buffer of this name
    dtype: str
    shape: list[int]  # on a rank of the first of these stages


def buffers_of_model(
    chunks: Mapping[int, nn.Module], mesh: Mesh, device: torch.device | str
) -> dict[str, BufferInModel]:
    """Return the persistent buffers of all pipeline stages, by name. chunks: this rank's, by stage. Every rank must call."""
    own = []
    for name, of_stages in _by_name(chunks).items():
        for stage, buffer in of_stages.items():
            dtype = str(buffer.tensor.dtype).removeprefix("torch.")
            own.append((name, stage, dtype, list(buffer.tensor.shape)))
    buffers: dict[str, BufferInModel] = {}
    texts = collectives.all_gather_texts(json.dumps(own), mesh["pp"], device)
    for name, stage, dtype, shape in sorted(entry for text in texts for entry in json.loads(text)):
        buffers.setdefault(name, BufferInModel([], dtype, shape)).stages.append(stage)
    return buffers


def make_absent_buffers(
    modules: Iterable[nn.Module], shapes: Mapping[str, tuple[str, list[int]]], device: torch.device | str
) -> None:
    """Give buffers that are None so far, as one that a forward makes, zeros of the dtype and shape in `shapes`, by name."""
    for module in modules:
        for buffer in persistent_buffers(module):
            if buffer.name in shapes and not buffer.has_elements and buffer.declared.placement is None:
                dtype, shape = shapes[buffer.name]
                buffer.assign(torch.zeros(shape, dtype=getattr(torch, dtype), device=device))


def saved_buffer_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's buffers, by their names in it."""
    records = checkpoint.manifest.tensors
    return {name: tuple(record.shape) for name, record in records.items() if name.startswith(BUFFER)}


def sharded_buffers(
    chunks: Mapping[int, nn.Module],
    mesh: Mesh,
    buffers: Mapping[str, BufferInModel],
    saved_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, LocalTensor]:
    """Return this rank's part of every persistent buffer, by checkpoint name, with its present values.

    A buffer is saved as it is, [buffer's shape]. One that has several values is saved as [values, *buffer's shape]: if
    each rank keeps its own, or if several pipeline stages have a buffer of this name.

    chunks: by stage. buffers: `buffers_of_model`. saved_shapes: by checkpoint name, of
    a checkpoint to load, which may hold another number of values: value i is read from i modulo that number.
    Nothing is communicated.
    """
    state = {}
    for name, of_stages in _by_name(chunks).items():
        key = BUFFER + name
        first = next(iter(of_stages.values()))
        is_own = first.declared.sync == "own"
        placement = first.placement
        reduce = mesh.grad_axes(placement.reduce_over).reduce
        values_of_stage = 1
        number_here = 0
        if is_own:
            values_of_stage = reduce.size
            number_here = reduce.rank
            if first.declared.placement is None:  # ranks of tp too have values of their own
                placement = replace(placement, replicated_over=())
                values_of_stage *= mesh["tp"].size
                number_here = number_here * mesh["tp"].size + mesh["tp"].rank
        values = values_of_stage * len(buffers[name].stages)
        has_values = is_own or values > 1
        if saved_shapes is not None and key in saved_shapes:
            has_values = len(saved_shapes[key]) > first.tensor.ndim
            values = saved_shapes[key][0] if has_values else 1
        if not has_values:
            if not first.tensor.is_contiguous():  # as an expanded tensor, which could not be filled
                first.assign(first.tensor.contiguous())
            state[key] = placed_tensor(first.tensor.detach(), placement, mesh)
            continue

        # one tensor with this rank's values, of which the buffers become views, so that a load fills them
        stacked = torch.stack([buffer.tensor.detach() for buffer in of_stages.values()])  # [here, *shape on this rank]
        local = placed_tensor(stacked[0], placement, mesh)
        owned: list[tuple[Box, Box]] = []
        read_only: list[tuple[Box, Box]] = []
        for here, (stage, buffer) in enumerate(of_stages.items()):
            buffer.assign(stacked[here])
            number = buffers[name].stages.index(stage) * values_of_stage + number_here
            value = (number % values, number % values + 1)
            owned += [((value, *box), ((here, here + 1), *local_box)) for box, local_box in local.pieces]
            read_only += [((value, *box), ((here, here + 1), *local_box)) for box, local_box in local.copies]
        is_writer = bool(owned) if is_own else local.is_writer
        replicas = ALONE if is_own else local.replicas
        state[key] = LocalTensor(
            stacked, (values, *local.shape), owned, is_writer, copies=tuple(read_only), replicas=replicas
        )
    return state


def copy_buffers_to_later_stages(chunks: Mapping[int, nn.Module], saved_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give buffers of one name on several stages of this rank the one value that a checkpoint holds. After its load.

    Arguments as of `sharded_buffers`.
    """
    for name, of_stages in _by_name(chunks).items():
        first, *others = of_stages.values()
        if len(saved_shapes.get(BUFFER + name, ())) == first.tensor.ndim:
            for other in others:
                other.tensor.detach().copy_(first.tensor)


def _by_name(chunks: Mapping[int, nn.Module]) -> dict[str, dict[int, PersistentBuffer]]:
    """Return this rank's buffers: name -> stage -> buffer."""
    buffers: dict[str, dict[int, PersistentBuffer]] = {}
    for stage, module in chunks.items():
        for buffer in persistent_buffers(module):
            if buffer.has_elements:
                buffers.setdefault(buffer.name, {})[stage] = buffer
    return buffers
