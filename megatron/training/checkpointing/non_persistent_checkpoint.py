"""Copies of a run's state for restarts, beside its checkpoints: --non-persistent-save-interval.

    SAVE/non_persistent.json                    which copy counts: {"iteration": 7, "slot": "slot_1", "token": "a3..."}
    local     LOCAL/NAME-HASH/rank_00003/slot_1/iter_0000007/    on each machine's disk: all that one rank holds, in its
              pieces
    global    SAVE/non_persistent/slot_1/iter_0000007/           a checkpoint of all ranks, on a file system that they share

A copy is written into the slot that does not count; the pointer names it once every rank has written its part; then the
other
slot goes. So a run that is killed anywhere has the copy before or the new one. A rank finds its part by the pointer, and the
pointer's token in it: parts of different saves are never mixed, and without the --save folder a copy is nobody's.

A folder of a rank is a checkpoint like any other (hashes, atomic), whose tensors are the pieces that the rank holds.
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
from megatron.core.dist_checkpointing.format import DAMAGED, PARTIAL, show_box
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.sharding.boxes import size_of, whole
from megatron.core.storage import file_layer
from megatron.core.storage.paths import path_of
from megatron.training.arguments.checkpoint_to_load import loads_what_it_saves
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.global_vars import print_rank_0

_POINTER = "non_persistent.json"
_MOST_POINTER = 1 << 10  # bytes
_SLOTS = ("slot_0", "slot_1")


@dataclass(frozen=True)
class Copy:
    """The copy that counts, as the pointer names it."""

    iteration: int
    slot: str
    token: str


def pointed_at(config: CheckpointConfig) -> Copy | None:
    """The copy that the pointer below --save names; None without one, or where it is damaged. For one rank."""
    path = path_of(config.save) / _POINTER
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        copy = Copy(**json.loads(file_layer.read_start(path, _MOST_POINTER)))
        number = type(copy.iteration) is int and copy.iteration >= 0
        if number and copy.slot in _SLOTS and re.fullmatch("[0-9a-f]{32}", copy.token):
            return copy
    return None


def place_of(config: CheckpointConfig, rank: int) -> Path:
    """The folder of the slots of this rank's copies."""
    if config.non_persistent_ckpt_type == "global":
        given = config.non_persistent_global_ckpt_dir
        root = path_of(config.save) / "non_persistent" if given is None else path_of(given)
        return root / _name_of(config)
    return path_of(config.non_persistent_local_ckpt_dir) / _name_of(config) / f"rank_{rank:05d}"


def _name_of(config: CheckpointConfig) -> str:
    """Of the run's copies, beside those of other runs: the --save folder's, and a hash of where it is."""
    where = os.path.realpath(path_of(config.save))
    return f"{Path(where).name}-{hashlib.sha256(where.encode()).hexdigest()[:12]}"


def check_place(config: CheckpointConfig, world: Axis, device: torch.device) -> None:
    """Check at the start that every rank can write its copies. Every rank must call."""
    if config.non_persistent_save_interval is None:
        return
    kind, place = config.non_persistent_ckpt_type, place_of(config, world.rank)
    with collectives.raise_together(world, device):
        try:
            if world.is_first:
                file_layer.remove_if_there(path_of(config.save) / (_POINTER + PARTIAL))
            if kind == "local" or world.is_first:
                file_layer.make_folders(place)
                file_layer.check_writable(place / f"written{PARTIAL}")
        except OSError as error:
            flag = f"--non-persistent-{kind}-ckpt-dir"
            raise ConfigError(f"{flag} {place} cannot be written: {error.strerror}; choose another folder") from error


# ---------------------------------------------------------------- saving


def save_copy(
    config: CheckpointConfig,
    iteration: int,
    tensors: dict[str, LocalTensor],
    state: dict[str, Any],
    world: Axis,
    device: torch.device,
) -> None:
    """Write the copy of this step, make it the one that counts, and remove the one before. Every rank must call.

    If any rank fails, all raise, and the copy before still counts.
    """
    before = None
    with collectives.raise_together(world, device):
        before = pointed_at(config) if world.is_first else None
        slot = _SLOTS[before is not None and before.slot == _SLOTS[0]]
        mine = {"iteration": iteration, "slot": slot, "token": secrets.token_hex(16)}
    chosen = Copy(**json.loads(collectives.broadcast_text(json.dumps(mine), world, device)))
    is_local = config.non_persistent_ckpt_type == "local"
    place, removes = place_of(config, world.rank), is_local or world.is_first
    with collectives.raise_together(world, device):
        if removes:
            remove(place / chosen.slot)
    written = iteration, own_pieces(tensors) if is_local else tensors, {**state, "copy": chosen.token}
    if is_local:
        with collectives.raise_together(world, device):
            save_checkpoint(place / chosen.slot, *written, ALONE)
    else:
        save_checkpoint(place / chosen.slot, *written, world, device)
    with collectives.raise_together(world, device):
        if world.is_first:
            _point_at(config, mine)
    with collectives.raise_together(world, device):
        if removes:
            remove(place / _SLOTS[chosen.slot == _SLOTS[0]])


