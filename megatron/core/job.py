"""The processes of a job: which of them this one is, meeting the others, and leaving them."""

import atexit
import dataclasses
import datetime
import gc
import os

import torch.distributed as dist

# Imported later (torch.optim does), its functions would take the job's group as a default value and keep it, and its threads,
# alive after destroy_process_group. Seen in torch 2.13.
from megatron.core.comm import Ledger, StoreGroup, TorchGroup
from megatron.core.config import ConfigError
from megatron.core.current_mesh import mesh_of_process, set_mesh_of_process
from megatron.core.grid import Axis
from megatron.core.launch import Launch, discover

_joined = False  # whether start_distributed has initialised torch.distributed, and not the caller


def will_join() -> bool:
    """Whether `start_distributed` will make a process group: there is none yet, and a launcher started this process."""
    return not dist.is_initialized() and _has_others_to_meet(discover(os.environ))


def _has_others_to_meet(launch: Launch) -> bool:
    return launch.address is not None and (launch.world_size > 1 or launch.launcher == "torchrun")


def start_distributed(backend: str, timeout_minutes: int) -> None:
    """Join the job: adopt torch.distributed if the caller has initialised it, else go by what the launcher says (`launch.py`).

    A process that no launcher started is a job of one, and needs no torch.distributed at all. Raises ConfigError.
    """
    global _joined
    if dist.is_initialized():
        atexit.register(_leave_what_the_caller_joined)
        return
    launch = discover(os.environ)
    if not _has_others_to_meet(launch):
        return
    try:
        dist.init_process_group(
            backend,
            init_method=launch.meeting_point,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(minutes=timeout_minutes),
        )
    except dist.DistError as error:
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.address}:{launch.port} "
            f"({str(error).splitlines()[0].rstrip('.')}): a rank has ended already and says why where it prints, or was not started, or "
            "looks elsewhere, or another job has that port; check the number of processes, MASTER_ADDR and MASTER_PORT"
        ) from error
    _joined = True


def stop_distributed() -> None:
    """Forget the mesh, and leave the job that `start_distributed` joined; a process group that the caller made stays.

    The groups must be gone before the interpreter ends: gloo's threads, found alive by then, abort the process.
    """
    global _joined
    if (mesh := mesh_of_process()) is not None:
        for axis in mesh.values():
            if isinstance(axis.group, TorchGroup):
                axis.group.process_group = None
        mesh.kept.clear()
        set_mesh_of_process(None)
    if _joined:
        gc.collect()  # graphs of the last step hold axes in circles
        dist.destroy_process_group()
        _joined = False


def _leave_what_the_caller_joined() -> None:
    """At the end of the interpreter, for a caller who made a process group and did not destroy it: for the same reason."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def available_backends() -> list[str]:
    """The back ends that this torch was built with."""
    if not dist.is_available():
        return []
    return [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", "fake") and dist.is_backend_available(name)
    ]


def has_joined() -> bool:
    """Whether torch.distributed is initialised, by us or by the caller."""
    return dist.is_initialized()


def backend_of(group: dist.ProcessGroup) -> str:
    return dist.get_backend(group)


def notices_lost_ranks() -> bool:
    """Whether a call of the job's back end fails when a rank at its other end has gone. On a device it would wait."""
    return not dist.is_initialized() or dist.get_backend() == "gloo"


def job_store() -> dist.Store | None:
    """Where the processes of a job left word for one another when they met, and may again; None for a job of one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def world_axis() -> Axis:
    """All ranks of the job, before there is a mesh: for agreeing on how to make one."""
    ranks = tuple(range(launched_world_size()))
    group = TorchGroup(dist.group.WORLD) if dist.is_initialized() and len(ranks) > 1 else None
    return Axis("world", ranks, launched_rank(), group, Ledger())


def agreement_axis() -> Axis:
    """All ranks of the job, for agreeing in memory of the host on whether it can start: through the store, where the back end connects
    devices, since a rank that cannot start may have none, or that of another rank."""
    world = world_axis()
    if world.group is None or notices_lost_ranks():
        return world
    return dataclasses.replace(world, group=StoreGroup(job_store(), world.rank, world.size))


def shared_device_problem(device: str) -> str | None:
    """Why this rank cannot compute on the device of this name: another rank does, and a back end connects no device with itself."""
    if notices_lost_ranks():
        return None
    first = job_store().compare_set(f"megatron/device/{device}", "", str(launched_rank())).decode()
    if first == str(launched_rank()):
        return None
    return (
        f"rank {launched_rank()} and rank {first} compute on one device ({device}), which {dist.get_backend()} cannot connect with "
        "itself; start as many processes a machine as it has devices, or give each a device of its own"
    )


def launched() -> Launch:
    """What the launcher says of this process; of variables that cannot be (`start_distributed` refuses them), nothing."""
    try:
        return discover(os.environ)
    except ConfigError:
        return Launch()


def launched_rank() -> int:
    """The global rank of this process, before or after the job is joined."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def launched_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


def launched_local_rank() -> int:
    """The rank within this node, which picks the device. A caller who has joined by himself need not have told anybody."""
    launch = launched()
    return launched_rank() if launch.launcher == "none" else launch.local_rank
