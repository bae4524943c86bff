"""--use-checkpoint-args: what the checkpoint's run computed becomes the default of this command line.

    taken           the model's settings and its precision, the tokenizer, --seq-length, a script's flags of the model
    not taken       what changes no number (memory, kernels), data, schedules, optimizer; the layout, but for
                    --use-mp-args-from-checkpoint-args

    command line  >  --yaml-cfg FILE  >  checkpoint, folder or --hf-config  >  the script's args_defaults  >  our defaults

Where a given setting differs from the checkpoint's, a note says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.convert import is_foreign, settings_of_folder
from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagParser,
    build,
    default_of,
    field_of_action,
    flag_of,
    option_fields,
)
from megatron.core.dist_checkpointing.checkpoint_folder import find, read_manifest
from megatron.core.dist_checkpointing.format import MANIFEST, CheckpointError, parse_manifest
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.storage.paths import path_of
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.checkpoint_to_load import where_to_start
from megatron.training.arguments.config import CheckpointConfig, shown
from megatron.training.arguments.config_diff import COURSE_OF_MODEL, NOT_COMPARED, PRECISION, SCALING

_OF_A_MACHINE = ("attention_backend", "cpu_half_products", "compile")
_LAYOUT = tuple(field.name for field in option_fields(ParallelConfig))
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
    """What a checkpoint adds to a command line."""

    words: list[str]
    settings: dict[str, Any]  # those that no flag can say: a switch that is off, a number that is left open
    notes: list[str]
    where: str = ""  # the checkpoint, for messages


NOTHING_TAKEN = Taken([], {}, [])


def taken_from_checkpoint(given: Mapping[str, Any], parser: FlagParser, defaults: Mapping[str, Any]) -> Taken:
    """The checkpoint's settings. given: the settings of the command line, by name; empty without one of the two flags.
    defaults: the script's args_defaults.

    Raises ConfigError where --load names no folder of checkpoints, or one whose settings cannot be read.
    """
    roots = [root for name in ("load", "pretrained_checkpoint") if (root := given.get(name))]
    # Of another project, whose settings no command line has given.
    if any(map(is_foreign, roots)) or (given.get("load") and is_foreign(given["load"], given.get("ckpt_step"))):
        given = {**given, "use_checkpoint_args": True}
    asked = [name for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args") if given.get(name)]
    if not asked or not roots:
        return NOTHING_TAKEN
    config, flag = build(CheckpointConfig, dict(given)), flag_of(asked[0])
    start = where_to_start(config)
    if start is None:
        return Taken([], {}, [f"{flag}: {config.load} holds no checkpoint yet, so nothing is taken from it"])
    step = next(iter(start.iterations), None)
    if is_foreign(start.root, step):
        saved, where = settings_of_folder(path_of(start.root), step), start.root
    else:
        saved, iteration = _saved_settings(path_of(start.root), start.iterations)
        where = f"iteration {iteration} of {start.root}"
    saved_own = saved.get("own_model", {})
    own = [(action.dest, saved_own[action.dest]) for action in parser.own if action.dest in saved_own]
    wanted = [*_wanted(config, given, saved), *(own if config.use_checkpoint_args else [])]
    return as_flags(flag, where, wanted, given, parser, defaults)


def as_flags(
    flag: str,
    where: str,
    wanted: Iterable[tuple[str, Any]],
    given: Mapping[str, Any],
    parser: FlagParser,
    defaults: Mapping[str, Any],
) -> Taken:
    """The settings `wanted` that are not given and differ from what the script would have without them; notes say where
    given
    ones differ. defaults: the script's args_defaults."""
    words: list[str] = []
    settings: dict[str, Any] = {}
    taken: list[str] = []
    notes: list[str] = []
    own_fields = {action.dest: field for action in parser.own if (field := field_of_action(action)) is not None}
    usual = _DEFAULTS | {name: default_of(field) for name, field in own_fields.items()}
    for name, value in wanted:
        if name in given:
            if given[name] != value:
                notes.append(f"{flag}: {flag_of(name)} {shown(given[name])} is given, {where} has {shown(value)}")
            continue
        if value == defaults.get(name, usual.get(name)):
            continue
        if said := _words(name, value, parser):
            words += said
        elif (value is None or isinstance(value, bool)) and name in usual and value == usual[name]:
            settings[name] = value
        else:
            continue
        taken.append(f"{name} {shown(value)}")
    return Taken(words, settings, [f"{flag}: taken from {where}: {', '.join(taken) or 'nothing'}", *notes], where)


def _saved_settings(root: Path, iterations: list[int]) -> tuple[dict[str, dict[str, Any]], int]:
    """(the settings of the newest iteration with an undamaged manifest, by component; that iteration)."""
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
            raise ConfigError(f"{folder} holds no settings of a run, which --use-checkpoint-args needs; leave it out")
        return config, iteration
    raise ConfigError(str(problem))


def _wanted(
    config: CheckpointConfig, given: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """(setting, the checkpoint's value) of all that the flags ask for."""
    if config.use_mp_args_from_checkpoint_args:
        yield from ((name, saved.get("parallel", {}).get(name, _DEFAULTS[name])) for name in _LAYOUT)
    if config.use_checkpoint_args:
        yield from of_model_and_tokenizer(config, given, saved)
    if config.use_checkpoint_args and "seq_length" in saved.get("data", {}):
        yield "seq_length", saved["data"]["seq_length"]


def of_model_and_tokenizer(
    config: CheckpointConfig, given: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """(setting, the saved value) of the model, of its precision unless another is given, and likewise of the tokenizer.

    A setting of the model that is not saved has our default, and not the script's: so does the comparison with the
    checkpoint.
    """
    model, tokenizer = saved.get("transformer", {}), saved.get("tokenizer", {})
    keeps_precision = not config.allow_precision_change and not any(given.get(name) for name in PRECISION)
    left_out = {*(() if keeps_precision else PRECISION)}
    if config.allow_rope_change and any(name in given for name in SCALING):
        left_out.update(SCALING)  # one scaling excludes another
    of_model = {name: _DEFAULTS[name] for name in _DESCRIBED} | {name: model[name] for name in _MODEL if name in model}
    yield from ((name, of_model[name]) for name in _MODEL if name in of_model and name not in left_out)
    kind = tokenizer.get("tokenizer_type")
    if given.get("tokenizer_type", kind) == kind and not config.allow_tokenizer_change:
        yield from ((name, tokenizer[name]) for name in _TOKENIZER if name in tokenizer and name != "model_vocab_size")
    elif kind is not None and "tokenizer_type" not in given and given.get("tokenizer_model") is not None:
        yield "tokenizer_type", kind  # of the same type from another file
    if "model_vocab_size" in tokenizer and config.resize_token_embeddings is None:
        yield "model_vocab_size", tokenizer["model_vocab_size"]


def _words(name: str, value: Any, parser: FlagParser) -> list[str]:
    """A setting as on the command line; none where no flag says it, or it is unset."""
    actions = [action for action in parser.actions_by_flag().values() if action.dest == name]
    if isinstance(value, bool):
        actions = [action for action in actions if action.nargs == 0 and action.const is value]
    if not actions or value is None:
        return []
    flag = actions[0].option_strings[0]
    if isinstance(value, bool):
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
