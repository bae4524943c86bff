"""State of modules that is no parameter. Checkpoints of the training loop do not hold it, and a run says so.

    at the start     a WARNING names the persistent buffers, and the modules with an extra state (torch's `get_extra_state`)
    at a save        the manifest's "lost_buffers" names those that have changed since the model was built; so does a WARNING
                     its "buffers_at_start" says with which values the buffers began
    at a resume      a checkpoint that names some is refused without --allow-lost-buffers; a WARNING names those that
    begin with
                     other values than in the checkpoint's run

A buffer that never changes is made again by the model's constructor, so nothing of it is lost if that makes the same.
One that
is drawn at random is another under another --seed.
"""

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.lost_buffers import first_names
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.ops.tensor_hash import tensor_hash
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.training.global_vars import print_rank_0

_EXTRA_STATE = "_extra_state"  # the end of torch's name for what `get_extra_state` returns
Digests = dict[str, str]


def note_buffers(chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str) -> None:
    """Remember the values with which the model begins; warn of those that a checkpoint will lack. Every rank must call."""
    with collectives.raise_together(world, device):
        for chunk in chunks:
            chunk.buffers_at_start = digests_of(chunk.module)
    names = _names_on_any_rank((name for chunk in chunks for name in chunk.buffers_at_start), world, device)
    if names:
        print_rank_0(
            f"WARNING: this model has buffers that checkpoints do not hold: {first_names(names)}. A resume from a save in which "
            "one has changed is refused without --allow-lost-buffers, with which it begins anew. A constant that the "
            "constructor makes again is no state: register it with persistent=False"
        )


def changed_buffers(chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str) -> list[str]:
    """The names, on any rank, of what is not as it was when the model was built; a WARNING names them. Every rank must call.

    A chunk whose beginning was not noted may have changed in all."""
    mine: list[str] = []
    with collectives.raise_together(world, device):
        for chunk in chunks:
            before, now = chunk.buffers_at_start or {}, digests_of(chunk.module)
            mine += [name for name in before | now if before.get(name) != now.get(name)]
    names = _names_on_any_rank(mine, world, device)
    if names:
        print_rank_0(
            f"WARNING: this save lacks buffers that have changed since the model was built: {first_names(names)}; in a run that "
            "resumes from it they begin anew, and it needs --allow-lost-buffers"
        )
    return names


def first_buffers(chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str) -> Digests:
    """The digest of each buffer as the model began with it, of those that are equal on all ranks that have them. Every
    rank must
    call."""
    mine = [(name, text) for chunk in chunks for name, text in (chunk.buffers_at_start or {}).items()]
    mine = [(name, text) for name, text in mine if not name.endswith(_EXTRA_STATE)]
    texts = collectives.all_gather_texts(json.dumps(mine), world, device)
    found: dict[str, set[str]] = {}
    for name, text in (pair for gathered in texts for pair in json.loads(gathered)):
        found.setdefault(name, set()).add(text)
    return {name: text for name, (text, *others) in sorted(found.items()) if not others}


def note_other_buffers(before: Digests, now: Digests, given: str) -> None:
    """A WARNING names the buffers that do not begin as in the checkpoint's run. Those of another shape or dtype, as a
    layout or a
    precision may make them, are not compared. given: the checkpoint's flag and folder."""
    alike = [name for name, text in before.items() if name in now and _form_of(text) == _form_of(now[name])]
    if names := [name for name in alike if before[name] != now[name]]:
        print_rank_0(
            f"WARNING: buffers of the model do not begin as in the run of {given}: {first_names(names)}. Checkpoints do not hold "
            "them, and the model computes something else with other ones; give that run's --seed if they are drawn at random"
        )


def _form_of(text: str) -> str:
    return text.rpartition(" ")[0]


def check_lost_buffers(lost: Sequence[str], given: str, *, allowed: bool) -> None:
    """Refuse a checkpoint that lacks the buffers `lost`, unless `allowed`; then a WARNING names them. given: its flag and
    folder."""
    if not lost:
        return
    text = f"{given} lacks buffers of the model that had changed when it was saved: {first_names(lost)}"
    if not allowed:
        raise ConfigError(
            f"{text}; they would begin anew, and the model would compute something else. Give --allow-lost-buffers to go on so"
        )
    print_rank_0(f"WARNING: {text}; they begin anew, as --allow-lost-buffers allows")


# ---------------------------------------------------------------- what a module's state is


def digests_of(module: nn.Module) -> Digests:
    """A digest of each persistent buffer and extra state, by its name in `state_dict`. Empty ones are left out."""
    saved = module.state_dict(keep_vars=True)
    found = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved}
    found |= {name: value for name, value in saved.items() if name.endswith(_EXTRA_STATE)}
    return {name: digest(value) for name, value in found.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and not value.numel())


def digest(value: Any) -> str:
    """Equal for equal values, bit by bit. value: a tensor, whose dtype and shape come first; or what a module's extra
    state is,
    with any tensors inside."""
    if isinstance(value, Tensor):
        return _digest_of_leaf(value)
    leaves, structure = tree_flatten(value)
    return hashlib.sha256(" ".join([str(structure), *map(_digest_of_leaf, leaves)]).encode()).hexdigest()


def _digest_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        bits = torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf
        return f"{leaf.dtype} {tuple(leaf.shape)} {int(tensor_hash(bits.to_dense()).item())}"
    if isinstance(leaf, io.BytesIO):
        leaf = leaf.getvalue()
    return hashlib.sha256(leaf).hexdigest() if isinstance(leaf, bytes | bytearray) else repr(leaf)


def _names_on_any_rank(mine: Iterable[str], world: Axis, device: torch.device | str) -> list[str]:
    texts = collectives.all_gather_texts(json.dumps(sorted(set(mine))), world, device)
    return sorted({name for text in texts for name in json.loads(text)})
