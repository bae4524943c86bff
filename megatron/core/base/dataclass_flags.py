"""Command-line flags from dataclass fields: an option is declared once, beside the component that it configures.

    @dataclass(frozen=True)
    class ModelConfig(FlagConfig):
        \"\"\"Shape of the transformer.\"\"\"
        num_layers: Count = option(12, "transformer layers in the whole model")

gives `--num-layers 24`, its default, its help, and `ModelConfig(num_layers=24)`. Configs are frozen; derived values are
properties. An option's type may bound its numbers (`Count`), rules within one config are checked in
`FlagConfig.problems`, and the caller checks rules across configs.
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

from megatron.core.base import tolerate_broken_output
from megatron.core.base.version import version_text

_REQUIRED = dataclasses.MISSING


class ProblemsError(Exception):
    """An error that lists problems, one line each, complete in itself."""

    problems: list[str]


class ConfigError(ProblemsError, ValueError):
    """Invalid settings, one line per problem: what was given, what is allowed, which flag to change."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def problems_of(error: Exception) -> list[str]:
    """Return the problems that an error lists; else its message."""
    listed = error.problems if isinstance(error, ProblemsError) else []
    return listed or [str(error)]


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    required: bool = False,
    of_model: bool = False,
    names: Collection[str] | None = None,
    read: Callable[[str], str | None] | None = None,
) -> Any:
    """Declare a dataclass field that is also a flag.

    flags: replaces the spelling `--field-name`; further entries are aliases. A boolean with default False is switched
        on by `--field-name`, a boolean with default True is switched off by `--no-field-name`; the help says what
        giving the flag does.
    required: help and docs say so; the config, or a check across configs, refuses its absence.
    of_model: for a script's own options: a checkpoint with another value does not fit the model and is refused. One
        without the option has its default in a resume, and any value if a run takes only its weights.
    names: a registry; the allowed values are its keys when the flags are read, with a script's additions.
    read: for a text with a form of its own, or for `names`, to accept other texts too: returns its one spelling, None
        for a text that leaves the option at its default, or raises an ArgumentTypeError that says what is allowed.
    """
    metadata = dict(
        help=help, flags=flags, metavar=metavar, required=required, of_model=of_model, names=names, read=read
    )
    if isinstance(default, list):  # a mutable default, which has no hash
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the spellings of a field on the command line."""
    if field.metadata["flags"]:
        return field.metadata["flags"]
    name = f"no_{field.name}" if field.default is True else field.name
    return (flag_of(name),)


def flag_of(name: str) -> str:
    """Return the default spelling of a field: --num-layers for num_layers."""
    return f"--{name.replace('_', '-')}"


def option_fields(config_class: type) -> list[dataclasses.Field]:
    """Return the fields of a config class that are flags."""
    return [f for f in dataclasses.fields(config_class) if "help" in f.metadata]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is _REQUIRED else field.default


def title_of(config_class: type) -> str:
    """Return the title of a group of flags: the first line of the class's docstring."""
    return (config_class.__doc__ or config_class.__name__).strip().split("\n")[0].removesuffix(".")


def default_text(field: dataclasses.Field) -> str:
    """Return the default as help and docs show it; "" for a switch and for None."""
    default = default_of(field)
    if isinstance(default, bool) or default is None:
        return "required" if field.metadata["required"] else ""
    return " ".join(map(str, default)) if isinstance(default, list) else str(default)


# ---------------------------------------------------------------- rules within one config


class FlagConfig:
    """Base class of configs.

    The constructor checks ranges and `problems`, and raises one ConfigError with all problems.
    """

    def __post_init__(self) -> None:
        problems = [*out_of_range(self), *self.problems()]
        if problems:
            raise ConfigError(problems)

    def problems(self) -> Iterable[str]:
        """Return the violated rules of this config, one line each. Also called if a number is out of range."""
        return ()

    @property
    def without_effect(self) -> dict[str, str]:
        """Flags that were given and that nothing reads under these settings -> why."""
        return {}


# Types of options with a range: the metadata of the `Annotated` type is an interval.
Count = Annotated[int, "[1, inf)"]
WholeNumber = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NotNegative = Annotated[float, "[0, inf)"]
BelowOne = Annotated[float, "[0, 1)"]
Share = Annotated[float, "[0, 1]"]

_INTERVAL = re.compile(r"[\[(](\S+), (\S+)[\])]")
_annotations_of = cache(partial(typing.get_type_hints, include_extras=True))


