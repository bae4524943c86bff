"""Megatron's calculator against hand-counted sizes, outside of a run."""

from collections.abc import Iterator

import pytest
from said import raises_telling

from megatron.core import num_microbatches_calculator as calculator


@pytest.fixture(autouse=True)
def no_calculator() -> Iterator[None]:
    calculator.destroy_num_microbatches_calculator()
    yield
    calculator.destroy_num_microbatches_calculator()


def sizes() -> tuple[int, int, int, int]:
    return (
        calculator.get_num_microbatches(),
        calculator.get_current_global_batch_size(),
        calculator.get_current_running_global_batch_size(),
        calculator.get_micro_batch_size(),
    )


def test_a_constant_size_stays():
    calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
    assert sizes() == (4, 32, 32, 2)
    calculator.update_num_microbatches(1_000_000)
    assert sizes() == (4, 32, 32, 2)


def test_a_ramp_grows_with_the_samples():
    calculator.init_num_microbatches_calculator(0, [4, 4, 60], 16, 2, 2)  # stages at 0, 20, 40, and past 60
    found = []
    for consumed in (0, 19, 20, 39, 40, 59, 60, 61, 500):
        calculator.update_num_microbatches(consumed)
        found.append(sizes()[:2])
    assert found == [(1, 4), (1, 4), (2, 8), (2, 8), (3, 12), (3, 12), (4, 16), (4, 16), (4, 16)]


def test_a_size_that_replicas_cannot_share_is_rounded_down_or_refused():
    calculator.init_num_microbatches_calculator(0, None, 30, 2, 4, decrease_batch_size_if_needed=True)
    assert sizes() == (3, 30, 24, 2)
    with pytest.raises(ValueError, match="multiple of micro batch size x data-parallel size"):
        calculator.reconfigure_num_microbatches_calculator(0, None, 30, 2, 4)
    calculator.reconfigure_num_microbatches_calculator(0, [6, 6, 100], 24, 2, 2)
    calculator.update_num_microbatches(0, consistency_check=False)
    assert sizes() == (1, 6, 6, 2)
    with pytest.raises(ValueError, match="global batch size 6 must be a multiple"):
        calculator.update_num_microbatches(0)


def test_a_ramp_that_is_rounded_down_runs_what_replicas_share():
    calculator.init_num_microbatches_calculator(0, [6, 6, 100], 24, 2, 2, decrease_batch_size_if_needed=True)
    calculator.update_num_microbatches(0)
    assert sizes() == (1, 6, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (([4, 4], 16, 2, 2), "START INCREMENT SAMPLES"),
        (([4, 5, 60], 16, 2, 2), "multiple of INCREMENT"),
        ((None, 2, 2, 4), "global batch size 2 multiple of 8"),
        ((None, 0, 2, 4), "global batch size 0 below 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, facts):
    with raises_telling(ValueError, facts):
        calculator.init_num_microbatches_calculator(0, *arguments)
    with pytest.raises(RuntimeError, match="init_num_microbatches_calculator"):
        calculator.get_num_microbatches()


def test_a_second_calculator_is_refused():
    calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
    with pytest.raises(RuntimeError, match="already initialized"):
        calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
