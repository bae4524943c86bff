"""Are the copies of a parameter equal? Each rank hashes its copies; the ranks that should agree compare the hashes.

    data parallel      every parameter, or with ZeRO 3 every replica of a shard
    replicated_over    a parameter that its placement declares a copy, such as a norm over tp
    shared rows        key/value heads that several tensor-parallel ranks hold

A copy that is used apart gets other gradients on each rank and drifts without any error: the loss falls nearly as it should.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.stored_tensor import Stored, read_parts
from megatron.core.ops.tensor_hash import tensor_hash
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import rows_to_flat_range
from megatron.core.sharding.placement import shared_rows
from megatron.training.rerun.base_check import Check


class ReplicaCheck(Check):
    """--check-weight-hash-across-dp-replicas-interval."""

    def after_update(self, iteration: int) -> None:
        if iteration % self.config.check_weight_hash_across_dp_replicas_interval == 0:
            for chunk in self.chunks:
                chunk.finish_param_gather()
            self.stop_if(show_differences(differences_of_copies(self.chunks, self.mesh)))


class Difference(NamedTuple):
    """A parameter whose copies differ. ranks: global ranks by equal copies, the largest group first."""

    name: str
    axis: str
    ranks: list[list[int]]

    def __str__(self) -> str:
        sides = " and ".join(f"rank{'s' * (len(some) > 1)} {' '.join(map(str, some))}" for some in self.ranks)
        return f"{self.name} should be equal over {self.axis}, but differs between {sides}"


def show_differences(found: list[Difference]) -> str:
    """The message of a mismatch; "" if there is none."""
    if not found:
        return ""
    more = f"\n  and {len(found) - 10} more" if len(found) > 10 else ""
    lines = "".join(f"\n  {one}" for one in found[:10])
    return (
        f"copies of the weights differ:{lines}{more}\nEither a rank's memory or device is wrong, or a parameter declared a copy "
        "(Placement.replicated_over) is used apart and needs partial_grad"
    )


@torch.no_grad()
def differences_of_copies(chunks: list[DistributedDataParallel], mesh: Mesh) -> list[Difference]:
    """The parameters whose copies differ, as this rank's axes show. Every rank must call, with all parameters gathered.

    Communication: over each axis with copies, an all-reduce of two numbers a parameter; in stage 3 another over the shards.
    The ranks of an axis with a difference also gather its hashes.
    """
    copies = [copy for chunk in chunks for copy in _copies_of(chunk, mesh)]
    found = _compare({}, [(copy, copy.replica) for copy in copies])
    for axis in {copy.shards.ranks: copy.shards for copy in copies}.values():
        divided = [copy.hash for copy in copies if copy.shards.ranks == axis.ranks]
        total = collectives.all_reduce(torch.stack(divided), axis)
        for mine, whole in zip(divided, total):
            mine.copy_(whole)
    alike = [(copy, axis) for copy in copies for axis in copy.alike]
    return list(_compare({one.name: one for one in found}, alike))


class _Copy(NamedTuple):
    """A parameter, or shared rows of one. hash: of this rank's part; after a sum over `shards`, of the whole."""

    name: str
    hash: Tensor
    replica: Axis  # its ranks hold the same part
    shards: Axis  # its ranks hold the whole together
    alike: list[Axis]  # their ranks hold the same whole


def _copies_of(chunk: DistributedDataParallel, mesh: Mesh) -> Iterator[_Copy]:
    sharded = chunk.param_shards()
    for name, parameter in chunk.module.named_parameters():
        placement, shape = parameter.placement, tuple(parameter.shape)
        axes = mesh.grad_axes(placement.reduce_over, shards=name in sharded)
        held, values = sharded.get(name, ((0, parameter.numel()), None))
        values = parameter.data.reshape(-1) if values is None else values
        wanted = [(name, (0, parameter.numel()), placement.replicated_over)]
        for axis_name, box in shared_rows(placement, shape):
            wanted.append((f"{name} (shared rows)", rows_to_flat_range(box, shape), (axis_name,)))
        for label, run, alike in wanted:
            mine = _hash_of(values, held, run, parameter.device)
            yield _Copy(label, mine, axes.replica, axes.shard, [mesh[one] for one in alike])


def _hash_of(values: Stored, held: tuple[int, int], run: tuple[int, int], device: torch.device) -> Tensor:
    """The hash of the elements `run` of a parameter, of which `values` are the elements `held`: of the part in both."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop in overlaps([held], *run):
        at = start - run[0]
        for part in read_parts(values[start - held[0] : stop - held[0]]):
            total += tensor_hash(part, at).to(device)
            at += part.numel()
    return total


def _compare(known: dict[str, Difference], copies: list[tuple[_Copy, Axis]]) -> list[Difference]:
    """`known`, and the copies that differ over their axis and are not known."""
    found = dict(known)
    axes: dict[Any, Axis] = {axis.ranks: axis for _, axis in copies if axis.size > 1}
    for ranks, axis in axes.items():
        some = [copy for copy, over in copies if over.ranks == ranks]
        mine = torch.stack([copy.hash for copy in some])
        largest, smallest = collectives.all_reduce(torch.stack((mine, ~mine)), axis, "max")  # ~ turns the order round
        differ = (largest != ~smallest).nonzero().view(-1).tolist()
        if not differ:
            continue
        theirs = collectives.all_gather(mine[differ], axis).view(axis.size, -1).T.tolist()
        for at, hashes in zip(differ, theirs):
            groups: dict[int, list[int]] = {}
            for rank, value in zip(axis.ranks, hashes):
                groups.setdefault(value, []).append(rank)
            ordered = sorted(groups.values(), key=len, reverse=True)
            found.setdefault(some[at].name, Difference(some[at].name, axis.name, ordered))
    return list(found.values())
