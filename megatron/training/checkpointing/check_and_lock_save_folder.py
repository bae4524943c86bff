"""The folders of --save and --save-hf: checked before the first step, and locked against other runs."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folder import newest_iteration
from megatron.core.dist_checkpointing.manifest_format import LATEST, PARTIAL, folder_name
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import try_clear_leftovers
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.storage import file_layer
from megatron.core.storage.file_lock import locked
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.choose_checkpoint_to_resume import loads_what_it_saves
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing.hf_export import clean_up_killed_export, refuse_foreign_files
from megatron.training.checkpointing.non_persistent_checkpoint import check_folders
from megatron.training.global_vars import print_rank_0


def prepare_folder(config: CheckpointConfig, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Check that --save and the folders of local checkpoints are writable, before the first step. Every rank must call.

    Locks the folder until `held` is closed, and removes incomplete checkpoints of earlier runs. An object store has no
    locks. Raises ConfigError.
    """
    with collectives.raise_together(world, device):
        if config.save is not None and world.is_first:
            with _write_errors_of("", config.save):
                _prepare(config.save, path_of(config.save), held)
    check_folders(config, world, device)


def prepare_hf_folder(folder: str | None, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Prepare --save-hf like --save; it must hold nothing else. Every rank must call. Raises ConfigError."""
    with collectives.raise_together(world, device):
        if folder is not None and world.is_first:
            root = path_of(folder)
            with _write_errors_of("-hf", folder):
                if file_layer.is_folder(root):
                    refuse_foreign_files(root)
                if _make_and_lock("-hf", folder, root, held):
                    clean_up_killed_export(root)


@contextlib.contextmanager
def _write_errors_of(suffix: str, folder: str) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names --save or, by the suffix "-hf", --save-hf."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--save{suffix} {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _prepare(folder: str, root: Path, held: contextlib.ExitStack) -> None:
    if file_layer.is_object(root):
        file_layer.write_and_sync_content(root / (LATEST + PARTIAL), "")  # a name that every save removes
        _clear(root)
    elif _make_and_lock("", folder, root, held):
        _clear(root)


def _make_and_lock(suffix: str, folder: str, root: Path, held: contextlib.ExitStack) -> bool:
    """Make the folder, check that it can be written, and lock it until `held` is closed.

    False if it cannot be locked.
    """
    if not file_layer.exists(root):
        file_layer.make_folders(root)
        held.callback(_remove_if_empty, root)
    # The name is one that the next save removes, if this process is killed, and that no other run writes at this moment.
    file_layer.check_writable(root / f"{folder_name(0)}.{secrets.randbits(32)}{PARTIAL}")
    return _lock(suffix, folder, root, held)


def _clear(root: Path) -> None:
    for problem in try_clear_leftovers(root):
        print_rank_0(f"WARNING: {problem}")


def _remove_if_empty(root: Path) -> None:
    """Remove the folder that a refused run, or a run without any checkpoint, has created."""
    with contextlib.suppress(OSError):
        file_layer.backend_of(root).remove_folder(root)


def _lock(suffix: str, folder: str, root: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder itself: no lock file is left, and the system unlocks it if this process is killed.

    Returns False on network file systems without folder locks; no run is refused there. Raises ConfigError if another
    process holds the lock.
    """
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, handle)
    try:
        is_ours = locked(handle)
    except OSError:
        return False
    if not is_ours:
        raise ConfigError(
            f"--save{suffix} {folder}: another running job saves there, and each would remove the other's unfinished "
            "files; end that job, or choose another folder"
        )
    return True


def warn_of_other_checkpoints(config: CheckpointConfig, iteration: int, world: Axis) -> None:
    """Warn if --save holds checkpoints later than `iteration`, which this run will replace."""
    if config.save is None or not world.is_first:
        return
    if iteration and loads_what_it_saves(config):
        return  # already reported when the checkpoint was found
    newest = newest_iteration(path_of(config.save))
    if newest is None or newest <= iteration:
        return
    instead = f"give --load {config.save} to resume from them, or " if config.load is None else ""
    print_rank_0(
        f"WARNING: --save {config.save} holds checkpoints up to iteration {newest}, and this run begins after iteration "
        f"{iteration}: it will replace them one by one; {instead}give another --save to keep them"
    )
