"""The folder of --save: written by one run at a time, and tried out before the first step."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import torch

from megatron.core import comm
from megatron.core.checkpoint.format import iteration_of
from megatron.core.config import ConfigError
from megatron.core.grid import Axis
from megatron.training.runtime import print_rank_0


def prepare_folder(root: str | None, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Find out at the start, not after hours, whether checkpoints can be written to `root`. Every rank must call.

    No other run may save there until `held` is closed.
    """
    with comm.together(world, device):
        if root is not None and world.is_first:
            try:
                Path(root).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=root):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"--save {root} cannot be written: {error.strerror}; choose another folder"
                ) from error
            _lock(root, held)


def _lock(root: str, held: contextlib.ExitStack) -> None:
    """Lock the folder itself, so that no file is left there, and the system unlocks it when this process is killed."""
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--save {root}: another run saves there, and is alive; each would remove what the other is writing. End that run or "
            "choose another folder"
        ) from None
    except OSError:  # some network file systems do not lock folders: then nobody is refused
        pass


def note_other_checkpoints(root: str | None, iteration: int, world: Axis) -> None:
    """Say of a run that begins after `iteration` that --save holds later checkpoints, which it does not go on from."""
    if root is None or not world.is_first:
        return
    found = (iteration_of(path.name) for path in Path(root).glob("iter_*"))
    if later := sorted(number for number in found if number is not None and number > iteration):
        print_rank_0(
            f"--save {root} holds {len(later)} checkpoint(s) of up to iteration {later[-1]}, which this run does not go on from; "
            "it will replace those it comes to"
        )