def _point_at(config: CheckpointConfig, named: dict[str, Any]) -> None:
    file_layer.write_whole(path_of(config.save) / _POINTER, json.dumps(named))


def own_pieces(tensors: dict[str, LocalTensor]) -> dict[str, LocalTensor]:
    """Each piece that this rank holds as a tensor of its own, under a name that says which."""
    found = {}
    for name, local in tensors.items():
        for piece in dict.fromkeys((*local.pieces, *local.copies)):
            box = whole(size_of(piece[0]))
            region = local.region(piece)
            found[f"{name} {show_box(piece[0])}"] = LocalTensor(region, size_of(piece[0]), [(box, box)], is_writer=True)
    return found


# ---------------------------------------------------------------- resuming


@dataclass(frozen=True)
class OwnPart:
    """One rank's part of a local copy, in the place of a `Checkpoint`: it fits the layout in which it was written alone."""

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
        """As `Checkpoint.read_into`; a copy holds what it was made of, so nothing is converted."""
        del convert
        with collectives.raise_together(world, device):
            self.inner.read_into(own_pieces(tensors))


def newest_copy(config: CheckpointConfig, newest: int | None, world: Axis, device: torch.device) -> Copy | None:
    """The copy to go on from; None if there is none after the checkpoint of iteration `newest`. Every rank must call."""
    text = json.dumps(None)
    with collectives.raise_together(world, device):
        if world.is_first and (copy := _usable(config, newest)) is not None:
            text = json.dumps(vars(copy))
    found = json.loads(collectives.broadcast_text(text, world, device))
    return None if found is None else Copy(**found)


def _usable(config: CheckpointConfig, newest: int | None) -> Copy | None:
    asked = config.ckpt_step is not None or config.finetune or not config.load_optim
    if config.non_persistent_save_interval is None or asked or not loads_what_it_saves(config):
        return None
    copy = pointed_at(config)
    return copy if copy is not None and copy.iteration > (-1 if newest is None else newest) else None


def state_of_copy(config: CheckpointConfig, newest: int | None) -> dict[str, Any] | None:
    """The state of the copy that the run would go on from; None if there is none. For the first rank; raises
    CheckpointError."""
    copy = _usable(config, newest)
    return None if copy is None else open_checkpoint(place_of(config, 0) / copy.slot, copy.iteration).state


def open_copy(config: CheckpointConfig, copy: Copy, world: Axis, device: torch.device) -> Checkpoint | OwnPart:
    """This rank's part. Raises CheckpointError, or PeerError, if any rank's is missing, damaged or of another save."""
    folder = place_of(config, world.rank) / copy.slot
    if config.non_persistent_ckpt_type == "global":
        checkpoint: Checkpoint | OwnPart = open_checkpoint(folder, copy.iteration, world, device)
    else:
        with collectives.raise_together(world, device):
            checkpoint = OwnPart(open_checkpoint(folder, copy.iteration))
    with collectives.raise_together(world, device):
        if checkpoint.state.get("copy") != copy.token:
            raise CheckpointError(checkpoint.folder, f"is not of the save that {_POINTER} names", DAMAGED)
    return checkpoint


@contextlib.contextmanager
def without_copy(
    copy: Copy, instead: str, world: Axis, device: torch.device, *, may_end: bool = True
) -> Iterator[None]:
    """A block that goes on from a copy: what is missing or damaged, on any rank, ends it on all of them with a warning.

    may_end: False where tensors are filled and nothing else could fill them: then it raises CheckpointError on every rank.
    """
    try:
        yield
    except collectives.LostPeerError:
        raise
    except (CheckpointError, collectives.PeerError) as error:
        mine = str(error) if isinstance(error, CheckpointError) else ""
        told = collectives.all_gather_texts(mine, world, device)
        if not any(told):
            raise
        number, what = next((rank, text) for rank, text in enumerate(told) if text)
        where = f"the copy of iteration {copy.iteration} cannot be used"
        if not may_end:
            advice = f"there is no checkpoint to go back to; remove {_POINTER} from --save to start anew"
            raise CheckpointError(f"rank {number}", f"{what}, so {where}", advice) from error
        print_rank_0(f"WARNING: {where} (rank {number}: {what}); the run goes on from {instead}")
