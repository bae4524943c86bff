"""The products of a rank's experts with their rows against one product for each expert."""

import random

import pytest
import torch
from torch.nn import functional

from megatron.core.ops.main_grad_interface import GradSink, set_grad_sink
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.tensor_parallel.linear_autograd import NATIVE_MATMUL
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.transformer.moe.experts import _GroupedProduct, can_group
from megatron.core.transformer.moe.token_dispatcher import DelayedWgrads, EarlierWgrads

COUNTS = [(37, 21, 0, 46, 5), (3, 0, 1), (0, 0, 0), (17, 33, 5, 1, 0), (0, 100, 7), (1,), (9, 16)]


class Rounded(MatmulBackend):
    """torch's products, of numbers of rows that are multiples of 16; it notes them."""

    def __init__(self):
        self.rows: list[int] = []

    def rows_of_product(self, rows, x):
        return -(-rows // 16) * 16

    def forward(self, x, weight, state):
        self.rows.append(len(x))
        return x @ weight.t()

    def dgrad(self, grad, weight, state):
        self.rows.append(len(grad))
        return grad @ weight

    def wgrad(self, grad, x, state):
        return grad.t() @ x


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", [NATIVE_MATMUL, Rounded()], ids=["torch", "rounded"])
def test_products_of_more_rows_write_each_experts_own(backend: MatmulBackend, dtype: torch.dtype, counts: tuple):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), 2, 5, 24, dtype=dtype, requires_grad=True)
    y = _GroupedProduct.apply(x, weight, counts, WeightGradStore(), backend, False)
    grad = torch.randn_like(y)
    y.backward(grad)
    got = y.detach(), x.grad, weight.grad
    x.grad = weight.grad = None
    expected = torch.cat([rows @ matrix.t() for rows, matrix in zip(x.split(counts), weight.flatten(1, 2))])
    expected.backward(grad)
    tolerance = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for own, reference in zip(got, (expected.detach(), x.grad, weight.grad)):
        torch.testing.assert_close(own, reference, **tolerance)


