"""Command-line flags from dataclass fields: a knob is declared once, beside the component that it configures.

    @dataclass(frozen=True)
    class ModelConfig:
        \"\"\"Shape of the transformer.\"\"\"
        num_layers: int = knob(12, "transformer layers in the whole model")

gives `--num-layers 24`, its default, its help, and `ModelConfig(num_layers=24)`. Configs are frozen: what follows from a
knob is a property, a rule within one config lives in its `__post_init__`, a rule across configs in the caller's `check`.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, NoReturn

_REQUIRED = dataclasses.MISSING


class ConfigError(ValueError):
    """Settings that cannot work: what was given, what is allowed, what to change. One line a problem."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def knob(default: Any, help: str, *, flags: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    """A dataclass field that is also a flag.

    `flags` replaces the spelling `--field-name` (several are aliases). A boolean whose default is True is switched off by
    `--no-field-name`, one whose default is False is switched on by `--field-name`; its help says what giving the flag does.
    """
    metadata = {"help": help, "flags": flags, "metavar": metavar}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """How the command line spells a field."""
    if field.metadata["flags"]:
        return field.metadata["flags"]
    name = field.name.replace("_", "-")
    return (f"--no-{name}",) if field.default is True else (f"--{name}",)


def knobs(config_class: type) -> list[dataclasses.Field]:
    """The fields of a config class that are flags."""
    return [f for f in dataclasses.fields(config_class) if "help" in f.metadata]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is _REQUIRED else field.default


class FlagParser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are raised as ConfigError, so that every rank says the same and stops."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def known_flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def _argparse_options(field: dataclasses.Field, kind: Any) -> dict[str, Any]:
    """How argparse reads a value of type `kind`: bool, int, float, str, Literal[...], list[X], or X | None."""
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    if kind is bool:
        return options | {"action": "store_false" if field.default is True else "store_true"}
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return options | {"choices": choices, "type": type(choices[0])}
    metavar = field.metadata["metavar"] or field.name.upper().rsplit("_", 1)[-1]
    if typing.get_origin(kind) is list:
        return options | {"nargs": "+", "type": typing.get_args(kind)[0], "metavar": metavar}
    return options | {"type": kind, "metavar": metavar}


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add one group of flags for `config_class`; its docstring's first line is the group's title."""
    title = (config_class.__doc__ or config_class.__name__).strip().split("\n")[0]
    group = parser.add_argument_group(title.removesuffix("."))
    hints = typing.get_type_hints(config_class)
    for field in knobs(config_class):
        default = default_of(field)
        text = field.metadata["help"] if isinstance(default, bool) else f"{field.metadata['help']} (default: {default})"
        text = text.replace("%", "%%")
        group.add_argument(*flags_of(field), help=text, **_argparse_options(field, hints[field.name]))


def unknown_flag_message(flag: str, known: list[str]) -> str:
    """`unknown flag --num-layer; did you mean --num-layers?`"""
    near = difflib.get_close_matches(flag.split("=")[0], known, 1)
    return f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "; --help lists the known ones")


def build(config_class: type, given: dict[str, Any]) -> Any:
    """`config_class` from the values the user gave; names of other classes in `given` are passed over."""
    names = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in given.items() if name in names})


def changes(config: Any) -> dict[str, tuple[Any, Any]]:
    """The fields that differ from their defaults: name -> (default, value)."""
    pairs = {f.name: (default_of(f), getattr(config, f.name)) for f in knobs(type(config))}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
