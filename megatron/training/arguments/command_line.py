"""The command line: flags of the components' dataclasses, Megatron's other flags (tables), the script's own (a function)."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagParser,
    add_flag,
    build,
    flags_of,
    option_fields,
    repeated_flags,
    unknown_problems,
)
from megatron.core.datasets.data_config import DATA_SOURCES
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS
from megatron.training.arguments.args_namespace import (
    Arguments,
    flag_that_sets,
    flags_without_a_setting,
    other_names_of,
    switch_that_clears,
)
from megatron.training.arguments.checkpoint_args import taken_from_checkpoint
from megatron.training.arguments.config import COMPONENTS, Config
from megatron.training.arguments.help import add_help_flags, flag_groups, meaning_of_shorthand
from megatron.training.arguments.hf_config import taken_from_hf_config
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, OTHERS, REFUSED, SHORTHAND, WARNED
from megatron.training.arguments.script_flags import own_flags
from megatron.training.arguments.yaml_arguments import YAML_FLAG, read_yaml


class ArgumentsError(ConfigError):
    """An invalid command line. parts: the components that are valid."""

    def __init__(self, problems: list[str], parts: dict[str, Any]):
        super().__init__(problems)
        self.parts = parts


ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def make_parser(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    unread: Mapping[str, str] | None = None,
) -> FlagParser:
    """The parser of all flags: accepted, refused or without effect. args_defaults: the script's, shown in help."""
    defaults, unread = args_defaults or {}, unread or {}
    parser = FlagParser(description="Pretrain a transformer.", add_help=False)
    for title, text, fields in flag_groups():
        group = parser.add_argument_group(title, text)
        for component, field in fields:
            add_flag(group, component, field, default=defaults.get(field.name), hidden=field.name in unread)
    shorthand = parser.add_argument_group("Other ways to say it")
    yaml_help = "read flags from FILE: `key: value` lines, with or without groups; the command line takes precedence"
    shorthand.add_argument(YAML_FLAG, metavar="FILE", default=argparse.SUPPRESS, dest=YAML_FLAG, help=yaml_help)
    for flag in SHORTHAND:
        text = f"the same as {meaning_of_shorthand(flag)}"
        shorthand.add_argument(flag, dest=flag, action="store_true", default=argparse.SUPPRESS, help=text)
    add_help_flags(parser, {_flag_of(name): reason for name, reason in unread.items()})
    if extra_args_provider is not None:
        try:
            with parser.flags_of_script():
                extra_args_provider(parser)
        except argparse.ArgumentError as error:
            raise ConfigError(f"extra_args_provider: {error}; choose another name for the flag") from None
    known = set(parser.known_flags())  # a script may have its own --temperature or --num-classes
    for other in OTHERS.values():
        if other.flag not in known:
            takes = {"action": "store_true"} if other.values == "0" else {"nargs": "*" if other.values == "*" else None}
            parser.add_argument(other.flag, dest=other.flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **takes)
    parser.refused.update(REFUSED.keys() - known)
    return parser


@cache
def _plain_parser(defaults: tuple[tuple[str, str], ...], unread: tuple[tuple[str, str], ...]) -> FlagParser:
    """The parser without a script's own flags, cached: creating it takes longer than parsing."""
    return make_parser(None, dict(defaults), dict(unread))


@dataclass
class GivenFlags:
    """The flags of one source: the command line, or a YAML file."""

    settings: dict[str, Any]
    problems: list[str]
    no_effect: dict[str, str]  # flag -> why
    warned: dict[str, str]  # flag and value -> what happens instead
    others: dict[str, Any]  # flags that are no settings
    hides_positions: bool  # --no-position-embedding without a --position-embedding-type beside it
    unreadable: list[str]  # settings with an invalid value


class ParsedArgs(NamedTuple):
    """A parsed command line."""

    config: Config
    args: Arguments  # for `get_args()`
    notes: list[str]  # about flags without effect, or given twice


