"""`deepspeed.comm`: joining the job, and the collectives of torch.distributed under DeepSpeed's names and arguments.

    init_distributed()    adopts torch.distributed if it is initialised, else follows the launcher; never initialises twice
    cdb                   the back end that is up: its name, rank and world size; None before `init_distributed`

The collectives are calls of the script, not of this project: each goes to torch.distributed, whose result it has. In all
of them

    group       a process group of torch's, for example of `new_group`, or an `Axis` of the mesh; default: all ranks
    op          an operation of `ReduceOp`, which is torch's, a member of another enumeration with the same name, or the name
    src, dst    global ranks
    async_op    True: return at once, a handle whose `wait()` completes the call; else the call has completed at its return

`prof`, `log_name` and `debug` belong to DeepSpeed's log of communication. That log is not built: they have no effect.
"""

import atexit
import datetime
import os
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.base import output_streams, rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import initialize_distributed
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_mesh, model_parallel_is_initialized
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.launcher_environment import discover

ReduceOp = dist.ReduceOp
ProcessGroup = dist.ProcessGroup

_OPERATIONS = {
    name.lower(): getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_OPERATIONS |= {"prod": ReduceOp.PRODUCT, "mean": ReduceOp.AVG}

# ---------------------------------------------------------------- the job


class Backend:
    """The back end that is up. name: gloo, nccl, ...; was_adopted: the script has initialised it."""

    def __init__(self, name: str, was_adopted: bool):
        self.name, self.was_adopted = name, was_adopted

    @property
    def world(self) -> Axis:
        """The axis of all ranks."""
        return get_mesh()["world"] if model_parallel_is_initialized() else initialize_distributed.world_axis()

    def is_initialized(self) -> bool:
        return initialize_distributed.has_joined()

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

    dist_backend: default that of the device. ConfigError if this torch does not have it on this machine, or if
    torch.distributed is up with another. auto_mpi_discovery: False: the variables of mpirun, mpiexec and srun are not
    followed, and a process that one of them has started needs torchrun's. distributed_port: where rank 0 listens, unless
    MASTER_PORT says so. dist_init_required: False: torch.distributed must be initialised already, else RuntimeError. The
    place in the job follows from the variables of torchrun, Open MPI, MPICH or SLURM (MASTER_ADDR included); a process
    without any is a job of one. init_method, rank, world_size: read only where torch.distributed is initialised already,
    and refused otherwise. config: a ds_config; its communication log is not built.
    """
    global cdb
    dist_backend = dist_backend and dist_backend.lower()  # as torch
    was_up = initialize_distributed.has_joined()
    if was_up:
        _check_backend_up(dist_backend)
    if cdb is not None and was_up:
        return
    if not was_up and (dist_init_required is False or init_method is not None or rank >= 0 or world_size > 0):
        raise RuntimeError(
            "init_distributed(): dist_init_required=False, init_method, rank and world_size are for a script that has "
            "initialised torch.distributed, which is adopted, and this one has not; leave them out and start with torchrun"
        )
    own = Device.select(local_rank=get_local_rank()).backend
    if not was_up:
        _check_backend_there(dist_backend, own)
        _follow_launcher(auto_mpi_discovery, distributed_port)
    output_streams.keep_running(initialize_distributed.launched_rank())
    atexit.register(initialize_distributed.stop_distributed)
    if not was_up and not initialize_distributed.will_join():
        initialize_distributed.join_alone(dist_backend or "gloo")
    initialize_distributed.start_distributed(dist_backend or own, timeout.total_seconds() / 60)
    cdb = Backend(initialize_distributed.backend_of(None), was_up)
    if verbose and cdb.world.is_first:
        print(f"deepspeed: {cdb}", flush=True)


def _check_backend_there(asked: str | None, own: str) -> None:
    """own: the back end of the device that this process computes on."""
    if asked is None or asked == own:
        return
    wanted = [part.rpartition(":")[2] for part in asked.split(",")]  # "cpu:gloo,cuda:nccl" names two
    missing = [name for name in wanted if not dist.is_backend_available(name)]
    if not missing and own == "gloo" and wanted != ["gloo"] and "gloo" not in wanted and "mpi" not in wanted:
        missing = wanted  # built in, but it works on accelerators alone, and this process computes on the CPU
    if missing:
        raise ConfigError(
            f"init_distributed(dist_backend={asked!r}): {', '.join(missing)} is not available here; leave it out, or give "
            f"{own!r}, the back end of this process's device"
        )


def _check_backend_up(asked: str | None) -> None:
    up = initialize_distributed.backend_of(None)
    if asked is not None and asked != up and asked not in str(dist.get_backend_config()).replace(",", ":").split(":"):
        raise ConfigError(
            f"init_distributed(dist_backend={asked!r}): torch.distributed is initialised already, with {up}; leave dist_backend "
            f"out, or initialise torch.distributed with {asked!r}"
        )


def _follow_launcher(auto_mpi_discovery: bool, port: int | None) -> None:
    launcher = discover(os.environ).launcher
    if launcher in ("torchrun", "none"):
        return
    if not auto_mpi_discovery:
        raise ConfigError(
            f"init_distributed(auto_mpi_discovery=False): this process was started by {launcher}, whose variables are then not "
            "followed; leave it out, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start "
            "with torchrun"
        )
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))


def is_available() -> bool:
    return dist.is_available()


def is_initialized() -> bool:
    return cdb is not None and cdb.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End `group`; None: all, after which `init_distributed` may be called again."""
    global cdb
    dist.destroy_process_group(group)
    if group is None:
        _group_of_this_rank.cache_clear()
        cdb = None


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Of the log of communication, which is not built. NotImplementedError if it is switched on."""
    if enabled:
        raise NotImplementedError(_NO_LOG)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    raise NotImplementedError(_NO_LOG)


_NO_LOG = (
    "DeepSpeed's log of communication is not built; use torch.profiler, or `engine.mesh.ledger.record()` for the calls of "
    "the engine"
)

# ---------------------------------------------------------------- groups and ranks


def new_group(ranks: Sequence[int]) -> ProcessGroup:
    """The group of these global ranks. Every rank of the job must call, in it or not."""
    _require_back_end()
    return dist.new_group(list(ranks))


def get_world_group() -> ProcessGroup:
    """The group of all ranks. RuntimeError while no back end is up."""
    return _process_group(None)


def get_rank(group: ProcessGroup | Axis | None = None) -> int:
    """This rank's position in the group; -1 if it is not in it."""
    return group.rank if isinstance(group, Axis) else dist.get_rank(_process_group(group))


def get_world_size(group: ProcessGroup | Axis | None = None) -> int:
    """The number of ranks in the group; -1 if this rank is not in it."""
    return group.size if isinstance(group, Axis) else dist.get_world_size(_process_group(group))


def get_local_rank() -> int:
    return initialize_distributed.launched_local_rank()


def get_global_rank(group: ProcessGroup | Axis | None = None, group_rank: int = 0) -> int:
    """The global rank of the rank at position `group_rank` of the group."""
    return get_all_ranks_from_group(group)[group_rank]


def get_all_ranks_from_group(group: ProcessGroup | Axis | None = None) -> list[int]:
    """The global ranks of the group, in the order of their positions."""
    return list(group.ranks) if isinstance(group, Axis) else dist.get_process_group_ranks(_process_group(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Torch's device mesh. Every rank must call."""
    _require_back_end()
    device = Device.select(local_rank=get_local_rank()).torch_device.type
    return dist.init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    """Torch's context manager that joins calls, which no function here uses."""
    return False


def _require_back_end() -> None:
    if not dist.is_initialized():
        raise RuntimeError("no back end is up; call init_distributed() first")


def _process_group(group: Any) -> ProcessGroup:
    _require_back_end()
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, Axis):
        if not isinstance(group, ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"group is a {type(group).__name__}; give a process group of torch's (new_group), an Axis of the mesh, or None"
            )
        return group
    return _group_of_this_rank() if group.size == 1 else group.group.process_group


@cache
def _group_of_this_rank() -> ProcessGroup:
    """The mesh makes no group for an axis of one rank."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _operation(op: Any) -> Any:
    """Torch's operation that `op` means. Raises ValueError rather than take an unknown one for a sum."""
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    name = op.name if isinstance(op, Enum) else op
    if not isinstance(name, str) or name.lower() not in _OPERATIONS:
        raise ValueError(
            f"op={op!r} is no operation; give one of torch.distributed.ReduceOp, or of {', '.join(_OPERATIONS)}"
        )
    return _OPERATIONS[name.lower()]


# ---------------------------------------------------------------- how a call is made


class Handle:
    """A call that has begun."""

    def __init__(self, work: dist.Work, slot: int, finish: Callable[[], Any] | None):
        self._work, self._slot, self._finish = work, slot, finish

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Complete the call. On an accelerator the compute stream waits, not the host."""
        rank_status.begin_wait(self._slot)
        result = self._work.wait() if timeout is None else self._work.wait(timeout)
        rank_status.end_wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return result

    def is_completed(self) -> bool:
        """False too while the result still has to be made by `wait`."""
        return self._finish is None and self._work.is_completed()


def _call(
    op: str,
    start: Callable[..., dist.Work | None],
    group: Any,
    tensors: Sequence[Tensor],
    async_op: bool,
    finish: Callable[[], Any] | None = None,
) -> Handle | None:
    """Start a call of torch's and, unless `async_op`, wait for it. op: its name where a hang is reported."""
    members = _process_group(group)
    if members is dist.GroupMember.NON_GROUP_MEMBER:
        return None  # as torch, which has nothing to do on a rank outside of the group
    ranks = tuple(dist.get_process_group_ranks(members))
    slot = rank_status.issue(op, "script", ranks, sum(x.nbytes for x in tensors), -1)
    work = start(group=members, async_op=True)
    rank_status.end_wait()
    if work is None:
        return None
    handle = Handle(work, slot, finish)
    if async_op:
        return handle
    handle.wait()
    return None


def _reduction(op: Any, group: Any, result: Tensor, here: bool = True) -> tuple[Any, Callable[[], Any] | None]:
    """(operation to ask torch for, what is left to do with the result). Gloo has no mean: a sum is divided, where it comes
    `here`. Means of integers are rounded towards zero, as NCCL does."""
    chosen = _operation(op)
    has_mean = result.device.type != "cpu" and dist.get_backend(_process_group(group)) != "gloo"
    if chosen != ReduceOp.AVG or has_mean:
        return chosen, None
    size = get_world_size(group)
    rounding = None if result.is_floating_point() or result.is_complex() else "trunc"
    return ReduceOp.SUM, partial(result.detach().div_, size, rounding_mode=rounding) if here else None


# ---------------------------------------------------------------- reductions


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Reduce the tensor over the ranks, in place; returns it, or the handle."""
    torchs, finish = _reduction(op, group, tensor)
    handle = _call("all_reduce", partial(dist.all_reduce, tensor, op=torchs), group, [tensor], async_op, finish)
    return handle if async_op else tensor


def inference_all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    return all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> "Handles | None":
    """`all_reduce` of each tensor."""
    return _together([all_reduce(x, op, group, True) for x in tensors], async_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = None,
) -> Handle | None:
    """Reduce the tensor over the ranks into that of `dst`. What the others' hold afterwards is not said, as in torch."""
    torchs, finish = _reduction(op, group, tensor, here=dist.get_rank() == dst)
    return _call("reduce", partial(dist.reduce, tensor, dst, op=torchs), group, [tensor], async_op, finish)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = None,
) -> Handle | None:
    """This rank's part, along dimension 0, of the reduction over the ranks, into `output_tensor`."""
    torchs, finish = _reduction(op, group, output_tensor)
    start = partial(_reduce_scatter_single, output_tensor, tensor, op=torchs)
    return _call("reduce_scatter", start, group, [tensor], async_op, finish)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> Handle | None:
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = None,
) -> Handle | None:
    """The reduction over the ranks of the tensors that lie at this rank's position of their lists, into `output`."""
    torchs, finish = _reduction(op, group, output)
    start = partial(dist.reduce_scatter, output, list(input_list), op=torchs)
    return _call("reduce_scatter", start, group, input_list, async_op, finish)


