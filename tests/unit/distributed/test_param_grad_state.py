"""Which gradients are set to zero before a step, and which a product overwrites: a table written by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.distributed.bucket_reduce_and_gather import Bucket
from megatron.core.distributed.param_grad_state import ParamGradSink

RUNS = {"a": (0, 3), "b": (4, 6), "c": (6, 7)}  # 3 and 7 are gaps of alignment
NAN = float("nan")


class Step:
    """The beginning of a step, time after time: what memory holds then, where it held ones."""

    def __init__(self, poison: bool = False):
        self.gradients, self.sinks = torch.zeros(8), []
        self.buffer = SimpleNamespace(poison=poison)
        for name, (start, stop) in RUNS.items():
            sink = ParamGradSink(name, nn.Parameter(torch.zeros(stop - start)))
            sink.start, sink.stop = start, stop
            sink.parameter.main_grad = self.gradients[start:stop].data
            self.sinks.append(sink)

    def begin(self) -> list[float]:
        self.gradients.fill_(1.0)
        Bucket._clear(self)
        return self.gradients.tolist()

    def open(self, name: str, *, overwrites: bool) -> bool:
        return next(sink for sink in self.sinks if sink.name == name).prepare(overwrites=overwrites)

    @property
    def unset(self) -> set[str]:
        return {sink.name for sink in self.sinks if sink.is_unset}


def test_all_are_zeros_until_a_product_came_first():
    step = Step()
    assert step.begin() == [0.0] * 8
    assert not step.open("b", overwrites=True)  # there are zeros: adding is as good
    assert not step.open("b", overwrites=True)
    assert not step.open("c", overwrites=False)
    assert not step.open("c", overwrites=True)  # not the first
    assert step.begin() == [0, 0, 0, 0, 1, 1, 0, 0] and step.unset == {"b"}


def test_what_is_left_is_overwritten_or_set_to_zero_once():
    step = Step()
    step.begin()
    for name in RUNS:
        step.open(name, overwrites=True)
    assert step.begin() == [1, 1, 1, 0, 1, 1, 1, 0] and step.unset == set(RUNS)
    assert step.open("a", overwrites=True)
    assert not step.open("a", overwrites=True)
    assert not step.open("b", overwrites=False) and step.gradients.tolist() == [1, 1, 1, 0, 0, 0, 1, 0]
    assert not step.open("b", overwrites=True)
    assert step.unset == {"c"}  # whoever sums the gradients finds that nobody came
    step.begin()
    assert step.unset == set(RUNS)


def test_what_is_left_is_nan_for_debugging_and_must_be_opened():
    step = Step(poison=True)
    step.begin()
    step.open("b", overwrites=True)
    assert [x != x for x in step.begin()] == [False] * 4 + [True] * 2 + [False] * 2
    step.sinks[1].parameter.main_grad.add_(1.0)
    with pytest.raises(RuntimeError, match=r"main_grad of b .*open_main_grad"):
        step.open("b", overwrites=True)
