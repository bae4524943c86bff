"""The command line is parsed into a `Config`.

Its flags are those of the components' dataclasses, Megatron's other flags (tables), and the script's own (a function).
A setting's value comes from the first of these sources that has it:

    command line  >  --yaml-cfg FILE  >  checkpoint or --hf-config  >  the script's args_defaults  >  our defaults
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagConfig,
    FlagParser,
    build,
    default_of,
    field_of_action,
    option_fields,
    repeated_flags,
    unknown_problems,
)
from megatron.core.datasets.data_config import DATA_SOURCES
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS
from megatron.training.arguments.args_namespace import (
    Arguments,
    megatron_only_flag_for,
    megatron_only_switch_clearing,
    other_names_of,
    unsupported_flag_values,
)
from megatron.training.arguments.config import COMPONENTS, Config
from megatron.training.arguments.hf_config import taken_from_hf_config
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, OTHERS, REFUSED, SHORTHAND, WARNED
from megatron.training.arguments.load_args_from_checkpoint import taken_from_checkpoint
from megatron.training.arguments.parser import ExtraArgs, field_of_setting, flag_of_setting, make_parser
from megatron.training.arguments.record_script_flags import script_flag_values
from megatron.training.arguments.yaml_arguments import YAML_FLAG, read_yaml


class ArgumentsError(ConfigError):
    """The command line is invalid. parts: the components that are valid, by name."""

    def __init__(self, problems: list[str], parts: dict[str, Any]):
        super().__init__(problems)
        self.parts = parts


@cache
def _plain_parser(defaults: tuple[tuple[str, str], ...], unread: tuple[tuple[str, str], ...]) -> FlagParser:
    """Return the parser without a script's own flags, cached: creating it takes longer than parsing."""
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
    without_effect: Callable[[Config], Mapping[str, str]] = lambda config: {},
) -> ParsedArgs:
    """Return the settings of a command line. Raises ConfigError with all problems at once.

    args_defaults: defaults of the script, by the names of settings or of any other flag. unread: settings that this
    script does not read, with the reason. without_effect: returns further flags that other settings make ineffective, with
    the reason.
    """
    defaults = args_defaults or {}
    unread = unread or {}
    if extra_args_provider is not None:
        parser = make_parser(extra_args_provider, defaults, unread)
    else:
        parser = _plain_parser(tuple((name, str(value)) for name, value in defaults.items()), tuple(unread.items()))
    words = sys.argv[1:] if argv is None else list(argv)

    # read the YAML file, then the command line, which takes precedence. sources: in the order of precedence, lowest first
    sources = _given_in_file(parser, words)
    sources.append(_given(parser, words))
    settings: dict[str, Any] = {}
    for source in sources:
        settings = merge_settings(source.settings, settings)
    given = {name for name, value in settings.items() if value is not None}

    # read the script's defaults
    script = _given_by_script(parser, {**parser.defaults_of_script, **defaults}, settings)
    defaults = script.settings

    # take settings from a config.json or a checkpoint; both see the settings so far
    taken = [take(settings, parser, defaults) for take in (taken_from_hf_config, taken_from_checkpoint)]
    for description in taken:
        source = _given(parser, description.words)
        source.problems = [f"{description.where}: {problem}" for problem in source.problems]
        sources.insert(0, source)
        settings = merge_settings(settings, description.settings | source.settings)

    # note the settings that are given although this script does not read them
    unread_here = {flag_of_setting(name): reason for name, reason in unread.items() if _is_set(name, settings)}

    # the script's defaults have the lowest precedence
    sources.insert(0, script)
    problems = [problem for source in sources for problem in source.problems]

    # --no-position-embedding, which is given beside --use-rotary-position-embeddings, hides learned positions alone
    hides_positions = _hides_positions(sources)
    if hides_positions and settings.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        settings["position_embedding_type"] = "none"

    # fill in the script's defaults, also for its own flags that are not given
    names = _names_of_settings()
    own_not_given = [name for name, value in settings.items() if value is None and name not in names]
    settings = merge_settings(settings, _usable(defaults, settings))
    for name in own_not_given:
        settings[name] = defaults.get(name)

    # --sft implies them: packed examples do not see each other, also in a script of Megatron's, which gives --sft alone
    if settings.get("sft"):
        settings["reset_position_ids"] = True
        settings["reset_attention_mask"] = True

    # build the components
    unreadable = {name for source in sources for name in source.unreadable}
    parts, build_problems = _build_all(settings, unreadable, COMPONENTS)
    of_script = {kind.__name__: kind for kind in parser.configs_of_script()}
    parts_of_script, problems_of_script = _build_all(_option_defaults(parser) | settings, unreadable, of_script)
    build_problems += problems_of_script
    if problems or build_problems:
        raise ArgumentsError(problems + build_problems, parts)
    config = Config(**parts, own=script_flag_values(parser, settings, names))

    # collect the notes
    no_effect: dict[str, str] = {}
    warned: dict[str, str] = {}
    others: dict[str, Any] = {}
    for source in sources:
        no_effect |= source.no_effect
        warned |= source.warned
        others |= source.others
    of_settings = unread_here | config.without_effect | without_effect(config)
    for part in parts_of_script.values():
        if isinstance(part, FlagConfig):
            of_settings |= part.without_effect
    # a value may come from the script, a config.json or a checkpoint, and nobody has given its flag then
    not_given = settings.keys() - given
    flags = parser.actions_by_flag()
    no_effect |= {flag: reason for flag, reason in of_settings.items() if flags[flag].dest not in not_given}
    notes = [note for description in taken for note in description.notes]
    notes += repeated_flags(parser, words)
    notes += reason_lines("no effect here", no_effect)
    notes += reason_lines("WARNING", warned)

    # collect the values for `get_args()`
    values = unsupported_flag_values(others) | _option_defaults(parser) | settings
    return ParsedArgs(config, args_of(config, values), notes)


