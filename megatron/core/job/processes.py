"""The processes of a job: which of them this one is, meeting the others, and leaving them."""

import atexit
import contextlib
import dataclasses
import datetime
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

# Imported later (torch.optim does), its functions would take the job's group as a default value and keep it, and its threads,
# alive after destroy_process_group. Seen in torch 2.13.
from megatron.core.comm import Ledger, LostPeerError, StoreGroup, TorchGroup, broadcast_text
from megatron.core.config import ConfigError
from megatron.core.current_mesh import mesh_of_process, set_mesh_of_process
from megatron.core.grid import Axis
from megatron.core.job.launch import Launch, discover
from megatron.core.job.lines import SAYS_EVERY, Exchange, Line, answers, listed, waiting

_joined = False  # whether start_distributed has initialised torch.distributed, and not the caller
_line: Line | None = None  # to the first rank, from when this one comes until it leaves the job
_exchange: Exchange | None = None  # of the first rank
_store: dist.Store | None = None  # which ranks that come late look into
_STAYS_FOR_LATE_COMERS = 6.0  # seconds
_meetings = itertools.count()  # of this process; all ranks of a job count alike


def will_join() -> bool:
    """Whether `start_distributed` will make a process group: there is none yet, and a launcher started this process."""
    return not dist.is_initialized() and _has_others_to_meet(discover(os.environ))


def _has_others_to_meet(launch: Launch) -> bool:
    return launch.address is not None and (launch.world_size > 1 or launch.launcher == "torchrun")


def start_distributed(backend: str, timeout_minutes: float) -> None:
    """Join the job: adopt torch.distributed if the caller has initialised it, else go by what the launcher says (`launch.py`).

    A process that no launcher started is a job of one, and needs no torch.distributed at all. Ranks may come minutes apart; every
    half minute the waiting ones say which have not come. Raises ConfigError if they have not after `timeout_minutes`, and
    LostPeerError if one that came has died.
    """
    global _joined
    if dist.is_initialized():
        atexit.register(_leave_what_the_caller_joined)
        _open_line_of_adopted_job()
        return
    launch = discover(os.environ)
    if not _has_others_to_meet(launch):
        return
    try:
        store = _meet(launch, timeout_minutes)
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(minutes=timeout_minutes),
        )
    except (RuntimeError, OSError) as error:
        if lost := lost_rank(seconds=0.0 if isinstance(error, OSError) else 1.0):  # whose call broke may hear it first
            raise LostPeerError(lost) from error
        say_goodbye(str(error))
        if not isinstance(error, dist.DistError | OSError):
            raise
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.address}:{launch.port} "
            f"({str(error).splitlines()[0].rstrip('.')}): a rank has ended already and says why where it prints, or was not "
            "started, or looks elsewhere, or another job has that port; check the number of processes, MASTER_ADDR and "
            "MASTER_PORT"
        ) from error
    _joined = True


def _meet(launch: Launch, timeout_minutes: float) -> dist.Store:
    """The store of the job, once all its ranks have come."""
    global _store
    began = time.monotonic()
    deadline = began + 60 * timeout_minutes
    keeps_store = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def wait_for_first_rank(is_there: Callable[[], bool]) -> None:
        says = began + SAYS_EVERY
        while not is_there():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("rank 0 did not come")
            if now > says:
                says += SAYS_EVERY
                print(waiting(launch.rank, launch.world_size, listed([0]), began), file=sys.stderr, flush=True)
            time.sleep(0.05 if now < began + 5 else 0.5)

    if not keeps_store:
        wait_for_first_rank(lambda: answers(launch.address, launch.port))
    _store = store = dist.TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=keeps_store,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        wait_for_workers=False,  # which waits without a word; the lines tell who has come
        multi_tenant=keeps_store,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's own rendezvous has it
    )
    if launch.world_size > 1:
        key = f"megatron/lines/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_meetings)}"
        if launch.rank == 0:
            store.set(key, _open_exchange(launch.world_size))
        wait_for_first_rank(lambda: store.check([key]))
        _open_line(store.get(key).decode(), launch.rank, launch.world_size, [launch.address])
        if not _line.wait_until_all_have_come(deadline, SAYS_EVERY):
            raise TimeoutError(_line.lost or f"{_line.missing()} did not come")
    return store


def _open_line_of_adopted_job() -> None:
    """All ranks of such a job have met. Where calls end when a rank has gone, they can be told where the lines begin; elsewhere,
    and where the first rank cannot be reached in this way, the job goes without."""
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
    """Tell the lines that calls of the back end connect the ranks from now on."""
    if _line is not None:
        _line.all_have_met()


def lost_rank(seconds: float = 0.0) -> str | None:
    """ "rank 3 (on gpu07, process 4711) has ended without a word", if one has and this rank hears of it within `seconds`."""
    return None if _line is None else _line.what_was_lost(seconds)


def has_line() -> bool:
    """Whether this rank hears of the deaths of others."""
    return _line is not None


def say_goodbye(why: str | None = None) -> None:
    """Close this rank's line: its end, however it ends, is news to no other rank from now on."""
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
    """For a script that comes to its end without `stop_distributed`. One that ends in an error leaves its line to be found
    closed."""
    if not hasattr(sys, "last_type"):
        say_goodbye()


def stop_distributed() -> None:
    """Forget the mesh, and leave the job that `start_distributed` joined; a process group that the caller made stays.

    The groups must be gone before the interpreter ends: gloo's threads, found alive by then, abort the process.
    """
    global _joined
    say_goodbye()
    if (mesh := mesh_of_process()) is not None:
        for axis in mesh.values():
            if isinstance(axis.group, TorchGroup):
                axis.group.process_group = None
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
    """All ranks of the job, for agreeing in memory of the host on whether it can start: through the store, where the back end
    connects devices, since a rank that cannot start may have none, or that of another rank."""
    world = world_axis()
    if world.group is None or notices_lost_ranks():
        return world
    return dataclasses.replace(world, group=StoreGroup(job_store(), world.rank, world.size))


def shared_device_problem(device: str) -> str | None:
    """Why this rank cannot compute on the device of this name: another rank does, and a back end connects no device with
    itself."""
    if notices_lost_ranks():
        return None
    first = job_store().compare_set(f"megatron/device/{device}", "", str(launched_rank())).decode()
    if first == str(launched_rank()):
        return None
    return (
        f"rank {launched_rank()} and rank {first} compute on one device ({device}), which {dist.get_backend()} cannot connect "
        "with itself; start as many processes a machine as it has devices, or give each a device of its own"
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
