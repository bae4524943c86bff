"""Command-line flags from dataclass fields: a knob is declared once, beside the component that it configures.

    @dataclass(frozen=True)
    class ModelConfig(FlagConfig):
        \"\"\"Shape of the transformer.\"\"\"
        num_layers: Count = knob(12, "transformer layers in the whole model")

gives `--num-layers 24`, its default, its help, and `ModelConfig(num_layers=24)`. Configs are frozen; derived values are
properties. A knob's type may bound its numbers (`Count`), rules within one config stand in `FlagConfig.problems`, and the
caller checks rules across configs.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from megatron.core.base import output_streams

_REQUIRED = dataclasses.MISSING


class ConfigError(ValueError):
    """Invalid settings, one line per problem: what was given, what is allowed, which flag to change."""

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
    read: Callable[[str], str] | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    `flags` replaces the spelling `--field-name`; further entries are aliases. A boolean with default False is switched on by
    `--field-name`, a boolean with default True is switched off by `--no-field-name`; the help says what giving the flag
    does.
    `required`: help and docs say so; the config, or a check across configs, refuses its absence.
    `of_model`, for a script's own knobs: a checkpoint with another value does not fit the model and is refused.
    `names`: an open table; the allowed values are its keys when the flags are read, with a script's additions.
    `read`, for a text with a form of its own, or for `names`, to say more of others: its one spelling, or an
    ArgumentTypeError
    that says what is allowed.
    """
    metadata = dict(
        help=help, flags=flags, metavar=metavar, required=required, of_model=of_model, names=names, read=read
    )
    if isinstance(default, list):  # which has no hash
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """The spellings of a field on the command line."""
    if field.metadata["flags"]:
        return field.metadata["flags"]
    return (flag_of(f"no_{field.name}" if field.default is True else field.name),)


def flag_of(name: str) -> str:
    """The default spelling of a field: --num-layers for num_layers."""
    return f"--{name.replace('_', '-')}"


def knobs(config_class: type) -> list[dataclasses.Field]:
    """The fields of a config class that are flags."""
    return [f for f in dataclasses.fields(config_class) if "help" in f.metadata]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is _REQUIRED else field.default


def title_of(config_class: type) -> str:
    """The title of a group of flags: the first line of the class's docstring."""
    return (config_class.__doc__ or config_class.__name__).strip().split("\n")[0].removesuffix(".")


def default_text(field: dataclasses.Field) -> str:
    """The default as help and docs show it; "" for a switch and for None."""
    default = default_of(field)
    if isinstance(default, bool) or default is None:
        return "required" if field.metadata["required"] else ""
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


# ---------------------------------------------------------------- rules within one config


class FlagConfig:
    """Base class of configs. The constructor checks ranges and `problems`, and raises one ConfigError with all problems."""

    def __post_init__(self) -> None:
        if problems := [*out_of_range(self), *self.problems()]:
            raise ConfigError(problems)

    def problems(self) -> Iterable[str]:
        """Violated rules of this config, one line each. Also called if a number is out of range."""
        return ()

    @property
    def without_effect(self) -> dict[str, str]:
        """Flags that were given and that nothing reads under these settings -> why."""
        return {}


# Types of knobs with a range: the metadata of the `Annotated` type is an interval.
Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NotNegative = Annotated[float, "[0, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
Share = Annotated[float, "[0, 1]"]

_INTERVAL = re.compile(r"[\[(](\S+), (\S+)[\])]")
_annotations_of = cache(partial(typing.get_type_hints, include_extras=True))


def interval_of(config_class: type, field: dataclasses.Field) -> str | None:
    """The interval of a knob's type, such as "[0, 1)"; None if it has none."""
    kind = _annotations_of(config_class)[field.name]
    return next((one.__metadata__[0] for one in (kind, *typing.get_args(kind)) if hasattr(one, "__metadata__")), None)


_IN_WORDS = {"[0, inf)": "not be negative", "(0, inf)": "be positive", "[1, inf)": "be at least 1"}


def out_of_range(config: Any) -> Iterator[str]:
    """One line for each value outside its knob's interval or table of names, or that its reader refuses."""
    for field, interval in _limited(type(config)):
        names, value = field.metadata["names"], getattr(config, field.name)
        if value is None:
            continue
        if field.metadata["read"] is not None:
            try:
                field.metadata["read"](value)
            except argparse.ArgumentTypeError as error:
                yield f"{flags_of(field)[0]}: {error}"
        elif names is not None and value not in names:
            yield f"{flags_of(field)[0]} is {value}; it must be one of {', '.join(names)}"
        if interval is None:
            continue
        low, high = _ends_of(interval)
        above = low < value or (interval[0] == "[" and value == low)
        below = value < high or (interval[-1] == "]" and value == high)
        if not (above and below):
            yield f"{flags_of(field)[0]} is {value}; it must {_IN_WORDS.get(interval, f'be in {interval}')}"


@cache
def _limited(config_class: type) -> list[tuple[dataclasses.Field, str | None]]:
    """The knobs with an interval, a table of names or a reader."""
    pairs = ((field, interval_of(config_class, field)) for field in knobs(config_class))
    return [(f, i) for f, i in pairs if i or f.metadata["names"] is not None or f.metadata["read"] is not None]


@cache
def _ends_of(interval: str) -> tuple[float, ...]:
    return tuple(map(_bound, _INTERVAL.fullmatch(interval).groups()))


def _bound(text: str) -> float:
    """An end of an interval: "0", "inf" or "2^32"."""
    base, *power = text.split("^")
    return float(base) ** float(*power or [1])


# ---------------------------------------------------------------- reading values


def read_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def read_number(text: str) -> float:
    """A finite number. NaN is refused because it would pass range checks: every comparison with it is false."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def read_text(text: str) -> str:
    """A text that is not empty: an empty value is usually an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; give one or omit the flag")
    return text


_READERS = {int: read_whole_number, float: read_number, str: read_text}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def one_of(choices: Collection[Any]) -> Any:
    """A reader of one of `choices`, all of one type. Looks them up when called: a script may have added to the table."""

    def read(text: str) -> Any:
        if text not in map(str, choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, choices))}")
        return type(next(iter(choices)))(text)

    return read


