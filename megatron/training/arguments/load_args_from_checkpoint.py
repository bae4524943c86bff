"""--use-checkpoint-args: the settings of the checkpoint's run become the defaults of this command line.

    taken           the model's settings and its precision, the tokenizer, --seq-length, a script's flags of the model
    not taken       settings that change no number (memory, kernels), data, schedules, optimizer; the layout, unless
                    --use-mp-args-from-checkpoint-args is given

    command line > --yaml-cfg FILE > checkpoint, folder or --hf-config > the script's args_defaults > our defaults

A note names each given setting that differs from the checkpoint's.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.convert import is_foreign, settings_of_foreign_folder
from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagParser,
    build,
    default_of,
    field_of_action,
    flag_of,
    option_fields,
    problems_of,
)
from megatron.core.dist_checkpointing.checkpoint_folder import find, read_manifest
from megatron.core.dist_checkpointing.manifest_format import MANIFEST, CheckpointError, parse_manifest
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.storage.file_layer import exists
from megatron.core.storage.path_or_url import is_url, path_of
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.choose_checkpoint_to_resume import where_to_start
from megatron.training.arguments.compare_settings_with_checkpoint import (
    COURSE_OF_MODEL,
    NOT_COMPARED,
    PRECISION,
    SCALING,
)
from megatron.training.arguments.config import CheckpointConfig, shown

_OF_A_MACHINE = ("attention_backend", "cpu_half_products", "compile")
_LAYOUT = tuple(field.name for field in option_fields(ParallelConfig))
_TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_TOKENIZER = tuple(field.name for field in option_fields(TokenizerConfig))
_NOT_TAKEN = {*_OF_A_MACHINE, *(name for names in NOT_COMPARED.values() for name in names)} - {
    "max_position_embeddings"
}
_MODEL = tuple(field.name for field in option_fields(ModelConfig) if field.name not in _NOT_TAKEN)
_DEFAULTS = {
    field.name: default_of(field)
    for kind in (ModelConfig, TokenizerConfig, ParallelConfig)
    for field in option_fields(kind)
}
# Settings whose absence from a description says that the model has our default.
_DESCRIBED = {*_MODEL} - {*COURSE_OF_MODEL, *PRECISION, "max_position_embeddings"}


class Taken(NamedTuple):
    """The flags and settings that a checkpoint adds to a command line."""

    words: list[str]
    settings: dict[str, Any]  # those that no flag can express: a switch that is off, a number that is unset
    notes: list[str]
    where: str = ""  # the checkpoint, for messages


NOTHING_TAKEN = Taken([], {}, [])


def taken_from_checkpoint(given: Mapping[str, Any], parser: FlagParser, defaults: Mapping[str, Any]) -> Taken:
    """Return the checkpoint's settings; empty without one of the two flags.

    given: the settings of the command line, by name. defaults: the script's args_defaults. Raises ConfigError if --load
    names no folder of checkpoints, or one whose settings cannot be read.
    """
    roots = []
    for name in ("load", "pretrained_checkpoint"):
        if given.get(name):
            roots.append(given[name])

    # a model of another project: no command line of ours has its settings, so they are taken without the flag
    is_foreign_model = any(map(is_foreign, roots))
    if not is_foreign_model and given.get("load"):
        is_foreign_model = is_foreign(given["load"], given.get("ckpt_step"))
    is_asked_for = any(given.get(name) for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args"))
    if is_foreign_model:
        given = {**given, "use_checkpoint_args": True}

    # a script may have the flag among its defaults
    if defaults.get("use_checkpoint_args") and "use_checkpoint_args" not in given:
        given = {**given, "use_checkpoint_args": True}

    switches = [name for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args") if given.get(name)]
    if not switches or not roots:
        return NOTHING_TAKEN

    # find the checkpoint and read its settings
    config = build(CheckpointConfig, dict(given))
    flag = flag_of(switches[0])
    if is_foreign_model and not is_asked_for:
        flag = flag_of("pretrained_checkpoint" if given.get("pretrained_checkpoint") else "load")
    start = where_to_start(config)
    if start is None:
        return Taken([], {}, [f"{flag}: {config.load} holds no checkpoint yet, so nothing is taken from it"])
    step = next(iter(start.iterations), None)
    if is_foreign(start.root, step):
        saved = settings_of_foreign_folder(path_of(start.root), step)
        where = start.root
    else:
        saved, iteration = _saved_settings(path_of(start.root), start.iterations)
        where = f"iteration {iteration} of {start.root}"

    # select the requested ones, with the script's own flags of the model
    wanted = _with_files_where_they_are(list(_wanted(config, given, saved)), given, f"{flag}: the tokenizer of {where}")
    if config.use_checkpoint_args:
        saved_own = saved.get("own_model", {})
        for action in parser.own:
            if action.dest in saved_own:
                wanted.append((action.dest, saved_own[action.dest]))
    return as_flags(flag, where, wanted, given, parser, defaults)


def _with_files_where_they_are(
    wanted: list[tuple[str, Any]], given: Mapping[str, Any], source: str
) -> list[tuple[str, Any]]:
    """Return `wanted` with the tokenizer's files in the folder of --pretrained-checkpoint, if their own has moved there.

    source: what the files are of, for errors. Raises ConfigError for a file that is in neither place.
    """
    result = []
    for name, value in wanted:
        is_file = name in _TOKENIZER_FILES and name not in given and isinstance(value, str)
        if is_file and not is_url(value) and not exists(path_of(value)):
            moved = None
            root = given.get("pretrained_checkpoint")
            if root is not None and not is_url(root):
                moved = path_of(root) / path_of(value).name
            if moved is None or not exists(moved):
                raise ConfigError(
                    f"{source} is no longer at {value}; give {flag_of(name)} with its place today, or "
                    "--pretrained-checkpoint with the model's folder if that has moved"
                )
            value = str(moved)
        result.append((name, value))
    return result


def as_flags(
    flag: str,
    where: str,
    wanted: Iterable[tuple[str, Any]],
    given: Mapping[str, Any],
    parser: FlagParser,
    defaults: Mapping[str, Any],
) -> Taken:
    """Return the settings of `wanted` that are not given and differ from what the script would have without them.

    Notes name the given settings that differ from `wanted`. defaults: the script's args_defaults.
    """
    words: list[str] = []
    settings: dict[str, Any] = {}
    taken: list[str] = []
    notes: list[str] = []

    # the defaults, also of the script's own flags
    usual = dict(_DEFAULTS)
    for action in parser.own:
        field = field_of_action(action)
        if field is not None:
            usual[action.dest] = default_of(field)

    for name, value in wanted:
        if name in given:
            if given[name] != value:
                notes.append(f"{flag}: {flag_of(name)} {shown(given[name])} is given, {where} has {shown(value)}")
            continue
        if value == defaults.get(name, usual.get(name)):
            continue
        flag_words = words_of_setting(name, value, parser)
        if flag_words:
            words += flag_words
        elif (value is None or isinstance(value, bool)) and name in usual and value == usual[name]:
            settings[name] = value  # no flag expresses it
        else:
            continue
        taken.append(f"{name} {shown(value)}")
    return Taken(words, settings, [f"{flag}: taken from {where}: {', '.join(taken) or 'nothing'}", *notes], where)


def _saved_settings(root: Path, iterations: list[int]) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the settings of the newest iteration with an undamaged manifest, by component, and that iteration."""
    problem = None
    for iteration in iterations:
        try:
            folder = find(root, iteration).folder
            state = parse_manifest(read_manifest(folder), folder / MANIFEST).state
        except CheckpointError as error:
            problem = problem or error
            continue
        config = state.get("config")
        if not isinstance(config, dict) or not all(isinstance(part, dict) for part in config.values()):
            raise ConfigError(
                f"{folder} contains no settings of a run, which --use-checkpoint-args needs; leave it out"
            )
        return config, iteration
    raise ConfigError(problems_of(problem))


