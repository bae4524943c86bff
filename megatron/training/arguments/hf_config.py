"""--hf-config trains from scratch the model that a config.json of Hugging Face describes. No weights are read.

taken     the model's settings, its precision and, from a folder, the tokenizer; the command line takes precedence
checked   the resulting model: one that the file does not describe is refused, as when a folder's weights are loaded
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.convert import is_foreign, model_from_hf_config
from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, has_hf_config, read_json
from megatron.core.base.dataclass_flags import ConfigError, FlagParser, build, flag_of, option_fields
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.models.common.model_rules import ModelRules
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.compare_settings_with_checkpoint import compare
from megatron.training.arguments.config import CheckpointConfig, Config, shown
from megatron.training.arguments.load_args_from_checkpoint import (
    NOTHING_TAKEN,
    Taken,
    as_flags,
    model_and_tokenizer_settings,
)

_TOKENIZER_FLAGS = ("vocab_size", "vocab_file", "merge_file", "tokenizer_model")


def taken_from_hf_config(given: Mapping[str, Any], parser: FlagParser, defaults: Mapping[str, Any]) -> Taken:
    """Return the settings of the file; empty without --hf-config.

    given: the settings of the command line, by name. defaults: the script's args_defaults. Raises ConfigError for a
    file that cannot be read or is not understood, and if another source of the model's flags is given too.
    """
    path = given.get("hf_config")
    if path is None:
        return NOTHING_TAKEN
    problems = list(_other_sources(given))
    if problems:
        raise ConfigError([f"--hf-config {path}: {problem}" for problem in problems])
    saved = model_from_hf_config(Path(path)).settings
    config = build(CheckpointConfig, dict(given))
    wanted = dict(model_and_tokenizer_settings(config, given, saved))

    # without a tokenizer, NullTokenizer gets the model's vocabulary size; it adds one token, the end of a document
    kind = given.get("tokenizer_type", wanted.get("tokenizer_type", "NullTokenizer"))
    if kind == "NullTokenizer" and not any(given.get(name) for name in _TOKENIZER_FLAGS):
        wanted["vocab_size"] = max(1, saved["tokenizer"]["model_vocab_size"] - 1)
    return as_flags("--hf-config", path, wanted.items(), given, parser, defaults)


def _other_sources(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the other sources of the model's flags that are given."""
    if given.get("use_checkpoint_args"):
        yield "--use-checkpoint-args and --hf-config both set the model's flags; give only one of them"
    for name in ("load", "pretrained_checkpoint"):
        root = given.get(name)
        step = given.get("ckpt_step") if name == "load" else None
        if root and is_foreign(root, step):
            yield f"{flag_of(name)} {root} sets the model's flags itself; leave out --hf-config"


_SCRIPTS = {
    "GPTModel": ("pretrain_gpt.py", "gpt"),
    "BertModel": ("pretrain_bert.py", "bert"),
    "T5Model": ("pretrain_t5.py", "t5"),
}


def other_model_problem(config: Config, rules: ModelRules) -> str | None:
    """Return that a Hugging Face config.json or folder describes a model of another class than the script's.

    None if it does not. Then the settings that it gave are of that model, and other rules about them say nothing.
    """
    checkpoint = config.checkpoint
    sources = {"--hf-config": checkpoint.hf_config}
    for flag, root in (("--load", checkpoint.load), ("--pretrained-checkpoint", checkpoint.pretrained_checkpoint)):
        if root is not None and is_foreign(root) and has_hf_config(Path(root)):
            sources[flag] = root
    for flag, path in sources.items():
        if path is None or not rules.model:
            continue
        file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
        try:
            model = family_of(read_json(file), str(file)).model
        except (ConfigError, CheckpointError):  # told by those who read the model
            continue
        if model != rules.model:
            script, name = _SCRIPTS.get(model, (f"the script of a {model}", model))
            return (
                f"{flag} {path} describes a {model}, and this script trains a {rules.model}: run {script} (a tool takes "
                f"--model {name})"
            )
    return None


def hf_config_problems(config: Config) -> list[str]:
    """Return why the model of these settings is not the model that --hf-config describes, setting by setting."""
    path = config.checkpoint.hf_config
    if path is None:
        return []
    try:
        described = model_from_hf_config(Path(path))
    except ConfigError as error:
        return error.problems
    file_model = build(ModelConfig, described.settings["transformer"])
    run_model = config.transformer

    # the settings that differ: name -> (in the file, in this run)
    differences: dict[str, tuple[Any, Any]] = {}
    changes = compare(_of_model(run_model), _of_model(file_model))
    for change in changes.model + changes.turned_on:
        differences[change.name] = (change.before, change.now)
    if not config.checkpoint.allow_rope_change:
        for change in changes.rope:
            differences[change.name] = (change.before, change.now)

    # the number of positions, which `compare` leaves out
    file_positions = file_model.max_position_embeddings
    has_positions = run_model.position_embedding_type == "learned_absolute" and file_positions is not None
    if has_positions and file_positions != config.positions:
        differences["max_position_embeddings"] = (file_positions, config.positions)

    # the vocabulary
    file_vocab_size = described.settings["tokenizer"]["model_vocab_size"]
    if file_vocab_size != config.tokenizer.model_vocab_size:
        differences["model_vocab_size"] = (file_vocab_size, config.tokenizer.model_vocab_size)

    problems = []
    for name, (in_file, in_run) in differences.items():
        problems.append(
            f"--hf-config {path} describes another model; {name} is {shown(in_file)} there, and {shown(in_run)} in this run: "
            "leave its flag out"
        )
    return problems


def _of_model(model: ModelConfig) -> dict[str, dict[str, Any]]:
    return {"transformer": {field.name: getattr(model, field.name) for field in option_fields(ModelConfig)}}
