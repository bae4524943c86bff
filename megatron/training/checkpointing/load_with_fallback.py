"""Loading the newest undamaged checkpoint: if any rank finds damage, all ranks fall back to an older one together."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, open_checkpoint
from megatron.core.dist_checkpointing.manifest_format import DAMAGED, MANIFEST, CheckpointError, folder_name
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import set_aside_damaged
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.storage import file_layer
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.choose_checkpoint_to_resume import Start
from megatron.training.global_vars import print_rank_0

_MAX_SHOWN = 3  # problems of one checkpoint in a message

_T = TypeVar("_T")


def load_undamaged(
    start: Start, load: Callable[[Checkpoint], _T], world: Axis, device: torch.device | str, *, owns_root: bool
) -> _T:
    """Return `load(checkpoint)` of the first of `start.iterations` in which no rank finds damage. Every rank must call.

    Hashes are checked as the tensors are read, so damage may show after some tensors are filled: `load` must fill the
    same tensors from any of the checkpoints. owns_root: this run saves there; then damaged folders are renamed, so that
    nothing takes them for checkpoints. Raises CheckpointError, with every damage, if no older checkpoint is left.
    """
    root = path_of(start.root)
    candidates = [*start.iterations] or [None]
    damages: list[tuple[int, str]] = []
    while candidates:
        # try the newest
        iteration = candidates.pop(0)
        checkpoint = None
        try:
            checkpoint = open_any(root, iteration, world, device)
            loaded = load(checkpoint)
        except (CheckpointError, ConfigError, collectives.PeerError) as error:
            # fall back to an older one of the same run, on all ranks, if any rank has found damage
            damage = _damage_on_any_rank(error, world, device)
            if damage is None or len(start.iterations) <= 1:
                raise
            damages.append((iteration, damage))
            candidates = [number for number in candidates if _is_ancestor(number, checkpoint)]
            instead = "there is no older one of its run"
            if candidates:
                instead = f"iteration {candidates[0]} is used instead"
            print_rank_0(f"WARNING: iteration {iteration} of {root} is damaged: {damage}; {instead}")
            continue

        # it is loaded: set the damaged ones aside
        with collectives.raise_together(world, device):
            if owns_root and world.is_first:
                _set_aside(root, [*start.spoiled, *(number for number, _ in damages)])
        return loaded

    advice = (
        "restore one of them from a copy, or give --ckpt-step N for another iteration, or other folders to start anew"
    )
    raise CheckpointError(root, [f"iteration {number} is damaged: {damage}" for number, damage in damages], advice)


def newest_with_good_manifest(start: Start) -> Checkpoint:
    """Return the first of `start.iterations` whose manifest is undamaged; reads no tensors. Call on one rank."""
    root = path_of(start.root)
    for iteration in start.iterations[:-1]:
        with contextlib.suppress(CheckpointError):
            return open_checkpoint(root, iteration)
    return open_checkpoint(root, start.iterations[-1])


def _damage_on_any_rank(error: Exception, world: Axis, device: torch.device | str) -> str | None:
    """Return the damage that the lowest of the ranks has found; None if all ranks fail for another reason.

    Every rank must call, with its own error.
    """
    if isinstance(error, collectives.LostPeerError):
        return None
    own_damage = ""
    if isinstance(error, CheckpointError) and error.advice == DAMAGED:
        problems = [error.wrong] if isinstance(error.wrong, str) else error.wrong
        own_damage = f"{error.file}: {'; '.join(problems[:_MAX_SHOWN])}"
        if len(problems) > _MAX_SHOWN:
            own_damage += f" and {len(problems) - _MAX_SHOWN} more"
    damages = collectives.all_gather_texts(own_damage, world, device)
    return next(filter(None, damages), None)


def _is_ancestor(iteration: int, checkpoint: Checkpoint | None) -> bool:
    """Return whether a damaged checkpoint's run has passed through an iteration; True if its manifest does not tell."""
    ancestors = checkpoint.state.get("checkpoints") if checkpoint else None
    return iteration in ancestors if isinstance(ancestors, list) else True


def _set_aside(root: Path, iterations: list[int]) -> None:
    """Rename the damaged folders of these iterations."""
    for iteration in iterations:
        folder = root / folder_name(iteration)
        # In an object store the objects stay, so the folder still exists afterwards; its manifest does not.
        proof = folder / MANIFEST if file_layer.is_object(folder) else folder
        try:
            if file_layer.exists(proof):
                print_rank_0(
                    f"WARNING: {folder} is damaged and is now {set_aside_damaged(folder).name}: look at it, then remove it"
                )
        except OSError as error:
            print_rank_0(f"WARNING: {folder} is damaged and cannot be renamed ({error}); remove it by hand")
