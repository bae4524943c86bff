"""`deepspeed.comm`: joining the job, and communication between all ranks, over the object `cdb`.

    init_distributed()    adopts torch.distributed if it is initialised, else follows the launcher; never initialises twice
    cdb                   the back end that is up: its name, rank and world size; None before `init_distributed`

Collectives go over all ranks, or over `group`, an `Axis` of the mesh that contains this rank. They wait for the result.
"""

import atexit
import datetime
from enum import Enum
from typing import Any

from torch import Tensor

from megatron.core import comm, outputs
from megatron.core.current_mesh import get_mesh, model_parallel_is_initialized
from megatron.core.device import Device
from megatron.core.grid import Axis
from megatron.core.job import processes

ReduceOp = Enum("ReduceOp", {"SUM": "sum", "AVG": "avg", "MAX": "max"})


class Backend:
    """The back end that is up. name: gloo, nccl, ...; was_adopted: the script has initialised it."""

    def __init__(self, name: str, was_adopted: bool):
        self.name, self.was_adopted = name, was_adopted

    @property
    def world(self) -> Axis:
        """The axis of all ranks."""
        return get_mesh()["world"] if model_parallel_is_initialized() else processes.world_axis()

    def is_initialized(self) -> bool:
        return processes.has_joined()

    def __repr__(self) -> str:
        way = "adopted" if self.was_adopted else "initialised here"
        return f"Backend({self.name}, {way}, rank {self.world.rank} of {self.world.size})"


cdb: Backend | None = None


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: datetime.timedelta = datetime.timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job. Every rank must call; later calls change nothing.

    dist_backend: default that of the device. dist_init_required: False: torch.distributed must be initialised already,
    else RuntimeError. The place in the job follows from the variables of torchrun, Open MPI, MPICH or SLURM (MASTER_ADDR
    and MASTER_PORT included); a process without any is a job of one. init_method, rank, world_size: read only where
    torch.distributed is initialised already, and refused otherwise. config: accepted without effect.
    """
    global cdb
    was_up = processes.has_joined()
    if cdb is not None and was_up:
        return
    if not was_up and (dist_init_required is False or init_method is not None or rank >= 0 or world_size > 0):
        raise RuntimeError(
            "init_distributed(): dist_init_required=False, init_method, rank and world_size are for a script that has "
            "initialised torch.distributed, which is adopted, and this one has not; leave them out and start with torchrun"
        )
    outputs.keep_running(processes.launched_rank())
    atexit.register(processes.stop_distributed)
    if not was_up and not processes.will_join():
        processes.join_alone()
    backend = dist_backend or Device.select(local_rank=get_local_rank()).backend
    processes.start_distributed(backend, timeout.total_seconds() / 60)
    cdb = Backend(processes.backend_of(None), was_up)
    if verbose and cdb.world.is_first:
        print(f"deepspeed: {cdb}", flush=True)


def is_initialized() -> bool:
    return cdb is not None and cdb.is_initialized()


def get_world_group(group: Axis | None = None) -> Axis:
    """The axis of all ranks, or the `group` given. RuntimeError while no back end is up."""
    if group is not None or model_parallel_is_initialized():
        return group or get_mesh()["world"]
    if cdb is None:
        raise RuntimeError("no back end is up; call init_distributed() first")
    return cdb.world


def get_rank(group: Axis | None = None) -> int:
    return get_world_group(group).rank


def get_world_size(group: Axis | None = None) -> int:
    return get_world_group(group).size


def get_local_rank() -> int:
    return processes.launched_local_rank()


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Axis | None = None) -> Tensor:
    """The sum, mean or maximum over the ranks, in place."""
    axis = get_world_group(group)
    comm.all_reduce(tensor, axis, "max" if op is ReduceOp.MAX else "sum")
    return tensor.div_(axis.size) if op is ReduceOp.AVG else tensor


def broadcast(tensor: Tensor, src: int, group: Axis | None = None) -> Tensor:
    """Copy the tensor of the global rank `src` into those of the others."""
    axis = get_world_group(group)
    return comm.broadcast(tensor, axis, axis.ranks.index(src))


def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group: Axis | None = None) -> None:
    """The ranks' tensors, of one shape, one after the other."""
    output_tensor.copy_(comm.all_gather(tensor, get_world_group(group)).view_as(output_tensor))


def reduce_scatter_tensor(output_tensor: Tensor, tensor: Tensor, group: Axis | None = None) -> None:
    """This rank's part, along dimension 0, of the sum over the ranks."""
    output_tensor.copy_(comm.reduce_scatter(tensor, get_world_group(group)).view_as(output_tensor))


def barrier(group: Axis | None = None) -> None:
    """Block until every rank has called."""
    comm.barrier(get_world_group(group), Device.select(local_rank=get_local_rank()).torch_device)
