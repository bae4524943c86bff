"""Processes join and leave the job: rendezvous, torch.distributed, and the rank of this process."""

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
# argument, which keeps its threads alive after destroy_process_group. Seen in torch 2.13.
from megatron.core.base import rank_status, tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.collectives import Ledger, LostPeerError, StoreGroup, TorchGroup, broadcast_text
from megatron.core.parallel.detect_lost_ranks_by_tcp import (
    REPORT_SECONDS,
    LivenessClient,
    LivenessServer,
    RankRejectedError,
    answers,
    ranks_as_text,
    refuses,
    waiting_message,
)
from megatron.core.parallel.global_state import mesh_of_process, set_mesh_of_process
from megatron.core.parallel.launcher_environment import Launch, discover
from megatron.core.parallel.rank_grid import Axis

_joined = False  # whether start_distributed, not the caller, initialised torch.distributed
_client: LivenessClient | None = None  # this rank's connection to rank 0, while this process is in the job
_server: LivenessServer | None = None  # on rank 0
_store: dist.Store | None = None  # kept alive for ranks that come late
_LATE_RANK_SECONDS = 6.0  # for which rank 0 waits for ranks that come late, to tell them of a death
_AGENT_SECONDS = 5.0  # for torchrun's agent to answer: its store was there before its ranks
_rendezvous_numbers = itertools.count()  # of this process; equal on all ranks


def will_join() -> bool:
    """Return whether `start_distributed` will create a process group.

    It will if there is none, and a launcher started this process.
    """
    return not dist.is_initialized() and _needs_rendezvous(discover(os.environ))


def _needs_rendezvous(launch: Launch) -> bool:
    return launch.address is not None and (launch.world_size > 1 or launch.launcher == "torchrun")


def start_distributed(backend: str, timeout_minutes: float) -> None:
    """Join the job: adopt torch.distributed if the caller has initialised it, else follow the launcher.

    Every rank must call. `launcher_environment.py` reads the launcher's variables; a process without a launcher is a
    job of one rank, without torch.distributed. Ranks may come minutes apart; waiting ranks report the missing ranks
    every half minute. Raises ConfigError if ranks are missing after `timeout_minutes`, and LostPeerError if a rank dies
    in the meantime.
    """
    global _joined
    if dist.is_initialized():
        leave_at_exit()
        _connect_adopted_job()
        return
    launch = discover(os.environ)
    if not _needs_rendezvous(launch):
        return
    rank_status.enter("meeting the others")
    try:
        timeout = datetime.timedelta(minutes=timeout_minutes)
        store = _meet(launch, timeout)
        rank_status.enter("connecting")
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except (RuntimeError, OSError) as error:
        # A call of torch may fail before the message about the dead rank arrives.
        lost = lost_rank(seconds=0.0 if isinstance(error, OSError) else 1.0)
        if lost:
            raise LostPeerError(lost) from error
        say_goodbye(str(error))
        if not isinstance(error, dist.DistError | OSError):
            raise
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} did not find the other ranks at "
            f"{launch.address}:{launch.port} ({str(error).splitlines()[0].rstrip('.')}). Either a rank has failed "
            "(see its own output) or was not started, or its address differs, or another job uses the port. Check "
            "the number of processes, MASTER_ADDR and MASTER_PORT"
        ) from error
    _joined = True


