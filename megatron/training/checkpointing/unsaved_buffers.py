"""Buffers and extra states of modules: checkpoints of the training loop do not hold them, and a run says so.

    at the start    a WARNING names the persistent buffers, and the modules with an extra state (`get_extra_state`)
    at a save       the manifest's "lost_buffers" names those that have changed since the model was built, and so does
                    a WARNING; its "buffers_at_start" has a digest of each buffer's first value
    at a resume     a checkpoint that names some is refused without --allow-lost-buffers; a WARNING names those whose
                    first values are not those of the checkpoint's run

A buffer that never changes is not lost if the model's constructor makes the same one again. One that is drawn at random
is another one under another --seed.
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


def remember_and_warn_of_buffers(
    chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str
) -> None:
    """Remember the first values of the model's buffers; warn of those that a checkpoint will lack.

    Every rank must call.
    """
    with collectives.raise_together(world, device):
        for chunk in chunks:
            chunk.buffers_at_start = persistent_buffer_digests(chunk.module)
    names = _names_on_any_rank((name for chunk in chunks for name in chunk.buffers_at_start), world, device)
    if names:
        print_rank_0(
            f"WARNING: this model has buffers that checkpoints do not hold: {first_names(names)}. A resume from a save in which "
            "one has changed is refused without --allow-lost-buffers, with which it begins anew. A constant that the "
            "constructor makes again is no state: register it with persistent=False"
        )


def changed_persistent_buffers(
    chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str
) -> list[str]:
    """Return the names, on any rank, of buffers that have changed since the model was built; a WARNING names them.

    Every rank must call. In a chunk whose first values were not noted, every buffer may have changed.
    """
    own_names: list[str] = []
    with collectives.raise_together(world, device):
        for chunk in chunks:
            before = chunk.buffers_at_start or {}
            now = persistent_buffer_digests(chunk.module)
            own_names += [name for name in before | now if before.get(name) != now.get(name)]
    names = _names_on_any_rank(own_names, world, device)
    if names:
        print_rank_0(
            f"WARNING: this save lacks buffers that have changed since the model was built: {first_names(names)}; a "
            "run that resumes from it needs --allow-lost-buffers, and starts with the buffers' initial values"
        )
    return names


def initial_buffer_digests(
    chunks: Collection[DistributedDataParallel], world: Axis, device: torch.device | str
) -> Digests:
    """Return the digest of each buffer's first value, if it is equal on all ranks that have the buffer.

    Every rank must call.
    """
    own_digests = []
    for chunk in chunks:
        for name, digest_text in (chunk.buffers_at_start or {}).items():
            if not name.endswith(_EXTRA_STATE):
                own_digests.append((name, digest_text))
    digests: dict[str, set[str]] = {}  # name -> the different digests of all ranks
    for text in collectives.all_gather_texts(json.dumps(own_digests), world, device):
        for name, digest_text in json.loads(text):
            digests.setdefault(name, set()).add(digest_text)
    return {name: next(iter(texts)) for name, texts in sorted(digests.items()) if len(texts) == 1}


def note_other_buffers(before: Digests, now: Digests, source: str) -> None:
    """Warn of buffers whose first values are not those of the checkpoint's run.

    source: the checkpoint's flag and folder. Buffers of another shape or dtype, as a layout or a precision may make
    them, are not compared.
    """
    names = []
    for name, digest_text in before.items():
        is_alike = name in now and _dtype_and_shape(digest_text) == _dtype_and_shape(now[name])
        if is_alike and digest_text != now[name]:
            names.append(name)
    if names:
        print_rank_0(
            f"WARNING: buffers of the model do not begin as in the run of {source}: {first_names(names)}. Checkpoints do not "
            "hold them, and the model computes something else with other ones; give that run's --seed if they are drawn at random"
        )


def _dtype_and_shape(digest_text: str) -> str:
    """Return the start of a tensor's digest; empty for the digest of another value."""
    return digest_text.rpartition(" ")[0]


def check_lost_buffers(lost: Sequence[str], source: str, *, allowed: bool) -> None:
    """Refuse a checkpoint that lacks the buffers `lost`; if `allowed`, only warn.

    source: the checkpoint's flag and folder. Raises ConfigError.
    """
    if not lost:
        return
    text = f"{source} lacks buffers of the model that had changed when it was saved: {first_names(lost)}"
    if not allowed:
        raise ConfigError(
            f"{text}; they would start at their initial values, and the model would compute something else; give "
            "--allow-lost-buffers to continue nevertheless"
        )
    print_rank_0(f"WARNING: {text}; they start at their initial values, as --allow-lost-buffers allows")


# ---------------------------------------------------------------- digests


def persistent_buffer_digests(module: nn.Module) -> Digests:
    """Return a digest of each persistent buffer and extra state, by its name in `state_dict`.

    Empty ones are left out.
    """
    saved = module.state_dict(keep_vars=True)
    values = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved}
    values |= {name: value for name, value in saved.items() if name.endswith(_EXTRA_STATE)}
    return {name: digest(value) for name, value in values.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and not value.numel())


def digest(value: Any) -> str:
    """Return a text that is equal for values that are equal bit by bit.

    value: a tensor of any shape, whose digest begins with its dtype and shape, or a module's extra state with
    any tensors inside.
    """
    if isinstance(value, Tensor):
        return _digest_of_leaf(value)
    leaves, structure = tree_flatten(value)
    parts = [str(structure), *map(_digest_of_leaf, leaves)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _digest_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        real = torch.view_as_real(leaf.detach().resolve_conj()) if leaf.is_complex() else leaf
        return f"{leaf.dtype} {tuple(leaf.shape)} {int(tensor_hash(real.to_dense()).item())}"
    if isinstance(leaf, io.BytesIO):
        leaf = leaf.getvalue()
    if isinstance(leaf, bytes | bytearray):
        return hashlib.sha256(leaf).hexdigest()
    return repr(leaf)


def _names_on_any_rank(own_names: Iterable[str], world: Axis, device: torch.device | str) -> list[str]:
    """Return the names of all ranks, sorted. Every rank must call."""
    texts = collectives.all_gather_texts(json.dumps(sorted(set(own_names))), world, device)
    return sorted({name for text in texts for name in json.loads(text)})
