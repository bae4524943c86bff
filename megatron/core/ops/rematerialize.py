"""A tensor whose readers need not keep it for their backward: they keep what it is made from, and make it again.

    y = gelu(x)         keeps x for its own backward, and marks y: made by its compiled formula from x
    z = y W^T           keeps x instead of y; its backward makes y again, with the same program and so to the same bits

It saves memory only where something else keeps what y is made from anyway, so only its maker may mark it.

A maker's backward reads what y is made from. A reader whose own backward can wait for that one asks it for y
(`ask_maker`), which
then costs no pass of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Again = Callable[..., Tensor]


class _Mark(NamedTuple):
    version: int  # of the marked tensor, which counts its changes in place
    by: Callable[..., tuple[Tensor | None, ...]]
    inputs: tuple[Any, ...]


def mark_made(made: Tensor, by: Callable[..., tuple[Tensor | None, ...]], inputs: tuple[Any, ...]) -> None:
    """Say that by(*inputs)[0] has the values of `made`, now and in the backward."""
    made.made_again = _Mark(made._version, by, inputs)


def _mark_of(x: Tensor) -> _Mark | None:
    """Also of a tensor that was changed in place since it was marked."""
    return getattr(x, "made_again", None)


def unmarked(made: Tensor) -> Tensor:
    """The same tensor, to be kept by its readers: they run where ZeRO stage 3 may have released a parameter it is
    made from."""
    if _mark_of(made) is not None:
        del made.made_again
    return made


def kept_for(x: Tensor) -> tuple[Again, tuple[Tensor | None, ...]]:
    """(again, kept): again(*kept) has the values of x. kept: what to save for a backward, x itself if nobody has
    marked it."""
    mark = _mark_of(x)
    if mark is None or mark.version != x._version:  # changed in place since
        return _as_kept, (x,)
    numbers = tuple(None if isinstance(value, Tensor) else value for value in mark.inputs)
    return partial(_make, mark.by, numbers), tuple(
        value if isinstance(value, Tensor) else None for value in mark.inputs
    )


def maker_of(x: Tensor) -> "Maker | None":
    """Whom to ask for x in the backward; None: nobody."""
    mark = _mark_of(x)
    return x.grad_fn if mark is not None and mark.version == x._version and hasattr(x.grad_fn, "asked") else None


def ask_maker(maker: "Maker | None", use: Callable[[Tensor], Any]) -> bool:
    """Whether the backward that runs has that of the maker before it, which will call use(x)."""
    if maker is None or not torch._C._will_engine_execute_node(maker):
        return False
    maker.asked.append(use)
    return True


class Maker(Protocol):
    """A node of autograd's graph: whom its backward is to give its result."""

    asked: list[Callable[[Tensor], Any]]


def _as_kept(x: Tensor) -> Tensor:
    return x


def _make(by: Callable[..., tuple[Tensor, ...]], numbers: tuple[Any, ...], *kept: Tensor | None) -> Tensor:
    return by(*(number if value is None else value for value, number in zip(kept, numbers)))[0]
