"""Joining and leaving the job: rendezvous, torch.distributed, and the rank of this process."""

import atexit
import contextlib
import dataclasses
import datetime
import gc
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

# Imported before a process group exists: imported later (torch.optim does), its functions take the group as a default
# argument,
# which keeps its threads alive after destroy_process_group. Seen in torch 2.13.
from megatron.core.base import output_streams, rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.collectives import Ledger, LostPeerError, StoreGroup, TorchGroup, broadcast_text
from megatron.core.parallel.global_state import mesh_of_process, set_mesh_of_process
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.launcher_environment import Launch, discover
from megatron.core.parallel.tcp_liveness import (
    SAYS_EVERY,
    Exchange,
    Line,
    RefusedError,
    answers,
    listed,
    refuses,
    waiting,
)

_joined = False  # whether start_distributed, not the caller, initialised torch.distributed
_line: Line | None = None  # to rank 0, while this process is in the job
_exchange: Exchange | None = None  # on rank 0
_store: dist.Store | None = None  # kept alive for ranks that come late
_STAYS_FOR_LATE_COMERS = 6.0  # seconds
_AGENT_ANSWERS_WITHIN = 5.0  # seconds: its store was there before its ranks
_meetings = itertools.count()  # rendezvous of this process; equal on all ranks


def will_join() -> bool:
    """Whether `start_distributed` will create a process group: there is none, and a launcher started this process."""
    return not dist.is_initialized() and _has_others_to_meet(discover(os.environ))


def _has_others_to_meet(launch: Launch) -> bool:
    return launch.address is not None and (launch.world_size > 1 or launch.launcher == "torchrun")


def start_distributed(backend: str, timeout_minutes: float) -> None:
    """Joins the job: adopts torch.distributed if the caller has initialised it, else follows the launcher
    (`launcher_environment.py`).

    Every rank must call. A process without a launcher is a job of one rank, without torch.distributed. Ranks may come
    minutes
    apart; waiting ranks report the missing ranks every half minute. Raises ConfigError if ranks are missing after
    `timeout_minutes`, and LostPeerError if a rank dies meanwhile.
    """
    global _joined
    if dist.is_initialized():
        leave_at_exit()
        _open_line_of_adopted_job()
        return
    launch = discover(os.environ)
    if not _has_others_to_meet(launch):
        return
    rank_status.enter("meeting the others")
    try:
        timeout = datetime.timedelta(minutes=timeout_minutes)
        place = {"store": _meet(launch, timeout), "rank": launch.rank, "world_size": launch.world_size}
        rank_status.enter("connecting")
        dist.init_process_group(backend, **place, timeout=timeout)
    except (RuntimeError, OSError) as error:
        if lost := lost_rank(seconds=0.0 if isinstance(error, OSError) else 1.0):  # the call may fail before the news
            raise LostPeerError(lost) from error
        say_goodbye(str(error))
        if not isinstance(error, dist.DistError | OSError):
            raise
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.address}:{launch.port} "
            f"({str(error).splitlines()[0].rstrip('.')}): a rank has failed (see its own output), was not started, or has "
            "another address, or another job uses the port; check the number of processes, MASTER_ADDR and MASTER_PORT"
        ) from error
    _joined = True


def join_alone(backend: str = "gloo") -> None:
    """Gives a job of one process torch.distributed, for scripts of Megatron core, which ask it for the rank."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _meet(launch: Launch, timeout: datetime.timedelta) -> dist.Store:
    """Waits for all ranks; returns the job's store."""
    global _store
    began = time.monotonic()
    deadline = began + timeout.total_seconds()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = launch.rank == 0 and not by_agent

    def wait_for_first_rank(is_there: Callable[[], bool]) -> None:
        says = began + SAYS_EVERY
        while not is_there():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("rank 0 did not come")
            if by_agent and now > began + _AGENT_ANSWERS_WITHIN and refuses(launch.address, launch.port):
                raise ConnectionRefusedError("torchrun's agent, which keeps the store, has ended")
            if now > says:
                says += SAYS_EVERY
                output_streams.print_stderr(waiting(launch.rank, launch.world_size, listed([0]), began))
            time.sleep(0.05 if now < began + 5 else 0.5)

    if not keeps_store:
        wait_for_first_rank(lambda: answers(launch.address, launch.port))
    _store = store = dist.TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=keeps_store,
        timeout=timeout,
        wait_for_workers=False,  # the lines wait instead, and report the missing ranks
        multi_tenant=keeps_store,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as in torch's own rendezvous
    )
    if launch.world_size == 1:
        return dist.PrefixStore(secrets.token_hex(8), store)
    key = f"megatron/lines/{next(_meetings)}"
    if launch.rank == 0:
        store.set(key, _open_exchange(launch.world_size))

    def first_rank_is_reached() -> bool:
        """Opens the line. A launcher's store outlives the ranks: it may hold the address of a dead rank 0."""
        if not store.check([key]):
            return False
        try:
            _open_line(store.get(key).decode(), launch.rank, launch.world_size, [launch.address])
        except OSError as error:
            if not by_agent or isinstance(error, RefusedError):
                raise
            return False
        return True

    wait_for_first_rank(first_rank_is_reached)
    if not _line.wait_until_all_have_come(deadline, SAYS_EVERY):
        raise TimeoutError(_line.lost or f"{_line.missing()} did not come")
    # Apart from what earlier attempts of the same launcher have left: addresses of dead processes, reports of failures.
    return dist.PrefixStore(_line.token, store)


