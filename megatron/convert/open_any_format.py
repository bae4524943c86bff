"""Open a folder: a checkpoint of ours, a Hugging Face folder or config, a checkpoint of Megatron-LM or torchtitan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.formats.find_megatron_folder import (
    is_megatron_folder,
    refuse_unsupported_format,
    unsupported_format_hint,
)
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, has_hf_config, read_json
from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.convert.megatron_reader import open_megatron, settings_of_megatron
from megatron.convert.open_hf_safetensors_folder import (
    open_hf_folder,
    read_config_with_true_tying,
    settings_by_component,
)
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint
from megatron.convert.torchtitan_reader import open_titan
from megatron.convert.torchtitan_to_hf_names import has_dcp_weights
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, open_checkpoint
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.storage.file_layer import is_file, is_folder
from megatron.core.storage.path_or_url import is_url, path_of


def is_foreign(root: Path | str, iteration: int | None = None) -> bool:
    """Return whether a folder holds a model of another project that can be read here.

    iteration: of a folder that has some.
    """
    if is_url(root):
        return False
    return has_hf_config(path_of(root)) or is_megatron_folder(path_of(root), iteration)


def settings_of_foreign_folder(root: Path, iteration: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the settings that another project's folder gives to a run, by component."""
    if has_hf_config(root):
        return settings_by_component(read_config_with_true_tying(root), root / CONFIG, root)
    return settings_of_megatron(root, iteration)


class ConfigOnlyModel(NamedTuple):
    """The model that a config.json describes, without weights."""

    model: str  # the name of our class
    settings: dict[str, dict[str, Any]]  # by component
    origin: Provenance  # recorded in the checkpoints of a run that starts from it


def model_from_hf_config(path: Path) -> ConfigOnlyModel:
    """Return the model that a config.json, or a folder with one, describes.

    A folder adds its tokenizer's settings and files; a config.json on its own says nothing of the files beside it.
    Raises ConfigError for a file that does not exist, cannot be read, or has keys that its family's table does not
    know.
    """
    folder = path if is_folder(path) else None
    source = path if folder is None else folder / CONFIG
    if not is_file(source):
        hint = None if folder is None else unsupported_format_hint(folder)
        if hint is not None:
            raise ConfigError(f"{folder} {hint}")
        raise ConfigError(f"{source} is not a file; give the config.json of a model, or the folder that contains it")
    try:
        config = read_json(source)
    except CheckpointError as error:
        raise ConfigError(f"{source}: {error.wrong}") from error
    model = family_of(config, str(source)).model
    settings = settings_by_component(config, source, folder)
    origin = Provenance.of(config, source.parent)
    if folder is None:
        origin = replace(origin, files={})
    return ConfigOnlyModel(model, settings, origin)


def open_any(
    root: Path | str, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, or a folder of another project. Every rank of `world` must call."""
    # The first rank looks at the folder, so that all ranks take the same branch.
    foreign = None
    with collectives.raise_together(world, device):
        if world.is_first:
            is_of_other_project = is_foreign(root, iteration)
            if not is_of_other_project and not is_url(root):
                refuse_unsupported_format(path_of(root))
            foreign = json.dumps(is_of_other_project)
    if json.loads(collectives.broadcast_text(foreign, world, device)):
        return open_foreign(root, world, device, iteration=iteration)
    return open_checkpoint(root, iteration, world, device)


def open_foreign(
    root: Path | str, world: Axis = ALONE, device: torch.device | str = "cpu", *, iteration: int | None = None
) -> StridedCheckpoint:
    """Open the model in a folder of another project as a checkpoint that any layout can load; reads no tensors.

    Every rank of `world` must call. The first rank reads the description of the tensors and broadcasts it.
    """
    root = path_of(root)
    kinds = None
    with collectives.raise_together(world, device):
        if world.is_first:
            kinds = json.dumps([has_hf_config(root), has_dcp_weights(root)])
    is_hf, is_titan = json.loads(collectives.broadcast_text(kinds, world, device))
    if not is_hf:
        return open_megatron(root, iteration, world, device)
    if iteration is not None:
        raise ConfigError(f"{root} has no folders of iterations; leave out iteration {iteration}")
    if is_titan:
        return open_titan(root, world, device)
    return open_hf_folder(root, world, device)
