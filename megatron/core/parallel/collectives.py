"""All collectives and point-to-point transfers run here, each over an `Axis` and recorded in a ledger.

This is the only file that calls torch.distributed communication (`initialize_model_parallel.py` creates the groups). On
an axis of one rank a function returns at once, so callers need no special case. `start_*` returns an `AsyncHandle`
whose `wait()` gives the result; the tensors of a call must not be read or written before `wait()`. `wait()` raises
LostPeerError if another rank is lost.

    with mesh.ledger.record() as calls:
        train_step()
    Counter((c.op, c.axis) for c in calls)      {("all_reduce", "tp"): 8, ...}

What each collective does on an axis of two ranks (| separates the ranks, n is the size of dimension 0):

    all_reduce        a | b                ->    a+b | a+b                    in place
    all_gather        a | b                ->    [a b] | [a b]                [n, ...] -> [2 n, ...]
    reduce_scatter    [a0 a1] | [b0 b1]    ->    a0+b0 | a1+b1                [n, ...] -> [n / 2, ...]
    all_to_all        [a0 a1] | [b0 b1]    ->    [a0 b0] | [a1 b1]            [n, ...] -> [n, ...]
    all_to_all_v      the same with parts of any lengths                      [n, ...] -> [received, ...]
    broadcast         a | b                ->    a | a                        in place, from position 0
    shift             a | b                ->    b | a                        to the next rank, the last to the first
"""

import contextlib
import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron.core.base import rank_status
from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.dataclass_flags import ProblemsError
from megatron.core.parallel.rank_grid import Axis

# ---------------------------------------------------------------- the ledger


class Call(NamedTuple):
    """One collective as this rank issued it."""

    op: str
    axis: str
    bytes: int  # of the local input tensor; of all_to_all_v without the part that stays on this rank
    ranks: int  # on the axis


class Ledger:
    """The record of one mesh's calls.

    flight_recorder: the last `keep` calls, for a report of a hang. `record` lists all calls of a block.
    profiled: while it is set, each call and each wait is a range in torch's profiler.
    listener: called with (call, its input, is_result=False), and once the call is done with (call, its result,
        is_result=True).
    """

    def __init__(self, keep: int = 256):
        self.flight_recorder: deque[Call] = deque(maxlen=keep)
        self.profiled = False
        self.listener: Callable[..., None] | None = None
        self._open: list[list[Call]] = []

    def note(self, call: Call) -> None:
        """Record a call in the ring, and in the lists of all open `record` blocks."""
        self.flight_recorder.append(call)
        for calls in self._open:
            calls.append(call)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Call]]:
        """List the calls that this rank issues inside the block."""
        calls: list[Call] = []
        self._open.append(calls)
        try:
            yield calls
        finally:
            self._open.remove(calls)


def bytes_sent(call: Call) -> float:
    """Return the bytes that this rank sends with a bandwidth-optimal algorithm (Patarasuk and Yuan 2009)."""
    n = call.ranks
    size = call.bytes
    share = (n - 1) / n
    return {
        "all_reduce": 2 * share * size,
        "all_gather": (n - 1) * size,  # the input is one shard
        "reduce_scatter": share * size,  # the input is the full tensor
        "all_to_all": share * size,
        "all_to_all_v": size,
        "broadcast": share * size,
        "send": size,
        "recv": 0,
    }[call.op]


# ---------------------------------------------------------------- process groups


