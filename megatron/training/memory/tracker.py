"""Resident bytes by kind, as tensors come and go; predictions are compared with them. Any device; made for CPUs.

`TorchDispatchMode` sees every operator, so each new storage is counted until it is freed. The innermost of our functions that
allocates decides the kind: copies of a bucket and transfers between stages are communication, temporary memory of the
optimizer is "other", all else is activations. `assign` names the tensors that stay.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.buffer import Transient
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.storage.resize import listeners
from megatron.core.storage.stored import Stored, StoredTensor

_COUNTED = ("parameters", "gradients", "optimizer", "activations", "communication")
_ROOT = str(Path(__file__).resolve().parents[2]) + "/"
_DOUBLES = "training/memory/shapes.py"  # replaces torch and other ranks; its caller decides the kind
_READS = "core/tiers/tier.py"  # data from a file are host slices until they are viewed in their dtype
# Path, or start of a path, that allocates -> kind; None: the caller decides.
_KIND_OF = {
    "core/comm.py": None,
    "core/pending.py": None,
    "core/distributed/buffer.py": None,
    _READS: None,
    "core/distributed/fixed_order.py": "gradients",
    "core/distributed": "communication",
    "core/pipeline_parallel/transport.py": "communication",
    "core/optimizer": "other",
    "core/pipeline_parallel/pipeline.py": "other",
    "training/memory/dry_run.py": "away",
    "training/watch/statistics.py": "other",
}
# The executor detaches a tensor to send it, and a received tensor to compute with it: its kind changes.
_HANDS_OVER = {"send": "communication", "_as_inputs": "activations"}


@dataclass
class _Memory:
    """A counted storage."""

    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    bytes: int
    stays: bool  # of its kind, whatever it passes through


class MemoryTracker(TorchDispatchMode):
    """Counts inside its `with` block, in the thread that entered it. `live`, `peak`: bytes by kind; peak["total"]: of all kinds
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
        listeners.append(self._resized)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        listeners.remove(self._resized)

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
        changes = func in (torch.ops.aten.view.dtype, torch.ops.aten.detach.default)
        frame = _own_frame(sys._getframe(1)) if made or changes else None
        for storage in made:
            self._count_new(storage, frame)
        if changes and frame is not None:
            self._change_kind(func, args[0].untyped_storage(), frame)
        if made or changes:  # nothing else makes more live, but for `_resized`
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
            self.assign("gradients", buffer.held_sums.tensors)
            kind = "gradients" if buffer.grads_come_late else "communication"
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

    def _count_new(self, storage: torch.UntypedStorage, frame: FrameType | None) -> None:
        name = None if frame is None else frame.f_code.co_name
        if frame is not None and frame.f_code is Transient.__init__.__code__:
            self._add(storage, "communication", stays=True)
        elif name != "strides_like":  # its tensor gives a shape, and is dropped
            self._add(storage, "slices" if name == "start_read" else _kind_from(frame))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Its owner has given memory back, or taken it again."""
        if (one := self._held.get(id(storage))) is not None:
            self.live[one.kind] += storage.nbytes() - one.bytes
            one.bytes = storage.nbytes()
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

    def _change_kind(self, func: Any, storage: torch.UntypedStorage, frame: FrameType) -> None:
        """A view in a dtype takes activations out of a slice; parameters that pass through the host stay slices. A detach by
        the executor hands a tensor over."""
        if id(storage) not in self._held:
            return
        if func is torch.ops.aten.view.dtype:
            is_slice = frame.f_code.co_filename.endswith(_READS) and self._held[id(storage)].kind == "slices"
            kind = "activations" if is_slice and _kind_from(frame) == "activations" else None
        else:
            # The frame that asked the generator decides, not the generator's own.
            while frame.f_back is not None and frame.f_code.co_name.startswith("<"):  # a generator
                frame = frame.f_back
            is_ours = frame.f_code.co_filename.endswith("core/pipeline_parallel/executor.py")
            kind = _HANDS_OVER.get(frame.f_code.co_name) if is_ours else None
        if kind is not None:
            self._add(storage, kind)

    def _note_peak(self) -> None:
        now = self.now()
        now["total"] = sum(size for kind, size in now.items() if kind in _COUNTED)
        for kind, size in now.items():
            self.peak[kind] = max(self.peak[kind], size)


def _tensors_in(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, which are mostly one."""
    return [values] if isinstance(values, Tensor) else [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of our code."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) and not path.endswith(_DOUBLES):
            return frame
        frame = frame.f_back
    return None


def _kind_from(frame: FrameType | None) -> str:
    """The kind of memory that this frame allocates."""
    while frame := _own_frame(frame):
        name = frame.f_code.co_filename.removeprefix(_ROOT).replace("\\", "/")
        known = next((kind for start, kind in _KIND_OF.items() if name.startswith(start)), "activations")
        if known is not None:
            return known
        frame = frame.f_back
    return "activations"