def args_of(config: Config, values: Mapping[str, Any]) -> Arguments:
    """Return what `get_args()` gives in a run with these settings. values: those that are no settings, by name."""
    fixed: dict[str, Any] = {}
    for component_values in config.component_values().values():
        fixed |= component_values
    fixed["log_interval"] = config.log.steps_between_lines  # scripts use it as a number, as in Megatron
    return Arguments({**values, **fixed, **other_names_of(config)}, fixed=fixed)


def _option_defaults(parser: FlagParser) -> dict[str, Any]:
    """Return the defaults of the script's options; argparse adds only those of its `add_argument`."""
    defaults = {}
    for action in parser.own:
        field = field_of_action(action)
        if field is not None:
            defaults[action.dest] = default_of(field)
    return defaults


def _names_of_settings() -> set[str]:
    return {field.name for component in COMPONENTS.values() for field in option_fields(component)}


def _given_in_file(parser: FlagParser, words: Sequence[str]) -> list[GivenFlags]:
    """Return the flags of the --yaml-cfg file, or [].

    The file's values of the script's own flags become their defaults.
    """
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
    names = _names_of_settings()
    parser.set_defaults(**{name: value for name, value in source.settings.items() if name not in names})
    source.settings = file.settings | source.settings
    return [source]


def settings_in_file(path: str) -> dict[str, Any]:
    """Return the settings in a --yaml-cfg file by name, without the script's defaults.

    For tools that need a few of them. Raises ConfigError for a file that a training script refuses.
    """
    (source,) = _given_in_file(make_parser(), [YAML_FLAG, path])
    if source.problems:
        raise ConfigError(source.problems)
    return source.settings


