"""Repeated calls of one compiled program that skip torch's guards.

torch.compile checks its guards before each call: everything that the program might depend on. With the work after them
that takes 30 to 100 microseconds, as long as a small region. The first call with some kinds of argument goes that way
and is watched: which program ran, which of the arguments it took, and where its results went. Later calls with
arguments of the same kinds go straight to that program.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Program = Callable[..., Sequence[Any]]


class _Call(NamedTuple):
    program: Program
    arguments: Sequence[Any]
    results: Sequence[Any]


class _WatchOfThread(threading.local):
    calls: list[_Call] | None = None  # of programs; None: nobody watches


_watch = _WatchOfThread()


def watched_backend(name: str) -> Callable[..., Program]:
    """Return the backend of torch.compile of this name, with its calls listed by `programs_called`."""
    compile_graph = torch._dynamo.lookup_backend(name)  # imported here: it takes a second

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Program:
        program = compile_graph(graph, examples)

        def watched_program(*arguments: Any) -> Sequence[Any]:
            results = program(*arguments)
            if _watch.calls is not None:
                _watch.calls.append(_Call(program, arguments, results))
            return results

        return watched_program

    return backend


@contextmanager
def programs_called() -> Iterator[list[_Call]]:
    """List the calls of programs in this thread inside the block."""
    before = _watch.calls
    _watch.calls = []
    try:
        yield _watch.calls
    finally:
        _watch.calls = before


# ---------------------------------------------------------------- kinds of argument


def call_kind(inputs: Sequence[Any]) -> Hashable | None:
    """Return everything that a program may depend on but the values of tensors; None if that is not known.

    inputs: tensors of any shapes, and numbers; a kind has their shapes, strides, dtypes and devices. It is not
    known under autocast.
    """
    if torch._C._is_any_autocast_enabled():
        return None
    settings = torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    kinds = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in inputs]
    return settings, *kinds


# ---------------------------------------------------------------- replays


@dataclass(frozen=True)
class Replay:
    """One program, with the sources of its arguments and of the call's outputs.

    A source is a position, or a constant of this kind of call.
    """

    program: Program
    arguments: tuple[tuple[int | None, Any], ...]  # position among the inputs, or None and a number
    # Position among the program's results, or among the inputs; None and None: the output is None.
    outputs: tuple[tuple[int | None, int | None], ...]

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return what the watched call has returned, for inputs of its kind: the same shapes as then."""
        # This runs once per region and layer: list comprehensions, no statements.
        results = self.program(*[number if i is None else inputs[i] for i, number in self.arguments])
        return tuple([results[i] if i is not None else None if j is None else inputs[j] for i, j in self.outputs])


def replay_of(calls: Sequence[_Call], inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> Replay | None:
    """Return the replay of a watched call that computed `outputs` of `inputs`, tensors of any shapes.

    None if it was not one program, or if an argument or an output has no known source.
    """
    if len(calls) != 1:
        return None
    (call,) = calls
    input_positions = _positions(inputs)
    result_positions = _positions(call.results)

    arguments = []
    for x in call.arguments:
        if not isinstance(x, Tensor):
            arguments.append((None, x))
        elif id(x) in input_positions:
            arguments.append((input_positions[id(x)], None))
        else:
            return None

    sources = []
    for x in outputs:
        if x is None:
            sources.append((None, None))
        elif id(x) in result_positions or id(x) in input_positions:
            sources.append((result_positions.get(id(x)), input_positions.get(id(x))))
        else:
            return None

    return Replay(call.program, tuple(arguments), tuple(sources))


def _positions(values: Sequence[Any]) -> dict[int, int]:
    """Return the position of each tensor, by its id."""
    return {id(x): i for i, x in enumerate(values) if isinstance(x, Tensor)}