def interval_of(config_class: type, field: dataclasses.Field) -> str | None:
    """Return the interval of an option's type, such as "[0, 1)"; None if it has none."""
    kind = _annotations_of(config_class)[field.name]
    for part in (kind, *typing.get_args(kind)):  # Count, or Count | None
        if hasattr(part, "__metadata__"):
            return part.__metadata__[0]
    return None


_IN_WORDS = {"[0, inf)": "not be negative", "(0, inf)": "be positive", "[1, inf)": "be at least 1"}


def out_of_range(config: Any) -> Iterator[str]:
    """Yield one line for each value outside its option's interval or registry, or that its reader refuses."""
    for field, interval in _limited(type(config)):
        names = field.metadata["names"]
        value = getattr(config, field.name)
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
        is_above = low < value or (interval[0] == "[" and value == low)
        is_below = value < high or (interval[-1] == "]" and value == high)
        if not (is_above and is_below):  # also for NaN, whose comparisons are all false
            yield f"{flags_of(field)[0]} is {value}; it must {_IN_WORDS.get(interval, f'be in {interval}')}"


@cache
def _limited(config_class: type) -> list[tuple[dataclasses.Field, str | None]]:
    """Return the options with an interval, a registry of names or a reader, each with its interval."""
    limited = []
    for field in option_fields(config_class):
        interval = interval_of(config_class, field)
        if interval or field.metadata["names"] is not None or field.metadata["read"] is not None:
            limited.append((field, interval))
    return limited


@cache
def _ends_of(interval: str) -> tuple[float, ...]:
    return tuple(map(_bound, _INTERVAL.fullmatch(interval).groups()))


def _bound(text: str) -> float:
    """Read an end of an interval: "0", "inf" or "2^32"."""
    base, *power = text.split("^")
    return float(base) ** float(*power or [1])


# ---------------------------------------------------------------- reading values


def read_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def read_number(text: str) -> float:
    """Read a finite number. NaN is refused because it would pass range checks: every comparison with it is false."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def read_text(text: str) -> str:
    """Read a text that is not empty: an empty value is usually an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty; give one, or leave out the flag")
    return text


_READERS = {int: read_whole_number, float: read_number, str: read_text}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def one_of(choices: Collection[Any]) -> Any:
    """Return a reader of one of `choices`, all of one type.

    It looks them up when called: a script may have added some.
    """

    def read(text: str) -> Any:
        if text not in map(str, choices):
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, choices))}")
        return type(next(iter(choices)))(text)

    return read


_types_of = cache(typing.get_type_hints)  # called several times for each field of a class


def value_kind(config_class: type, field: dataclasses.Field) -> Any:
    """Return the type of an option's value without None: int for int | None."""
    kind = _types_of(config_class)[field.name]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    return kind


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON has the type of a field.

    kind: bool, int, float, str, Literal[...], list[X], or X | None.
    """
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(fits(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is Annotated:
        return fits(value, typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return type(value) in (str, int, bool) and value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        element = typing.get_args(kind)[0]
        return isinstance(value, list) and all(fits(entry, element) for entry in value)
    if kind is float:
        return (type(value) is float and math.isfinite(value)) or fits(value, int)
    if kind is int:
        return type(value) is int and abs(value) < 1 << 63
    return type(value) is kind


def type_mismatches(config_class: type, values: typing.Mapping[str, Any]) -> list[str]:
    """Return the `values` from JSON that do not have the type of the field of their name in the dataclass."""
    problems = []
    for name, kind in _types_of(config_class).items():
        if name in values and not fits(values[name], kind):
            problems.append(f"{name} is {values[name]!r:.40}")
    return problems


def _choices_of(kind: Any, field: dataclasses.Field) -> Collection[Any]:
    """Return the allowed values of a choice; empty for other options."""
    if field.metadata["names"]:
        return field.metadata["names"]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def metavar_of(config_class: type, field: dataclasses.Field) -> str:
    """Return the placeholder of the value in help: N an integer, X a number, {a,b} a choice; "" for a switch."""
    kind = value_kind(config_class, field)
    if kind is bool:
        return ""
    choices = _choices_of(kind, field)
    if choices:
        return "{" + ",".join(map(str, choices)) + "}"
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return field.metadata["metavar"] or _METAVARS[element]


def _argparse_options(config_class: type, field: dataclasses.Field) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option.

    Its type is bool, int, float, str, Literal[...], list[X] or X | None.
    """
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kind = value_kind(config_class, field)
    if kind is bool:
        return options | {"action": "store_false" if field.default is True else "store_true"}
    options["metavar"] = metavar_of(config_class, field)
    choices = _choices_of(kind, field)
    if choices:
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