def join_alone(backend: str = "gloo") -> None:
    """Initialise torch.distributed for a job of one process: scripts of Megatron core ask it for the rank."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _meet(launch: Launch, timeout: datetime.timedelta) -> dist.Store:
    """Wait for all ranks; return the job's store."""
    global _store
    began = time.monotonic()
    deadline = began + timeout.total_seconds()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = launch.rank == 0 and not by_agent

    def wait_for_rank_0(is_there: Callable[[], bool]) -> None:
        next_report = began + REPORT_SECONDS
        while not is_there():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("rank 0 did not come")
            if by_agent and now > began + _AGENT_SECONDS and refuses(launch.address, launch.port):
                raise ConnectionRefusedError("torchrun's agent, which runs the store, has ended")
            if now > next_report:
                next_report += REPORT_SECONDS
                message = waiting_message(launch.rank, launch.world_size, ranks_as_text([0]), began)
                tolerate_broken_output.print_stderr(message)
            time.sleep(0.05 if now < began + 5 else 0.5)

    # open the store, which rank 0 or torchrun's agent keeps
    if not keeps_store:
        wait_for_rank_0(lambda: answers(launch.address, launch.port))
    _store = store = dist.TCPStore(
        launch.address,
        launch.port,
        launch.world_size,
        is_master=keeps_store,
        timeout=timeout,
        wait_for_workers=False,  # the liveness connections wait instead, and report the missing ranks
        multi_tenant=keeps_store,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as in torch's own rendezvous
    )
    if launch.world_size == 1:
        return dist.PrefixStore(secrets.token_hex(8), store)

    # connect to rank 0, whose address is in the store
    key = f"megatron/lines/{next(_rendezvous_numbers)}"
    if launch.rank == 0:
        store.set(key, _open_server(launch.world_size))

    def connects_to_rank_0() -> bool:
        """Open the connection. A launcher's store outlives the ranks: it may hold the address of a dead rank 0."""
        if not store.check([key]):
            return False
        try:
            _open_client(store.get(key).decode(), launch.rank, launch.world_size, [launch.address])
        except OSError as error:
            if not by_agent or isinstance(error, RankRejectedError):
                raise
            return False
        return True

    wait_for_rank_0(connects_to_rank_0)

    # wait for the other ranks
    if not _client.wait_for_all_ranks(deadline, REPORT_SECONDS):
        raise TimeoutError(_client.lost or f"{_client.missing()} did not come")
    # The token separates this attempt from earlier ones of the same launcher: addresses of dead processes, reports of
    # failures.
    return dist.PrefixStore(_client.token, store)


def _connect_adopted_job() -> None:
    """Connect the ranks of a job that the caller has joined, if its backend notices lost ranks.

    The job does without liveness if rank 0 cannot be reached.
    """
    world = world_axis()
    if world.group is None or not notices_lost_ranks():
        return
    address = _open_server(world.size, awaits_all=False) if world.is_first else None
    address = broadcast_text(address, world)
    with contextlib.suppress(OSError):
        _open_client(address, world.rank, world.size, [os.environ.get("MASTER_ADDR", "localhost")])


def _open_server(ranks: int, *, awaits_all: bool = True) -> str:
    global _server
    _server = LivenessServer(ranks, awaits_all=awaits_all)
    return _server.address


def _open_client(address: str, rank: int, ranks: int, near: list[str]) -> None:
    global _client
    _client = LivenessClient(address, rank, ranks, near)
    atexit.register(_say_goodbye_at_exit)


def stop_tcp_probes() -> None:
    """Note that the backend connects the ranks from now on."""
    if _client is not None:
        _client.stop_tcp_probes()


def lost_rank(seconds: float = 0.0) -> str | None:
    """Return a message about a dead rank, if one arrives within `seconds`; else None.

    An example: "rank 3 (on gpu07, process 4711) has ended without a word".
    """
    return None if _client is None else _client.lost_rank(seconds)


def has_liveness() -> bool:
    """Return whether this rank learns of the death of other ranks."""
    return _client is not None


def say_goodbye(reason: str | None = None) -> None:
    """Close this rank's connection: the end of this process is no longer reported as a loss.

    reason: an error, if any.
    """
    global _client, _server, _store
    if _client is not None:
        _client.begin_leaving()
        if _server is not None:
            _server.tell_late_ranks(_LATE_RANK_SECONDS)
        _client.leave(reason)
        _client = None
    if _server is not None:
        _server.join(seconds=2.0)
        _server = None
    _store = None