class Communicator(Protocol):
    """The communicator of an axis: torch.distributed in a job, a test double in tests. Calls start and do not wait.

    Every rank of the group must make each collective call, with tensors of one shape. Tensors are contiguous, and `out`
    shares no memory with x.
    """

    def all_reduce(self, x: Tensor, op: str) -> AsyncHandle[Any]:
        """Sum x over the ranks in place, or take the maximum with op "max". x: any shape."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """Concatenate the ranks' x [n, ...] along dimension 0 into out [size n, ...]."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """Sum x [n, ...] over the ranks; out [n / size, ...] is this rank's shard of dimension 0."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """Send part i of x [n, ...] to rank i; out [n, ...] has the received parts in rank order."""
        ...

    def all_to_all_v(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> AsyncHandle[Any]:
        """The same with sent[i] rows for rank i and received[i] rows of it; x and out: as many rows, contiguous."""
        ...

    def broadcast(self, x: Tensor, source: int) -> AsyncHandle[Any]:
        """Copy x of position `source` into x of the others. x: any shape."""
        ...

    def shift(self, out: Tensor, x: Tensor, to: int, source: int) -> AsyncHandle[Any]:
        """Send x to one rank and receive out from another. x and out: one shape, equal on all ranks."""
        ...

    def send(self, x: Tensor, to: int) -> AsyncHandle[Any]:
        """Send x, of any shape, to a rank, which must call `recv`."""
        ...

    def recv(self, x: Tensor, source: int) -> AsyncHandle[Any]:
        """Receive x, of the shape and dtype that the rank `source` sends."""
        ...


# torch 2.13 renames these two and deprecates the old names; earlier releases have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class PeerError(ProblemsError, RuntimeError):
    """Another rank failed; the message is that rank's.

    problems: those that the error of that rank lists; empty if it lists none.
    """

    def __init__(self, message: str = "", problems: Sequence[str] = ()):
        super().__init__(message)
        self.problems = list(problems)


class LostPeerError(PeerError):
    """Contact with another rank is lost; this rank does not know the reason."""


class as_peer_error:
    """Turn an error of torch.distributed into LostPeerError.

    Usually the other rank has died, and its own error tells why. An error of this rank's device may surface in any
    later call, and is raised unchanged: out of memory, a failed kernel, two ranks on one device. NCCL reports the death
    of another rank as ncclRemoteError.
    """

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            return
        if "NCCL error" in str(error) and "ncclRemoteError" not in str(error):
            return
        reason = re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0])  # without torch's own file and line
        raise LostPeerError(f"lost the connection to another rank: {reason}") from error


class TorchGroup:
    """A torch.distributed process group as a `Communicator`.

    Peers are positions within the group, not global ranks. Calls and their `wait()` raise LostPeerError if a
    rank is lost.
    """

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group

    def _start(self, call: Callable[..., dist.Work], *tensors: Tensor, **options: Any) -> AsyncHandle[None]:
        """Start a call of torch.distributed. On an accelerator `wait` blocks the compute stream, not the host."""
        try:
            work = call(*tensors, group=self.process_group, **options)
        except RuntimeError:
            with as_peer_error():
                raise
        return AsyncHandle(partial(_wait_for, work))

    def all_reduce(self, x: Tensor, op: str) -> AsyncHandle[Any]:
        """x: any shape, in place"""
        return self._start(dist.all_reduce, x, op=_OPS[op], async_op=True)

    def all_gather(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """x: [n, ...] -> out: [size n, ...]"""
        return self._start(_all_gather_single, out, x, async_op=True)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """x: [n, ...] -> out: [n / size, ...]"""
        if x.device.type == "cpu" and self.process_group.size() == 2:
            return self._sum_of_two(out, x)
        return self._start(_reduce_scatter_single, out, x, async_op=True)

    def _sum_of_two(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """Reduce-scatter x [2 n, ...] over two ranks into out [n, ...], by an all-to-all.

        The result has the bits of gloo's own reduce-scatter. gloo all-reduces a copy instead, which sends twice the
        bytes. Three or more terms would be added in another order than the all-reduce of ZeRO stage 0 adds them.
        """
        parts = torch.empty_like(x)  # [2 n, ...]: this rank's shard of `x` on both ranks
        exchange = self.all_to_all(parts, x)

        def finish() -> None:
            exchange.wait()
            half = out.shape[0]
            torch.add(parts[:half], parts[half:], out=out)  # [n, ...]

        return AsyncHandle(finish)

    def all_to_all(self, out: Tensor, x: Tensor) -> AsyncHandle[Any]:
        """x: [n, ...] -> out: [n, ...]; size must divide n"""
        return self._start(dist.all_to_all_single, out, x, async_op=True)

    def all_to_all_v(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> AsyncHandle[Any]:
        """x: [sum of sent, ...] -> out: [sum of received, ...]"""
        splits = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
        return self._start(dist.all_to_all_single, out, x, async_op=True, **splits)

    def broadcast(self, x: Tensor, source: int) -> AsyncHandle[Any]:
        """x: any shape, in place"""
        return self._start(dist.broadcast, x, group_src=source, async_op=True)

    def shift(self, out: Tensor, x: Tensor, to: int, source: int) -> AsyncHandle[Any]:
        """Send `x` to one rank and receive `out`, of the same shape, from another, as one batch.

        NCCL runs a communicator's transfers in order, and in a ring bare sends would wait for each other.
        """
        group = self.process_group
        buffer = self._receive_buffer(out)
        send = dist.P2POp(dist.isend, self._send_buffer(x), group=group, group_peer=to)
        receive = dist.P2POp(dist.irecv, buffer, group=group, group_peer=source)
        with as_peer_error():
            works = dist.batch_isend_irecv([send, receive])
        return _then_copy(AsyncHandle(lambda: [_wait_for(work) for work in works]), buffer, out)

    def send(self, x: Tensor, to: int) -> AsyncHandle[Any]:
        """x: any shape"""
        return self._start(dist.isend, self._send_buffer(x), group_dst=to)

    def recv(self, x: Tensor, source: int) -> AsyncHandle[Any]:
        """x: any shape, that of the sender"""
        buffer = self._receive_buffer(x)
        return _then_copy(self._start(dist.irecv, buffer, group_src=source), buffer, x)

    def _send_buffer(self, x: Tensor) -> Tensor:
        return x.cpu() if sends_from_host(self.process_group, x) else x

    def _receive_buffer(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype) if sends_from_host(self.process_group, x) else x


def sends_from_host(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Return whether a transfer of x, of any shape, to one rank goes through host memory.

    gloo takes device tensors only in collectives.
    """
    return x.device.type != "cpu" and dist.get_backend(group) == "gloo"


