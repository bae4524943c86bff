"""Any torch module under data parallelism: where it starts, and its parameters whole in every ZeRO stage.

start_alike(module, mesh, device)           before it is wrapped: on the device, with the first rank's values
with WholeParameters(module.parameters()):  inside, this rank has all values
whole_state_dict(module)                    copies of all values
"""

import json
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.zero_init import shard_of
from megatron.core.ops.main_grad_interface import GradSlot, slot_of
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.placement import Placement, placement_of


@torch.no_grad()
def start_alike(module: nn.Module, mesh: Mesh, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Bring a module's tensors to the device, in `dtype` if they are floating (None: their own), with the values of the
    first
    data-parallel rank. Every rank must call. RuntimeError if the ranks have different models.

    One at a time is whole of the parameters that were made in shards (`MakingInShards`).
    """
    _check_alike(module, mesh.samples, device)
    for tensor in (*module.parameters(), *module.buffers()):
        shard = shard_of(tensor)
        was_sharded = shard is not None and not shard.is_whole
        if not (was_sharded and dtype in (None, tensor.dtype) and shard.mine.device == torch.device(device)):
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)
            if was_sharded:
                shard.release()
            else:
                collectives.broadcast(tensor.data, mesh.samples)
        if isinstance(tensor, nn.Parameter) and placement_of(tensor) is None:
            tensor.placement = Placement(tuple(tensor.shape), init=None, replicated_over=("tp",))


def _check_alike(module: nn.Module, samples: Axis, device: torch.device | str) -> None:
    """Raise RuntimeError on every rank if one has other parameters or buffers than the first."""
    named = (*module.named_parameters(), *module.named_buffers())
    mine = [f"{name} {list(x.shape)} {'trained' if x.requires_grad else 'fixed'}" for name, x in named]
    marks = collectives.all_gather(torch.tensor([collectives.fingerprint(str(mine))], device=device), samples).tolist()
    if len(set(marks)) == 1:
        return
    all_named = [json.loads(text) for text in collectives.all_gather_texts(json.dumps(mine), samples, device)]
    rank = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
    pairs = zip_longest(all_named[rank], all_named[0], fillvalue="nothing")
    one, other = next((one, other) for one, other in pairs if one != other)
    raise RuntimeError(
        f"rank {samples.ranks[rank]} has another model than rank {samples.ranks[0]}: {one} in the place of {other}"
    )


class WholeParameters:
    """A block in which these parameters, made in shards or of a wrapped module, are whole. Every rank must enter.

    changed_on: (axis, rank) whose changes inside the block count, on all ranks of the axis. None: changes are lost, or where
    the parameter is whole anyway (stages 0 to 2), each rank keeps its own. ValueError if one is a rounded copy of a float32
    master, which cannot be changed.
    """

    def __init__(self, parameters: Iterable[Tensor], changed_on: tuple[Axis, int] | None = None):
        self._parameters, self._source = list(parameters), changed_on
        rounded = [slot for slot in _slots_of(self._parameters) if slot.bucket.buffer.is_half_precision]
        if changed_on is not None and rounded:
            raise ValueError(
                f"{rounded[0].name} is a rounded copy of a float32 master, which would undo a change; change weights "
                "before the module is wrapped"
            )

    def __enter__(self) -> None:
        self._buckets = list(dict.fromkeys(slot.bucket for slot in _slots_of(self._parameters)))
        for bucket in self._buckets:
            bucket.start_gather()
            bucket.finish_gather()
        shards = [shard_of(parameter) for parameter in self._parameters]
        self._shards = [shard for shard in shards if shard is not None and not shard.is_whole]
        for shard in self._shards:
            shard.gather()

    @torch.no_grad()
    def __exit__(self, kind: Any, *_: Any) -> None:
        keeps = self._source is not None and kind is None
        for parameter in self._parameters if keeps else ():
            collectives.broadcast(parameter.data, *self._source)
        for bucket in self._buckets:
            if keeps:
                bucket.keep_values()
            bucket.release_params()
        for shard in self._shards:
            shard.release()


def _slots_of(parameters: Iterable[Tensor]) -> list[GradSlot]:
    return [slot for parameter in parameters if (slot := slot_of(parameter)) is not None]


def whole_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, on the CPU, on every rank. Every rank must call."""
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        with WholeParameters([value]):
            state[name] = value.detach().cpu().clone()
    return state
