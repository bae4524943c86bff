"""Loading the newest checkpoint without damage: where one rank finds damage, all ranks go back to an older one together."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, open_checkpoint
from megatron.core.dist_checkpointing.commit import set_aside
from megatron.core.dist_checkpointing.format import DAMAGED, MANIFEST, CheckpointError, folder_name
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.storage import file_layer
from megatron.core.storage.paths import path_of
from megatron.training.arguments.checkpoint_to_load import Start
from megatron.training.global_vars import print_rank_0

_T = TypeVar("_T")


def load_undamaged(
    start: Start, load: Callable[[Checkpoint], _T], world: Axis, device: torch.device | str, *, owns_root: bool
) -> _T:
    """What `load` returns for the first of `start.iterations` in which no rank finds damage. Every rank must call.

    Hashes are checked as the tensors are read, so damage may show after some of them are filled: `load` must fill the same
    tensors from any of the checkpoints. owns_root: this run saves there; then damaged folders are renamed, so that
    nothing takes
    them for checkpoints. Raises CheckpointError, with every damage, if there is nothing else to go back to.
    """
    root, left = path_of(start.root), [*start.iterations] or [None]
    damages: list[tuple[int, str]] = []
    while left:
        iteration, checkpoint = left.pop(0), None
        try:
            checkpoint = open_any(root, iteration, world, device)
            loaded = load(checkpoint)
        except (CheckpointError, ConfigError, collectives.PeerError) as error:
            damage = _damage_on_any_rank(error, world, device)
            if damage is None or len(start.iterations) <= 1:
                raise
            left = [number for number in left if _is_ancestor(number, checkpoint)]
            damages.append((iteration, damage))
            instead = f"iteration {left[0]} is used instead" if left else "there is no older one of its run"
            print_rank_0(f"WARNING: iteration {iteration} of {root} is damaged: {damage}; {instead}")
            continue
        with collectives.raise_together(world, device):
            if owns_root and world.is_first:
                _set_aside(root, [*start.spoiled, *(number for number, _ in damages)])
        return loaded
    advice = (
        "restore one of them from a copy, or give --ckpt-step N for another iteration, or other folders to start anew"
    )
    raise CheckpointError(root, [f"iteration {number} is damaged: {damage}" for number, damage in damages], advice)


def newest_readable(start: Start) -> Checkpoint:
    """The first of `start.iterations` whose manifest is undamaged; reads no tensors. For one rank."""
    for iteration in start.iterations[:-1]:
        with contextlib.suppress(CheckpointError):
            return open_checkpoint(path_of(start.root), iteration)
    return open_checkpoint(path_of(start.root), start.iterations[-1])


def _damage_on_any_rank(error: Exception, world: Axis, device: torch.device | str) -> str | None:
    """The damage that a rank has found; None if all ranks fail for another reason. Every rank must call, with its own
    error."""
    if isinstance(error, collectives.LostPeerError):
        return None
    mine = ""
    if isinstance(error, CheckpointError) and error.advice == DAMAGED:
        problems = [error.wrong] if isinstance(error.wrong, str) else error.wrong
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        mine = f"{error.file}: {'; '.join(problems[:3])}{more}"
    return next(filter(None, collectives.all_gather_texts(mine, world, device)), None)


def _is_ancestor(iteration: int, checkpoint: Checkpoint | None) -> bool:
    """Whether a damaged checkpoint's run has passed through an iteration; assumed where its manifest does not tell."""
    before = checkpoint.state.get("checkpoints") if checkpoint else None
    return iteration in before if isinstance(before, list) else True


def _set_aside(root: Path, iterations: list[int]) -> None:
    for folder in (root / folder_name(number) for number in iterations):
        try:
            # Objects stay where they are, so a folder of an object store is still there afterwards; its manifest is not.
            if file_layer.exists(folder / MANIFEST if file_layer.is_object(folder) else folder):
                print_rank_0(
                    f"WARNING: {folder} is damaged and is now {set_aside(folder).name}: look at it, then remove it"
                )
        except OSError as error:
            print_rank_0(f"WARNING: {folder} is damaged and cannot be renamed ({error}); remove it by hand")
