"""Local checkpoints: copies of a run's state for restarts, beside its checkpoints (--non-persistent-save-interval).

    SAVE/non_persistent.json                                     the pointer to the copy: {"iteration": 7,
                                                                 "slot": "slot_1", "token": "a3..."}
    local     LOCAL/NAME-HASH/rank_00003/slot_1/iter_0000007/    on each machine's disk: all pieces that one rank holds
    global    SAVE/non_persistent/slot_1/iter_0000007/           a checkpoint of all ranks, on a shared file system

A copy is written into the slot that the pointer does not name. Once every rank has written its part the pointer names
this slot, and then the other slot is removed: a run that is killed at any point has the previous copy or the new one. A
rank finds its part by the pointer and checks that the part has the pointer's token, so parts of different saves are
never mixed. Without the --save folder a copy belongs to no run.

A rank's folder is a checkpoint like any other (hashes, atomic), whose tensors are the pieces that the rank holds.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import remove
from megatron.core.dist_checkpointing.manifest_format import DAMAGED, PARTIAL, show_box
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import size_of, whole
from megatron.core.storage import file_layer
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.choose_checkpoint_to_resume import loads_what_it_saves
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.global_vars import print_rank_0

_POINTER = "non_persistent.json"
_MAX_POINTER_BYTES = 1 << 10
_SLOTS = ("slot_0", "slot_1")


@dataclass(frozen=True)
class LocalCheckpointPointer:
    """The valid copy, as the pointer file names it."""

    iteration: int
    slot: str
    token: str  # of the save that wrote the copy; every rank's part holds it too


def read_pointer(config: CheckpointConfig) -> LocalCheckpointPointer | None:
    """Return the pointer below --save; None if there is none or it is damaged. Call on one rank."""
    path = path_of(config.save) / _POINTER
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        pointer = LocalCheckpointPointer(**json.loads(file_layer.read_start(path, _MAX_POINTER_BYTES)))
        has_iteration = type(pointer.iteration) is int and pointer.iteration >= 0
        if has_iteration and pointer.slot in _SLOTS and re.fullmatch("[0-9a-f]{32}", pointer.token):
            return pointer
    return None


def slots_folder(config: CheckpointConfig, rank: int) -> Path:
    """Return the folder of the slots into which this rank writes."""
    if config.non_persistent_ckpt_type == "global":
        if config.non_persistent_global_ckpt_dir is None:
            root = path_of(config.save) / "non_persistent"
        else:
            root = path_of(config.non_persistent_global_ckpt_dir)
        return root / _name_of(config)
    return path_of(config.non_persistent_local_ckpt_dir) / _name_of(config) / f"rank_{rank:05d}"


def _name_of(config: CheckpointConfig) -> str:
    """Return a name for this run's copies, beside those of other runs: of the --save folder, and a hash of its path."""
    path = os.path.realpath(path_of(config.save))
    return f"{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def check_folders(config: CheckpointConfig, world: Axis, device: torch.device) -> None:
    """Check at the start of a run that every rank can write its copies. Every rank must call. Raises ConfigError."""
    if config.non_persistent_save_interval is None:
        return
    kind = config.non_persistent_ckpt_type
    folder = slots_folder(config, world.rank)
    with collectives.raise_together(world, device):
        try:
            if world.is_first:
                file_layer.remove_if_there(path_of(config.save) / (_POINTER + PARTIAL))
            if kind == "local" or world.is_first:
                file_layer.make_folders(folder)
                file_layer.check_writable(folder / f"written{PARTIAL}")
        except OSError as error:
            flag = f"--non-persistent-{kind}-ckpt-dir"
            raise ConfigError(f"{flag} {folder} cannot be written: {error.strerror}; choose another folder") from error


# ---------------------------------------------------------------- saving


def save_local_checkpoint(
    config: CheckpointConfig,
    iteration: int,
    tensors: dict[str, LocalTensor],
    state: dict[str, Any],
    world: Axis,
    device: torch.device,
) -> None:
    """Write the copy of this step, point to it, and remove the previous one. Every rank must call.

    If any rank fails, all raise, and the pointer still names the previous copy. tensors: name -> this rank's part, as
    `LocalTensor` has it.
    """
    # the first rank chooses the slot, and a token for this save
    with collectives.raise_together(world, device):
        previous = read_pointer(config) if world.is_first else None
        slot = _SLOTS[0] if previous is None else _other_slot(previous.slot)
        proposal = {"iteration": iteration, "slot": slot, "token": secrets.token_hex(16)}
    text = collectives.broadcast_text(json.dumps(proposal), world, device)
    pointer = LocalCheckpointPointer(**json.loads(text))

    # empty the slot
    is_local = config.non_persistent_ckpt_type == "local"
    owns_folder = is_local or world.is_first
    folder = slots_folder(config, world.rank)
    with collectives.raise_together(world, device):
        if owns_folder:
            remove(folder / pointer.slot)

    # write: each rank a checkpoint of its own pieces, or all ranks one checkpoint
    state = {**state, "copy": pointer.token}
    if is_local:
        with collectives.raise_together(world, device):
            save_checkpoint(folder / pointer.slot, iteration, pieces_as_tensors(tensors), state, ALONE)
    else:
        save_checkpoint(folder / pointer.slot, iteration, tensors, state, world, device)

    # every rank has written: point to the copy, then remove the previous one
    with collectives.raise_together(world, device):
        if world.is_first:
            file_layer.write_atomically(path_of(config.save) / _POINTER, json.dumps(proposal))
    with collectives.raise_together(world, device):
        if owns_folder:
            remove(folder / _other_slot(pointer.slot))


