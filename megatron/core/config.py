"""Command-line flags from dataclass fields: a knob is declared once, beside the component that it configures.

    @dataclass(frozen=True)
    class ModelConfig(FlagConfig):
        \"\"\"Shape of the transformer.\"\"\"
        num_layers: Count = knob(12, "transformer layers in the whole model")

gives `--num-layers 24`, its default, its help, and `ModelConfig(num_layers=24)`. Configs are frozen: what follows from a
knob is a property. The type of a knob may say the range of its numbers (`Count`), a config says its own rules
(`FlagConfig.problems`), and the rules across configs lie with the caller.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

_REQUIRED = dataclasses.MISSING


class ConfigError(ValueError):
    """Settings that cannot work: what was given, what is allowed, what to change. One line a problem."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def knob(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    required: bool = False,
    of_model: bool = False,
    names: Collection[str] | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    `flags` replaces the spelling `--field-name` (several are aliases). A boolean whose default is True is switched off by
    `--no-field-name`, one whose default is False is switched on by `--field-name`; its help says what giving the flag does.
    `required` is what help and documents say of it; the config, or a check across configs, refuses its absence.
    `of_model`, of a script's own knob: with another value the parameters mean something else, so a run refuses the checkpoint.
    `names`: the open table whose keys the values are, those included that a script has added when the flags are read.
    """
    metadata = {"help": help, "flags": flags, "metavar": metavar, "required": required, "of_model": of_model}
    metadata["names"] = names
    if isinstance(default, list):
        return dataclasses.field(
            default_factory=lambda: list(default), metadata=metadata, hash=False
        )  # lists have none
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """How the command line spells a field."""
    if field.metadata["flags"]:
        return field.metadata["flags"]
    return (flag_of(f"no_{field.name}" if field.default is True else field.name),)


def flag_of(name: str) -> str:
    """How the command line spells the field `name`, where it has no spelling of its own: --num-layers of num_layers."""
    return f"--{name.replace('_', '-')}"


def knobs(config_class: type) -> list[dataclasses.Field]:
    """The fields of a config class that are flags."""
    return [f for f in dataclasses.fields(config_class) if "help" in f.metadata]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is _REQUIRED else field.default


def title_of(config_class: type) -> str:
    """What a group of flags is called: the first line of the class's docstring."""
    return (config_class.__doc__ or config_class.__name__).strip().split("\n")[0].removesuffix(".")


def default_text(field: dataclasses.Field) -> str:
    """The default as help and documents show it; empty for a switch and for a setting that is unset."""
    default = default_of(field)
    if isinstance(default, bool) or default is None:
        return "required" if field.metadata["required"] else ""
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


# ---------------------------------------------------------------- rules within one config


class FlagConfig:
    """The base of a config: when one is made, every knob is within its range and the rules of the class hold.

    Raises ConfigError with all that is wrong at once.
    """

    def __post_init__(self) -> None:
        if problems := [*out_of_range(self), *self.problems()]:
            raise ConfigError(problems)

    def problems(self) -> Iterable[str]:
        """What cannot stand in this config, beside numbers out of range. Called for those too."""
        return ()


# Numbers in a range, as types of knobs: an interval is the second part of an `Annotated` type.
Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NotNegative = Annotated[float, "[0, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
Share = Annotated[float, "[0, 1]"]

_INTERVAL = re.compile(r"[\[(](?P<low>\S+), (?P<high>\S+)[\])]")
_annotations_of = cache(partial(typing.get_type_hints, include_extras=True))


def interval_of(config_class: type, field: dataclasses.Field) -> str | None:
    """The range of a knob's numbers, such as "[0, 1)", where its type says one."""
    kind = _annotations_of(config_class)[field.name]
    return next((one.__metadata__[0] for one in (kind, *typing.get_args(kind)) if hasattr(one, "__metadata__")), None)


_IN_WORDS = {"[0, inf)": "not be negative", "(0, inf)": "be positive", "[1, inf)": "be at least 1"}


def out_of_range(config: Any) -> Iterator[str]:
    """A line for each value of `config` that is not in the interval, or the table of names, that its knob says."""
    for field in knobs(type(config)):
        names, value = field.metadata["names"], getattr(config, field.name)
        if names is not None and value is not None and value not in names:
            yield f"{flags_of(field)[0]} is {value}; it must be one of {', '.join(names)}"
        interval = interval_of(type(config), field)
        if interval is None or value is None:
            continue
        ends = _INTERVAL.fullmatch(interval)
        low, high = _bound(ends["low"]), _bound(ends["high"])
        above = low < value or (interval[0] == "[" and value == low)
        below = value < high or (interval[-1] == "]" and value == high)
        if not (above and below):
            yield f"{flags_of(field)[0]} is {value}; it must {_IN_WORDS.get(interval, f'be in {interval}')}"


def _bound(text: str) -> float:
    """The number that an interval ends at: 0, inf, 2^32."""
    base, *power = text.split("^")
    return float(base) ** float(*power or [1])


# ---------------------------------------------------------------- reading values


def read_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def read_number(text: str) -> float:
    """A finite number: no setting has a use for an infinite one, and a NaN would pass every comparison as false."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def read_text(text: str) -> str:
    """Any text but none: an empty one is a shell variable that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; give one, or leave the flag out")
    return text


_READERS = {int: read_whole_number, float: read_number, str: read_text}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _one_of(choices: Collection[Any]) -> Any:
    """A reader of one of `choices`, all of one type. A table may have grown since the reader was made."""

    def read(text: str) -> Any:
        if text not in map(str, choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, choices))}")
        return type(next(iter(choices)))(text)

    return read


