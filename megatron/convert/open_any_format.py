"""Opening a folder: a checkpoint of ours, a Hugging Face folder or config, a checkpoint of Megatron-LM or torchtitan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.convert.families.config_json import family_of
from megatron.convert.formats.find_megatron_folder import check_readable, is_megatron_folder
from megatron.convert.formats.read_hf_folder import CONFIG, is_hf_folder, read_json
from megatron.convert.hf_origin import Provenance
from megatron.convert.hf_reader import components_of, config_in, open_hf_folder
from megatron.convert.megatron_reader import open_megatron, settings_of_megatron
from megatron.convert.strided_checkpoint import StridedCheckpoint
from megatron.convert.torchtitan_reader import open_titan
from megatron.convert.torchtitan_to_hf import is_titan_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, open_checkpoint
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.storage.file_layer import is_file, is_folder
from megatron.core.storage.paths import is_url, path_of


def is_foreign(root: Path | str, iteration: int | None = None) -> bool:
    """Whether a folder, at an iteration if it has some, holds a model of another project that is read as it lies."""
    return not is_url(root) and (is_hf_folder(path_of(root)) or is_megatron_folder(path_of(root), iteration))


def settings_in(root: Path, iteration: int | None = None) -> dict[str, dict[str, Any]]:
    """The settings that another project's folder gives to a run, by component."""
    if is_hf_folder(root):
        return components_of(config_in(root), root / CONFIG, root)
    return settings_of_megatron(root, iteration)


class DescribedModel(NamedTuple):
    """The model that a config.json describes, without weights."""

    model: str  # the name of our class
    settings: dict[str, dict[str, Any]]  # by component
    origin: Provenance  # where a run that starts from it begins


def described_by(path: Path) -> DescribedModel:
    """What a config.json, or a folder with one, says. A folder's tokenizer.json is given too; a file speaks of itself alone.

    Raises ConfigError for a file that is not there, cannot be read, or says what its family's table does not know.
    """
    folder = path if is_folder(path) else None
    source = path if folder is None else folder / CONFIG
    if not is_file(source):
        raise ConfigError(f"{source} is no file; give the config.json of a model, or the folder that holds it")
    try:
        config = read_json(source)
    except CheckpointError as error:
        raise ConfigError(f"{source}: {error.wrong}") from error
    model, settings = family_of(config, str(source)).model, components_of(config, source, folder)
    origin = Provenance.of(config, source.parent)
    return DescribedModel(model, settings, origin if folder else replace(origin, files={}))


def open_any(
    root: Path | str, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> Checkpoint:
    """`open_checkpoint`, also of a folder of another project. Every rank of `world` must call."""
    foreign = None
    with collectives.raise_together(world, device):
        if world.is_first:
            if not (is_it := is_foreign(root, iteration)) and not is_url(root):
                check_readable(path_of(root))
            foreign = json.dumps(is_it)
    if json.loads(collectives.broadcast_text(foreign, world, device)):
        return open_foreign(root, world, device, iteration=iteration)
    return open_checkpoint(root, iteration, world, device)


def open_foreign(
    root: Path | str, world: Axis = ALONE, device: torch.device | str = "cpu", *, iteration: int | None = None
) -> StridedCheckpoint:
    """The model in a folder of another project, as a checkpoint that any layout reads; reads no tensors.

    Every rank of `world` must call. The first rank reads what describes the tensors for all.
    """
    root = path_of(root)
    with collectives.raise_together(world, device):
        kinds = json.dumps([is_hf_folder(root), is_titan_folder(root)]) if world.is_first else None
    is_hf, is_titan = json.loads(collectives.broadcast_text(kinds, world, device))
    if not is_hf:
        return open_megatron(root, iteration, world, device)
    if iteration is not None:
        raise ConfigError(f"{root} is no folder of iterations: leave iteration {iteration} out")
    return open_titan(root, world, device) if is_titan else open_hf_folder(root, world, device)