def _given_by_script(parser: FlagParser, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GivenFlags:
    """Return the script's defaults, read as if they were flags.

    They may have any name that a flag has, and are refused or warned of like the flag.

    given: settings of the command line and its file; a default of the same setting does not count. Defaults that belong
    to no flag are attributes of the script's own.
    """
    flags = parser.actions_by_flag()
    setting_names = _names_of_settings()
    own_names = {action.dest for action in parser.own}

    # write the defaults as a command line
    words: list[str] = []
    for name, value in defaults.items():
        if name in own_names or value is None:
            continue

        # the flag that the name stands for
        is_setting = name in setting_names
        if is_setting:
            flag = flag_of_setting(name)
        elif value is False:
            flag = megatron_only_switch_clearing(name)
        else:
            spellings = (f"--{name.replace('_', '-')}", f"--{name}", megatron_only_flag_for(name))
            flag = next((spelling for spelling in spellings if spelling in flags), None)
        if flag not in flags or flags[flag].dest in given:
            continue

        # the flag with its value; a switch of a setting is left to `defaults` below, which has the setting's own value
        if flags[flag].nargs == 0:
            if not is_setting:
                words.append(flag)
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            words.append(f"{flag}={value}")
        elif isinstance(value, list) and not is_setting:
            words += [flag, *map(str, value)]

    # read it
    source = _given(parser, words)
    source.problems = [f"args_defaults of the script: {problem}" for problem in source.problems]
    if source.hides_positions:
        source.settings.setdefault("position_embedding_type", "none")
    settings = {name: value for name, value in source.settings.items() if name not in own_names}
    source.settings = {**defaults, **settings}
    return source


def _given(parser: FlagParser, words: Sequence[str]) -> GivenFlags:
    """Return the flags of a command line, with their problems."""
    read = parser.read(words)
    given = vars(read.values)
    problems = list(read.unreadable.values())
    if read.unknown:
        problems += unknown_problems(read.unknown, parser)

    # Megatron's other flags
    no_effect = {}
    warned = {}
    others = {flag: value for flag, value in given.items() if flag in OTHERS}
    for flag, value in others.items():
        other = OTHERS[flag]
        if other.is_harmless(value):
            no_effect[flag] = "the value asks for the only behaviour there is"
        elif flag in REFUSED:
            problems.append(f"{flag}: {other.reason}")
        elif flag in WARNED:
            flag_and_value = flag if other.values == "0" else f"{flag} {value}"
            warned[flag_and_value] = other.reason
        elif flag in NO_EFFECT:
            no_effect[flag] = other.reason

    # the settings; the parser stores all other flags under names that begin with --
    settings = {name: value for name, value in given.items() if not name.startswith("--")}
    problems += _expand_shorthand(given, settings)
    hides_positions = "--no-position-embedding" in given and "position_embedding_type" not in settings
    return GivenFlags(settings, problems, no_effect, warned, others, hides_positions, list(read.unreadable))


def _hides_positions(sources: Sequence[GivenFlags]) -> bool:
    """Whether positions are hidden by the highest source that gives any flag about them. sources: the lowest first."""
    for source in reversed(sources):
        if source.hides_positions:
            return True
        if "position_embedding_type" in source.settings:
            return False
    return False


def _expand_shorthand(given: Mapping[str, Any], settings: dict[str, Any]) -> list[str]:
    """Add the settings that shorthand flags stand for to `settings`.

    Returns contradictions with settings given already.
    """
    problems = []
    given_by = {name: f"--{name.replace('_', '-')} {value}" for name, value in settings.items()}
    for flag, meaning in SHORTHAND.items():
        if flag not in given:
            continue
        for name, value in meaning.items():
            if settings.setdefault(name, value) != value:
                problems.append(
                    f"{flag} stands for --{name.replace('_', '-')} {value}, which contradicts {given_by[name]}; give one"
                )
            given_by.setdefault(name, flag)
    return problems


def reason_lines(kind: str, reasons: Mapping[str, str]) -> list[str]:
    """Return one line for each reason: `no effect here: --a --b: reason`."""
    flags_by_reason: dict[str, list[str]] = {}
    for flag, reason in reasons.items():
        flags_by_reason.setdefault(reason, []).append(flag)
    return [f"{kind}: {' '.join(flags)}: {reason}" for reason, flags in flags_by_reason.items()]


# Settings that are alternatives to each other: where a source gives one of them, a lower source's others do not count.
_ALTERNATIVES = (
    ("bf16", "fp16", "fp64"),
    ("train_iters", "train_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    ("use_rope_scaling", "rope_scaling"),
)


def merge_settings(settings: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of two sources, of which the first takes precedence.

    Where it gives one of several alternatives, such as --train-samples, the others of the lower source do not count.
    """
    # the settings that are given; 0 steps of warm-up are a choice, but a switch that is off leaves the choice to the others
    given = {name for name, value in settings.items() if value is not None and value is not False}

    # the settings of the lower source that do not count
    dropped: set[str] = set()
    for alternatives in _ALTERNATIVES:
        if given.intersection(alternatives):
            dropped.update(alternatives)
    for fields in DATA_SOURCES.values():
        if given.intersection(fields):
            for other_fields in DATA_SOURCES.values():
                if other_fields != fields:
                    dropped.update(other_fields)
    if settings.get("swiglu"):  # it means both
        dropped |= {"gated", "activation"}
    elif settings.get("gated") is not None or settings.get("activation") is not None:
        dropped.add("swiglu")
    if settings.get("group_query_attention") is False:
        dropped.add("num_query_groups")

    merged = {name: value for name, value in lower.items() if name not in dropped}
    return merged | dict(settings)


def _usable(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's defaults, without a default tokenizer that has none of its files.

    Errors would blame a choice that nobody made.
    """
    kind = TOKENIZERS.get(defaults.get("tokenizer_type"))
    known = {name for name, value in (*defaults.items(), *settings.items()) if value is not None}
    lacks_files = kind is not None and bool(kind.needs) and not known.intersection(kind.needs)
    usable = dict(defaults)
    if lacks_files:
        usable.pop("tokenizer_type", None)
    return usable


def _is_set(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is given. A switch does not count that a file sets to its default."""
    if name not in settings:
        return False
    default = field_of_setting(name).default
    return not isinstance(default, bool) or settings[name] != default


def _build_all(
    settings: Mapping[str, Any], unreadable: set[str], components: Mapping[str, type]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config of each valid component, and the problems of the others.

    A component with an unreadable setting is skipped.
    """
    parts = {}
    problems = []
    for name, component in components.items():
        if unreadable & {field.name for field in option_fields(component)}:
            continue
        try:
            parts[name] = build(component, dict(settings))
        except ConfigError as error:
            problems += error.problems
    return parts, problems