def _wanted(
    config: CheckpointConfig, given: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield (setting, the checkpoint's value) for all that the flags ask for."""
    if config.use_mp_args_from_checkpoint_args:
        layout = saved.get("parallel", {})
        for name in _LAYOUT:
            yield name, layout.get(name, _DEFAULTS[name])
    if config.use_checkpoint_args:
        yield from model_and_tokenizer_settings(config, given, saved)
        if "seq_length" in saved.get("data", {}):
            yield "seq_length", saved["data"]["seq_length"]


def model_and_tokenizer_settings(
    config: CheckpointConfig, given: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield (setting, the saved value) of the model and of the tokenizer.

    The precision is left out if another is given.

    A setting of the model that is not saved has our default, and not the script's, as in the comparison with the
    checkpoint.
    """
    model = saved.get("transformer", {})
    tokenizer = saved.get("tokenizer", {})

    # the settings of the model that are not taken
    excluded: set[str] = set()
    if config.allow_precision_change or any(given.get(name) for name in PRECISION):
        excluded.update(PRECISION)
    if config.allow_rope_change and any(name in given for name in SCALING):
        excluded.update(SCALING)  # one scaling excludes another

    # the model
    for name in _MODEL:
        if name in excluded:
            continue
        if name in model:
            yield name, model[name]
        elif name in _DESCRIBED:
            yield name, _DEFAULTS[name]

    # the tokenizer
    kind = tokenizer.get("tokenizer_type")
    if given.get("tokenizer_type", kind) == kind and not config.allow_tokenizer_change:
        for name in _TOKENIZER:
            if name in tokenizer and name != "model_vocab_size":
                yield name, tokenizer[name]
    elif kind is not None and "tokenizer_type" not in given and given.get("tokenizer_model") is not None:
        yield "tokenizer_type", kind  # a tokenizer of the same type from another file

    # the vocabulary size of the model
    if "model_vocab_size" in tokenizer and config.resize_token_embeddings is None:
        yield "model_vocab_size", tokenizer["model_vocab_size"]


def words_of_setting(name: str, value: Any, parser: FlagParser) -> list[str]:
    """Return a setting as words of the command line; none if no flag expresses it, or it is unset."""
    actions = [action for action in parser.actions_by_flag().values() if action.dest == name]
    if isinstance(value, bool):
        actions = [action for action in actions if action.nargs == 0 and action.const is value]
    if not actions or value is None:
        return []
    flag = actions[0].option_strings[0]
    if isinstance(value, bool):
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