_types_of = cache(typing.get_type_hints)  # called several times for each field of a class


def value_kind(config_class: type, field: dataclasses.Field) -> Any:
    """The type of a knob's value without None: int for int | None."""
    kind = _types_of(config_class)[field.name]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    return kind


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that came as JSON is of the type of a field: bool, int, float, str, Literal[...], list[X], or X
    | None."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Annotated:
        return fits(value, typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return type(value) in (str, int, bool) and value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(fits(one, typing.get_args(kind)[0]) for one in value)
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or fits(value, int)
    if kind is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is kind


def misfits(of: type, given: typing.Mapping[str, Any]) -> list[str]:
    """The values among `given`, which came as JSON, that are not of the type of the field of their name in the
    dataclass `of`."""
    kinds = _types_of(of)
    named = [(name, kinds[name], given[name]) for name in kinds if name in given]
    return [f"{name} is {value!r:.40}" for name, kind, value in named if not fits(value, kind)]


def _choices_of(kind: Any, field: dataclasses.Field) -> Collection[Any]:
    """The allowed values of a choice; empty for other knobs."""
    return field.metadata["names"] or (typing.get_args(kind) if typing.get_origin(kind) is Literal else ())


def metavar_of(config_class: type, field: dataclasses.Field) -> str:
    """The placeholder of the value in help: N an integer, X a number, {a,b} a choice; "" for a switch."""
    kind = value_kind(config_class, field)
    if kind is bool:
        return ""
    if choices := _choices_of(kind, field):
        return "{" + ",".join(map(str, choices)) + "}"
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return field.metadata["metavar"] or _METAVARS[element]


def _argparse_options(config_class: type, field: dataclasses.Field) -> dict[str, Any]:
    """The arguments of `add_argument` for a knob of type bool, int, float, str, Literal[...], list[X] or X | None."""
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kind = value_kind(config_class, field)
    if kind is bool:
        return options | {"action": "store_false" if field.default is True else "store_true"}
    options["metavar"] = metavar_of(config_class, field)
    if choices := _choices_of(kind, field):
        return options | {"type": field.metadata["read"] or one_of(choices)}
    if typing.get_origin(kind) is list:
        return options | {"nargs": "+", "type": _READERS[typing.get_args(kind)[0]]}
    return options | {"type": field.metadata["read"] or _READERS[kind]}


# ---------------------------------------------------------------- the parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints defaults, and keeps the line breaks of the epilog."""


class ReadFlags(NamedTuple):
    """The parsed command line."""

    values: argparse.Namespace
    unknown: list[str]  # words that belong to no flag
    unreadable: dict[str, str]  # field -> problem of its value


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting, so that every rank reports alike and stops."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **{"usage": "%(prog)s [flags]"} | options)
        self._unreadable: dict[str, str] = {}
        self.refused: set[str] = set()  # Megatron's flags that are parsed only to explain why they are refused
        self.own: list[argparse.Action] = []  # the script's flags
        self.defaults_of_script: dict[str, Any] = {}  # that it sets of other flags by `set_defaults`

    def read(self, argv: Sequence[str] | None) -> "ReadFlags":
        """Parses a command line; values that cannot be read are listed, not raised."""
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

    def print_help(self, file: Any = None) -> None:
        """Also for `--help | head`."""
        if file is None:
            output_streams.print_answer(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ConfigError([*self._unreadable.values(), message.removeprefix("argument ")])

    # argparse stops at the first unreadable value; these overrides continue, so that one error lists them all.
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
        """Flags added inside the block become `own`; help shows them, and their groups, after the first group.

        A default that it sets of a flag that is not its own would count as if the user had given it.
        """
        before, ours = list(self._action_groups), len(self._actions)
        defaults = {action.dest: action.default for action in self._actions}
        yield
        self.own = self._actions[ours:]
        names = self._defaults.keys() - {action.dest for action in self.own}
        self.defaults_of_script = {name: self._defaults.pop(name) for name in sorted(names)}
        for action in self._actions[:ours]:
            action.default = defaults[action.dest]
        added = [group for group in self._action_groups if group not in before]
        self._optionals.title = "Flags of this script"
        first, *others = [group for group in before if group is not self._optionals and group is not self._positionals]
        self._action_groups[:] = [first, self._positionals, self._optionals, *added, *others]

    def known_flags(self) -> list[str]:
        return list(self.actions_by_flag())

    def actions_by_flag(self) -> dict[str, argparse.Action]:
        return {flag: action for action in self._actions for flag in action.option_strings}


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Adds the group of flags of `config_class`."""
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
    """Adds the flag of one field. default: shown in help instead of the field's own. hidden: not in help."""
    default = default_text(field) if default is None else default
    shown = {"": "", "required": " (required)"}.get(default, f" (default: {default})")
    text = argparse.SUPPRESS if hidden else f"{field.metadata['help']}{shown}".replace("%", "%%")
    action = group.add_argument(*flags_of(field), help=text, **_argparse_options(config_class, field))
    action.knob = field  # argparse itself does not know the default


def knob_of(action: argparse.Action) -> dataclasses.Field | None:
    """The config field whose flag this is; None: a script added the flag by argparse alone."""
    return getattr(action, "knob", None)


def read_flags(parser: FlagParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The values of the given flags. Raises ConfigError for unknown flags, with the nearest known flag."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_problems(unknown, parser))
    return vars(given)


def repeated_flags(parser: FlagParser, argv: Sequence[str]) -> list[str]:
    """One line for each setting that is given more than once; the last value counts."""
    actions, times = parser.actions_by_flag(), Counter()
    for word in argv:
        action = actions.get(word.split("=")[0])
        if action is not None and not isinstance(action, argparse._AppendAction):
            times["/".join(action.option_strings)] += 1
    return [f"{flags} is given {count} times; the last value counts" for flags, count in times.items() if count > 1]


def unknown_problems(words: Sequence[str], parser: FlagParser) -> list[str]:
    """One line for each unknown flag among `words`, or one for all if none is a flag. `-1` is a value, not a flag."""
    flags = [word for word in words if re.match(r"--?[A-Za-z_]", word)]
    if flags:
        return [unknown_flag_message(flag, parser.known_flags(), parser.refused) for flag in flags]
    return [f"{' '.join(words)} does not belong to any flag"]


def unknown_flag_message(flag: str, known: list[str], refused: Collection[str] = ()) -> str:
    """`unknown flag --num-layer; did you mean --num-layers?`"""
    name = flag.split("=")[0]
    allowed = [other for other in known if other not in refused]
    near = nearest_flag(name, known, refused) or " or ".join(_longer_flags(name, allowed))
    return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else "; --help lists the known ones")


_CALLED_ELSEWHERE = {"--learning-rate": "--lr", "--max-steps": "--train-iters", "--num-steps": "--train-iters"}
_CLOSE = 0.8  # share of equal letters; difflib's default of 0.6 suggests --lr for --xavier


def _longer_flags(name: str, known: list[str]) -> list[str]:
    """The flags that begin with `name` and a hyphen; none if there are more than 4."""
    longer = [flag for flag in known if flag.startswith(f"--{name.lstrip('-').replace('_', '-')}-")]
    return longer if len(longer) <= 4 else []


def nearest_flag(flag: str, known: list[str], refused: Collection[str] = ()) -> str | None:
    """The known flag nearest to `flag`: other hyphens, with or without --no-, a unique continuation, or a typing error.

    None if the nearest is in `refused`: the next nearest would have another meaning.
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
    """A `config_class` from the given values; fields of other classes are ignored."""
    names = {f.name for f in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in given.items() if name in names})


def changes(config: Any) -> dict[str, tuple[Any, Any]]:
    """The fields that differ from their defaults: name -> (default, value)."""
    pairs = {f.name: (default_of(f), getattr(config, f.name)) for f in knobs(type(config))}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
