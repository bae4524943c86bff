"""Rows that each rank sends in numbers of its own to every other: forward, backward and bytes against a table of all rows."""

import pytest
import torch
from local_ranks import run_ranks

from megatron.core.parallel.collectives import bytes_sent
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.autograd_collectives import all_to_all_v

# rows that rank (line) sends to rank (column)
ROWS = [[2, 0, 3], [1, 4, 0], [0, 0, 5]]
WIDTH = 2


def row(source: int, to: int, number: int) -> list[float]:
    return [100 * source + 10 * to + number, 1.0]


def rows_of(source: int) -> torch.Tensor:
    rows = [row(source, to, i) for to in range(3) for i in range(ROWS[source][to])]
    return torch.tensor(rows, dtype=torch.float64).view(-1, WIDTH)


@pytest.mark.parametrize("delayed", [False, True])
def test_each_rank_gets_the_rows_for_it_and_gradients_go_back(delayed: bool):
    def work(mesh: Mesh):
        axis = mesh["tp"]
        rank = axis.rank
        sent, received = ROWS[rank], [line[rank] for line in ROWS]
        x = rows_of(rank).requires_grad_()
        with axis.ledger.record() as calls:
            out = all_to_all_v(x, axis, sent, received)
            (out * (rank + 1)).sum().backward()
        expected = [row(source, rank, i) for source in range(3) for i in range(ROWS[source][rank])]
        assert out.tolist() == expected
        # the gradient of a row is the factor of the rank that got it
        assert x.grad[:, 0].tolist() == [to + 1 for to in range(3) for _ in range(sent[to])]
        forward, backward = calls
        row_bytes = WIDTH * 8
        assert bytes_sent(forward) == (sum(sent) - sent[rank]) * row_bytes
        assert bytes_sent(backward) == (sum(received) - received[rank]) * row_bytes

    run_ranks({"tp": 3}, work, delayed=delayed)


def test_megatrons_function_sends_equal_parts_without_sizes():
    def work(mesh: Mesh):
        x = torch.arange(6.0, dtype=torch.float64).view(6, 1) + 10 * mesh["tp"].rank
        uneven = all_to_all(None, x, [[1] * 3, [3] * 3, [2] * 3][mesh["tp"].rank], [1, 3, 2])
        return all_to_all(None, x).view(-1).tolist(), uneven.view(-1).tolist()

    equal, uneven = run_ranks({"tp": 3}, work)[1]
    assert equal == [2, 3, 12, 13, 22, 23] and uneven == [1, 2, 3, 11, 12, 13, 21, 22, 23]


def test_numbers_that_do_not_fit_are_refused_with_all_of_them():
    def work(mesh: Mesh):
        with pytest.raises(ValueError, match=r"sends \[1, 1\] of 3 rows, receives \[1, 1\]"):
            all_to_all_v(torch.zeros(3, 1), mesh["tp"], [1, 1], [1, 1])

    run_ranks({"tp": 2}, work)
