"""What this rank holds of a model's parameters and of an optimizer's state, by the names of a checkpoint, in any ZeRO stage.

model/<parameter>                       in the model's precision
optimizer/<state>/<parameter>           float32: Adam's moments, masters of half-precision parameters, ...
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.core.dist_checkpointing.local_tensor import LocalTensor, placed_tensor
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import pieces_of_run


def model_tensors(chunks: Sequence[DistributedDataParallel], mesh: Mesh) -> dict[str, LocalTensor]:
    """This rank's part of every parameter (its shard in ZeRO stage 3), by checkpoint name. One without elements is
    left out."""
    return {
        f"model/{name}": placed_tensor(parameter.data, parameter.placement, mesh)
        if name not in shards
        else _run(parameter, *shards[name], mesh, mesh.grad_axes(parameter.placement.reduce_over, shards=True).replica)
        for chunk in chunks
        for shards in [chunk.param_shards()]
        for name, parameter in chunk.module.named_parameters()
        if parameter.numel()
    }


def optimizer_tensors(optimizer: FlatOptimizer, mesh: Mesh) -> dict[str, LocalTensor]:
    """This rank's part of the optimizer state, by checkpoint name."""
    parameters = {name: p for buffer in optimizer.buffers for name, p in buffer.parameters.items()}
    replicas = {name: buffer.axes.replica for buffer in optimizer.buffers for name in buffer.parameters}
    kept = optimizer.kept_of()
    return {
        f"optimizer/{kind}/{name}": _run(parameters[name], kept[name], tensor, mesh, replicas[name])
        if name in kept
        else placed_tensor(tensor, parameters[name].placement, mesh)
        for kind, tensors in optimizer.tensors().items()
        for name, tensor in tensors.items()
        if parameters[name].numel()
    }


def _run(parameter: nn.Parameter, kept: tuple[int, int], values: Tensor, mesh: Mesh, replicas: Axis) -> LocalTensor:
    """`placed_tensor` for a sharded parameter: `values` are its elements `kept` (start, stop), equal on all ranks of
    `replicas`."""
    whole = placed_tensor(parameter, parameter.placement, mesh)
    owned, copies = (tuple(pieces_of_run(pairs, kept, parameter.shape)) for pairs in (whole.pieces, whole.copies))
    return LocalTensor(values, whole.shape, list(owned), bool(owned) and replicas.is_first, copies, replicas)
