"""A trained model for tools, in any layout: of a checkpoint, a Hugging Face folder, or adapters with their base.

read_model_settings   the flags of `TrainedModelConfig`
TrainedModel.open     opens checkpoint and base, of which settings and state are known then, before anything long
TrainedModel.load     this rank's stage, and the mesh
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from megatron.convert import open_any
from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import FROZEN
from megatron.core.inference import (
    SavedSettings,
    layout_problems,
    load_gpt,
    load_t5,
    notes_on_checkpoint,
    read_saved_settings,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.parallel.rank_grid import Axis
from megatron.core.storage.path_or_url import path_of
from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.transformer.context_parallel_setting_problems import context_parallel_problems
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.training import Script
from tools.generating.t5 import is_t5
from tools.script import script_at
from tools.trained_model.checkpoint_tokenizer import tokenizer_of_checkpoint
from tools.trained_model.flags import LAYOUT_SIZES, RefusedFlags, TrainedModelConfig
from tools.trained_model.script_model import load_script_model

LAYOUT_FIELDS = (*LAYOUT_SIZES, "cp_comm_type", "hierarchical_context_parallel_sizes")


@dataclass(frozen=True)
class ModelSettings:
    """The part of a command line that says which model runs where."""

    config: TrainedModelConfig
    parallel: ParallelConfig  # the layout of the ranks
    tokenizer_flags: dict[str, Any]  # override the checkpoint's tokenizer settings
    device: Device
    script: Script | None = None  # of --model


def read_model_settings(values: dict[str, Any]) -> ModelSettings:
    """Return the settings of a command line's values. Raises ConfigError."""
    config = build(TrainedModelConfig, values)
    script = None if config.model is None else script_at(config.model)
    layout = {
        field.name: getattr(config, field.name) for field in fields(ParallelConfig) if field.name in LAYOUT_FIELDS
    }
    tokenizer_names = {field.name for field in fields(TokenizerConfig)}
    tokenizer_flags = {name: value for name, value in values.items() if name in tokenizer_names}
    local_rank = config.local_rank
    if local_rank is None:
        local_rank = parallel_state.launched_local_rank()
    device = Device.select(config.device, local_rank)
    return ModelSettings(config, build(ParallelConfig, layout), tokenizer_flags, device, script)


@dataclass(frozen=True)
class TrainedModel:
    """An opened checkpoint, with its base if it holds adapters alone."""

    settings: ModelSettings
    checkpoint: Checkpoint
    base: Checkpoint | None
    saved: SavedSettings

    @classmethod
    def open(cls, settings: ModelSettings, world: Axis, log: Callable[[str], None]) -> "TrainedModel":
        """Open the checkpoint, and its base. Every rank of `world` must call. Raises ConfigError, CheckpointError."""
        config = settings.config
        device = settings.device.torch_device
        checkpoint = open_any(config.load, config.iteration, world, device)
        root = None
        with collectives.raise_together(world, device):
            saved = read_saved_settings(
                checkpoint.state, str(checkpoint.folder), has_script=settings.script is not None
            )
            root = base_of(checkpoint, config.pretrained_checkpoint)
        base = None
        if root is not None:
            try:
                base = open_any(path_of(root), None, world, device)
            except CheckpointError as error:
                raise ConfigError(
                    f"the base of the adapters of {config.load}, --pretrained-checkpoint {root}: {error}"
                ) from None
        for opened in (checkpoint, base):
            if opened is not None and opened.warning:
                log(f"WARNING: {opened.warning}")
        return cls(settings, checkpoint, base, saved)

    @property
    def state(self) -> dict[str, Any]:
        return self.checkpoint.state

    @property
    def source(self) -> str:
        """The checkpoint's name in errors."""
        return str(self.checkpoint.folder)

    @property
    def notes(self) -> list[str]:
        """Lines for the user: of settings that are ignored, and of the base."""
        notes = notes_on_checkpoint(self.state, has_script=self.settings.script is not None)
        if self.base is not None:
            notes.append(f"adapters of {self.settings.config.load} on the base {self.base.folder}")
        return notes

    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer. Raises as `tokenizer_of_checkpoint`."""
        return tokenizer_of_checkpoint(self.settings.tokenizer_flags, self.saved, self.state, self.source)

    def load(
        self, transformer: ModelConfig, problems: list[str], *, restarts_positions: bool = False
    ) -> tuple[nn.Module, Mesh]:
        """Return this rank's stage with its weights, and the mesh of the ranks. Every rank must call.

        transformer: the saved settings, perhaps in another precision. problems: further validation errors, raised with
        those of the layout. restarts_positions: `LayerContext`'s. Raises RefusedFlags, ConfigError, CheckpointError.
        """
        config = self.settings.config
        device = self.settings.device
        tp_size = config.tensor_model_parallel_size
        pp_size = config.pipeline_model_parallel_size

        # check the layout against the saved model
        problems = [
            *layout_problems(
                transformer, tp_size, pp_size, config.expert_model_parallel_size, config.expert_tensor_parallel_size
            ),
            *problems,
            *context_parallel_problems(self.settings.parallel, transformer, {}),
        ]
        if problems:
            raise RefusedFlags(problems)

        # create the process groups, then the stage
        mesh = parallel_state.initialize_model_parallel(
            tp_size,
            pp_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes,
            ranks_per_kv_head=transformer.ranks_per_kv_head(tp_size),
            distributed_timeout_minutes=config.distributed_timeout_minutes,
        )
        if self.settings.script is not None:
            stage = load_script_model(
                self.settings.script,
                self.checkpoint,
                replace(self.saved, transformer=transformer),
                self.settings.parallel,
                mesh,
                device,
                self.base,
            )
            return stage, mesh
        load = load_t5 if is_t5(self.state) else load_gpt
        stage = load(
            self.checkpoint,
            transformer,
            vocab_size=self.saved.vocab_size,
            positions=self.saved.positions,
            device=device.torch_device,
            mesh=mesh,
            lora=self.saved.lora,
            base=self.base,
            cp_types=tuple(config.cp_comm_type),
            restarts_positions=restarts_positions,
        )
        return stage, mesh


def base_of(checkpoint: Checkpoint, requested: str | None) -> str | None:
    """Return the folder of the base of a checkpoint that holds adapters alone; None: it holds all its weights.

    requested: --pretrained-checkpoint. Without it the base is where the training found it. Raises ConfigError.
    """
    if FROZEN not in checkpoint.state:
        if requested is not None:
            raise RefusedFlags(
                f"--pretrained-checkpoint {requested}: {checkpoint.folder} holds all its weights, and needs no base; leave it "
                "out"
            )
        return None
    if requested is not None:
        return requested
    trained_on = checkpoint.state["config"].get("checkpoint", {}).get("pretrained_checkpoint")
    origin = (checkpoint.state.get("origin") or {}).get("folder")
    places = [place for place in (trained_on, origin) if place]
    for place in places:
        if "://" in place or Path(place).exists():
            return place
    named = f"; that of the training, {places[0]}, is not there" if places else ""
    raise ConfigError(
        f"{checkpoint.folder} holds adapters without their base{named}; give the base as --pretrained-checkpoint DIR"
    )
