"""Test double: the ranks of a job as threads of one process, so that parallel code is tested in milliseconds on a CPU.

    losses = run_ranks({"tp": 2, "pp": 2, "dp": 2}, lambda mesh: train(mesh))       one result per rank

Two kinds of group. One completes a call when it starts. The other (`delayed=True`) completes it at `wait()`, as late as a network
may: until then a result is filled with NaN (integers with their smallest value), and what is sent or gathered is read from the
caller's own tensor, so that touching either before the wait is loud. A receive is always of the second kind: it is posted before
the send. In both, a call that nobody waits for is an error at the end. A call that the other ranks do not join fails as soon as
no rank can run, and says which call each rank is in.

One rank runs at a time, and hands over to one other where it waits: the same order in every run. Threads that all want the
interpreter would pass it on at every operator, which costs more than the operators.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core import parallel_state
from megatron.core.parallel.mesh import Mesh, build_mesh
from megatron.core.parallel.parallel_config import ORDER
from megatron.core.parallel.rank_grid import AxisSizes
from megatron.core.parallel.stage_to_rank import StageMap

_NAME = "rank "  # of a thread


class _Turns:
    """Which rank runs. Whoever calls has the turn, so that nothing changes under its hands but in `wait`."""

    def __init__(self, ranks: int):
        self.able = deque(range(ranks))
        self.waiting: dict[int, tuple[object, str]] = {}  # rank -> (where, for which call)
        self.stuck: dict[int, str] = {}  # the same once no rank is able
        self.failed = False  # a rank has raised an error
        self._gates = [threading.Lock() for _ in range(ranks)]
        for gate in self._gates:
            gate.acquire()

    def enter(self, rank: int) -> None:
        """Block until this rank has the turn."""
        self._gates[rank].acquire()

    def hand_over(self) -> None:
        """Let the next rank run. The caller waits, or has ended."""
        if not self.able:
            self.stuck = {rank: call for rank, (_, call) in self.waiting.items()}
            self.wake_all()  # each finds out for itself
        if self.able:
            self._gates[self.able.popleft()].release()

    def wait(self, rank: int, where: object, call: str, ready: Callable[[], bool]) -> None:
        """Hand over until somebody wakes whoever waits there, and `ready`."""
        while not ready():
            if self.failed:
                raise threading.BrokenBarrierError(call)
            if self.stuck:
                raise TimeoutError(f"{call}: not all ranks came; rank -> call in which it waits: {self.stuck}")
            self.waiting[rank] = where, call
            self.hand_over()
            self.enter(rank)

    def wake(self, where: object) -> None:
        for rank in [rank for rank, (place, _) in self.waiting.items() if place == where]:
            del self.waiting[rank]
            self.able.append(rank)

    def wake_all(self) -> None:
        self.able.extend(self.waiting)
        self.waiting.clear()


class _Meeting:
    """Where the ranks of one group meet: the k-th collective of each rank is the same collective."""

    def __init__(self, ranks: tuple[int, ...], turns: _Turns):
        self.ranks, self.size, self.turns = ranks, len(ranks), turns
        self.deposits: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        self.letters: dict[tuple[int, int], deque[_Letter]] = defaultdict(deque)
        self.taken: dict[int, int] = defaultdict(int)

    def put(self, call: int, rank: int, op: str, x: Tensor) -> None:
        self.deposits[call][rank] = (op, x)
        if len(self.deposits[call]) == self.size:  # nobody is woken who would have to wait on
            self.turns.wake((self, call))

    def seal(self, call: int, mine: int) -> None:
        """From now on rank `mine` may change the tensor that it put into its `call`-th collective."""
        op, own = self.deposits[call][mine]
        self.deposits[call][mine] = op, own.clone()

    def take_all(self, call: int, mine: int, op: str) -> list[Tensor]:
        """What every rank put into its `call`-th collective, in rank order. To be read before the turn is handed over."""
        deposits = self.deposits[call]
        self.turns.wait(self.ranks[mine], (self, call), op, lambda: len(deposits) == self.size)
        got = [deposits[rank] for rank in range(self.size)]
        self.taken[call] += 1
        if self.taken[call] == self.size:
            del self.deposits[call], self.taken[call]
        if op not in ("broadcast", "all_to_all_v") and len({(name, x.shape, x.dtype) for name, x in got}) != 1:
            raise AssertionError(f"ranks disagree on the call: {[(n, tuple(x.shape), x.dtype) for n, x in got]}")
        return [x for _, x in got]

    def post(self, source: int, to: int, letter: "_Letter") -> None:
        self.letters[source, to].append(letter)
        self.turns.wake((self, source, to))

    def receive(self, source: int, to: int) -> Tensor:
        letters = self.letters[source, to]
        self.turns.wait(self.ranks[to], (self, source, to), f"recv from {source}", lambda: len(letters) > 0)
        return letters.popleft().x.clone()


class _Letter:
    """A tensor on its way to another rank."""

    def __init__(self, x: Tensor):
        self.x = x

    def seal(self) -> None:
        """From now on the sender may change its tensor."""
        self.x = self.x.clone()


def unseen(call: Callable) -> Callable:
    """The copies that stand for a network are no memory of the rank: who counts its tensors does not see them."""

    @wraps(call)
    def inside(*args: object) -> object:
        if not torch._C._len_torch_dispatch_stack():
            return call(*args)
        with _disable_current_modes():
            return call(*args)

    return inside


class _Later:
    """A call that completes when first waited for."""

    def __init__(self, what: str, complete: Callable[[], object]):
        self.what = what
        self.complete: Callable[[], object] | None = complete

    @unseen
    def wait(self) -> None:
        if self.complete is not None:
            self.complete()
            self.complete = None


class ThreadGroup:
    """One rank's end of a meeting; a `comm.Group`."""

    def __init__(self, meeting: _Meeting, rank: int, delayed: bool):
        self.meeting, self.rank, self.delayed, self.calls = meeting, rank, delayed, 0
        self.begun: list[_Later] = []

    def all_reduce(self, x: Tensor, op: str) -> _Later:
        combine = {"sum": lambda xs: sum(xs[1:], xs[0].clone()), "max": lambda xs: torch.stack(xs).amax(0)}[op]
        return self._collective(f"all_reduce {op}", x, x, combine)

    def all_gather(self, out: Tensor, x: Tensor) -> _Later:
        return self._collective("all_gather", out, x, torch.cat)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> _Later:
        return self._collective(
            "reduce_scatter", out, x, lambda xs: sum(xs[1:], xs[0].clone()).chunk(len(xs))[self.rank]
        )

    def all_to_all(self, out: Tensor, x: Tensor) -> _Later:
        return self._collective("all_to_all", out, x, lambda xs: torch.cat([y.chunk(len(xs))[self.rank] for y in xs]))

    def all_to_all_v(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> _Later:
        all_sent = torch.empty(
            len(sent) * self.meeting.size, dtype=torch.int64
        )  # each rank must know where its rows begin
        self._collective("numbers of rows", all_sent, torch.tensor(sent), torch.cat).wait()
        table = all_sent.view(-1, len(sent)).tolist()

        def combine(xs: list[Tensor]) -> Tensor:
            parts = [y.split(of_source)[self.rank] for y, of_source in zip(xs, table, strict=True)]
            assert [len(part) for part in parts] == list(received), f"{[len(p) for p in parts]} come, not {received}"
            return torch.cat(parts)

        return self._collective("all_to_all_v", out, x, combine)

    def broadcast(self, x: Tensor, source: int) -> _Later:
        return self._collective("broadcast", x, x, lambda xs: xs[source])

    @unseen
    def send(self, x: Tensor, to: int) -> _Later:
        letter = _Letter(x.detach() if self.delayed else x.detach().clone())
        self.meeting.post(self.rank, to, letter)
        return self._note(_Later(f"send to {to}", letter.seal))

    def recv(self, x: Tensor, source: int) -> _Later:
        complete = lambda: x.detach().copy_(self.meeting.receive(source, self.rank))  # noqa: E731
        return self._later(f"recv from {source}", x, complete, delayed=True)

    def shift(self, out: Tensor, x: Tensor, to: int, source: int) -> _Later:
        sent, received = self.send(x, to), self.recv(out, source)
        return self._note(_Later(f"shift to {to}", lambda: (received.wait(), sent.wait())))

    def unfinished(self) -> list[str]:
        """Calls that nobody has waited for."""
        return [later.what for later in self.begun if later.complete is not None]

    @unseen
    def _collective(self, op: str, out: Tensor, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> _Later:
        call, self.calls = self.calls, self.calls + 1
        reads_late = self.delayed and out is not x  # a sum in place is poisoned where it was read
        self.meeting.put(call, self.rank, op, x.detach() if reads_late else x.detach().clone())

        def complete() -> None:
            if reads_late:
                self.meeting.seal(call, self.rank)
            out.detach().copy_(combine(self.meeting.take_all(call, self.rank, op)).view_as(out))

        return self._later(op, out, complete, delayed=self.delayed)

    def _later(self, what: str, out: Tensor, complete: Callable[[], object], *, delayed: bool) -> _Later:
        later = _Later(what, complete)
        if not delayed:
            later.wait()
        elif out.is_floating_point():
            out.detach().fill_(float("nan"))
        elif out.dtype != torch.bool:
            out.detach().fill_(torch.iinfo(out.dtype).min)
        return self._note(later)

    def _note(self, later: _Later) -> _Later:
        self.begun = [one for one in self.begun if one.complete is not None] + [later]
        return later


def rank_of_thread() -> int:
    """The rank that this thread is; 0 where there are no ranks."""
    name = threading.current_thread().name
    return int(name.removeprefix(_NAME)) if name.startswith(_NAME) else 0


def run_ranks(
    sizes: dict[str, int],
    work: Callable[[Mesh], object],
    *,
    delayed: bool = False,
    order: str = ORDER,
    ranks_per_kv_head: int = 1,
    stages: StageMap | None = None,
) -> list:
    """work(mesh) of every rank, run as threads; results in rank order. `sizes`: those of `AxisSizes`."""
    sizes = AxisSizes(**sizes, order=order)
    turns = _Turns(sizes.world_size)
    meetings: dict[tuple, _Meeting] = {}
    results: list = [None] * sizes.world_size
    errors: list[tuple[int, BaseException]] = []

    def one(rank: int) -> None:
        groups: list[ThreadGroup] = []

        def make_group(name: str, ranks: tuple[int, ...]) -> ThreadGroup:
            meeting = meetings.setdefault((name, ranks), _Meeting(ranks, turns))
            groups.append(ThreadGroup(meeting, ranks.index(rank), delayed))
            return groups[-1]

        turns.enter(rank)
        try:
            mesh = build_mesh(sizes, rank, make_group, ranks_per_kv_head, stages=stages)
            parallel_state.set_thread_mesh(mesh)
            results[rank] = work(mesh)
            left = [what for group in groups for what in group.unfinished()]
            assert not left, f"nobody waited for {left}"
        except BaseException as error:
            errors.append((rank, error))
            turns.failed = True
            turns.wake_all()
        finally:
            parallel_state.set_thread_mesh(None)
            turns.hand_over()

    threads = [threading.Thread(target=one, args=(rank,), name=_NAME + str(rank)) for rank in range(sizes.world_size)]
    for thread in threads:
        thread.start()
    turns.hand_over()
    for thread in threads:
        thread.join()
    if errors:
        rank, error = next((e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)), errors[0])
        raise RuntimeError(f"rank {rank} failed: {error}") from error
    return results
