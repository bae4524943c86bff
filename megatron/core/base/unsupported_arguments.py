"""Functions of ours may have Megatron's signatures: with arguments that they accept at their defaults only."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def accepts_defaults_only(after: str = "", /, **others: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function, or a class, Megatron's further arguments, each with its default.

    Any other value raises NotImplementedError. The arguments are placed behind the argument `after`, in this order; by
    default behind all of the function's own positional arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        # the signature with the further arguments
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        further = [inspect.Parameter(name, kind, default=value) for name, value in others.items()]
        place = sum(parameter.kind <= kind for parameter in parameters)
        if after:
            place = [*own.parameters].index(after) + 1
        signature = own.replace(parameters=[*parameters[:place], *further, *parameters[place:]])

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            for name, default in others.items():
                value = bound.arguments.pop(name, default)
                # `is` first: a value such as a tensor may not be comparable.
                if value is not default and (default is None or value != default):
                    raise NotImplementedError(
                        f"{function.__qualname__}: {name}={value!r} is not built; leave it at its default, {default!r}"
                    )
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__defaults_only__ = dict(others)  # type: ignore[attr-defined]
        return call

    return decorate