_types_of = cache(typing.get_type_hints)  # a class has many fields, and each is asked for several times


def value_kind(config_class: type, field: dataclasses.Field) -> Any:
    """The type of a knob's value, where it has one: int | None is int."""
    kind = _types_of(config_class)[field.name]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    return kind


def _choices_of(kind: Any, field: dataclasses.Field) -> Collection[Any]:
    """The values of a choice, empty for a knob of another kind."""
    return field.metadata["names"] or (typing.get_args(kind) if typing.get_origin(kind) is Literal else ())


def metavar_of(config_class: type, field: dataclasses.Field) -> str:
    """What stands for the value: N a whole number, X any number, {a,b} a choice; empty for a switch."""
    kind = value_kind(config_class, field)
    if kind is bool:
        return ""
    if choices := _choices_of(kind, field):
        return "{" + ",".join(map(str, choices)) + "}"
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return field.metadata["metavar"] or _METAVARS[element]


def _argparse_options(config_class: type, field: dataclasses.Field) -> dict[str, Any]:
    """How argparse reads a value: bool, int, float, str, Literal[...], list[X], or X | None."""
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kind = value_kind(config_class, field)
    if kind is bool:
        return options | {"action": "store_false" if field.default is True else "store_true"}
    options["metavar"] = metavar_of(config_class, field)
    if choices := _choices_of(kind, field):
        return options | {"type": _one_of(choices)}
    if typing.get_origin(kind) is list:
        return options | {"nargs": "+", "type": _READERS[typing.get_args(kind)[0]]}
    return options | {"type": _READERS[kind]}


# ---------------------------------------------------------------- the parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults after each flag that has one; the text at the end as it was laid out."""


class ReadFlags(NamedTuple):
    """The values of the flags on a command line, and what could not be read."""

    values: argparse.Namespace
    unknown: list[str]  # words that no flag took
    unreadable: dict[str, str]  # field -> what is wrong with the value it was given


class FlagParser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are raised as ConfigError, so that every rank says the same and stops."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **{"usage": "%(prog)s [flags]"} | options)
        self._unreadable: dict[str, str] = {}
        self.refused: set[str] = set()  # flags that are known in order to say why they cannot be given
        self.own: list[argparse.Action] = []  # those that a script added

    def read(self, argv: Sequence[str] | None) -> "ReadFlags":
        """What a command line says; a value that cannot be read is left out."""
        self._unreadable = {}
        values, unknown = super().parse_known_args(argv)
        for name in self._unreadable:
            vars(values).pop(name, None)
        return ReadFlags(values, unknown, self._unreadable)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        read = self.read(args)
        if read.unreadable:
            raise ConfigError(list(read.unreadable.values()))
        return read.values, read.unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError([*self._unreadable.values(), message.removeprefix("argument ")])

    # argparse ends at the first value that it cannot read; these two go on, so that all can be said.
    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            self._note_unreadable(action, error)
            return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            self._note_unreadable(action, error)

    def _note_unreadable(self, action: argparse.Action, error: argparse.ArgumentError) -> None:
        self._unreadable.setdefault(action.dest, str(error).removeprefix("argument "))

    @contextlib.contextmanager
    def flags_of_script(self) -> Iterator[None]:
        """Flags that are added meanwhile, in groups or not, are `own`, and stand behind the first group in help."""
        before, ours = list(self._action_groups), len(self._actions)
        yield
        self.own = self._actions[ours:]
        added = [group for group in self._action_groups if group not in before]
        self._optionals.title = "Flags of this script"
        first, *others = [group for group in before if group is not self._optionals and group is not self._positionals]
        self._action_groups[:] = [first, self._positionals, self._optionals, *added, *others]

    def known_flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def actions_by_flag(self) -> dict[str, argparse.Action]:
        return {flag: action for action in self._actions for flag in action.option_strings}


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add one group of flags for `config_class`; its docstring's first line is the group's title."""
    group = parser.add_argument_group(title_of(config_class))
    for field in knobs(config_class):
        add_flag(group, config_class, field)


def add_flag(
    group: argparse._ArgumentGroup,
    config_class: type,
    field: dataclasses.Field,
    *,
    default: Any = None,
    hidden: bool = False,
) -> None:
    """Add the flag of one field. default: what help says it is, instead of the field's own. hidden: not in help."""
    default = default_text(field) if default is None else default
    shown = {"": "", "required": " (required)"}.get(default, f" (default: {default})")
    text = argparse.SUPPRESS if hidden else f"{field.metadata['help']}{shown}".replace("%", "%%")
    action = group.add_argument(*flags_of(field), help=text, **_argparse_options(config_class, field))
    action.knob = field  # for whoever asks an action for its default, which argparse is not told