def _then_copy(receiving: AsyncHandle[Any], buffer: Tensor, out: Tensor) -> AsyncHandle[Any]:
    """Return a handle that also copies a buffer in host memory to `out`."""
    return receiving if buffer is out else AsyncHandle(lambda: (receiving.wait(), out.copy_(buffer)))


def _wait_for(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError:
        with as_peer_error():
            raise


class StoreGroup:
    """Collectives of a few numbers in host memory through the job's store, before ranks have selected devices.

    Rank 0 reduces for all ranks, so n ranks make 3 n requests. All groups of a process share one call counter: every
    rank must make its calls in the same order. Calls raise LostPeerError if the store is lost, or a rank does not come
    within its timeout.
    """

    _calls = itertools.count()

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store = store
        self._rank = rank
        self._size = size

    def all_reduce(self, x: Tensor, op: str) -> AsyncHandle[Any]:
        """Sum `x` over the ranks (or take the "max"), in place. x: any shape, on the CPU. Every rank must call."""
        key = self._put(x)
        if self._rank == 0:
            parts = torch.stack([self._get(f"{key}/{rank}", x) for rank in range(self._size)])  # [ranks, ...]
            result = parts.sum(0) if op == "sum" else parts.amax(0)
            self._store.set(key, result.numpy().tobytes())
        x.copy_(self._get(key, x))
        return done()

    def broadcast(self, x: Tensor, source: int) -> AsyncHandle[Any]:
        """Copy `x` of the rank `source` into `x` of the others. x: any shape, on the CPU. Every rank must call."""
        key = self._put(x)
        x.copy_(self._get(f"{key}/{source}", x))
        return done()

    def _put(self, x: Tensor) -> str:
        key = f"megatron/agreement/{next(self._calls)}"
        with as_peer_error():
            self._store.set(f"{key}/{self._rank}", x.numpy().tobytes())
        return key

    def _get(self, key: str, x: Tensor) -> Tensor:
        """Return the tensor under a key. Blocks until it exists, at most for the store's timeout."""
        with as_peer_error():
            data = bytearray(self._store.get(key))
        return torch.frombuffer(data, dtype=x.dtype).view(x.shape) if data else x


def _issue(
    op: str,
    axis: Axis,
    x: Tensor,
    start: Callable[[], AsyncHandle[Any]],
    result: Tensor | None = None,
    peer: int = -1,
    num_bytes: int | None = None,
) -> AsyncHandle[Tensor]:
    """Record the call and start it. result: the output tensor; default: `x`. peer: the other rank of a transfer.

    num_bytes: of the call; default: of `x`.
    """
    # record the call: in the ledger, in this rank's status page, and for the ledger's listener
    ledger = axis.ledger
    call = Call(op, axis.name, x.nbytes if num_bytes is None else num_bytes, axis.size)
    ledger.note(call)
    slot = rank_status.issue(op, axis.name, axis.ranks, call.bytes, peer)
    result = x if result is None else result
    if ledger.listener is not None:
        ledger.listener(call, x, is_result=False)

    # start it
    if ledger.profiled:
        with record_function(f"{op} {axis.name} ({call.bytes} bytes)"):
            work = start()
    else:
        work = start()
    rank_status.end_wait()

    def finish() -> Tensor:
        rank_status.begin_wait(slot)
        if ledger.profiled:
            with record_function(f"wait for {op} {axis.name}"):
                work.wait()
        else:
            work.wait()
        rank_status.end_wait()
        if ledger.listener is not None:
            ledger.listener(call, result, is_result=True)
        return result

    return AsyncHandle(finish, result, x)


# ---------------------------------------------------------------- collectives: every rank of the axis must call


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> AsyncHandle[Tensor]:
    """Start to sum `x` over the axis (or take the "max"), in place. x: any shape, contiguous.

    Every rank of the axis must call.
    """
    if axis.size == 1:
        return done(x)
    return _issue("all_reduce", axis, x, lambda: axis.group.all_reduce(x, op))


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Sum `x` over the axis (or take the "max"), in place. x: any shape, contiguous.

    Every rank of the axis must call.
    """
    return start_all_reduce(x, axis, op).wait()


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> AsyncHandle[Tensor]:
    """Start to concatenate the ranks' `x` along dimension 0, into `out` if given: [n, ...] -> [size n, ...].

    x has the same shape on every rank. `out` must be contiguous and share no memory with x. On an axis of one rank the
    result is x, and `out` is not written. Every rank of the axis must call.
    """
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))  # [size n, ...]
    return _issue("all_gather", axis, x, lambda: axis.group.all_gather(out, x), out)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' `x` along `dim`: [n, ...] -> [size n, ...] for dimension 0.

    x has the same shape on every rank. Every rank of the axis must call.
    """
    if axis.size == 1:
        return x
    if dim % x.dim() == 0:
        return start_all_gather(x, axis).wait()
    # The collective concatenates dimension 0: move `dim` there and back.
    return start_all_gather(x.movedim(dim, 0), axis).wait().movedim(0, dim).contiguous()


def start_reduce_scatter(x: Tensor, axis: Axis) -> AsyncHandle[Tensor]:
    """Start to sum `x` over the axis; the result is this rank's shard of dimension 0: [n, ...] -> [n / size, ...].

    Every rank of the axis must call. Raises ValueError if the ranks do not divide n.
    """
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    shard = local_slice(x.shape[0], axis)
    out = x.new_empty((shard.stop - shard.start, *x.shape[1:]))  # [n / size, ...]
    return _issue("reduce_scatter", axis, x, lambda: axis.group.reduce_scatter(out, x), out)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over the axis, and return this rank's shard of dimension 0: [n, ...] -> [n / size, ...].

    Every rank of the axis must call. Raises ValueError if the ranks do not divide n.
    """
    return start_reduce_scatter(x, axis).wait()


def start_reduce_scatter_in(dtype: torch.dtype, x: Tensor, axis: Axis) -> AsyncHandle[Tensor]:
    """Start a reduce-scatter that accumulates in `dtype`, always in rank order: [n, ...] -> [n / size, ...].

    Every rank of the axis must call. Raises ValueError if the ranks do not divide n. On an axis of one rank the result
    is x. An all-to-all sends each shard once in x's dtype: the same traffic, without rounding the partial sums.
    """
    if axis.size == 1:
        return done(x)
    local_slice(x.shape[0], axis)  # raises if dimension 0 is not divisible
    x = x.contiguous()
    out = torch.empty_like(x)  # [n, ...]: this rank's shard of `x` on every rank
    exchange = _issue("all_to_all", axis, x, lambda: axis.group.all_to_all(out, x), out)

    def sum_in_rank_order() -> Tensor:
        parts = exchange.wait().chunk(axis.size)  # each [n / size, ...]
        total = parts[0].to(dtype)
        for part in parts[1:]:
            total.add_(part)
        return total

    return AsyncHandle(sum_in_rank_order, out)


def start_broadcast(x: Tensor, axis: Axis, source: int = 0) -> AsyncHandle[Tensor]:
    """Start to copy `x` of the rank at position `source` into `x` of the others. x: any shape, contiguous.

    Every rank of the axis must call.
    """
    if axis.size == 1:
        return done(x)
    return _issue("broadcast", axis, x, lambda: axis.group.broadcast(x, source))


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Copy `x` of the rank at position `source` into `x` of the others, and return it. x: any shape, contiguous.

    Every rank of the axis must call.
    """
    return start_broadcast(x, axis, source).wait()


def start_all_to_all(x: Tensor, axis: Axis) -> AsyncHandle[Tensor]:
    """Start to send the i-th equal part of dimension 0 to the rank at position i. The result: the received parts in rank order.

    x and result: [n, ...], n a multiple of the axis size. Every rank of the axis must call.
    """
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    return _issue("all_to_all", axis, x, lambda: axis.group.all_to_all(out, x), out)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Exchange equal parts with every rank, as `start_all_to_all`: [n, ...] -> [n, ...]. Every rank of the axis must call."""
    return start_all_to_all(x, axis).wait()


def start_all_to_all_v(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> AsyncHandle[Tensor]:
    """Start to send sent[i] rows of `x` to the rank at position i, and to receive received[i] rows of it.

    x: [sum of sent, ...], the rows for each rank in rank order. The result is [sum of received, ...], in rank order. Every
    rank of the axis must call; the number that one rank sends another must be the number that the other receives.
    Raises ValueError if the numbers are not one for each rank, or not the rows of x.
    """
    if len(sent) != axis.size or len(received) != axis.size or sum(sent) != x.shape[0]:
        raise ValueError(
            f"all_to_all_v over the {axis.size} ranks of axis {axis.name}: sends {list(sent)} of {x.shape[0]} rows, "
            f"receives {list(received)}; each must have one number of rows for each rank, and `sent` those of x in all"
        )
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    out = x.new_empty((sum(received), *x.shape[1:]))
    row_bytes = x[:1].nbytes if x.shape[0] else 0
    return _issue(
        "all_to_all_v",
        axis,
        x,
        lambda: axis.group.all_to_all_v(out, x, received, sent),
        out,
        num_bytes=(x.shape[0] - sent[axis.rank]) * row_bytes,
    )


def all_to_all_v(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange rows with every rank, as `start_all_to_all_v`: [sum of sent, ...] -> [sum of received, ...].

    Every rank of the axis must call.
    """
    return start_all_to_all_v(x, axis, sent, received).wait()


def local_slice(size: int, axis: Axis) -> slice:
    """Return this rank's equal shard of a dimension of `size`, as a slice. ValueError if the ranks do not divide it."""
    if size % axis.size:
        raise ValueError(f"a dimension of {size} must be divisible by the {axis.size} ranks of axis {axis.name}")
    length = size // axis.size
    return slice(axis.rank * length, (axis.rank + 1) * length)


# ---------------------------------------------------------------- transfers between two ranks of an axis


def start_send(x: Tensor, axis: Axis, to: int) -> AsyncHandle[Tensor]:
    """Start to send `x`, of any shape, to the rank at position `to`, which must call `start_recv`.

    Transfers between two ranks arrive in the order sent.
    """
    x = x.contiguous()
    return _issue("send", axis, x, lambda: axis.group.send(x, to), peer=axis.ranks[to])


def start_shift(x: Tensor, axis: Axis) -> AsyncHandle[Tensor]:
    """Start to send `x` to the next rank of the axis, the last to the first; the result is that of the rank before.

    x has any shape, equal on every rank. Every rank of the axis must call.
    """
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    to = (axis.rank + 1) % axis.size
    source = (axis.rank - 1) % axis.size
    return _issue("send", axis, x, lambda: axis.group.shift(out, x, to, source), out)


def start_recv(x: Tensor, axis: Axis, source: int) -> AsyncHandle[Tensor]:
    """Start to receive into `x`, of any shape, from the rank at position `source`, which must call `start_send`.

    x is contiguous. Shape and dtype must equal the sender's.
    """
    return _issue("recv", axis, x, lambda: axis.group.recv(x, source), peer=axis.ranks[source])


# ---------------------------------------------------------------- agreement


@contextlib.contextmanager
def raise_together(axis: Axis, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block that may fail on some ranks only, such as reading a file; if it fails anywhere, every rank raises.

    A failed rank raises its own error, the others a `PeerError` with the message of the first failed rank, so that no
    rank waits in a collective that a failed rank never reaches. Every rank of the axis must enter. The block must not
    communicate with a rank that may fail in it. Costs one all-reduce of one number, and acts as a barrier.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if axis.size > 1:
        # find the first failed rank: it has the largest number, and 0 means that none failed
        number = 0 if error is None else axis.size - axis.rank
        number = int(all_reduce(torch.tensor([number], device=device), axis, "max").item())

        # raise its message on the ranks that have not failed
        if number:
            source = axis.size - number
            listed = error.problems if isinstance(error, ProblemsError) else []
            text = broadcast_text(json.dumps([str(error), listed]), axis, device, source)
            if error is None:
                message, listed = json.loads(text)
                peer = f"rank {axis.ranks[source]}"
                raise PeerError(f"{peer}: {message}", [f"{peer}: {problem}" for problem in listed])
    if error is not None:
        raise error


def broadcast_text(text: str | None, axis: Axis, device: torch.device | str = "cpu", source: int = 0) -> str:
    """Return the text of the rank at position `source`, on every rank of the axis. Every rank must call."""
    data = (text or "").encode()
    length = broadcast(torch.tensor([len(data)], dtype=torch.int64, device=device), axis, source)
    x = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)  # [bytes]
    if axis.rank == source and data:  # torch.frombuffer refuses an empty buffer
        x.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return broadcast(x, axis, source).cpu().numpy().tobytes().decode()


def all_gather_texts(text: str, axis: Axis, device: torch.device | str = "cpu") -> list[str]:
    """Return the texts of all ranks of the axis, in rank order, on every rank. Every rank must call."""
    data = text.encode()
    length = all_reduce(torch.tensor([len(data)], dtype=torch.int64, device=device), axis, "max")
    padded = torch.zeros(1, int(length.item()), dtype=torch.uint8, device=device)  # [1, longest text]
    if data:  # torch.frombuffer refuses an empty buffer
        padded[0, : len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    gathered = all_gather(padded, axis).cpu()  # [ranks, longest text]
    return [row.numpy().tobytes().rstrip(b"\0").decode() for row in gathered]


def barrier(axis: Axis, device: torch.device | str = "cpu") -> None:
    """Block the host until every rank of the axis has called, as every rank must."""
    all_reduce(torch.zeros(1, dtype=torch.int64, device=device), axis).item()


def fingerprint(text: str) -> int:
    """Return a 63-bit hash of a text, so that ranks can compare texts by one number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
