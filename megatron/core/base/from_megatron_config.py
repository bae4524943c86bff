"""Megatron's config dataclasses are read as configs of ours.

Fields have equal names; what is not built is refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError


def problems_of_not_built(config: Any, not_built: Mapping[str, Any]) -> list[str]:
    """Return a problem for each field of `config` that asks for what is not built.

    not_built: fields that would change the numbers, and that nothing here computes -> the only value that is accepted.
    A field that the config lacks asks for nothing.
    """
    kind = type(config).__name__
    problems = []
    for name, default in not_built.items():
        value = getattr(config, name, default)
        if value != default:
            problems.append(f"{kind}: {name}={value!r} is not built yet; leave it out")
    return problems


def settings_from(
    config: Any, megatron_class: type, our_class: type, not_built: Mapping[str, Any], **others: Any
) -> Any:
    """Return `config` as an `our_class`: the fields that `megatron_class` has too, and `others`, which come first.

    Raises ConfigError for what is not built, out of range, or does not go together.
    """
    shared = {field.name for field in fields(megatron_class)} & {field.name for field in fields(our_class)}
    values = {name: getattr(config, name) for name in shared}
    settings = our_class(**{**values, **others})
    problems = [*problems_of_not_built(config, not_built), *settings.problems()]
    if problems:
        raise ConfigError(problems)
    return settings