def read_flags(parser: FlagParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The values of the flags the user gave. Raises ConfigError for unknown ones, with the nearest known."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_problems(unknown, parser))
    return vars(given)


def repeated_flags(parser: FlagParser, argv: Sequence[str]) -> list[str]:
    """One line for each setting that a command line gives more than once, where the last one counts."""
    actions, times = parser.actions_by_flag(), Counter()
    for word in argv:
        action = actions.get(word.split("=")[0])
        if action is not None and not isinstance(action, argparse._AppendAction):
            times["/".join(action.option_strings)] += 1
    return [f"{flags} is given {count} times: the last one counts" for flags, count in times.items() if count > 1]


def unknown_problems(words: Sequence[str], parser: FlagParser) -> list[str]:
    """What is wrong with the words of a command line that no flag took. `-1` is a value, however it begins."""
    flags = [word for word in words if re.match(r"--?[A-Za-z_]", word)]
    if flags:
        return [unknown_flag_message(flag, parser.known_flags(), parser.refused) for flag in flags]
    return [f"{' '.join(words)} does not belong to any flag"]


def unknown_flag_message(flag: str, known: list[str], refused: Collection[str] = ()) -> str:
    """`unknown flag --num-layer; did you mean --num-layers?`"""
    name = flag.split("=")[0]
    near = nearest_flag(name, known, refused) or " or ".join(
        _longer_flags(name, [other for other in known if other not in refused])
    )
    return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else "; --help lists the known ones")


_CALLED_ELSEWHERE = {"--learning-rate": "--lr", "--max-steps": "--train-iters", "--num-steps": "--train-iters"}
_CLOSE = 0.8  # share of equal letters; at 0.6, difflib's own, --xavier leads to --lr


def _longer_flags(name: str, known: list[str]) -> list[str]:
    """The few flags that `name` may abbreviate, by whole words."""
    longer = [flag for flag in known if flag.startswith(f"--{name.lstrip('-').replace('_', '-')}-")]
    return longer if len(longer) <= 4 else []


def nearest_flag(flag: str, known: list[str], refused: Collection[str] = ()) -> str | None:
    """The flag that `flag` stands for, if one is close: other hyphens, with or without --no-, its beginning, a slip.

    None where that is one of `refused`: of the others one that is less close does something else.
    """
    near = _nearest(flag, known)
    return None if near in refused else near


def _nearest(flag: str, known: list[str]) -> str | None:
    plain = "--" + flag.lstrip("-").replace("_", "-")
    if (usual := _CALLED_ELSEWHERE.get(plain)) in known:
        return usual
    opposite = f"--{plain[5:]}" if plain.startswith("--no-") else f"--no-{plain[2:]}"
    longer = [other for other in known if other.startswith(f"{plain}-")]
    for candidate in (plain, opposite, *(longer if len(longer) == 1 else ())):
        if candidate in known:
            return candidate
    return next(iter(difflib.get_close_matches(plain, known, 1, _CLOSE)), None)


def build(config_class: type, given: dict[str, Any]) -> Any:
    """`config_class` from the values the user gave; names of other classes in `given` are passed over."""
    names = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in given.items() if name in names})


def changes(config: Any) -> dict[str, tuple[Any, Any]]:
    """The fields that differ from their defaults: name -> (default, value)."""
    pairs = {f.name: (default_of(f), getattr(config, f.name)) for f in knobs(type(config))}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
