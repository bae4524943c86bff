"""Provide `deepspeed.comm`: initialization, and torch.distributed's collectives under DeepSpeed's names.

    init_distributed()   uses torch.distributed if the script has initialized it, else does so as the launcher says
    cdb                  the active backend: its name, rank and world size; None before `init_distributed`

Scripts call these collectives; this project does not. Each calls the one of torch.distributed and returns its result.
Every rank of the group must call; tensors have the same shape and dtype on all of them, unless a function says
otherwise. On a rank outside of the group nothing happens. All raise RuntimeError before `init_distributed`, TypeError
for a group of another type, and ValueError for an unknown `op`. In all of them

    group       a process group of torch (`new_group`), or an `Axis` of the mesh; default: all ranks
    op          torch's `ReduceOp`, a member of another enumeration with the same name, or the name
    src, dst    global ranks
    async_op    True: return a handle at once, whose `wait()` completes the call; False: the call is complete on return

`prof`, `log_name` and `debug` belong to DeepSpeed's communication log. That log is not built: they have no effect.
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

from megatron.core.base import rank_status, tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import init_and_destroy_distributed
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_mesh, model_parallel_is_initialized
from megatron.core.parallel.launcher_environment import discover
from megatron.core.parallel.rank_grid import Axis

ReduceOp = dist.ReduceOp
ProcessGroup = dist.ProcessGroup

_OPERATIONS = {
    name.lower(): getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_OPERATIONS |= {"prod": ReduceOp.PRODUCT, "mean": ReduceOp.AVG}

# ---------------------------------------------------------------- the job


class Backend:
    """The active backend. name: gloo, nccl, ...; was_adopted: the script had initialized it before."""

    def __init__(self, name: str, was_adopted: bool):
        self.name = name
        self.was_adopted = was_adopted

    @property
    def world(self) -> Axis:
        """The axis of all ranks."""
        if model_parallel_is_initialized():
            return get_mesh()["world"]
        return init_and_destroy_distributed.world_axis()

    def is_initialized(self) -> bool:
        return init_and_destroy_distributed.has_joined()

    def __repr__(self) -> str:
        initialized = "adopted" if self.was_adopted else "initialised here"
        return f"Backend({self.name}, {initialized}, rank {self.world.rank} of {self.world.size})"


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
    """Initialize torch.distributed, or use it if the script has initialized it.

    Every rank must call; later calls do nothing. Rank and world size come from the variables of torchrun, Open MPI,
    MPICH or SLURM (MASTER_ADDR included); without any of them, the process is a job of one rank.

        dist_backend          default: the backend of the device
        auto_mpi_discovery    False: ignore the variables of mpirun, mpiexec and srun; a process that one of them has
                              started then needs torchrun's variables
        distributed_port      the port of rank 0, unless MASTER_PORT is set
        verbose               print the backend, on the first rank
        timeout               of a collective
        dist_init_required    False: torch.distributed must be initialized already
        init_method, rank, world_size    accepted, without effect, only where torch.distributed is initialized already
        config                a ds_config; its communication log is not built

    Raises ConfigError if the backend is not available or torch.distributed is initialized with another one,
    RuntimeError for arguments that need an initialized torch.distributed.
    """
    global cdb
    if dist_backend:
        dist_backend = dist_backend.lower()  # as torch does
    was_initialized = init_and_destroy_distributed.has_joined()
    if was_initialized:
        _check_active_backend(dist_backend)
        if cdb is not None:
            return
    expects_initialized = dist_init_required is False or init_method is not None or rank >= 0 or world_size > 0
    if expects_initialized and not was_initialized:
        raise RuntimeError(
            "init_distributed(): dist_init_required=False, init_method, rank and world_size are only for a script "
            "that has already initialised torch.distributed, and this one has not; leave them out and start with "
            "torchrun"
        )
    device_backend = Device.select(local_rank=get_local_rank()).backend
    if not was_initialized:
        _check_backend_available(dist_backend, device_backend)
        _check_launcher(auto_mpi_discovery, distributed_port)
    tolerate_broken_output.keep_running(init_and_destroy_distributed.launched_rank())
    atexit.register(init_and_destroy_distributed.stop_distributed)
    if not was_initialized and not init_and_destroy_distributed.will_join():
        init_and_destroy_distributed.join_alone(dist_backend or "gloo")
    init_and_destroy_distributed.start_distributed(dist_backend or device_backend, timeout.total_seconds() / 60)
    cdb = Backend(init_and_destroy_distributed.backend_of(None), was_initialized)
    if verbose and cdb.world.is_first:
        print(f"deepspeed: {cdb}", flush=True)


def _check_backend_available(requested: str | None, device_backend: str) -> None:
    """Raise ConfigError for a backend that this process cannot use.

    device_backend: that of the device it computes on.
    """
    if requested is None or requested == device_backend:
        return
    names = [part.rpartition(":")[2] for part in requested.split(",")]  # "cpu:gloo,cuda:nccl" names two
    missing = [name for name in names if not dist.is_backend_available(name)]
    if not missing and device_backend == "gloo" and "gloo" not in names and "mpi" not in names:
        missing = names  # torch has them, but they need an accelerator, and this process computes on the CPU
    if missing:
        raise ConfigError(
            f"init_distributed(dist_backend={requested!r}): {', '.join(missing)} is not available; leave "
            f"dist_backend out, or give {device_backend!r}, the backend of this process's device"
        )


def _check_active_backend(requested: str | None) -> None:
    """Raise ConfigError if torch.distributed is initialized with another backend."""
    active = init_and_destroy_distributed.backend_of(None)
    if requested is None or requested == active:
        return
    names = str(dist.get_backend_config()).replace(",", ":").split(":")  # "cpu:gloo,cuda:nccl"
    if requested not in names:
        raise ConfigError(
            f"init_distributed(dist_backend={requested!r}): torch.distributed is already initialised with {active}; "
            f"leave dist_backend out, or initialise torch.distributed with {requested!r}"
        )


def _check_launcher(auto_mpi_discovery: bool, port: int | None) -> None:
    """Refuse a launcher whose variables must not be read; set MASTER_PORT for one that does not set it."""
    launcher = discover(os.environ).launcher
    if launcher in ("torchrun", "none"):
        return
    if not auto_mpi_discovery:
        raise ConfigError(
            f"init_distributed(auto_mpi_discovery=False): this process was started by {launcher}, whose variables "
            "are ignored with this argument; leave it out, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT, or start with torchrun"
        )
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(port))


def is_available() -> bool:
    return dist.is_available()


def is_initialized() -> bool:
    return cdb is not None and cdb.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy `group`; None: all groups, after which `init_distributed` may be called again."""
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
    """Configure the communication log, which is not built. Raises NotImplementedError if it is switched on."""
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
    """Return the group of these global ranks. Every rank of the job must call, in it or not."""
    _require_backend()
    return dist.new_group(list(ranks))


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks. Raises RuntimeError before `init_distributed`."""
    return _process_group(None)


def get_rank(group: ProcessGroup | Axis | None = None) -> int:
    """Return this rank's position in the group; -1 if it is not in it."""
    return group.rank if isinstance(group, Axis) else dist.get_rank(_process_group(group))


