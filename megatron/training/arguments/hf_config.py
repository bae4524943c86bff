"""--hf-config: the model that a config.json of Hugging Face describes, trained from scratch. No weights are read.

taken     before the command line's own: the model's settings, its precision, and of a folder the tokenizer
checked   the model that the flags then make: one that the file does not describe is refused, as for a folder's weights
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.convert import describe_model, is_foreign
from megatron.core.base.dataclass_flags import ConfigError, FlagParser, build, flag_of, option_fields
from megatron.core.models.common.model_rules import ModelRules
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.checkpoint_args import NOTHING_TAKEN, Taken, as_flags, of_model_and_tokenizer
from megatron.training.arguments.config import CheckpointConfig, Config, shown
from megatron.training.arguments.config_diff import compare

_TOKENIZER_FLAGS = ("vocab_size", "vocab_file", "merge_file", "tokenizer_model")


def taken_from_hf_config(given: Mapping[str, Any], parser: FlagParser, defaults: Mapping[str, Any]) -> Taken:
    """The settings of the file. given: the settings of the command line, by name; nothing without --hf-config. defaults: the
    script's args_defaults.

    Raises ConfigError for a file that cannot be read or is not understood, and beside another source of the model's flags.
    """
    if (path := given.get("hf_config")) is None:
        return NOTHING_TAKEN
    if problems := list(_other_sources(given)):
        raise ConfigError([f"--hf-config {path}: {problem}" for problem in problems])
    saved, config = describe_model(Path(path)).settings, build(CheckpointConfig, dict(given))
    wanted = dict(of_model_and_tokenizer(config, given, saved))
    kind = given.get("tokenizer_type", wanted.get("tokenizer_type", "NullTokenizer"))
    if kind == "NullTokenizer" and not any(given.get(name) for name in _TOKENIZER_FLAGS):
        wanted["vocab_size"] = max(1, saved["tokenizer"]["model_vocab_size"] - 1)  # its end of a document is one more
    return as_flags("--hf-config", path, wanted.items(), given, parser, defaults)


def _other_sources(given: Mapping[str, Any]) -> Iterator[str]:
    if given.get("use_checkpoint_args"):
        yield "--use-checkpoint-args fills the model's flags, too; give one of them"
    for name in ("load", "pretrained_checkpoint"):
        if (root := given.get(name)) and is_foreign(root, given.get("ckpt_step") if name == "load" else None):
            yield f"{flag_of(name)} {root} fills the model's flags by itself; leave out --hf-config"


def hf_config_problems(config: Config, rules: ModelRules) -> list[str]:
    """Why the model of these settings is not the one that --hf-config describes, setting by setting."""
    if (path := config.checkpoint.hf_config) is None:
        return []
    try:
        described = describe_model(Path(path))
    except ConfigError as error:
        return error.problems
    theirs, mine = build(ModelConfig, described.settings["transformer"]), config.transformer
    changes = compare(_of_model(mine), _of_model(theirs))
    counting = changes.model + ([] if config.checkpoint.allow_rope_change else changes.rope)
    found = {change.name: (change.before, change.now) for change in counting}
    rows = theirs.max_position_embeddings, config.positions
    if mine.position_embedding_type == "learned_absolute" and rows[0] is not None and rows[0] != rows[1]:
        found["max_position_embeddings"] = rows
    words = described.settings["tokenizer"]["model_vocab_size"], config.tokenizer.model_vocab_size
    if words[0] != words[1]:
        found["model_vocab_size"] = words
    problems = [
        f"--hf-config {path} describes another model; {name} is {shown(there)} there, and {shown(here)} in this run: leave its "
        "flag out"
        for name, (there, here) in found.items()
    ]
    if rules.model and rules.model != described.model:
        problems.append(
            f"--hf-config {path} describes a {described.model}, and this script trains a {rules.model}: run the script of that "
            "model"
        )
    return problems


def _of_model(model: ModelConfig) -> dict[str, dict[str, Any]]:
    return {"transformer": {field.name: getattr(model, field.name) for field in option_fields(ModelConfig)}}
