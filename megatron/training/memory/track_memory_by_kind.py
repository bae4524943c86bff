"""Resident memory is counted by kind, as tensors are created and freed, to be compared with the prediction.

`TorchDispatchMode` sees every operator, so each new storage is counted until it is freed. The kind comes from the code
that allocates (`core/base/label_allocations_by_memory_kind.py`): copies of a bucket and transfers between stages are
communication, temporary memory of the optimizer is "other", all else is activations. `assign` names the tensors that stay.
Any device is counted; CPUs need it, because they have no allocator that measures.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.base import label_allocations_by_memory_kind
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.storage import resize_storage
from megatron.training.memory.shapes_of_results import ShapesOfResults

_COUNTED = ("parameters", "gradients", "optimizer", "activations", "communication")


@dataclass
class _Memory:
    """A counted storage."""

    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    bytes: int
    keeps_kind: bool  # whatever code it passes through
    label: object = None  # the tracker's when it was allocated


class MemoryTracker(TorchDispatchMode):
    """Count memory inside a `with` block, in the thread that entered it.

    live, peak: bytes by kind. peak["total"] is the peak of all kinds together, without "other".
    in_file: bytes by kind of assigned tensors that are in a file, not in memory.
    """

    def __init__(self, *, shapes_only: bool = False) -> None:
        """shapes_only: count tensors on the meta device, and no others."""
        super().__init__()
        self._is_meta = shapes_only
        self._shapes = ShapesOfResults()
        self.in_file: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._storages: dict[int, _Memory] = {}  # by the storage's id
        self.label: object = None  # of what is allocated now, such as the module that runs

    def __enter__(self) -> "MemoryTracker":
        resize_storage.listeners.append(self._resized)
        label_allocations_by_memory_kind.listeners.append(self._kind_is_set)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        label_allocations_by_memory_kind.listeners.remove(self._kind_is_set)
        resize_storage.listeners.remove(self._resized)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = self._shapes.run(func, args, kwargs) if self._is_meta else func(*args, **kwargs)

        # the storages among the results that are not counted yet
        uncounted = []
        for x in _tensors_in(result):
            storage = x.untyped_storage()
            is_meta = storage.device.type == "meta"
            if is_meta is self._is_meta and id(storage) not in self._storages:
                uncounted.append(storage)
        if not uncounted:
            return result

        # A result in the memory of an argument, such as a view or an update in place, allocates nothing.
        arguments = {id(x.untyped_storage()) for x in _tensors_in((args, kwargs))}
        new = [storage for storage in uncounted if id(storage) not in arguments]
        for storage in new:
            self._add(storage, label_allocations_by_memory_kind.current_memory_kind())
        if new:  # live memory grows only here, in `_resized` and in `_kind_is_set`
            self._note_peak()
        return result

    def assign(self, kind: str, tensors: Iterable[Stored]) -> None:
        """Count these tensors, of any shapes, created before or inside the block, as this kind.

        Those in a file take no memory.
        """
        for x in tensors:
            if isinstance(x, StoredTensor):
                self.in_file[kind] += x.nbytes
            elif isinstance(x, Tensor):
                self._add(x.untyped_storage(), kind)

    def assign_state(self, chunks: Iterable[DistributedDataParallel], optimizer: FlatOptimizer) -> None:
        """Count the resident state of model and optimizer by kind, and follow the buffers that their owners resize."""
        for chunk in chunks:
            # parameters: in one buffer, or with ZeRO 3 in shards; before ZeRO 3 frozen ones are in no buffer
            self.assign("parameters", (p for p in chunk.parameters() if place_in_bucket(p) is None))
            for buffer in (*chunk.buffers, *chunk.frozen_buffers):
                self.assign("parameters", [buffer.params.data] if buffer.params else buffer.owned_params.tensors)
                for resized in buffer.params_of:  # memory of gathered parameters, which its owner resizes
                    self._add(resized.data.untyped_storage(), "communication", keeps_kind=True)
            for buffer in chunk.buffers:
                # gradients: the buffer that backward adds to, and this rank's shard
                self.assign("gradients", [buffer.grads.data] if buffer.grads else [])
                self.assign("gradients", buffer.grad_shard.tensors)
                # memory of unreduced gradients, which its owner resizes
                kind = "gradients" if buffer.grads_need_no_buffer else "communication"
                for resized in buffer.grads_of:
                    self._add(resized.data.untyped_storage(), kind, keeps_kind=True)

        # masters: a float32 parameter is its own; a split master shares the parameter's bytes and adds the residual
        for buffer, master in zip(optimizer.buffers, optimizer.masters):
            if not buffer.is_half_precision:
                continue
            masters = [x.residual if isinstance(x, SplitMaster) else x for x in master.tensors]
            self.assign("optimizer", masters)

        # moments
        for shards in optimizer.moments.values():
            for shard in shards:
                self.assign("optimizer", shard.tensors)

    def kind_of(self, x: Tensor) -> str:
        """Return the kind of a tensor's memory, whatever its shape; "other" if it is not counted."""
        memory = self._storages.get(id(x.untyped_storage()))
        return memory.kind if memory else "other"

    def now(self) -> Counter[str]:
        """Return the live bytes by kind."""
        return +self.live

    def start_labels(self) -> None:
        """Forget the labels of what is allocated; what is allocated from here on has that of `label`."""
        self.label = None
        for memory in self._storages.values():
            memory.label = None

    def labelled(self, kind: str, label: object) -> int:
        """Return the live bytes of a kind that were allocated under a label."""
        return sum(memory.bytes for memory in self._storages.values() if memory.label == label and memory.kind == kind)

    def restart(self) -> None:
        """Start to measure peaks anew, from the memory that is live now."""
        self.peak = Counter()
        self._note_peak()

    # ---------------------------------------------------------------- counting

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew whose owner has freed its memory, or allocated it again."""
        memory = self._storages.get(id(storage))
        if memory is None:
            return
        self.live[memory.kind] += storage.nbytes() - memory.bytes
        memory.bytes = storage.nbytes()
        self._note_peak()

    def _kind_is_set(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Change the kind of memory that its owner uses for something else from here on."""
        for x in tensors:
            storage = x.untyped_storage()
            if id(storage) in self._storages:
                self._add(storage, kind)
                self._note_peak()

    def _add(self, storage: torch.UntypedStorage, kind: str, *, keeps_kind: bool = False) -> None:
        """Count a storage, or change the kind of a counted one, unless that one keeps its kind."""
        key = id(storage)
        memory = self._storages.get(key)
        if memory is None:
            # No operator frees a storage, so a weak reference tells when it is freed.
            reference = weakref.ref(storage, lambda _: self._forget(key))
            memory = _Memory(reference, kind, storage.nbytes(), keeps_kind, self.label)
            self._storages[key] = memory
        elif keeps_kind or not memory.keeps_kind:
            self.live[memory.kind] -= memory.bytes
            memory.kind = kind
            memory.keeps_kind = keeps_kind
        else:
            return
        self.live[kind] += memory.bytes

    def _forget(self, key: int) -> None:
        """Count a storage no more: it was freed."""
        memory = self._storages.pop(key, None)
        if memory is not None:
            self.live[memory.kind] -= memory.bytes

    def _note_peak(self) -> None:
        now = self.now()
        now["total"] = sum(size for kind, size in now.items() if kind in _COUNTED)
        for kind, size in now.items():
            self.peak[kind] = max(self.peak[kind], size)


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):  # the usual result
        return [values]
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    """Append the tensors among values. An operator takes lists and tuples; torch's `tree_leaves` knows more, and takes longer."""
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _collect(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            _collect(value, found)
