"""The folders of --save and --save-hf: checked before the first step, and locked against other runs."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folder import newest_iteration
from megatron.core.dist_checkpointing.commit import clear_leftovers
from megatron.core.dist_checkpointing.format import LATEST, PARTIAL, folder_name
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.storage import file_layer
from megatron.core.storage.file_lock import locked
from megatron.core.storage.paths import path_of
from megatron.training.arguments.checkpoint_to_load import loads_what_it_saves
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing.hf_export import check_contents, clear_partial
from megatron.training.checkpointing.non_persistent_checkpoint import check_place
from megatron.training.global_vars import print_rank_0


def prepare_folder(config: CheckpointConfig, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Check at the start, not after hours, that --save, and folders of copies, are writable. Every rank must call.

    Locks the folder until `held` is closed, and removes incomplete checkpoints of earlier runs. An object store has no
    locks.
    """
    root = config.save
    with collectives.raise_together(world, device):
        if root is not None and world.is_first:
            with _naming("", root):
                _prepare(root, path_of(root), held)
    check_place(config, world, device)


def prepare_hf_folder(given: str | None, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """`prepare_folder` of --save-hf, which must hold nothing else. Every rank must call."""
    with collectives.raise_together(world, device):
        if given is not None and world.is_first:
            root = path_of(given)
            with _naming("-hf", given):
                if file_layer.is_folder(root):
                    check_contents(root)
                if _is_locked("-hf", given, root, held):
                    clear_partial(root)


@contextlib.contextmanager
def _naming(form: str, given: str) -> Iterator[None]:
    """form: what follows --save in the name of the flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--save{form} {given} cannot be written: {error.strerror}; choose another folder") from error


def _prepare(given: str, root: Path, held: contextlib.ExitStack) -> None:
    if file_layer.is_object(root):
        file_layer.write_synced(root / (LATEST + PARTIAL), "")  # a name that is cleared away in any case
        _clear(root)
    elif _is_locked("", given, root, held):
        _clear(root)


def _is_locked(form: str, given: str, root: Path, held: contextlib.ExitStack) -> bool:
    """Make the folder, see that it can be written, and lock it until `held` is closed; False where it cannot be locked."""
    if not file_layer.exists(root):
        file_layer.make_folders(root)
        held.callback(_remove_if_empty, root)
    # Another name that is cleared away, should this process be killed, and none of a run that may be saving there.
    file_layer.check_writable(root / f"{folder_name(0)}.{secrets.randbits(32)}{PARTIAL}")
    return _lock(form, given, root, held)


def _clear(root: Path) -> None:
    for problem in clear_leftovers(root):
        print_rank_0(f"WARNING: {problem}")


def _remove_if_empty(root: Path) -> None:
    """Remove the folder that a refused run, or a run without any checkpoint, has created."""
    with contextlib.suppress(OSError):
        file_layer.at(root).remove_folder(root)


def _lock(form: str, given: str, root: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder itself: no lock file stays behind, and the system unlocks it if this process is killed.

    False on network file systems without folder locks; no run is refused there.
    """
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, handle)
    try:
        is_ours = locked(handle)
    except OSError:
        return False
    if not is_ours:
        raise ConfigError(
            f"--save{form} {given}: another run saves there, and is alive; each would remove the other's unfinished files. "
            "End that run or choose another folder"
        )
    return True


def warn_of_other_checkpoints(config: CheckpointConfig, iteration: int, world: Axis) -> None:
    """Warn if --save holds checkpoints later than `iteration`, which this run will replace."""
    if config.save is None or not world.is_first:
        return
    if iteration and loads_what_it_saves(config):
        return  # already reported when the checkpoint was found
    newest = newest_iteration(path_of(config.save))
    if newest is not None and newest > iteration:
        instead = f"give --load {config.save} to resume from them, or " if config.load is None else ""
        print_rank_0(
            f"WARNING: --save {config.save} holds checkpoints up to iteration {newest}, and this run begins after iteration "
            f"{iteration}: it will replace them one by one; {instead}give another --save to keep them"
        )