def _open_line_of_adopted_job() -> None:
    """Opens lines in a job that the caller has joined, if its backend notices lost ranks. Goes without if rank 0 cannot be
    reached."""
    world = world_axis()
    if world.group is None or not notices_lost_ranks():
        return
    address = broadcast_text(_open_exchange(world.size, awaits_all=False) if world.is_first else None, world)
    with contextlib.suppress(OSError):
        _open_line(address, world.rank, world.size, [os.environ.get("MASTER_ADDR", "localhost")])


def _open_exchange(ranks: int, *, awaits_all: bool = True) -> str:
    global _exchange
    _exchange = Exchange(ranks, awaits_all=awaits_all)
    return _exchange.address


def _open_line(address: str, rank: int, ranks: int, near: list[str]) -> None:
    global _line
    _line = Line(address, rank, ranks, near)
    atexit.register(_say_goodbye_at_exit)


def all_have_met() -> None:
    """Tells the lines that the backend connects the ranks from now on."""
    if _line is not None:
        _line.all_have_met()


def lost_rank(seconds: float = 0.0) -> str | None:
    """A message about a dead rank, if one arrives within `seconds`: "rank 3 (on gpu07, process 4711) has ended ..."."""
    return None if _line is None else _line.what_was_lost(seconds)


def has_line() -> bool:
    """Whether this rank learns of the death of other ranks."""
    return _line is not None


def say_goodbye(why: str | None = None) -> None:
    """Closes this rank's line: the end of this process is no longer reported as a loss. why: the error, if there is one."""
    global _line, _exchange, _store
    if _line is not None:
        _line.begin_to_leave()
        if _exchange is not None:
            _exchange.tell_late_comers(_STAYS_FOR_LATE_COMERS)
        _line.leave(why)
        _line = None
    if _exchange is not None:
        _exchange.join(seconds=2.0)
        _exchange = None
    _store = None


def _say_goodbye_at_exit() -> None:
    """For a script that ends without `stop_distributed`. After an error the line closes without a goodbye, as a loss."""
    if not hasattr(sys, "last_type"):
        say_goodbye()


def stop_distributed() -> None:
    """Drops the mesh, and leaves the job that `start_distributed` joined; a process group of the caller stays.

    Groups must be destroyed before the interpreter ends: gloo threads that are still alive abort the process.
    """
    global _joined
    say_goodbye()
    _drop_mesh()
    if _joined and dist.is_initialized():  # two functions that run at exit may both see to it
        _destroy_groups()
        _joined = False


def _drop_mesh() -> None:
    if (mesh := mesh_of_process()) is not None:
        for axis in mesh.values():
            if isinstance(axis.group, TorchGroup):
                axis.group.process_group = None
        set_mesh_of_process(None)


def _destroy_groups() -> None:
    gc.collect()  # graphs of the last step hold axes in reference cycles
    dist.destroy_process_group()


def leave_at_exit() -> None:
    """Destroys process groups of the caller's that still exist when the interpreter ends: see `stop_distributed`."""
    atexit.unregister(_leave_what_the_caller_joined)
    atexit.register(_leave_what_the_caller_joined)


def _leave_what_the_caller_joined() -> None:
    if dist.is_initialized():
        _drop_mesh()
        _destroy_groups()


def available_backends() -> list[str]:
    """The backends of this torch build."""
    names = dist.Backend.backend_list if dist.is_available() else ()
    return [name for name in names if name not in ("undefined", "fake") and dist.is_backend_available(name)]


def has_joined() -> bool:
    """Whether torch.distributed is initialised, by this module or by the caller."""
    return dist.is_initialized()


def backend_of(group: dist.ProcessGroup | None) -> str:
    """None: of all ranks."""
    return dist.get_backend(group)


def notices_lost_ranks() -> bool:
    """Whether a collective of the job's backend fails when a rank has died (gloo), instead of waiting."""
    return not dist.is_initialized() or dist.get_backend() == "gloo"


def job_store() -> dist.Store | None:
    """The job's key-value store; None for a job without torch.distributed."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def world_axis() -> Axis:
    """The axis of all ranks, for use before there is a mesh."""
    ranks = tuple(range(launched_world_size()))
    group = TorchGroup(dist.group.WORLD) if dist.is_initialized() and len(ranks) > 1 else None
    return Axis("world", ranks, launched_rank(), group, Ledger())


def agreement_axis() -> Axis:
    """The axis of all ranks, with collectives in host memory, for agreement before the start.

    If the backend works on devices, it goes through the store: a rank that cannot start may have no device, or another
    rank's.
    """
    world = world_axis()
    if world.group is None or notices_lost_ranks():
        return world
    return dataclasses.replace(world, group=StoreGroup(job_store(), world.rank, world.size))


def shared_device_problem(device: str) -> str | None:
    """The problem if another rank uses the device of this name: NCCL and its kin cannot connect a device with itself. Else
    None."""
    if notices_lost_ranks():
        return None
    first = job_store().compare_set(f"megatron/device/{device}", "", str(launched_rank())).decode()
    if first == str(launched_rank()):
        return None
    return (
        f"rank {launched_rank()} and rank {first} use the same device ({device}), which {dist.get_backend()} does not support; "
        "start at most one process per device, and give each process its own"
    )


def launched() -> Launch:
    """The launcher's variables; a job of one if they are invalid, which `start_distributed` refuses."""
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
    """The rank within this node, which selects the device. Without a launcher, the global rank."""
    launch = launched()
    return launched_rank() if launch.launcher == "none" else launch.local_rank
