"""Any torch module under data parallelism: where it starts, and its parameters whole in every ZeRO stage.

start_alike(module, mesh, device)           before it is wrapped: on the device, with the first rank's values
with WholeParameters(module.parameters()):  inside, this rank has all values
whole_state_dict(module)                    copies of all values
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.grid import Axis
from megatron.core.mesh import Mesh
from megatron.core.placement import Placement


@torch.no_grad()
def start_alike(module: nn.Module, mesh: Mesh, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Bring a module's tensors to the device, in `dtype` if they are floating (None: their own), with the values of the first
    data-parallel rank. Every rank must call.

    One at a time is whole of the parameters that were made in shards (`MakingInShards`).
    """
    for tensor in (*module.parameters(), *module.buffers()):
        shard = getattr(tensor, "shard", None)
        was_sharded = shard is not None and not shard.is_whole
        if not (was_sharded and dtype in (None, tensor.dtype) and shard.mine.device == torch.device(device)):
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)
            if was_sharded:
                shard.release()
            else:
                comm.broadcast(tensor.data, mesh.samples)
        if isinstance(tensor, nn.Parameter) and not hasattr(tensor, "placement"):
            tensor.placement = Placement(tuple(tensor.shape), init=None, replicated_over=("tp",))


class WholeParameters:
    """A block in which these parameters, made in shards or of a wrapped module, are whole. Every rank must enter.

    changed_on: (axis, rank) whose changes inside the block count, on all ranks of the axis. None: changes are lost, or where
    the parameter is whole anyway (stages 0 to 2), each rank keeps its own. ValueError if one is a rounded copy of a float32
    master, which cannot be changed.
    """

    def __init__(self, parameters: Iterable[Tensor], changed_on: tuple[Axis, int] | None = None):
        self._parameters, self._source = list(parameters), changed_on
        rounded = [p for p in self._parameters if hasattr(p, "slot") and p.slot.bucket.buffer.is_half_precision]
        if changed_on is not None and rounded:
            raise ValueError(
                f"{rounded[0].slot.name} is a rounded copy of a float32 master, which would undo a change; change weights "
                "before the module is wrapped"
            )

    def __enter__(self) -> None:
        self._buckets = list(dict.fromkeys(p.slot.bucket for p in self._parameters if hasattr(p, "slot")))
        for bucket in self._buckets:
            bucket.start_gather()
            bucket.finish_gather()
        self._shards = [p.shard for p in self._parameters if hasattr(p, "shard") and not p.shard.is_whole]
        for shard in self._shards:
            shard.gather()

    @torch.no_grad()
    def __exit__(self, kind: Any, *_: Any) -> None:
        keeps = self._source is not None and kind is None
        for parameter in self._parameters if keeps else ():
            comm.broadcast(parameter.data, *self._source)
        for bucket in self._buckets:
            if keeps:
                bucket.keep_values()
            bucket.release_params()
        for shard in self._shards:
            shard.release()


def whole_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, on the CPU, on every rank. Every rank must call."""
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        with WholeParameters([value]):
            state[name] = value.detach().cpu().clone()
    return state