class Sink(GradSink):
    """The sink of a weight whose main_grad is unset at first; it notes what it is told."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.events, self.is_opened = weight, [], False
        weight.main_grad = torch.full_like(weight, torch.nan)
        set_grad_sink(weight, self)

    def open_with_beta(self):
        beta = int(self.is_opened)
        self.is_opened = True
        return self.weight.main_grad, beta

    def grad_was_added(self):
        self.events.append("added")

    def grad_was_deferred(self):
        self.events.append("deferred")


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("counts", [((5, 3, 0, 0), (2, 0, 7, 0), (0, 0, 4, 0)), ((0, 0), (0, 0)), ((6, 1), (0, 9))])
def test_several_calls_add_one_gradient_of_a_weight(counts: tuple, defers: bool):
    """It comes with the backward of the first call, the last one there; an expert without rows has zeros."""
    torch.manual_seed(0)
    weight = torch.randn(len(counts[0]), 2, 5, 8, dtype=torch.float64, requires_grad=True)
    xs = [torch.randn(sum(of_call), 8, dtype=torch.float64, requires_grad=True) for of_call in counts]
    sink, store = Sink(weight), WeightGradStore()
    for _ in range(2):  # microbatches
        results = results_of_calls(xs, weight, counts, store)
        events = len(sink.events)
        work: list = []
        for result in reversed(results):
            assert len(sink.events) == events
            if defers:
                with store.collect() as collected:
                    result.backward(torch.ones_like(result))
                work += collected
            else:
                result.backward(torch.ones_like(result))
        for deferred in work:
            deferred()
    assert sink.events == (["deferred", "added"] if defers else ["added"]) * 2
    assert weight.grad is None
    assert_are_gradients_of_ones(weight.main_grad, xs, counts, times=2)


def results_of_calls(xs: list, weight: torch.Tensor, counts: tuple, store: WeightGradStore) -> list[torch.Tensor]:
    """As a dispatcher makes them: the weight gradients of the second call are delayed until the backward of the first."""
    delayed = DelayedWgrads()
    results = []
    for x, of_call, wgrads in zip(xs, counts, [None, delayed, EarlierWgrads()]):
        result = _GroupedProduct.apply(x, weight, of_call, store, NATIVE_MATMUL, False, wgrads)
        # here, not after all calls: autograd computes first what was made last
        results.append(delayed.before_backward_of(result) if wgrads is None else result)
    return results


def assert_are_gradients_of_ones(main_grad: torch.Tensor, xs: list, counts: tuple, *, times: int = 1) -> None:
    """Whether main_grad is that of a loss which adds up all results, several times."""
    expected = torch.zeros_like(main_grad).flatten(1, 2)
    for x, of_call in zip(xs, counts):
        for total, rows in zip(expected, x.detach().split(of_call)):
            total += times * torch.ones(len(rows), total.shape[0], dtype=torch.float64).t() @ rows
    torch.testing.assert_close(main_grad.flatten(1, 2), expected, rtol=0, atol=1e-12)


def test_a_backward_that_ended_early_leaves_nothing_to_the_next_through_the_same_graph():
    torch.manual_seed(0)
    counts = ((2, 0), (1, 3), (0, 2))
    weight = torch.randn(2, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    xs = [torch.randn(sum(of_call), 4, dtype=torch.float64, requires_grad=True) for of_call in counts]
    weight.main_grad = torch.zeros_like(weight)
    results = results_of_calls(xs, weight, counts, WeightGradStore())
    loss = sum(result.sum() for result in results)

    def fail(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook = results[0].register_hook(fail)  # when the other calls are done
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    hook.remove()
    weight.main_grad.zero_()
    loss.backward()
    assert_are_gradients_of_ones(weight.main_grad, xs, counts)


@pytest.mark.parametrize("counts", COUNTS)
def test_one_call_for_all_experts_has_the_products_of_each(counts: tuple, monkeypatch: pytest.MonkeyPatch):
    """A call that fails would look like a missing kernel, and experts would be multiplied one by one in silence."""
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 24, requires_grad=True)
    weight = torch.randn(len(counts), 2, 6, 24, requires_grad=True)
    assert can_group(x, weight) == (sum(counts) > 0)
    calls = []
    grouped_mm = functional.grouped_mm
    monkeypatch.setattr(functional, "grouped_mm", lambda *args, **more: calls.append(1) or grouped_mm(*args, **more))
    results = []
    for grouped in (True, False):
        y = _GroupedProduct.apply(x, weight, counts, WeightGradStore(), NATIVE_MATMUL, grouped)
        results.append([y, *torch.autograd.grad(y, [x, weight], torch.full_like(y, 0.5))])
        assert len(calls) == 2, "the forward and the gradient of x"
    for one_call, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(one_call, one_by_one, rtol=1e-5, atol=1e-5)


def test_one_call_is_for_dtypes_widths_and_devices_that_have_it():
    """On a CPU torch loops over the experts in half precision too, without `rows_of_product`."""
    x, weight = torch.ones(4, 8), torch.ones(2, 1, 12, 8)
    assert can_group(x, weight) and can_group(x, weight.unflatten(2, (3, 4)))
    assert not can_group(x, torch.ones(2, 1, 5, 8)), "rows of 20 bytes"
    assert not can_group(torch.ones(4, 6), torch.ones(2, 1, 12, 6)), "rows of 24 bytes"
    assert not can_group(x, weight.bfloat16())
    for dtype in (torch.float64, torch.bfloat16):
        assert not can_group(x.to(dtype), weight.to(dtype))
    assert not can_group(x.to("meta"), weight.to("meta"))


def test_products_have_few_numbers_of_rows_where_others_lie_behind_them():
    backend = Rounded()
    x, weight = torch.randn(160, 8), torch.randn(4, 1, 8, 8)
    for _ in range(20):
        counts = [random.Random(len(backend.rows)).randint(33, 47) for _ in range(3)]
        _GroupedProduct.apply(x, weight, (*counts, 160 - sum(counts)), WeightGradStore(), backend, False)
    assert set(backend.rows) <= {16, 32, 48, 64, 80} and 48 in backend.rows


def test_half_precision_on_a_cpu_has_eight_numbers_of_rows_between_powers_of_two():
    half = torch.empty(0, dtype=torch.bfloat16)
    rounded = [NATIVE_MATMUL.rows_of_product(rows, half) for rows in range(1, 4097)]
    assert all(rows <= more < rows * 1.125 for rows, more in enumerate(rounded, 1))
    assert len(set(rounded)) == 15 + 8 * 8 + 1  # 1 to 15, eight in each of 16..4095, and 4096
    assert [NATIVE_MATMUL.rows_of_product(rows, half) for rows in (1, 15, 17, 500, 513)] == [1, 15, 18, 512, 576]
    assert NATIVE_MATMUL.rows_of_product(501, half.float()) == 501
