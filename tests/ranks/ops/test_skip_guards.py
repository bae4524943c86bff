"""Calls that go straight to a compiled program: the same results, and never those of another kind of call."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.ops.compile import compiled_region
from megatron.core.ops.compile.compiled_region import Compiled
from megatron.core.ops.compile.skip_guards import call_kind


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")


def formula(x: Tensor, factor: float, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """A new tensor, an input as it is, nothing, and a number of the shape within the sum."""
    made = x * factor + x.shape[0]
    return made if bias is None else made + bias, x, None, made.sum(dim=0)


def checked(run: Compiled, *inputs: object) -> None:
    for _ in range(3):
        got, expected = run(*inputs), formula(*inputs)
        assert [x is None for x in got] == [x is None for x in expected]
        assert all(x is None or torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.full
def test_a_second_call_skips_torchs_checks(monkeypatch: pytest.MonkeyPatch):
    run, x = Compiled(formula), torch.randn(3, 4)
    checked(run, x, 2.0, None)

    def refused(*inputs: object) -> None:
        raise AssertionError("torch was asked")

    monkeypatch.setitem(run._runs, "eager", refused)
    checked(run, torch.randn(3, 4), 2.0, None)
    for other in (
        (torch.randn(5, 4), 2.0, None),
        (x, 3.0, None),
        (x, 2, None),
        (x.double(), 2.0, None),
        (x, 2.0, x[0]),
    ):
        with pytest.raises(AssertionError, match="torch was asked"):
            run(*other)
    with torch.autocast("cpu"), pytest.raises(AssertionError, match="torch was asked"):
        run(x, 2.0, None)


@pytest.mark.full
def test_every_kind_of_call_gets_its_own_program():
    """Other sizes, strides, dtypes and numbers, in turns; a parameter; one tensor twice."""
    run = Compiled(formula)
    for _ in range(2):
        for rows in (3, 5, 7, 1):
            for dtype in (torch.float32, torch.float64):
                x = torch.randn(rows, 4, dtype=dtype)
                for given in (x, torch.nn.Parameter(x), torch.randn(4, rows, dtype=dtype).t()):
                    checked(run, given, 2.0, None)
                    checked(run, given, rows, given[0].detach())
    square = torch.randn(4, 4)
    checked(run, square, 0.5, square)


def test_programs_that_torch_traces_with_an_unknown_argument_are_not_replayed():
    """A tensor from outside the arguments may be another one in the next call."""
    outside = [torch.ones(3)]
    run, x = Compiled(lambda x: (x + outside[0],)), torch.zeros(3)
    assert run(x)[0].tolist() == [1, 1, 1]
    outside[0] = torch.full((3,), 2.0)
    assert run(x)[0].tolist() == [2, 2, 2]


@pytest.mark.full
def test_threads_have_calls_of_their_own():
    run = Compiled(formula)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(partial(checked, run, torch.randn(rows, 4), 2.0, None)) for rows in range(1, 9)]:
            done.result()


def test_the_kind_of_a_call_knows_what_else_a_program_depends_on(monkeypatch: pytest.MonkeyPatch):
    inputs = [torch.zeros(2), True, 1, 1.0]
    before = call_kind(inputs)
    assert before == call_kind([torch.ones(2), True, 1, 1.0])
    assert len({before, call_kind([inputs[0], 1, 1, 1.0]), call_kind([inputs[0], True, 1.0, 1.0])}) == 3
    with torch.no_grad():
        assert call_kind(inputs) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert call_kind(inputs) != before