def parse_args(
    argv: Sequence[str] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    unread: Mapping[str, str] | None = None,
) -> ParsedArgs:
    """The settings of a command line. Raises ConfigError with all problems at once.

    args_defaults: defaults of the script, by the names of settings or of any other flag. unread: fields that this
    script does not read, with the reason.
    """
    defaults, unread = args_defaults or {}, unread or {}
    if extra_args_provider is not None:
        parser = make_parser(extra_args_provider, defaults, unread)
    else:
        parser = _plain_parser(tuple((name, str(value)) for name, value in defaults.items()), tuple(unread.items()))
    words = sys.argv[1:] if argv is None else list(argv)
    sources = _given_in_file(parser, words) + [_given(parser, words)]
    settings: dict[str, Any] = {}
    for source in sources:  # the file, then the command line, which takes precedence
        settings = _over(source.settings, settings)
    script = _given_by_script(parser, {**parser.defaults_of_script, **defaults}, settings)
    defaults = script.settings
    taken = [take(settings, parser, defaults) for take in (taken_from_hf_config, taken_from_checkpoint)]
    for one in taken:
        sources.insert(0, _given(parser, one.words))
        sources[0].problems = [f"{one.where}: {problem}" for problem in sources[0].problems]
        settings = _over(settings, one.settings | sources[0].settings)
    in_vain = {_flag_of(name): reason for name, reason in unread.items() if _is_set(name, settings)}
    sources.insert(0, script)
    problems = [problem for source in sources for problem in source.problems]
    if _hides_positions(sources) and settings.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        settings["position_embedding_type"] = "none"
    ours = _names_of_settings()
    unsaid = [
        name for name, value in settings.items() if value is None and name not in ours
    ]  # own flags that are not given
    settings = _over(settings, _usable(defaults, settings)) | {name: defaults.get(name) for name in unsaid}
    parts, more = _build_all(settings, {name for source in sources for name in source.unreadable})
    if problems + more:
        raise ArgumentsError(problems + more, parts)
    config = Config(**parts, own=own_flags(parser, settings, ours))
    flat = {name: value for part in config.component_values().values() for name, value in part.items()}
    flat["log_interval"] = config.log.steps_between_lines  # scripts use it as a number, as in Megatron
    no_effect = {flag: reason for source in sources for flag, reason in source.no_effect.items()}
    no_effect |= in_vain | config.without_effect
    warned = {given: reason for source in sources for given, reason in source.warned.items()}
    notes = [note for one in taken for note in one.notes] + repeated_flags(parser, words)
    notes += _lines("no effect here", no_effect) + _lines("WARNING", warned)
    others = {flag: value for source in sources for flag, value in source.others.items()}
    values = flags_without_a_setting(others) | settings | flat | other_names_of(config)
    return ParsedArgs(config, Arguments(values, fixed=flat), notes)


def _names_of_settings() -> set[str]:
    return {field.name for component in COMPONENTS.values() for field in option_fields(component)}


def _flag_of(name: str) -> str:
    """The first flag of the field `name`."""
    return next(flags_of(f)[0] for part in COMPONENTS.values() for f in option_fields(part) if f.name == name)


def _given_in_file(parser: FlagParser, words: Sequence[str]) -> list[GivenFlags]:
    """The flags of the --yaml-cfg file, or []. The file's values of the script's own flags become their defaults."""
    path = vars(parser.read(words).values).get(YAML_FLAG)
    if path is None:
        return []
    file = read_yaml(path, parser)
    try:
        source = _given(parser, file.words)
    except ConfigError as error:
        raise ConfigError([*file.problems, *(f"{path}: {problem}" for problem in error.problems)]) from None
    source.problems = [*file.problems, *(f"{path}: {problem}" for problem in source.problems)]
    source.no_effect |= file.no_effect
    ours = _names_of_settings()
    parser.set_defaults(**{name: value for name, value in source.settings.items() if name not in ours})
    source.settings = file.settings | source.settings
    return [source]


