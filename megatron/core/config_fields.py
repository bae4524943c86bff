"""Dataclasses of many fields as tables: a TOML file has the fields, their defaults, and those that are refused."""

import tomllib
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.config import ConfigError


class Fields(NamedTuple):
    """A table. not_built: fields that would change the numbers, and that nothing here computes. groups: fields by a name."""

    defaults: dict[str, Any]
    not_built: list[str]
    groups: dict[str, list[str]]

    def problems(self, config: Any) -> list[str]:
        """Why what `config` says cannot be computed."""
        asked = [name for name in self.not_built if getattr(config, name, self.defaults[name]) != self.defaults[name]]
        kind = type(config).__name__
        return [f"{kind}: {name}={getattr(config, name)!r} is not built yet; leave it out" for name in asked]

    def ours(self, config: Any, kind: type, **others: Any) -> Any:
        """What `config` says as one of our settings: fields of the same names, and `others`. Raises ConfigError for what is not
        built, out of range, or does not go together."""
        alike = {one.name: getattr(config, one.name) for one in fields(kind) if one.name in self.defaults}
        made = kind(**{**alike, **others})
        if problems := [*self.problems(config), *made.problems()]:
            raise ConfigError(problems)
        return made


def read_fields(beside: str, name: str) -> Fields:
    """The table NAME.toml beside a file. A default is written as in Python; it may be something of torch's."""
    tables = tomllib.loads(Path(beside).with_name(f"{name}.toml").read_text())
    defaults = {one: _value(value) for value, some in tables["defaults"].items() for one in some.split()}
    groups = {one: some.split() for one, some in tables.get("groups", {}).items()}
    return Fields(defaults, tables["not_built"]["fields"].split(), groups)


def _value(text: str) -> Any:
    return reduce(getattr, text.split(".")[1:], torch) if text.startswith("torch.") else literal_eval(text)


def dataclass_of(name: str, names: Mapping[str, Any], bases: tuple[type, ...] = (), *, kw_only: bool = False) -> type:
    """A dataclass with these fields and defaults."""
    of_fields = [
        (one, Any, field(default_factory=list) if value == [] else field(default=value)) for one, value in names.items()
    ]
    return make_dataclass(name, of_fields, bases=bases, kw_only=kw_only)
