"""The double of the ranks is loud: whoever touches a tensor before the wait, or does not wait, is found out."""

from collections.abc import Callable

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor

from megatron.core.parallel import collectives


def mine(mesh) -> Tensor:
    return torch.arange(4.0).view(2, 2) + 10 * mesh["tp"].rank


BOTH = [torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2) + 10]
MOVES: dict[str, tuple[Callable, Callable[[int], Tensor]]] = {
    "all_reduce": (collectives.all_reduce, lambda rank: BOTH[0] + BOTH[1]),
    "all_gather": (collectives.all_gather, lambda rank: torch.cat(BOTH)),
    "all_gather of columns": (
        lambda x, axis: collectives.all_gather(x, axis, dim=-1),
        lambda rank: torch.cat(BOTH, -1),
    ),
    "reduce_scatter": (collectives.reduce_scatter, lambda rank: (BOTH[0] + BOTH[1])[rank : rank + 1]),
    "reduce_scatter in another type": (
        lambda x, axis: collectives.start_reduce_scatter_in(torch.float32, x.bfloat16(), axis).wait(),
        lambda rank: (BOTH[0] + BOTH[1])[rank : rank + 1],
    ),
    "broadcast": (collectives.broadcast, lambda rank: BOTH[0]),
}


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_collective_has_its_result_when_it_returns(move: str, delayed: bool):
    call, expected = MOVES[move]
    for rank, got in enumerate(run_ranks({"tp": 2}, lambda mesh: call(mine(mesh), mesh["tp"]), delayed=delayed)):
        assert torch.equal(got, expected(rank))


STARTS = [collectives.start_all_reduce, collectives.start_all_gather, collectives.start_reduce_scatter]


@pytest.mark.parametrize("start", STARTS)
def test_a_late_result_is_poisoned_until_the_wait(start: Callable):
    def work(mesh):
        pending = start(mine(mesh), mesh["tp"])
        early = pending._keep[0].clone()
        return early, pending.wait()

    for early, late in run_ranks({"tp": 2}, work, delayed=True):
        assert early.isnan().all() and late.isfinite().all()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_receive_is_poisoned_until_the_wait(dtype: torch.dtype, delayed: bool):
    def work(mesh):
        axis, x = mesh["tp"], torch.full((3,), 7).to(dtype)
        if axis.is_first:
            return collectives.start_send(x, axis, 1).wait()
        out = torch.zeros(3, dtype=dtype)
        pending = collectives.start_recv(out, axis, 0)
        assert not (out > -1e9).any()
        return pending.wait()

    assert all((x == 7).all() for x in run_ranks({"tp": 2}, work, delayed=delayed))


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_send_reads_its_tensor_until_the_wait(waits_first: bool):
    """The receiver asks later than the sender writes; a barrier sees to that."""

    def work(mesh):
        axis, x = mesh["tp"], torch.full((3,), 7.0)
        if axis.is_first:
            pending = collectives.start_send(x, axis, 1)
            if waits_first:
                pending.wait()
            x.fill_(8.0)
            collectives.barrier(axis)
            return pending.wait()
        collectives.barrier(axis)
        return collectives.start_recv(torch.zeros(3), axis, 0).wait()

    assert run_ranks({"tp": 2}, work, delayed=True)[1].tolist() == [7.0 if waits_first else 8.0] * 3


@pytest.mark.parametrize("waits_first", [True, False])
@pytest.mark.parametrize("start", STARTS[1:])
def test_a_gather_or_scatter_reads_its_input_until_the_wait(start: Callable, waits_first: bool):
    def work(mesh):
        axis, x = mesh["tp"], mine(mesh)
        pending = start(x, axis)
        if waits_first:
            pending.wait()
        x.fill_(-1.0)
        collectives.barrier(axis)
        return bool((pending.wait() < 0).any())

    assert run_ranks({"tp": 2}, work, delayed=True) == [not waits_first] * 2


@pytest.mark.parametrize("delayed", [False, True])
def test_a_call_that_nobody_waits_for_is_an_error(delayed: bool):
    def work(mesh):
        axis = mesh["tp"]
        if axis.is_first:
            collectives.start_send(mine(mesh), axis, 1)
        else:
            collectives.start_recv(mine(mesh), axis, 0).wait()

    with pytest.raises(RuntimeError, match=r"rank 0 failed: nobody waited for \['send to 1'\]"):
        run_ranks({"tp": 2}, work, delayed=delayed)


def test_a_call_that_the_others_do_not_join_names_the_call_of_each():
    def work(mesh):
        x = torch.zeros(4)
        if mesh["world"].is_last:
            return None
        return (
            collectives.all_reduce(x, mesh["tp"])
            if mesh["pp"].is_first
            else collectives.start_recv(x, mesh["pp"], 0).wait()
        )

    with pytest.raises(RuntimeError, match=r"not all ranks came; .*\{2: 'recv from 0'\}"):
        run_ranks({"tp": 2, "pp": 2}, work)
