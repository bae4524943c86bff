"""Copies of a parameter are checked to be equal: each rank hashes its copies, and ranks with the same copy compare.

    data parallel      every parameter, or with ZeRO 3 every replica of a shard
    replicated_over    a parameter that its placement declares a copy, such as a norm over tp
    shared rows        key/value heads that several tensor-parallel ranks have

A copy whose gradient is not reduced over its ranks drifts without any error: the loss falls nearly as it should.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.tensor_in_memory_or_file import Stored, read_parts
from megatron.core.ops.tensor_hash import tensor_hash
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import rows_to_flat_range
from megatron.core.sharding.placement import shared_rows
from megatron.training.arguments.nan_spike_and_corruption_config import GuardConfig
from megatron.training.result_checks.base_check import Check


class ReplicaCheck(Check):
    """--check-weight-hash-across-dp-replicas-interval, --test-mode: compare copies of the weights after an update."""

    @classmethod
    def is_on(cls, config: GuardConfig, setting: str) -> bool:
        return config.compare_replicas_every is not None

    def after_update(self, iteration: int) -> None:
        if iteration % self.config.compare_replicas_every != 0:
            return
        for chunk in self.chunks:
            chunk.finish_param_gather()
        self.stop_if(show_differences(param_replica_differences(self.chunks, self.mesh)))


class Difference(NamedTuple):
    """A parameter whose copies differ. ranks: global ranks by equal copies, the largest group first."""

    name: str
    axis: str
    ranks: list[list[int]]

    def __str__(self) -> str:
        groups = [f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}" for ranks in self.ranks]
        sides = " and ".join(groups)
        return f"{self.name} should be equal over {self.axis}, but differs between {sides}"


def show_differences(differences: list[Difference]) -> str:
    """Return the message of a mismatch; "" if there is none."""
    if not differences:
        return ""
    more = f"\n  and {len(differences) - 10} more" if len(differences) > 10 else ""
    lines = "".join(f"\n  {difference}" for difference in differences[:10])
    return (
        f"copies of the weights differ:{lines}{more}\nEither a rank's memory or device is wrong, or a parameter declared a copy "
        "(Placement.replicated_over) is used apart and needs partial_grad"
    )


@torch.no_grad()
def param_replica_differences(chunks: list[DistributedDataParallel], mesh: Mesh) -> list[Difference]:
    """Return the parameters whose copies differ over an axis of this rank.

    Every rank must call, with all parameters gathered. Communication: over each axis with copies, an all-reduce of
    two numbers a parameter; with ZeRO 3 another over the shards. The ranks of an axis with a difference also
    gather its hashes.
    """
    # ranks with the same part of a parameter: data-parallel replicas
    copies = []
    for chunk in chunks:
        copies.extend(_copies_of(chunk, mesh))
    differences: dict[str, Difference] = {}  # by name
    _compare(differences, [(copy, copy.replica) for copy in copies])

    # With ZeRO 3 a rank has hashed its shard. The hash of the whole is the sum over the shards.
    shard_axes = {copy.shards.ranks: copy.shards for copy in copies}
    for axis in shard_axes.values():
        hashes = [copy.hash for copy in copies if copy.shards.ranks == axis.ranks]
        sums = collectives.all_reduce(torch.stack(hashes), axis)  # [copies]
        for copy_hash, total in zip(hashes, sums):
            copy_hash.copy_(total)

    # ranks with the same whole: copies declared by the placement
    declared = [(copy, axis) for copy in copies for axis in copy.replicated_over]
    _compare(differences, declared)
    return list(differences.values())


class _Copy(NamedTuple):
    """A parameter, or the shared rows of one."""

    name: str
    hash: Tensor  # []; of this rank's part, and after a sum over `shards` of the whole
    replica: Axis  # its ranks have the same part
    shards: Axis  # its ranks have the whole together
    replicated_over: list[Axis]  # their ranks have the same whole


def _copies_of(chunk: DistributedDataParallel, mesh: Mesh) -> Iterator[_Copy]:
    """Yield each parameter with its hash, and the rows of it that several tensor-parallel ranks have."""
    param_shards = chunk.param_shards()
    for name, parameter in chunk.module.named_parameters():
        placement = parameter.placement
        shape = tuple(parameter.shape)
        axes = mesh.grad_axes(placement.reduce_over, shards=name in param_shards)
        local_range, values = param_shards.get(name, ((0, parameter.numel()), None))
        if values is None:
            values = parameter.data.reshape(-1)

        # (name, range of elements, axes with copies of them)
        ranges = [(name, (0, parameter.numel()), placement.replicated_over)]
        for axis_name, box in shared_rows(placement, shape):
            ranges.append((f"{name} (shared rows)", rows_to_flat_range(box, shape), (axis_name,)))
        for label, elements, replicated_over in ranges:
            hashed = _hash_range(values, local_range, elements, parameter.device)
            yield _Copy(label, hashed, axes.replica, axes.shard, [mesh[axis] for axis in replicated_over])


def _hash_range(
    values: Stored, local_range: tuple[int, int], elements: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the hash, [], of those of a parameter's `elements` that this rank has.

    values: the elements `local_range` of the parameter.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop in overlaps([local_range], *elements):
        position = start - elements[0]  # the hash depends on it, so that the shards' hashes add up to the whole's
        for part in read_parts(values[start - local_range[0] : stop - local_range[0]]):
            total += tensor_hash(part, position).to(device)
            position += part.numel()
    return total


def _compare(differences: dict[str, Difference], copies: list[tuple[_Copy, Axis]]) -> None:
    """Add to `differences`, by name, the copies that differ over their axis. Known names are left as they are."""
    axes: dict[Any, Axis] = {axis.ranks: axis for _, axis in copies if axis.size > 1}
    for ranks, axis in axes.items():
        axis_copies = [copy for copy, copy_axis in copies if copy_axis.ranks == ranks]
        hashes = torch.stack([copy.hash for copy in axis_copies])  # [copies]

        # One reduction gives the largest and the smallest hash: ~x = -x - 1 reverses the order.
        largest, smallest = collectives.all_reduce(torch.stack((hashes, ~hashes)), axis, "max")  # [copies] each
        different = (largest != ~smallest).nonzero().view(-1).tolist()
        if not different:
            continue

        # group the ranks by hash
        gathered = collectives.all_gather(hashes[different], axis)  # [axis.size * different]
        hashes_of_copies = gathered.view(axis.size, -1).T.tolist()  # [different, axis.size]
        for index, rank_hashes in zip(different, hashes_of_copies):
            groups: dict[int, list[int]] = {}
            for rank, value in zip(axis.ranks, rank_hashes):
                groups.setdefault(value, []).append(rank)
            largest_first = sorted(groups.values(), key=len, reverse=True)
            name = axis_copies[index].name
            differences.setdefault(name, Difference(name, axis.name, largest_first))
