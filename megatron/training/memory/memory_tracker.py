"""Resident bytes by kind, as tensors come and go; predictions are compared with them. Any device; made for CPUs.

`TorchDispatchMode` sees every operator, so each new storage is counted until it is freed. The code that allocates says
the kind
(`core/base/memory_category.py`): copies of a bucket and transfers between stages are communication, temporary memory of the
optimizer is
"other", all else is activations. `assign` names the tensors that stay.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.base import memory_category
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.stored_tensor import Stored, StoredTensor
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.storage import resize_storage

_COUNTED = ("parameters", "gradients", "optimizer", "activations", "communication")


@dataclass
class _Memory:
    """A counted storage."""

    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    bytes: int
    stays: bool  # of its kind, whatever it passes through


class MemoryTracker(TorchDispatchMode):
    """Counts inside its `with` block, in the thread that entered it. `live`, `peak`: bytes by kind; peak["total"]: of
    all kinds
    together, without "other"."""

    def __init__(self, *, shapes_only: bool = False) -> None:
        """shapes_only: count tensors on the meta device, and no others."""
        super().__init__()
        self._is_meta = shapes_only
        self.in_file: Counter[str] = Counter()  # assigned, and not in memory
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held: dict[int, _Memory] = {}  # by the storage's id

    def __enter__(self) -> "MemoryTracker":
        resize_storage.listeners.append(self._resized)
        memory_category.listeners.append(self._kind_is_set)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        memory_category.listeners.remove(self._kind_is_set)
        resize_storage.listeners.remove(self._resized)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.untyped_storage() for x in _tensors_in(result)]
        made = [one for one in made if (one.device.type == "meta") is self._is_meta and id(one) not in self._held]
        if made:
            # A result in the memory of an argument, such as a view or an update in place, is nothing new.
            given = {id(x.untyped_storage()) for x in _tensors_in((args, kwargs))}
            made = [one for one in made if id(one) not in given]
        for storage in made:
            self._add(storage, memory_category.current_memory_kind())
        if made:  # nothing else makes more live, but for `_resized` and `_kind_is_set`
            self._note_peak()
        return result

    def assign(self, kind: str, tensors: Iterable[Stored]) -> None:
        """These tensors, created before or inside the block, are of this kind. Tensors in a file take no memory."""
        for x in tensors:
            if isinstance(x, StoredTensor):
                self.in_file[kind] += x.nbytes
            elif isinstance(x, Tensor):
                self._add(x.untyped_storage(), kind)

    def assign_state(self, chunks: Iterable[DistributedDataParallel], optimizer: FlatOptimizer) -> None:
        """Assign the resident state of model and optimizer, and watch the buffers that their owners resize."""
        for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
            self.assign("parameters", [buffer.params.data] if buffer.params else buffer.owned_params.tensors)
            self.assign("gradients", [buffer.grads.data] if buffer.grads else [])
            self.assign("gradients", buffer.grad_shard.tensors)
            kind = "gradients" if buffer.grads_are_lazy else "communication"
            for passing in (*buffer.params_of, *buffer.grads_of):
                self._add(passing.data.untyped_storage(), kind, stays=True)
        for buffer, master in zip(optimizer.buffers, optimizer.masters):
            if buffer.is_half_precision:
                kept = [one.residual if isinstance(one, SplitMaster) else one for one in master.tensors]
                self.assign("optimizer", kept)
        for shards in optimizer.moments.values():
            self.assign("optimizer", [tensor for shard in shards for tensor in shard.tensors])

    def kind_of(self, x: Tensor) -> str:
        """The kind of its memory."""
        held = self._held.get(id(x.untyped_storage()))
        return held.kind if held else "other"

    def now(self) -> Counter[str]:
        """Live bytes by kind."""
        return +self.live

    def restart(self) -> None:
        """Peaks count from here on."""
        self.peak = Counter()
        self._note_peak()

    # ---------------------------------------------------------------- counting

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Its owner has given memory back, or taken it again."""
        if (one := self._held.get(id(storage))) is not None:
            self.live[one.kind] += storage.nbytes() - one.bytes
            one.bytes = storage.nbytes()
            self._note_peak()

    def _kind_is_set(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Its owner uses this memory for something else from here on."""
        for storage in (x.untyped_storage() for x in tensors):
            if id(storage) in self._held:
                self._add(storage, kind)
                self._note_peak()

    def _add(self, storage: torch.UntypedStorage, kind: str, *, stays: bool = False) -> None:
        """Count a storage, or change the kind of a counted one, unless it stays of its kind."""
        key = id(storage)
        if key not in self._held:
            # No operator frees a storage, so the end of its life is the only sign.
            ends = weakref.ref(storage, lambda _: self._forget(key))
            self._held[key] = _Memory(ends, kind, storage.nbytes(), stays)
        elif stays or not self._held[key].stays:
            self.live[self._held[key].kind] -= self._held[key].bytes
            self._held[key].kind, self._held[key].stays = kind, stays
        else:
            return
        self.live[kind] += self._held[key].bytes

    def _forget(self, key: int) -> None:
        if (one := self._held.pop(key, None)) is not None:
            self.live[one.kind] -= one.bytes

    def _note_peak(self) -> None:
        now = self.now()
        now["total"] = sum(size for kind, size in now.items() if kind in _COUNTED)
        for kind, size in now.items():
            self.peak[kind] = max(self.peak[kind], size)


def _tensors_in(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, which are mostly one."""
    return [values] if isinstance(values, Tensor) else [x for x in tree_leaves(values) if isinstance(x, Tensor)]
