"""The folder of --save: written by one run at a time, and tried out before the first step."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch

from megatron.core import comm
from megatron.core.checkpoint.folder import clear_leftovers, newest_iteration
from megatron.core.config import ConfigError
from megatron.core.grid import Axis
from megatron.core.storage.locks import locked
from megatron.training.resume.start import loads_what_it_saves
from megatron.training.runtime import print_rank_0
from megatron.training.settings.config import CheckpointConfig


def prepare_folder(root: str | None, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Find out at the start, not after hours, whether checkpoints can be written to `root`. Every rank must call.

    No other run may save there until `held` is closed. What an earlier one left half-way is removed.
    """
    with comm.together(world, device):
        if root is not None and world.is_first:
            try:
                if not Path(root).exists():
                    Path(root).mkdir(parents=True)
                    held.callback(_remove_if_empty, root)
                with tempfile.TemporaryFile(dir=root):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"--save {root} cannot be written: {error.strerror}; choose another folder"
                ) from error
            if _lock(root, held):
                for problem in clear_leftovers(Path(root)):
                    print_rank_0(f"WARNING: {problem}")


def _remove_if_empty(root: str) -> None:
    """What a run that was refused, or ended before its first checkpoint, has made."""
    with contextlib.suppress(OSError):
        os.rmdir(root)


def _lock(root: str, held: contextlib.ExitStack) -> bool:
    """Lock the folder itself, so that no file is left there, and the system unlocks it when this process is killed.

    False on a network file system that does not lock folders: then nobody is refused.
    """
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, handle)
    try:
        is_ours = locked(handle)
    except OSError:
        return False
    if not is_ours:
        raise ConfigError(
            f"--save {root}: another run saves there, and is alive; each would remove what the other is writing. End that run or "
            "choose another folder"
        )
    return True


def warn_of_other_checkpoints(config: CheckpointConfig, iteration: int, world: Axis) -> None:
    """Say of a run that begins after `iteration` that --save holds later checkpoints, which it will replace."""
    if config.save is None or not world.is_first:
        return
    if iteration and loads_what_it_saves(config):
        return  # they are later than the one that is loaded, which has been said where it was found
    newest = newest_iteration(Path(config.save))
    if newest is not None and newest > iteration:
        instead = f"give --load {config.save} to go on from them, or " if config.load is None else ""
        print_rank_0(
            f"WARNING: --save {config.save} holds checkpoints up to iteration {newest}, and this run begins after iteration "
            f"{iteration}: it replaces those that it comes to; {instead}give another --save to keep them"
        )
