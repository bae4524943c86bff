"""The bytes that live, by what they are for, as tensors come and go: what a prediction is compared with. Any device;
made for CPUs.

Every operator is seen (`TorchDispatchMode`), each new storage is counted, and its end too. What it is for follows
from the innermost
of our files that asked for it: a bucket's copies and what travels between stages are communication, what the optimizer makes in
passing is left apart, the rest is activations. The tensors that stay are named by `assign`.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.buffer import Transient
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.storage.stored import Stored, StoredTensor

_COUNTED = ("parameters", "gradients", "optimizer", "activations", "communication")
_ROOT = str(Path(__file__).resolve().parents[2])
_DOUBLES = "training/memory/shapes.py"  # what stands for torch and for other ranks asks for nobody
_GIVES_UP = "core/transformer/norm.py"  # whose outputs may lose their memory, and get it back, without an operator
_READS = "core/tiers/tier.py"  # where what is read from a file is a slice of the host's until it is first looked into
# By the file, or by file and function, that asks for memory; None: whoever called it says.
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


class MemoryTracker(TorchDispatchMode):
    """Counts inside its `with` block, in the thread that entered it. `live`, `peak`: bytes by kind, and of all together, but for
    "other", under "total"."""

    def __init__(self, *, shapes_only: bool = False) -> None:
        """shapes_only: count tensors of the meta device, and no others."""
        super().__init__()
        self._is_meta = shapes_only
        self.in_file: Counter[str] = Counter()  # what was assigned and takes no memory
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kind: dict[int, str] = {}  # of a storage, by its identity
        self._bytes: dict[int, int] = {}
        self._ends: dict[int, weakref.ref] = {}
        self._given_up: dict[int, weakref.ref] = {}  # storages that may be
        self._passing: list[torch.UntypedStorage] = []  # kept alive, as their owners do

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        frame = None
        for x in tree_leaves(result):
            if (
                isinstance(x, Tensor)
                and ((storage := x.untyped_storage()).device.type == "meta") is self._is_meta
                and id(storage) not in given
                and id(storage) not in self._kind
            ):
                frame = frame or _own_frame(sys._getframe(1))
                name = None if frame is None else frame.f_code.co_name
                if frame is not None and frame.f_code is Transient.__init__.__code__:
                    self._watch(storage)
                elif name != "strides_like":  # which asks for a shape only
                    self._add(storage, "slices" if name == "start_read" else _kind_from(frame))
                    if frame is not None and frame.f_code.co_filename.endswith(_GIVES_UP):
                        self._given_up[id(storage)] = self._ends[id(storage)]
        if func is torch.ops.aten.view.dtype:
            self._look_into(args[0].untyped_storage(), sys._getframe(1))
        if func is torch.ops.aten.detach.default:
            self._hand_over(args[0], sys._getframe(1))
        self._note_peak()
        return result

    def assign(self, kind: str, tensors: Iterable[Stored]) -> None:
        """These tensors, made before or while it counts, are of this kind. What lies in a file takes no memory."""
        tensors = list(tensors)
        self.in_file[kind] += sum(x.nbytes for x in tensors if isinstance(x, StoredTensor))
        for storage in (x.untyped_storage() for x in tensors if isinstance(x, Tensor)):
            if id(storage) in self._kind:
                self._change(storage, kind)
            else:
                self._add(storage, kind)

    def assign_state(self, chunks: Iterable[DistributedDataParallel], optimizer: FlatOptimizer) -> None:
        """Name what stays between the steps, and what comes and goes in place."""
        for chunk in chunks:
            for buffer in chunk.buffers:
                self.assign("parameters", [buffer.params.data] if buffer.params else buffer.owned_params.tensors)
                self.assign("gradients", [buffer.grads.data] if buffer.grads else [])
                self.assign("gradients", buffer.held_sums.tensors)
                for passing in (*buffer.params_of, *buffer.grads_of):
                    self._watch(passing.data.untyped_storage())
        for buffer, master in zip(optimizer.buffers, optimizer.masters):
            if buffer.is_half_precision:
                self.assign("optimizer", [kept_apart(tensor) for tensor in master.tensors])
        for shards in optimizer.moments.values():
            self.assign("optimizer", [tensor for shard in shards for tensor in shard.tensors])

    def kind_of(self, x: Tensor) -> str:
        """What its memory was assigned to."""
        return self._kind.get(id(x.untyped_storage()), "other")

    def now(self) -> Counter[str]:
        """Bytes that live, by kind."""
        self._measure_again()
        passing = sum(storage.nbytes() for storage in self._passing)
        return self.live + Counter({"communication": passing})

    def restart(self) -> None:
        """Peaks count from here on."""
        self.peak = Counter()
        self._note_peak()

    # ---------------------------------------------------------------- counting

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Memory that comes and goes without an operator: its size is asked for each time."""
        if not any(storage is one for one in self._passing):
            self._kind[id(storage)], self._bytes[id(storage)] = "communication", 0
            self._passing.append(storage)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        self._kind[key], self._bytes[key] = kind, storage.nbytes()
        self._ends[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
        self.live[kind] += self._bytes[key]

    def _forget(self, key: int) -> None:
        kind = self._kind.pop(key, None)
        self._ends.pop(key, None)
        self._given_up.pop(key, None)
        if kind is not None:
            self.live[kind] -= self._bytes.pop(key)

    def _change(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        self.live[self._kind[key]] -= self._bytes[key]
        self.live[kind] += self._bytes[key]
        self._kind[key] = kind

    def _hand_over(self, x: Tensor, frame: FrameType | None) -> None:
        """The executor detaches what it sends, and what it has received."""
        frame = _own_frame(frame)
        while frame is not None and frame.f_code.co_name.startswith("<"):  # a generator's
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.endswith("core/pipeline_parallel/executor.py"):
            return
        kind = {"send": "communication", "_as_inputs": "activations"}.get(frame.f_code.co_name)
        if kind is not None and id(x.untyped_storage()) in self._kind:
            self._change(x.untyped_storage(), kind)

    def _look_into(self, storage: torch.UntypedStorage, frame: FrameType | None) -> None:
        """Activations that were read from a file; parameters on their way through the host are nobody's."""
        frame = _own_frame(frame)
        is_read = frame is not None and frame.f_code.co_filename.endswith(_READS)
        if is_read and self._kind.get(id(storage)) == "slices" and _kind_from(frame) == "activations":
            self._change(storage, "activations")

    def _measure_again(self) -> None:
        """What may have been given up, or come back."""
        for key, storage in self._given_up.items():
            if (there := storage()) is not None:
                self.live[self._kind[key]] += there.nbytes() - self._bytes[key]
                self._bytes[key] = there.nbytes()

    def _note_peak(self) -> None:
        total = 0
        for kind, size in self.now().items():
            total += size if kind in _COUNTED else 0
            if size > self.peak[kind]:
                self.peak[kind] = size
        self.peak["total"] = max(self.peak["total"], total)


def kept_apart(master: Stored) -> Stored:
    """What is kept of a master beside the parameters."""
    return master.residual if isinstance(master, SplitMaster) else master


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of our own code."""
    while frame is not None and not (
        frame.f_code.co_filename.startswith(_ROOT) and not frame.f_code.co_filename.endswith(_DOUBLES)
    ):
        frame = frame.f_back
    return frame


def _kind_from(frame: FrameType | None) -> str:
    """What memory is for that is asked for in this frame."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT):
            name = path[len(_ROOT) + 1 :].replace("\\", "/")
            known = next((kind for start, kind in _KIND_OF.items() if name.startswith(start)), "activations")
            if known is not None:
                return known
        frame = frame.f_back
    return "activations"
