"""Megatron's config dataclasses, read as settings of ours: fields of the same names, and refusals of what is not built."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError


def problems_of_not_built(config: Any, not_built: Mapping[str, Any]) -> list[str]:
    """Why what `config` says cannot be computed.

    not_built: fields that would change the numbers, and that nothing here computes -> the only value that is accepted. A field
    that the config lacks asks for nothing.
    """
    asked = [name for name, default in not_built.items() if getattr(config, name, default) != default]
    kind = type(config).__name__
    return [f"{kind}: {name}={getattr(config, name)!r} is not built yet; leave it out" for name in asked]


def settings_from(config: Any, theirs: type, ours: type, not_built: Mapping[str, Any], **others: Any) -> Any:
    """What `config` says as settings of the class `ours`: the fields that the class `theirs` has too, and `others`.

    Raises ConfigError for what is not built, out of range, or does not go together.
    """
    shared = {one.name for one in fields(theirs)} & {one.name for one in fields(ours)}
    made = ours(**{**{name: getattr(config, name) for name in shared}, **others})
    if problems := [*problems_of_not_built(config, not_built), *made.problems()]:
        raise ConfigError(problems)
    return made
