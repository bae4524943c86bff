"""Calls of one compiled program again, past torch's check of everything that the program might depend on.

torch.compile looks at its guards before each call, 30 to 100 microseconds with what comes after them, which is as long as a
small region takes. The first call with some kinds of argument goes that way and is watched: which program ran, which of the
arguments it took, and what became of its results. Later calls with arguments of the same kinds go straight to that program.
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
    given: Sequence[Any]
    made: Sequence[Any]


class _OfThread(threading.local):
    calls: list[_Call] | None = None  # of programs, while someone watches


_seen = _OfThread()


def watched_backend(name: str) -> Callable[..., Program]:
    """The backend of torch.compile of this name, whose calls `programs_called` lists."""
    compile_graph = torch._dynamo.lookup_backend(name)  # imported here: it takes a second

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Program:
        program = compile_graph(graph, examples)

        def watched(*given: Any) -> Sequence[Any]:
            made = program(*given)
            if _seen.calls is not None:
                _seen.calls.append(_Call(program, given, made))
            return made

        return watched

    return backend


@contextmanager
def programs_called() -> Iterator[list[_Call]]:
    """The calls of programs in this thread, inside."""
    before, _seen.calls = _seen.calls, []
    try:
        yield _seen.calls
    finally:
        _seen.calls = before


# ---------------------------------------------------------------- kinds of argument


def call_kind(inputs: Sequence[Any]) -> Hashable | None:
    """What a program may depend on but the values of tensors; None if nothing is known to be alike, as under autocast."""
    if torch._C._is_any_autocast_enabled():
        return None
    of_process = torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    return of_process, *[
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in inputs
    ]


# ---------------------------------------------------------------- replays


@dataclass(frozen=True)
class Replay:
    """One program, and where its arguments come from and its results go: positions, or constants of this kind of call."""

    program: Program
    given: tuple[tuple[int | None, Any], ...]  # position among the inputs, or None and a number
    # Position among the program's results, or of an input; neither: None.
    made: tuple[tuple[int | None, int | None], ...]

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        results = self.program(*[number if i is None else inputs[i] for i, number in self.given])
        return tuple([results[i] if i is not None else None if j is None else inputs[j] for i, j in self.made])


def replay_of(calls: Sequence[_Call], inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> Replay | None:
    """From the calls of programs that made `outputs` of `inputs`; None if it was not one, or something stays unexplained."""
    if len(calls) != 1:
        return None
    call, where = calls[0], _positions(inputs)
    if any(isinstance(x, Tensor) and id(x) not in where for x in call.given):
        return None
    results = _positions(call.made)
    if any(x is not None and id(x) not in results and id(x) not in where for x in outputs):
        return None
    return Replay(
        call.program,
        tuple((where[id(x)], None) if isinstance(x, Tensor) else (None, x) for x in call.given),
        tuple((results.get(id(x)), where.get(id(x))) if x is not None else (None, None) for x in outputs),
    )


def _positions(tensors: Sequence[Any]) -> dict[int, int]:
    return {id(x): i for i, x in enumerate(tensors) if isinstance(x, Tensor)}
