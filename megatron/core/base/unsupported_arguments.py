"""Functions of ours may have Megatron's signatures: with arguments that they accept at their defaults only."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckedArgument:
    """A further argument without effect, None by default.

    check(value, the argument's name) raises for a value that it refuses.
    by_name: it is given by name alone.
    """

    check: Callable[[Any, str], None]
    by_name: bool = False


def accepts_defaults_only(after: str = "", /, **others: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function, or a class, Megatron's further arguments, each with its default.

    Any other value raises NotImplementedError; a `CheckedArgument` decides itself. The arguments are placed behind the
    argument `after`, in this order; by default behind all of the function's own positional arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        # the signature with the further arguments
        own = inspect.signature(function)
        parameters = list(own.parameters.values())
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        checked = {name: value for name, value in others.items() if isinstance(value, CheckedArgument)}
        further = []
        by_name = []
        for name, value in others.items():
            if name not in checked:
                further.append(inspect.Parameter(name, kind, default=value))
            elif checked[name].by_name:
                by_name.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
            else:
                further.append(inspect.Parameter(name, kind, default=None))
        place = sum(parameter.kind <= kind for parameter in parameters)
        if after:
            place = [*own.parameters].index(after) + 1
        end = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        signature = own.replace(
            parameters=[*parameters[:place], *further, *parameters[place:end], *by_name, *parameters[end:]]
        )

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            for name, default in others.items():
                value = bound.arguments.pop(name, default)
                if name in checked:
                    if value is not default:
                        checked[name].check(value, f"{function.__qualname__}: {name}")
                    continue
                # `is` first: a value such as a tensor may not be comparable.
                if value is not default and (default is None or value != default):
                    raise NotImplementedError(
                        f"{function.__qualname__}: {name}={value!r} is not built; leave it at its default, {default!r}"
                    )
            return function(*bound.args, **bound.kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        only = {name: value for name, value in others.items() if name not in checked}
        call.__defaults_only__ = only  # type: ignore[attr-defined]
        return call

    return decorate