def _say_goodbye_at_exit() -> None:
    """Leave a script that ends without `stop_distributed`. After an error no goodbye is said, and the end is a loss."""
    if not hasattr(sys, "last_type"):
        say_goodbye()


def stop_distributed() -> None:
    """Drop the mesh, and leave the job that `start_distributed` joined; a process group of the caller stays.

    Groups must be destroyed before the interpreter ends: gloo threads that are still alive abort the process.
    """
    global _joined
    say_goodbye()
    _drop_mesh()
    if _joined and dist.is_initialized():  # two functions that run at exit may both see to it
        _destroy_groups()
        _joined = False


def _drop_mesh() -> None:
    mesh = mesh_of_process()
    if mesh is not None:
        for axis in mesh.values():
            if isinstance(axis.group, TorchGroup):
                axis.group.process_group = None
        set_mesh_of_process(None)


def _destroy_groups() -> None:
    gc.collect()  # graphs of the last step hold axes in reference cycles
    dist.destroy_process_group()


def leave_at_exit() -> None:
    """Destroy process groups of the caller's that still exist when the interpreter ends: see `stop_distributed`."""
    atexit.unregister(_leave_what_the_caller_joined)
    atexit.register(_leave_what_the_caller_joined)


def _leave_what_the_caller_joined() -> None:
    if dist.is_initialized():
        _drop_mesh()
        _destroy_groups()


def available_backends() -> list[str]:
    """Return the backends of this torch build."""
    names = dist.Backend.backend_list if dist.is_available() else ()
    return [name for name in names if name not in ("undefined", "fake") and dist.is_backend_available(name)]


def has_joined() -> bool:
    """Return whether torch.distributed is initialised, by this module or by the caller."""
    return dist.is_initialized()


def backend_of(group: dist.ProcessGroup | None) -> str:
    """Return the backend of a group. None: the group of all ranks."""
    return dist.get_backend(group)


def notices_lost_ranks() -> bool:
    """Return whether a collective of the job's backend fails when a rank has died (gloo), instead of waiting."""
    return not dist.is_initialized() or dist.get_backend() == "gloo"


def job_store() -> dist.Store | None:
    """Return the job's key-value store; None for a job without torch.distributed."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def world_axis() -> Axis:
    """Return the axis of all ranks, for use before there is a mesh."""
    ranks = tuple(range(launched_world_size()))
    group = TorchGroup(dist.group.WORLD) if dist.is_initialized() and len(ranks) > 1 else None
    return Axis("world", ranks, launched_rank(), group, Ledger())


def agreement_axis() -> Axis:
    """Return the axis of all ranks, with collectives in host memory, for agreement before the start.

    If the backend works on devices, the collectives go through the store: a rank that cannot start may have no device,
    or that of another rank.
    """
    world = world_axis()
    if world.group is None or notices_lost_ranks():
        return world
    return dataclasses.replace(world, group=StoreGroup(job_store(), world.rank, world.size))


def shared_device_problem(device: str) -> str | None:
    """Return a message if another rank uses the device of this name; else None.

    NCCL and other device backends cannot connect a device with itself.
    """
    if notices_lost_ranks():
        return None
    # The first rank to ask becomes the owner.
    owner = job_store().compare_set(f"megatron/device/{device}", "", str(launched_rank())).decode()
    if owner == str(launched_rank()):
        return None
    return (
        f"rank {launched_rank()} and rank {owner} use the same device ({device}), which {dist.get_backend()} does not support; "
        "start at most one process per device, and give each process its own"
    )


def launched() -> Launch:
    """Return the launcher's variables; a job of one if they are invalid, which `start_distributed` refuses."""
    try:
        return discover(os.environ)
    except ConfigError:
        return Launch()


def launched_rank() -> int:
    """Return the global rank of this process, before or after the job is joined."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def launched_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


def launched_local_rank() -> int:
    """Return the rank within this node, which selects the device. Without a launcher, the global rank."""
    launch = launched()
    return launched_rank() if launch.launcher == "none" else launch.local_rank