# ---------------------------------------------------------------- copies


def broadcast(
    tensor: Tensor,
    src: int,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: Any = None,
) -> Any:
    """Copy the tensor of the global rank `src` into those of the others; returns it, or the handle."""
    handle = _call("broadcast", partial(dist.broadcast, tensor, src), group, [tensor], async_op)
    return handle if async_op else tensor


def broadcast_object_list(object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
    """Copy the objects of the global rank `src` into the lists of the others. They go by pickle, between ranks of one
    job."""
    dist.broadcast_object_list(object_list, src, group=_process_group(group), device=device)


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: Any = None,
) -> Handle | None:
    """The ranks' tensors, into the tensors of the list."""
    return _call("all_gather", partial(dist.all_gather, list(tensor_list), tensor), group, [tensor], async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
    """The ranks' objects, into the list. They go by pickle, between ranks of one job."""
    dist.all_gather_object(object_list, obj, group=_process_group(group))


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> Handle | None:
    """The ranks' tensors, of one shape, one after the other."""
    start = partial(_all_gather_single, output_tensor, tensor)
    return _call("all_gather", start, group, [tensor], async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Handle | None:
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> "Handles | None":
    """`all_gather_into_tensor` of each tensor."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([all_gather_into_tensor(out, x, group, True) for out, x in pairs], async_op)


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = None,
) -> Handle | None:
    """Part i of dimension 0 goes to the rank at position i; `output` has the parts that came, in rank order. Default: equal
    parts."""
    splits = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    start = partial(dist.all_to_all_single, output, tensor, *splits)
    return _call("all_to_all", start, group, [tensor], async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Handle | None:
    """Tensor i of the second list goes to the rank at position i, into the first list there. One transfer of flat tensors,
    since gloo has none of lists; all tensors of a rank have one dtype."""
    sent = torch.cat([x.reshape(-1) for x in input_tensor_list])
    came = torch.empty(sum(x.numel() for x in output_tensor_list), dtype=sent.dtype, device=sent.device)
    sizes = [[x.numel() for x in tensors] for tensors in (output_tensor_list, input_tensor_list)]

    def unpack() -> None:
        for out, part in zip(output_tensor_list, came.split(sizes[0])):
            out.detach().copy_(part.view_as(out))

    start = partial(dist.all_to_all_single, came, sent, *sizes)
    return _call("all_to_all", start, group, [sent], async_op, unpack)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: Any = None,
) -> Handle | None:
    """The ranks' tensors, into the list of the global rank `dst`; the others give none."""
    return _call("gather", partial(dist.gather, tensor, gather_list, dst), group, [tensor], async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: Any = None,
) -> Handle | None:
    """Tensor i of the list of the global rank `src`, into `tensor` of the rank at position i; the others give none."""
    return _call("scatter", partial(dist.scatter, tensor, scatter_list, src), group, [tensor], async_op)


# torch 2.13 renames these two and deprecates the old names; earlier releases have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handles:
    """Several calls that have begun."""

    def __init__(self, handles: Sequence[Handle]):
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def _together(handles: Sequence[Handle | None], async_op: bool) -> Handles | None:
    begun = Handles([handle for handle in handles if handle is not None])
    if async_op:
        return begun
    begun.wait()
    return None


# ---------------------------------------------------------------- two ranks, and all of them


def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, **_: Any) -> None:
    """Send to the global rank `dst`; returns when the tensor may be changed."""
    dist.send(tensor, dst, group=_process_group(group), tag=tag)


def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **_: Any) -> int:
    """Receive from the global rank `src`, or from any; returns the sender."""
    return dist.recv(tensor, src, group=_process_group(group), tag=tag)


def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, **_: Any) -> dist.Work | None:
    return dist.isend(tensor, dst, group=_process_group(group), tag=tag)


def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **_: Any) -> dist.Work | None:
    return dist.irecv(tensor, src, group=_process_group(group), tag=tag)


def barrier(
    group: ProcessGroup | Axis | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = None,
) -> Handle | None:
    """Block until every rank of the group has called."""
    ids = None if device_ids is None else list(device_ids)
    return _call("barrier", partial(dist.barrier, device_ids=ids), group, [], async_op)


def monitored_barrier(
    group: Any = None, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False, **_: Any
) -> None:
    """`barrier` that names the ranks which have not come in time. Gloo's alone."""
    dist.monitored_barrier(_process_group(group), timeout, wait_all_ranks)