def get_world_size(group: ProcessGroup | Axis | None = None) -> int:
    """Return the number of ranks in the group; -1 if this rank is not in it."""
    return group.size if isinstance(group, Axis) else dist.get_world_size(_process_group(group))


def get_local_rank() -> int:
    return init_and_destroy_distributed.launched_local_rank()


def get_global_rank(group: ProcessGroup | Axis | None = None, group_rank: int = 0) -> int:
    """Return the global rank of the rank at position `group_rank` of the group."""
    return get_all_ranks_from_group(group)[group_rank]


def get_all_ranks_from_group(group: ProcessGroup | Axis | None = None) -> list[int]:
    """Return the global ranks of the group, in the order of their positions."""
    return list(group.ranks) if isinstance(group, Axis) else dist.get_process_group_ranks(_process_group(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return torch's device mesh. Every rank must call."""
    _require_backend()
    device = Device.select(local_rank=get_local_rank()).torch_device.type
    return dist.init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    """Return False: no function here uses torch's context manager that coalesces calls."""
    return False


def _require_backend() -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call init_distributed() first")


def _process_group(group: Any) -> ProcessGroup:
    """Return torch's group for a group, an axis, or None. Raises TypeError for anything else."""
    _require_backend()
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, Axis):
        if not isinstance(group, ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"group is a {type(group).__name__}; give a process group of torch's (new_group), an Axis of the mesh, or None"
            )
        return group
    if group.size == 1:
        return _group_of_this_rank()
    return group.group.process_group


@cache
def _group_of_this_rank() -> ProcessGroup:
    """Return a group of this rank alone: the mesh makes none for an axis of one rank."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _operation(op: Any) -> Any:
    """Return torch's operation. Raises ValueError for an unknown one, where DeepSpeed would compute a sum."""
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return op
    name = op.name if isinstance(op, Enum) else op
    if not isinstance(name, str) or name.lower() not in _OPERATIONS:
        raise ValueError(
            f"op={op!r} is not an operation; give one of torch.distributed.ReduceOp, or of {', '.join(_OPERATIONS)}"
        )
    return _OPERATIONS[name.lower()]


# ---------------------------------------------------------------- one call


class Handle:
    """A collective that has been issued."""

    def __init__(self, work: dist.Work, slot: int, finish: Callable[[], Any] | None):
        """slot: of the call in this rank's status page. finish: what `wait` does with the result."""
        self._work = work
        self._slot = slot
        self._finish = finish

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Complete the call. On an accelerator the current stream waits, not the host."""
        rank_status.begin_wait(self._slot)
        result = self._work.wait() if timeout is None else self._work.wait(timeout)
        rank_status.end_wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return result

    def is_completed(self) -> bool:
        """Return whether the call is complete; False also while `wait` still has to finish the result."""
        return self._finish is None and self._work.is_completed()


def _call(
    op: str,
    start: Callable[..., dist.Work | None],
    group: Any,
    tensors: Sequence[Tensor],
    async_op: bool,
    finish: Callable[[], Any] | None = None,
) -> Handle | None:
    """Issue a collective and, unless `async_op`, wait for it.

    op: the collective's name in reports of a hang. start: torch's function but for group and async_op. tensors: what
    this rank sends, for its size. finish: called once the result is there.
    """
    process_group = _process_group(group)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None  # as torch does on a rank outside of the group
    ranks = tuple(dist.get_process_group_ranks(process_group))
    slot = rank_status.issue(op, "script", ranks, sum(x.nbytes for x in tensors), -1)
    work = start(group=process_group, async_op=True)
    rank_status.end_wait()
    if work is None:
        return None
    handle = Handle(work, slot, finish)
    if async_op:
        return handle
    handle.wait()
    return None


def _reduction(op: Any, group: Any, result: Tensor, has_result: bool = True) -> tuple[Any, Callable[[], Any] | None]:
    """Return (the operation for torch, what is left to do with the result).

    Gloo has no mean: it computes a sum, which is divided on the ranks that have the result. Means of integers are
    rounded towards zero, as NCCL does.
    """
    operation = _operation(op)
    backend_has_mean = result.device.type != "cpu" and dist.get_backend(_process_group(group)) != "gloo"
    if operation != ReduceOp.AVG or backend_has_mean:
        return operation, None
    size = get_world_size(group)
    if not has_result:
        return ReduceOp.SUM, None
    is_integer = not (result.is_floating_point() or result.is_complex())
    return ReduceOp.SUM, partial(result.detach().div_, size, rounding_mode="trunc" if is_integer else None)


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
    """Reduce the tensor [..] over the ranks, in place; return it, or the handle if `async_op`."""
    operation, finish = _reduction(op, group, tensor)
    handle = _call("all_reduce", partial(dist.all_reduce, tensor, op=operation), group, [tensor], async_op, finish)
    return handle if async_op else tensor


def inference_all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    """Call `all_reduce` for the tensor [..]."""
    return all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> "Handles | None":
    """Call `all_reduce` for each tensor, of any shape [..]; in place."""
    return _wait_for_all([all_reduce(x, op, group, True) for x in tensors], async_op)


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
    """Reduce the tensor [..] over the ranks into that of the global rank `dst`.

    The others' values are undefined, as in torch.
    """
    operation, finish = _reduction(op, group, tensor, has_result=dist.get_rank() == dst)
    return _call("reduce", partial(dist.reduce, tensor, dst, op=operation), group, [tensor], async_op, finish)


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
    """Reduce [ranks x n, ...] over the ranks, and write this rank's part [n, ...] into `output_tensor`."""
    operation, finish = _reduction(op, group, output_tensor)
    start = partial(_reduce_scatter_single, output_tensor, tensor, op=operation)
    return _call("reduce_scatter", start, group, [tensor], async_op, finish)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> Handle | None:
    """Call `reduce_scatter_tensor`: [ranks x n, ...] -> [n, ...]."""
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
    """Reduce tensor i [..] of all ranks' lists into `output` [..] of the rank at position i."""
    operation, finish = _reduction(op, group, output)
    start = partial(dist.reduce_scatter, output, list(input_list), op=operation)
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
    """Copy the tensor [..] of the global rank `src` to the others; return it, or the handle if `async_op`."""
    handle = _call("broadcast", partial(dist.broadcast, tensor, src), group, [tensor], async_op)
    return handle if async_op else tensor


def broadcast_object_list(object_list: list[Any], src: int, group: Any = None, device: Any = None) -> None:
    """Copy the objects of the global rank `src` into the lists of the others.

    Ranks of a job trust each other's pickles.
    """
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
    """Gather the ranks' tensors [..] into the tensors [..] of the list, in the order of ranks."""
    return _call("all_gather", partial(dist.all_gather, list(tensor_list), tensor), group, [tensor], async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
    """Gather the ranks' objects into the list. Ranks of a job trust each other's pickles."""
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
    """Gather the ranks' tensors [n, ...] into `output_tensor` [ranks x n, ...]."""
    start = partial(_all_gather_single, output_tensor, tensor)
    return _call("all_gather", start, group, [tensor], async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Handle | None:
    """Call `all_gather_into_tensor`: [n, ...] -> [ranks x n, ...]."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> "Handles | None":
    """Call `all_gather_into_tensor` for each tensor: [n, ...] -> [ranks x n, ...]."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _wait_for_all([all_gather_into_tensor(out, x, group, True) for out, x in pairs], async_op)


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
    """Send part i of dimension 0 of the tensor [rows, ...] to the rank at position i.

    `output` [rows, ...] has the received parts, in rank order. output_split_sizes, input_split_sizes: rows of each
    part; default: equal parts.
    """
    splits = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    start = partial(dist.all_to_all_single, output, tensor, *splits)
    return _call("all_to_all", start, group, [tensor], async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Handle | None:
    """Send tensor i of the input list to the rank at position i, which receives it in its output list.

    Tensors may differ in shape; one is received in the shape in which it is sent. One transfer of flat tensors, since
    gloo has no all-to-all of lists; all tensors of a rank have one dtype.
    """
    flat_input = torch.cat([x.reshape(-1) for x in input_tensor_list])
    output_sizes = [x.numel() for x in output_tensor_list]
    input_sizes = [x.numel() for x in input_tensor_list]
    flat_output = torch.empty(sum(output_sizes), dtype=flat_input.dtype, device=flat_input.device)

    def unpack() -> None:
        for out, part in zip(output_tensor_list, flat_output.split(output_sizes)):
            out.detach().copy_(part.view_as(out))

    start = partial(dist.all_to_all_single, flat_output, flat_input, output_sizes, input_sizes)
    return _call("all_to_all", start, group, [flat_input], async_op, unpack)


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
    """Gather the ranks' tensors [..] into the list of the global rank `dst`, [..] each; the others pass no list."""
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
    """Send tensor i [..] of the global rank `src`'s list to `tensor` [..] of the rank at position i.

    The others pass no list.
    """
    return _call("scatter", partial(dist.scatter, tensor, scatter_list, src), group, [tensor], async_op)


# torch 2.13 renames these two and deprecates the old names; earlier releases have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handles:
    """Several collectives that have been issued."""

    def __init__(self, handles: Sequence[Handle]):
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def _wait_for_all(handles: Sequence[Handle | None], async_op: bool) -> Handles | None:
    """Wait for all handles; return them instead if `async_op`. None is the handle of a rank outside of the group."""
    issued = Handles([handle for handle in handles if handle is not None])
    if async_op:
        return issued
    issued.wait()
    return None


# ---------------------------------------------------------------- two ranks, and all of them


def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, **_: Any) -> None:
    """Send a tensor [..] to the global rank `dst`; return when it may be changed.

    `dst` must call `recv` or `irecv`; no other rank takes part.
    """
    dist.send(tensor, dst, group=_process_group(group), tag=tag)


def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **_: Any) -> int:
    """Receive a tensor [..] from the global rank `src`, default: any; return the sender.

    tensor: filled in place, in the shape in which it is sent. The sender must call `send` or `isend`.
    """
    return dist.recv(tensor, src, group=_process_group(group), tag=tag)


def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, **_: Any) -> dist.Work | None:
    """Start to send a tensor [..] as `send` does; it must not change before the returned work is complete."""
    return dist.isend(tensor, dst, group=_process_group(group), tag=tag)


def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **_: Any) -> dist.Work | None:
    """Start to receive a tensor [..] as `recv` does; it is filled when the returned work is complete."""
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
    """Wait as `barrier` does, with an error that names the ranks that did not call in time. For gloo alone."""
    dist.monitored_barrier(_process_group(group), timeout, wait_all_ranks)