# argparse's own pattern knows neither exponents nor words, and takes -1e5 and -inf for flags.
_NEGATIVE_NUMBER = re.compile(r"-((\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)


class FlagParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting, so that every rank reports alike and stops."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **{"usage": "%(prog)s [flags]"} | options)
        if self.add_help:
            self.add_argument("--version", action="version", version=version_text(), help="print the version")
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self._unreadable: dict[str, str] = {}
        self.refused: set[str] = set()  # Megatron's flags that are parsed only to explain why they are refused
        self.own: list[argparse.Action] = []  # the script's flags
        self.defaults_of_script: dict[str, Any] = {}  # that it sets of other flags by `set_defaults`

    def read(self, argv: Sequence[str] | None) -> "ReadFlags":
        """Parse a command line; values that cannot be read are listed, not raised."""
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
        """Print the help; a reader that ends early, as in `--help | head`, is no error."""
        if file is None:
            tolerate_broken_output.print_answer(self.format_help())
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
        """Take flags added inside the block as the script's `own`.

        Help shows them, and their groups, after the first group. A default that the script sets of a flag that is not
        its own would count as if the user had given it.
        """
        before = list(self._action_groups)
        num_actions = len(self._actions)
        defaults = {action.dest: action.default for action in self._actions}
        yield
        self.own = self._actions[num_actions:]
        names = self._defaults.keys() - {action.dest for action in self.own}
        self.defaults_of_script = {name: self._defaults.pop(name) for name in sorted(names)}
        for action in self._actions[:num_actions]:
            action.default = defaults[action.dest]
        added = [group for group in self._action_groups if group not in before]
        self._optionals.title = "Flags of this script"
        first, *others = [group for group in before if group is not self._optionals and group is not self._positionals]
        self._action_groups[:] = [first, self._positionals, self._optionals, *added, *others]

    def configs_of_script(self) -> list[type]:
        """Return the config classes of which the script has added all flags, by `add_flags`."""
        names: dict[type, set[str]] = {}
        for action in self.own:
            if field_of_action(action) is not None:
                names.setdefault(action.config_class, set()).add(action.dest)
        return [kind for kind, added in names.items() if added == {field.name for field in option_fields(kind)}]

    def known_flags(self) -> list[str]:
        return list(self.actions_by_flag())

    def actions_by_flag(self) -> dict[str, argparse.Action]:
        return {flag: action for action in self._actions for flag in action.option_strings}


def add_flags(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add the group of flags of `config_class`."""
    group = parser.add_argument_group(title_of(config_class))
    for field in option_fields(config_class):
        add_flag(group, config_class, field)


def add_flag(
    group: argparse._ArgumentGroup,
    config_class: type,
    field: dataclasses.Field,
    *,
    default: Any = None,
    hidden: bool = False,
) -> None:
    """Add the flag of one field. default: shown in help instead of the field's own. hidden: not in help."""
    if default is None:
        default = default_text(field)
    elif isinstance(default, list):
        default = " ".join(map(str, default))
    suffix = {"": "", "required": " (required)"}.get(default, f" (default: {default})")
    text = f"{field.metadata['help']}{suffix}".replace("%", "%%")
    if hidden:
        text = argparse.SUPPRESS
    action = group.add_argument(*flags_of(field), help=text, **_argparse_options(config_class, field))
    action.config_field = field  # argparse itself does not know the default
    action.config_class = config_class


def field_of_action(action: argparse.Action) -> dataclasses.Field | None:
    """Return the config field whose flag this is; None: a script added the flag by argparse alone."""
    return getattr(action, "config_field", None)


def read_flags(parser: FlagParser, argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of the given flags. Raises ConfigError for unknown flags, with the nearest known flag."""
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(unknown_problems(unknown, parser))
    return vars(values)


def repeated_flags(parser: FlagParser, argv: Sequence[str]) -> list[str]:
    """Return one line for each option that is given more than once; the last value counts."""
    actions = parser.actions_by_flag()
    times: Counter[str] = Counter()
    for word in argv:
        action = actions.get(word.split("=")[0])
        if action is not None and not isinstance(action, argparse._AppendAction):
            times["/".join(action.option_strings)] += 1
    return [f"{flags} is given {count} times; the last value counts" for flags, count in times.items() if count > 1]


def unknown_problems(words: Sequence[str], parser: FlagParser) -> list[str]:
    """Return one line for each unknown flag among `words`, or one for all if none is a flag.

    `-1` is a value, not a flag, and so is `-inf`.
    """
    flags = [word for word in words if re.match(r"--?[A-Za-z_]", word) and not _NEGATIVE_NUMBER.match(word)]
    if flags:
        return [unknown_flag_message(flag, parser.known_flags(), parser.refused) for flag in flags]
    return [f"{' '.join(words)} does not belong to any flag"]


def unknown_flag_message(flag: str, known: list[str], refused: Collection[str] = ()) -> str:
    """Return a message such as `unknown flag --num-layer; did you mean --num-layers?`."""
    name = flag.split("=")[0]
    allowed = [other for other in known if other not in refused]
    suggestion = nearest_flag(name, known, refused) or " or ".join(_longer_flags(name, allowed))
    if suggestion:
        return f"unknown flag {flag}; did you mean {suggestion}?"
    return f"unknown flag {flag}; --help lists the known ones"


_OTHER_PROGRAMS_NAMES = {"--learning-rate": "--lr", "--max-steps": "--train-iters", "--num-steps": "--train-iters"}
# What papers and logs call these settings. The sizes of axes are abbreviated by a rule, see `_axis_flag`.
_ABBREVIATIONS = {
    "--vpp": "--num-virtual-stages-per-pipeline-rank",
    "--mbs": "--micro-batch-size",
    "--gbs": "--global-batch-size",
    "--gqa": "--group-query-attention",
    "--wd": "--weight-decay",
    "--lr-warmup": "--lr-warmup-iters",
    "--warmup": "--lr-warmup-iters",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-ratio": "--lr-warmup-fraction",
}
_MIN_SIMILARITY = 0.8  # share of equal letters; difflib's default of 0.6 suggests --lr for --xavier


def _longer_flags(name: str, known: list[str]) -> list[str]:
    """Return the flags that begin with `name` and a hyphen; none if there are more than 4."""
    longer = [flag for flag in known if flag.startswith(f"--{name.lstrip('-').replace('_', '-')}-")]
    return longer if len(longer) <= 4 else []


def nearest_flag(flag: str, known: list[str], refused: Collection[str] = ()) -> str | None:
    """Return the known flag nearest to `flag`.

    It differs by hyphens, by --no-, by being the long form of the field's abbreviation (--tp, --tp-size, --mbs) or a
    unique continuation, or by a typing error.

    None if the nearest is in `refused`: the next nearest would have another meaning.
    """
    nearest = _nearest(flag, known)
    return None if nearest in refused else nearest


def _nearest(flag: str, known: list[str]) -> str | None:
    plain = "--" + flag.lstrip("-").replace("_", "-")
    short = plain.removesuffix("-size")
    ours = _OTHER_PROGRAMS_NAMES.get(plain) or _ABBREVIATIONS.get(short) or _axis_flag(short, known)
    if ours in known:
        return ours
    opposite = f"--{plain[5:]}" if plain.startswith("--no-") else f"--no-{plain[2:]}"
    candidates = [plain, opposite]
    longer = [other for other in known if other.startswith(f"{plain}-")]
    if len(longer) == 1:
        candidates += longer
    candidates = [candidate for candidate in candidates if candidate in known]
    candidates += difflib.get_close_matches(plain, known, 1, _MIN_SIMILARITY)
    return candidates[0] if candidates else None


def _axis_flag(short: str, known: list[str]) -> str | None:
    """Return the flag of parallelism with these initials: --tensor-model-parallel-size for --tp. `model` has none."""
    for flag in known:
        words = [word for word in flag[2:].removesuffix("-size").split("-") if word != "model"]
        if words[-1:] == ["parallel"] and short == "--" + "".join(word[0] for word in words):
            return flag
    return None


def build(config_class: type, values: dict[str, Any]) -> Any:
    """Build a `config_class` from values by name; fields of other classes are ignored."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in values.items() if name in names})


def changes(config: Any) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ from their defaults: name -> (default, value)."""
    changed = {}
    for field in option_fields(type(config)):
        default = default_of(field)
        value = getattr(config, field.name)
        if default != value:
            changed[field.name] = default, value
    return changed
