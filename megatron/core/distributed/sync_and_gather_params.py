"""Any torch module under data parallelism: equal values on all ranks, and full parameters in every ZeRO stage.

sync_module_states(module, mesh, device)     before it is wrapped: on the device, with the first rank's values
with FullParameters(module.parameters()):    inside, this rank has all values
full_state_dict(module)                      copies of all values
"""

import json
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.param_grad_state import ParamGradSink, ParamInBucket, place_in_bucket
from megatron.core.distributed.zero_init import shard_of
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.placement import Placement, placement_of


@torch.no_grad()
def sync_module_states(
    module: nn.Module, mesh: Mesh, device: torch.device | str, dtype: torch.dtype | None = None
) -> None:
    """Bring a module's tensors, of any shapes, to the device, with the values of the first data-parallel rank.

    dtype: of those that are floating; None: their own. Every rank must call. Raises RuntimeError if the ranks have
    different models. At any time only one of the parameters that were created in shards (`ShardedInit`) is whole.
    """
    _check_same_model(module, mesh.samples, device)
    for tensor in (*module.parameters(), *module.buffers()):
        shard = shard_of(tensor)
        was_sharded = shard is not None and not shard.is_whole
        is_done = was_sharded and dtype in (None, tensor.dtype) and shard.values.device == torch.device(device)
        if not is_done:
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)
            if was_sharded:
                shard.release()
            else:
                collectives.broadcast(tensor.data, mesh.samples)
        if isinstance(tensor, nn.Parameter) and placement_of(tensor) is None:
            tensor.placement = Placement(tuple(tensor.shape), init=None, replicated_over=("tp",))


def _check_same_model(module: nn.Module, samples: Axis, device: torch.device | str) -> None:
    """Raise RuntimeError on every rank if one has other parameters or buffers than the first."""
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = [f"{name} {list(x.shape)} {'trained' if x.requires_grad else 'fixed'}" for name, x in named]
    own_hash = torch.tensor([collectives.fingerprint(str(tensors))], device=device)
    hashes = collectives.all_gather(own_hash, samples).tolist()  # one per rank
    if len(set(hashes)) == 1:
        return
    # Some rank differs: now the names are sent, for the message.
    tensors_of = [json.loads(text) for text in collectives.all_gather_texts(json.dumps(tensors), samples, device)]
    rank = next(rank for rank, rank_hash in enumerate(hashes) if rank_hash != hashes[0])
    for tensor, first_ranks in zip_longest(tensors_of[rank], tensors_of[0], fillvalue="nothing"):
        if tensor != first_ranks:
            raise RuntimeError(
                f"rank {samples.ranks[rank]} has another model than rank {samples.ranks[0]}: it has {tensor} where "
                f"the other has {first_ranks}"
            )


class FullParameters:
    """A block in which these parameters, of a wrapped module or created in shards, are whole. Every rank must enter.

    parameters: of any shapes. changed_on: (axis, rank) whose changes inside the block are kept, on all ranks of the
    axis. None: changes are lost; where the parameter is whole anyway (stages 0 to 2), each rank keeps its own. Raises
    ValueError if one is a rounded copy of a float32 master, which cannot be changed. keeps_own: each rank keeps its own
    changes, which are equal on all data-parallel ranks; the caller then sets the masters
    (`FlatOptimizer.reload_masters`).
    """

    def __init__(
        self, parameters: Iterable[Tensor], changed_on: tuple[Axis, int] | None = None, *, keeps_own: bool = False
    ):
        self._parameters = list(parameters)
        self._source = changed_on
        self._keeps_own = keeps_own
        trained = [place for place in _places_of(self._parameters) if isinstance(place, ParamGradSink)]
        rounded = [sink for sink in trained if sink.bucket.buffer.is_half_precision]
        if changed_on is not None and rounded:
            raise ValueError(
                f"{rounded[0].name} is a rounded copy of a float32 master weight: the next update would overwrite a "
                "change of the copy from the master; change weights before the module is wrapped"
            )

    def __enter__(self) -> None:
        self._buckets = list(dict.fromkeys(place.bucket for place in _places_of(self._parameters)))
        for bucket in self._buckets:
            bucket.start_gather()
            bucket.finish_gather()
        shards = [shard_of(parameter) for parameter in self._parameters]
        self._shards = [shard for shard in shards if shard is not None and not shard.is_whole]
        for shard in self._shards:
            shard.gather()

    @torch.no_grad()
    def __exit__(self, kind: Any, *_: Any) -> None:
        keeps = (self._source is not None or self._keeps_own) and kind is None
        if keeps and self._source is not None:
            for parameter in self._parameters:
                collectives.broadcast(parameter.data, *self._source)
        for bucket in self._buckets:
            if keeps:
                bucket.keep_values()
            bucket.release_params()
        for shard in self._shards:
            shard.release()


def _places_of(parameters: Iterable[Tensor]) -> list[ParamInBucket]:
    places = [place_in_bucket(parameter) for parameter in parameters]
    return [place for place in places if place is not None]


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, in their full shapes, on the CPU, on every rank.

    Parameters that tensor-parallel ranks split have this rank's shape. Every rank must call.
    """
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        with FullParameters([value]):
            state[name] = value.detach().cpu().clone()
    return state
