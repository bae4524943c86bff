"""Megatron's config dataclasses, read as settings of ours: fields of the same names, and refusals of what is not built."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError


def problems_of_not_built(config: Any, kind: type, not_built: Sequence[str]) -> list[str]:
    """Why what `config` says cannot be computed.

    kind: its dataclass, or the one whose fields it has. not_built: fields that would change the numbers, and that
    nothing here
    computes; only the default is accepted, as the class that first declares the field gives it.
    """
    defaults = _first_defaults(kind)
    asked = [name for name in not_built if name in defaults and getattr(config, name, defaults[name]) != defaults[name]]
    name_of_kind = type(config).__name__
    return [f"{name_of_kind}: {name}={getattr(config, name)!r} is not built yet; leave it out" for name in asked]


def settings_from(config: Any, theirs: type, ours: type, not_built: Sequence[str], **others: Any) -> Any:
    """What `config` says as settings of the class `ours`: the fields that both classes have, and `others`.

    Raises ConfigError for what is not built, out of range, or does not go together.
    """
    shared = {one.name for one in fields(theirs)} & {one.name for one in fields(ours)}
    made = ours(**{**{name: getattr(config, name) for name in shared}, **others})
    if problems := [*problems_of_not_built(config, theirs, not_built), *made.problems()]:
        raise ConfigError(problems)
    return made


def _first_defaults(kind: type) -> dict[str, Any]:
    """Defaults by field. A subclass of a fork that gives a field another default asks for that value."""
    defaults: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for one in fields(base) if is_dataclass(base) else ():
            made = one.default_factory() if one.default_factory is not MISSING else one.default
            defaults.setdefault(one.name, made)
    return defaults
