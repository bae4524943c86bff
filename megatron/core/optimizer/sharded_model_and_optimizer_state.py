"""This rank's part of the parameters and of the optimizer's state, by the names of a checkpoint, in any ZeRO stage.

model/<parameter>                       in the model's precision
optimizer/<state>/<parameter>           float32: Adam's moments, masters of half-precision parameters, ...
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.core.dist_checkpointing.local_tensor import LocalTensor, placed_tensor
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import pieces_in_flat_range


def sharded_model_state(chunks: Sequence[DistributedDataParallel], mesh: Mesh) -> dict[str, LocalTensor]:
    """Return this rank's part of every parameter, by checkpoint name.

    Each is [parameter's shape on this rank]; its shard in ZeRO stage 3 is flat, [elements]. Parameters without elements
    are left out. Nothing is communicated.
    """
    state = {}
    for chunk in chunks:
        shards = chunk.param_shards()  # {} before stage 3
        for name, parameter in chunk.module.named_parameters():
            if not parameter.numel():
                continue
            placement = parameter.placement
            if name in shards:
                flat_range, values = shards[name]
                replica = mesh.grad_axes(placement.reduce_over, shards=True).replica
                state[f"model/{name}"] = _flat_part(parameter, flat_range, values, mesh, replica)
            else:
                state[f"model/{name}"] = placed_tensor(parameter.data, placement, mesh)
    return state


def sharded_optimizer_state(optimizer: FlatOptimizer, mesh: Mesh) -> dict[str, LocalTensor]:
    """Return this rank's part of the optimizer state, by checkpoint name.

    Each is [parameter's shape on this rank]; that of a sharded parameter is flat, [elements]. Nothing is communicated.
    """
    parameters: dict[str, nn.Parameter] = {}
    replicas: dict[str, Axis] = {}
    for buffer in optimizer.buffers:
        for name, parameter in buffer.parameters.items():
            parameters[name] = parameter
            replicas[name] = buffer.axes.replica

    flat_ranges = optimizer.owned_ranges()  # of sharded parameters alone
    state = {}
    for kind, tensors in optimizer.tensors().items():
        for name, tensor in tensors.items():
            parameter = parameters[name]
            if not parameter.numel():
                continue
            key = f"optimizer/{kind}/{name}"
            if name in flat_ranges:
                state[key] = _flat_part(parameter, flat_ranges[name], tensor, mesh, replicas[name])
            else:
                state[key] = placed_tensor(tensor, parameter.placement, mesh)
    return state


def _flat_part(
    parameter: nn.Parameter, flat_range: tuple[int, int], values: Tensor, mesh: Mesh, replicas: Axis
) -> LocalTensor:
    """Return `placed_tensor` for a sharded parameter.

    `values` [elements] are its elements `flat_range` (start, stop), equal on all ranks of `replicas`.
    """
    full = placed_tensor(parameter, parameter.placement, mesh)
    owned = tuple(pieces_in_flat_range(full.pieces, flat_range, parameter.shape))
    copies = tuple(pieces_in_flat_range(full.copies, flat_range, parameter.shape))
    is_writer = bool(owned) and replicas.is_first
    return LocalTensor(values, full.shape, list(owned), is_writer, copies, replicas)
