"""Megatron's signatures: arguments that a function of ours has no use for."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(**others: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function, or a class, with Megatron's further arguments, after its own and in this order, each with its default.

    NotImplementedError for any other value.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        own = inspect.signature(function)
        named, rest = [], []
        for one in own.parameters.values():
            (rest if one.kind is one.VAR_KEYWORD else named).append(one)
        kind = max([inspect.Parameter.POSITIONAL_OR_KEYWORD, *(one.kind for one in named)])
        more = [inspect.Parameter(name, kind, default=value) for name, value in others.items()]
        signature = own.replace(parameters=[*named, *more, *rest])

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options)
            for name, value in others.items():
                asked = given.arguments.pop(name, value)
                if asked is not value and (value is None or asked != value):
                    raise NotImplementedError(
                        f"{function.__qualname__}: {name}={asked!r} is not built; leave it at {value!r}"
                    )
            return function(*given.args, **given.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