def _given_by_script(parser: FlagParser, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GivenFlags:
    """The script's defaults, read as if they were flags: by any name that a flag has, and refused or warned of as it is.

    given: settings of the command line and its file, for which a default does not count. Defaults that are no flag's are
    attributes of the script's own.
    """
    flags, ours = parser.actions_by_flag(), _names_of_settings()
    own = {action.dest for action in parser.own}
    words: list[str] = []
    for name, value in defaults.items():
        if name in own or value is None:
            continue
        if name in ours:
            flag = _flag_of(name)
        elif value is False:
            flag = switch_that_clears(name)
        else:
            spellings = (f"--{name.replace('_', '-')}", f"--{name}", flag_that_sets(name))
            flag = next((one for one in spellings if one in flags), None)
        if flag not in flags or flags[flag].dest in given:
            continue
        if flags[flag].nargs == 0:  # a setting's own name says its value, and not whether the switch is given
            words += [flag] if name not in ours else []
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            words.append(f"{flag}={value}")
        elif isinstance(value, list) and name not in ours:
            words += [flag, *map(str, value)]
    source = _given(parser, words)
    source.problems = [f"args_defaults of the script: {problem}" for problem in source.problems]
    if source.hides_positions:
        source.settings.setdefault("position_embedding_type", "none")
    read = {name: value for name, value in source.settings.items() if name not in own}
    source.settings = {**defaults, **read}
    return source


def _given(parser: FlagParser, words: Sequence[str]) -> GivenFlags:
    """The flags of a command line, with their problems."""
    read = parser.read(words)
    given = vars(read.values)
    problems = [*read.unreadable.values(), *(unknown_problems(read.unknown, parser) if read.unknown else [])]
    no_effect, warned = {}, {}
    for flag, other in ((flag, OTHERS[flag]) for flag in given if flag in OTHERS):
        if other.is_harmless(given[flag]):
            no_effect[flag] = "the value asks for the only behaviour there is"
        elif flag in REFUSED:
            problems.append(f"{flag}: {other.reason}")
        elif flag in WARNED:
            warned[flag if other.values == "0" else f"{flag} {given[flag]}"] = other.reason
        elif flag in NO_EFFECT:
            no_effect[flag] = other.reason
    settings = {name: value for name, value in given.items() if not name.startswith("--")}
    problems += _expand_shorthand(given, settings)
    others = {flag: value for flag, value in given.items() if flag in OTHERS}
    hides_positions = "--no-position-embedding" in given and "position_embedding_type" not in settings
    return GivenFlags(settings, problems, no_effect, warned, others, hides_positions, list(read.unreadable))


def _hides_positions(sources: Sequence[GivenFlags]) -> bool:
    """Whether the highest of the sources that say anything about positions hides them. sources: the lowest first."""
    about = [source for source in sources if source.hides_positions or "position_embedding_type" in source.settings]
    return bool(about) and about[-1].hides_positions


def _expand_shorthand(given: Mapping[str, Any], settings: dict[str, Any]) -> list[str]:
    """Add the settings that shorthand flags stand for to `settings`. Returns contradictions with settings given already."""
    problems = []
    said_by = {name: f"--{name.replace('_', '-')} {value}" for name, value in settings.items()}
    for flag in (flag for flag in SHORTHAND if flag in given):
        for name, value in SHORTHAND[flag].items():
            if settings.setdefault(name, value) != value:
                problems.append(
                    f"{flag} stands for --{name.replace('_', '-')} {value}, which contradicts {said_by[name]}; give one"
                )
            said_by.setdefault(name, flag)
    return problems


def _lines(kind: str, reasons: Mapping[str, str]) -> list[str]:
    """One line a reason: `no effect here: --a --b: reason`."""
    flags = {reason: [flag for flag in reasons if reasons[flag] == reason] for reason in reasons.values()}
    return [f"{kind}: {' '.join(same)}: {reason}" for reason, same in flags.items()]


# Settings that say one thing together: where a source says it by one of them, another source's say nothing.
_SAY_ONE_THING = (
    ("bf16", "fp16", "fp64"),
    ("train_iters", "train_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    ("use_rope_scaling", "rope_scaling"),
)


def _over(settings: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of two sources, of which the first takes precedence."""
    # 0 steps of warm-up are a choice; a switch that is off leaves the choice to the others.
    said = {name for name, value in settings.items() if value is not None and value is not False}
    left_out = {name for group in _SAY_ONE_THING if said.intersection(group) for name in group}
    for fields in DATA_SOURCES.values():
        if said.intersection(fields):
            left_out.update(name for others in DATA_SOURCES.values() if others != fields for name in others)
    if settings.get("swiglu"):  # which is a gate and an activation
        left_out |= {"gated", "activation"}
    elif settings.get("gated") is not None or settings.get("activation") is not None:
        left_out.add("swiglu")
    if settings.get("group_query_attention") is False:
        left_out.add("num_query_groups")
    return {name: value for name, value in lower.items() if name not in left_out} | dict(settings)


def _usable(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The script's defaults, without a default tokenizer that has none of its files: errors would blame a choice
    nobody made."""
    kind = TOKENIZERS.get(defaults.get("tokenizer_type"))
    guessed = kind is not None and bool(kind.needs) and all(settings.get(name) is None for name in kind.needs)
    return {name: value for name, value in defaults.items() if not (guessed and name == "tokenizer_type")}


def _is_set(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is given, but for a switch of a file that leaves it as it is."""
    field = next(f for part in COMPONENTS.values() for f in option_fields(part) if f.name == name)
    is_switch = isinstance(field.default, bool)
    return name in settings and not (is_switch and settings[name] == field.default)


def _build_all(settings: Mapping[str, Any], unreadable: set[str]) -> tuple[dict[str, Any], list[str]]:
    """(config of each valid component, problems of the others). A component with an unreadable setting is skipped."""
    parts, problems = {}, []
    for name, component in COMPONENTS.items():
        if unreadable & {field.name for field in option_fields(component)}:
            continue
        try:
            parts[name] = build(component, dict(settings))
        except ConfigError as error:
            problems += error.problems
    return parts, problems
