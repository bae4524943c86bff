"""Megatron's signatures: arguments that a function of ours has no use for."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(after: str = "", /, **others: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function, or a class, with Megatron's further arguments, each with its default; NotImplementedError for any
    other value.

    They have the places behind the argument `after`, in this order; by default behind all of its own that have a place.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        own = inspect.signature(function)
        named = list(own.parameters.values())
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        more = [inspect.Parameter(name, kind, default=value) for name, value in others.items()]
        place = [*own.parameters].index(after) + 1 if after else sum(one.kind <= kind for one in named)
        signature = own.replace(parameters=[*named[:place], *more, *named[place:]])

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