def _other_slot(slot: str) -> str:
    return _SLOTS[1] if slot == _SLOTS[0] else _SLOTS[0]


def pieces_as_tensors(tensors: dict[str, LocalTensor]) -> dict[str, LocalTensor]:
    """Return each piece that this rank holds as a tensor of its own, [shape of the piece's box in the global tensor].

    Its name is that of the tensor, then the box. The tensors are views.
    """
    result = {}
    for name, local in tensors.items():
        for piece in dict.fromkeys((*local.pieces, *local.copies)):  # each piece once
            global_box = piece[0]
            shape = size_of(global_box)
            box = whole(shape)
            region = local.region(piece)  # [shape of the piece]
            result[f"{name} {show_box(global_box)}"] = LocalTensor(region, shape, [(box, box)], is_writer=True)
    return result


# ---------------------------------------------------------------- resuming


@dataclass(frozen=True)
class RankCheckpoint:
    """One rank's part of a local copy, with a `Checkpoint`'s interface. It fits only the layout that wrote it."""

    inner: Checkpoint

    @property
    def iteration(self) -> int:
        return self.inner.iteration

    @property
    def state(self) -> dict[str, Any]:
        return self.inner.state

    @property
    def folder(self) -> Path:
        return self.inner.folder

    @property
    def warning(self) -> str:
        return self.inner.warning

    @property
    def names(self) -> list[str]:
        """The names of the tensors of which this rank holds pieces."""
        return list(dict.fromkeys(name.rpartition(" ")[0] for name in self.inner.names))

    def read_into(
        self, tensors: dict[str, LocalTensor], world: Axis, *, convert: bool, device: torch.device | str
    ) -> None:
        """Read the pieces of `tensors`, as `Checkpoint.read_into`. Dtypes must be equal.

        tensors: name -> this rank's part, as `LocalTensor` has it. Every rank of `world` must call.
        """
        del convert
        with collectives.raise_together(world, device):
            self.inner.read_into(pieces_as_tensors(tensors))


def local_checkpoint_to_resume(
    config: CheckpointConfig, newest: int | None, world: Axis, device: torch.device
) -> LocalCheckpointPointer | None:
    """Return the copy to resume from, if there is one after the checkpoint of iteration `newest`.

    Every rank must call.
    """
    text = json.dumps(None)
    with collectives.raise_together(world, device):
        if world.is_first:
            pointer = _usable_pointer(config, newest)
            if pointer is not None:
                text = json.dumps(vars(pointer))
    fields = json.loads(collectives.broadcast_text(text, world, device))
    return None if fields is None else LocalCheckpointPointer(**fields)


def _usable_pointer(config: CheckpointConfig, newest: int | None) -> LocalCheckpointPointer | None:
    """Return the pointer, if the flags allow to resume from a copy and it is newer than the checkpoint `newest`."""
    if config.non_persistent_save_interval is None:
        return None
    if config.ckpt_step is not None or config.finetune or not config.load_optim or not loads_what_it_saves(config):
        return None
    pointer = read_pointer(config)
    if pointer is None:
        return None
    is_newer = newest is None or pointer.iteration > newest
    return pointer if is_newer else None


def local_checkpoint_common_state(config: CheckpointConfig, newest: int | None) -> dict[str, Any] | None:
    """Return the state of the copy that the run would resume from; None if there is none. Call on the first rank.

    Raises CheckpointError.
    """
    pointer = _usable_pointer(config, newest)
    if pointer is None:
        return None
    return open_checkpoint(slots_folder(config, 0) / pointer.slot, pointer.iteration).state


def open_non_persistent_checkpoint(
    config: CheckpointConfig, pointer: LocalCheckpointPointer, world: Axis, device: torch.device
) -> Checkpoint | RankCheckpoint:
    """Open this rank's part of a copy. Every rank must call.

    Raises CheckpointError or PeerError if any rank's part is missing, damaged or of another save.
    """
    folder = slots_folder(config, world.rank) / pointer.slot
    if config.non_persistent_ckpt_type == "global":
        checkpoint: Checkpoint | RankCheckpoint = open_checkpoint(folder, pointer.iteration, world, device)
    else:
        with collectives.raise_together(world, device):
            checkpoint = RankCheckpoint(open_checkpoint(folder, pointer.iteration))
    with collectives.raise_together(world, device):
        if checkpoint.state.get("copy") != pointer.token:
            raise CheckpointError(checkpoint.folder, f"is not of the save that {_POINTER} names", DAMAGED)
    return checkpoint


@contextlib.contextmanager
def falling_back(
    pointer: LocalCheckpointPointer, instead: str, world: Axis, device: torch.device, *, can_fall_back: bool = True
) -> Iterator[None]:
    """Run a block that reads a copy; a part that is missing or damaged on any rank ends it on all, with a warning.

    instead: what the run starts from then, in words. can_fall_back: False where tensors may be filled and nothing else
    could fill them; then this raises CheckpointError on every rank. Every rank must call.
    """
    try:
        yield
    except collectives.LostPeerError:
        raise
    except (CheckpointError, collectives.PeerError) as error:
        own_problem = str(error) if isinstance(error, CheckpointError) else ""
        problems = collectives.all_gather_texts(own_problem, world, device)
        if not any(problems):
            raise
        rank, problem = next((rank, text) for rank, text in enumerate(problems) if text)
        unusable = f"the copy of iteration {pointer.iteration} cannot be used"
        if not can_fall_back:
            advice = f"there is no checkpoint to go back to; remove {_POINTER} from --save to start anew"
            raise CheckpointError(f"rank {rank}", f"{problem}, so {unusable}", advice) from error
        print_rank_0(f"WARNING: {unusable} (rank {rank}: {problem}); the run goes on from {instead}")
