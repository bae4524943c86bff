"""The settings of a checkpoint's training run that generation needs."""

from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.datasets.data_config import DataConfig
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import note_of_lost_buffers
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.transformer.model_config import ModelConfig

_LORA = frozenset(f.name for f in fields(LoRAConfig))  # flags of adapters, which finetune_gpt.py adds
_COMPONENTS = {"transformer": ModelConfig, "data": DataConfig, "tokenizer": TokenizerConfig}


@dataclass(frozen=True)
class SavedSettings:
    """The settings of a training run; those that the checkpoint lacks have their defaults."""

    vocab_size: int
    transformer: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    lora: LoRAConfig | None = None  # None: no adapters

    @property
    def positions(self) -> int:
        """The rows of a learned position embedding."""
        longest = max(self.data.seq_length or 0, self.data.decoder_seq_length or 0)
        return self.transformer.max_position_embeddings or longest


def read_saved_settings(state: dict[str, Any], source: str, *, has_script: bool = False) -> SavedSettings:
    """Return the settings in `Checkpoint.state`, for inference: experts have no capacity. Raises ConfigError.

    A capacity would drop tokens depending on what else is computed with them: the cache, other texts of a batch.

    source: the checkpoint's name in errors. has_script: a training script builds the model, so that flags of its own may
    shape it.
    """
    saved = state.get("config", {})
    if not _COMPONENTS.keys() <= saved.keys() or "vocab_size" not in state:
        raise ConfigError(
            f"{source} does not name its model class; it was not written by a pretraining run of this project"
        )
    if unknown := sorted(saved["transformer"].keys() - {f.name for f in fields(ModelConfig)}):
        raise ConfigError(
            f"{source} has unknown model settings: {', '.join(unknown)}; use the version of the code that wrote it"
        )
    of_model = saved.get("own_model", {})
    has_lora_flags = _has_lora_flags(saved)
    own = _listed({name: value for name, value in of_model.items() if not (has_lora_flags and name in _LORA)})
    if own and not has_script:
        raise ConfigError(
            f"{source} is a script's own model, with the settings {own}; give the training script as --model, which builds it"
        )
    try:
        components = {name: build(kind, saved[name]) for name, kind in _COMPONENTS.items()}
        no_capacity = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
        components["transformer"] = replace(components["transformer"], **no_capacity)
        lora = None
        if has_lora_flags and of_model["lora_rank"] is not None:
            lora = build(LoRAConfig, {name: value for name, value in of_model.items() if name in _LORA})
        return SavedSettings(state["vocab_size"], **components, lora=lora)
    except ConfigError as error:
        advice = "if the script that trained adds it, give that script by --model"
        raise ConfigError([f"{source}: {problem}; {advice}" for problem in error.problems]) from None


def notes_on_checkpoint(state: dict[str, Any], *, has_script: bool = False) -> list[str]:
    """Return notes for the user: assumptions about the checkpoint, and saved settings that are ignored.

    has_script: as in `read_saved_settings`.
    """
    notes = []
    if "model" not in state:
        notes.append("the checkpoint does not name its model; GPT is assumed")
    if note := note_of_lost_buffers(state):
        notes.append(note)
    settings = state["config"].get("own", {})
    if _has_lora_flags(state["config"]):
        settings = {name: value for name, value in settings.items() if name not in _LORA and value is not None}
    own = _listed(settings)
    if own and not has_script:
        notes.append(f"the script's own settings are ignored: {own}")
    return notes


def _has_lora_flags(config: dict[str, Any]) -> bool:
    """Whether the script of the training had the flags of our adapters, as finetune_gpt.py has."""
    return {*config.get("own_model", {}), *config.get("own", {})} >= _LORA


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
