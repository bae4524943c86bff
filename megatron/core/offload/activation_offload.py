"""Saved activations of a stage's layers, offloaded to an `OffloadAllocator` or kept in slots of one device buffer.

    forward    layer 0 | layer 1          | layer 2            a layer's activations are copied while the next computes
                         layer 0 offloads   layer 1 offloads
    backward   layer 2          | layer 1          | layer 0   and loaded while the layer above computes its backward
                 layer 1 loads     layer 0 loads

A recomputed layer offloads its input. Any other layer offloads each large storage that autograd saves, as one, so that
all saved views of it keep their strides. A slot in the store is reused by storages of the same size.

    StageActivations   a stage: which layers offload, and the hooks on their forward
    _LayerStorages     the offloaded storages of one layer, and the layer before it
    OffloadedStorage   one storage: offloaded, then loaded in the backward
    OffloadBufferPool       its place in the store, and the transfers
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.base.label_allocations_by_memory_kind import ACTIVATIONS, set_memory_kind
from megatron.core.offload.contiguous_activation_buffer import RecomputeInputSlots, as_flat, strides_like
from megatron.core.offload.host_and_file_stores import HostOffloadStore, OffloadAllocator
from megatron.core.offload.tensor_in_memory_or_file import Stored, start_reading, start_writing
from megatron.core.parallel.accelerator import to_device

# A function that takes a tensor and returns a function that gives its values, any number of times.
InputSaver = Callable[[Tensor], Callable[[], Tensor]]


class StageActivations:
    """The saved activations of one stage.

    offloaded: number of leading layers whose activations are offloaded. contiguous: keep the inputs of further
    recomputed layers in slots on the device. smallest: elements of the smallest storage to offload. offload_store:
    default host memory.
    """

    def __init__(
        self,
        offloaded: int = 0,
        *,
        smallest: int = 0,
        contiguous: bool = False,
        offload_store: OffloadAllocator | None = None,
    ):
        self.offloaded = offloaded
        self.smallest = smallest
        self.contiguous = contiguous
        self.slots = RecomputeInputSlots()
        self.hooks = torch.autograd.graph.saved_tensors_hooks
        self._store = offload_store
        self._offload_slots: OffloadBufferPool | None = None
        # A weak reference to the last layer: only the autograd graph may keep a layer's storages.
        self._last: Callable[[], _LayerStorages | None] = lambda: None

    def set_store(self, store: OffloadAllocator) -> None:
        """Offload to another store. Call before anything is offloaded."""
        self._store = store

    def offload_slots(self, device: torch.device) -> "OffloadBufferPool":
        """Return the stage's slots in the store, made on first use."""
        if self._offload_slots is None:
            self._offload_slots = OffloadBufferPool(self._store or HostOffloadStore(device), device)
        return self._offload_slots

    def input_saver(self, layer: int) -> InputSaver | None:
        """Return what saves the input of the recomputed group that begins with this layer; None if autograd should.

        layer: number within the stage. Call once for each group, in order. The result is called with the input,
        [s, b, h] or any other shape, and returns a function that returns it, in its shape and strides.
        """
        if layer < self.offloaded:
            return partial(_offload_input, self._next_layer(first=layer == 0), self.offload_slots)
        if self.contiguous:
            return self.slots.keep
        return None

    @contextlib.contextmanager
    def saving(self, layer: int, x: Tensor, resident: Iterable[Tensor | None]) -> Iterator[None]:
        """Offload the tensors that autograd saves inside the block, which is this layer's forward.

        layer: number within the stage. x: its input, [s, b, h] or any other shape. resident: tensors of any shapes that
        stay on the device anyway, such as parameters.
        """
        # A freed parameter of ZeRO stage 3 must not be gathered for this question, so its __torch_function__ is left out.
        with torch._C.DisableTorchFunctionSubclass():
            resident_storages = {other.untyped_storage()._cdata for other in resident if other is not None}
        storage_device = x.untyped_storage().device
        slots = self.offload_slots(x.device)
        packer = _Packer(self._next_layer(first=layer == 0), slots, resident_storages, self.smallest, storage_device)
        with self.hooks(packer.pack, _unpack):
            yield

    def finish_forward(self, x: Tensor) -> None:
        """Start the last layer's loads when the backward reaches `x`, the output of the layers.

        x: [s, b, h] or any other shape. Call after the layers.
        """
        last = self._last()
        if last is not None and x.requires_grad:
            x.register_hook(lambda _: last.start_loading())

    def _next_layer(self, *, first: bool) -> "_LayerStorages":
        """Return a new layer, the first one of a forward or the next.

        At most two layers are being offloaded: this one and, in the same forward, the one before it.
        """
        before = self._last()
        if before is not None:
            if first:  # another forward's last layer
                before.finish_offload()
            if before.before is not None:
                before.before.finish_offload()
        layer = _LayerStorages(None if first else before)
        self._last = weakref.ref(layer)
        return layer


class HoldsActivations(nn.Module):
    """A module whose layers save their inputs in a `StageActivations`.

    A schedule tells it the microbatches in flight.
    """

    activations: StageActivations

    @property
    def weight_grads_read_inputs(self) -> bool:
        """Whether weight gradients may read the saved inputs, which then live until those that are put off are computed."""
        return True

    def reserve(self, microbatches: int) -> None:
        """Allocate slots for saved inputs of `microbatches` microbatches in flight, and no more."""
        raise NotImplementedError


def _offload_input(
    layer: "_LayerStorages", slots_on: Callable[[torch.device], "OffloadBufferPool"], x: Tensor
) -> Callable[[], Tensor]:
    """Start to offload a recomputed layer's input.

    The returned function gives it back, in the same shape and strides.
    """
    flat = as_flat(x)  # [elements of x]
    storage = layer.offload(slots_on(x.device), flat, x)
    return _OffloadedView(storage, x.dtype, 0, x.shape, strides_like(x)).get


class _LayerStorages:
    """The offloaded storages of one layer. The autograd graph keeps the storages, and each of them keeps the layer."""

    def __init__(self, before: "_LayerStorages | None"):
        self.before = before
        self._storages: list[weakref.ref[OffloadedStorage]] = []

    def offload(self, slots: "OffloadBufferPool", flat: Tensor, x: Tensor) -> "OffloadedStorage":
        """Start to offload `flat` [elements], the storage of x, which has any shape."""
        storage = OffloadedStorage(slots, flat, x, self)
        self._storages.append(weakref.ref(storage))
        return storage

    def start_loading(self) -> None:
        """Start to load the storages that are still needed."""
        for storage in self._alive():
            storage.start_loading()

    def finish_offload(self) -> None:
        """Wait until this layer's storages are offloaded."""
        for storage in self._alive():
            storage.finish_offload()

    def _alive(self) -> list["OffloadedStorage"]:
        storages = [reference() for reference in self._storages]
        return [storage for storage in storages if storage is not None]


class OffloadedStorage:
    """The storage of tensor `x`, offloaded. Its slot becomes free with this object."""

    # Class attributes, so that __del__ works on an object whose construction failed.
    _leaving: AsyncHandle[Any] | None = None  # the transfer to the store
    _loading: AsyncHandle[Tensor] | None = None  # the transfer back

    def __init__(self, slots: "OffloadBufferPool", flat: Tensor, x: Tensor, layer: _LayerStorages):
        self._slots = slots
        self._layer = layer
        self._slot = slots.take(flat.numel(), flat.dtype)
        # The source must stay until the transfer has ended. `detach` shares x's version counter.
        self._source = x.detach()
        self._version = x._version
        self._leaving = slots.send(self._slot, flat)
        # where the values were loaded to: a weak reference to the storage, and the first element in it
        self._loaded: tuple[Callable[[], torch.UntypedStorage | None], int] | None = None
        weakref.finalize(self, slots.give_back, self._slot).atexit = False

    def start_loading(self) -> None:
        """Start to load it, unless that has been started."""
        if self._loading is None and self._loaded is None:
            self._fetch()

    def get(self) -> Tensor:
        """Return the values on the device [elements].

        Also start to load the rest of the layer and the previous layer.
        """
        values = self._values_in_use()
        if values is None:
            if self._loading is None:
                self._fetch()
            values = self._loading.wait()
            self._loading = None
            self._loaded = weakref.ref(values.untyped_storage()), values.storage_offset()
        self._layer.start_loading()
        if self._layer.before is not None:
            self._layer.before.start_loading()
        return values

    def _values_in_use(self) -> Tensor | None:
        """Return the loaded values while any tensor views them.

        So query, key and value of one storage load it once.
        """
        if self._loaded is None:
            return None
        reference, offset = self._loaded
        storage = reference()
        if storage is None:
            return None
        values = torch.empty(0, dtype=self._slot.dtype, device=storage.device)
        return values.set_(storage, offset, (self._slot.numel(),), (1,))  # [elements]

    def finish_offload(self) -> None:
        """Wait until it is offloaded, and free the source.

        RuntimeError if the source was changed in place meanwhile.
        """
        if self._leaving is None:
            return
        transfer = self._leaving
        source = self._source
        self._leaving = None
        self._source = None
        transfer.wait()
        if source._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(source.shape)} that was saved for the backward was changed in place after "
                "its forward; do not change it, or leave out --cpu-offloading-num-layers"
            )

    def _fetch(self) -> None:
        self.finish_offload()
        self._loading = self._slots.fetch(self._slot)

    def __del__(self) -> None:
        # Wait for copies on the side stream: else the allocator would reuse the device memory during the copy.
        for in_flight in (self._leaving, self._loading):
            if in_flight is not None and self._slots.side is not None:
                in_flight.wait()


class OffloadBufferPool:
    """A stage's slots in a store, and the transfers to and from them.

    Transfers run in one order, so a freed slot may be reused while a transfer from it is in flight. An accelerator
    copies to host memory on a side stream.
    """

    def __init__(self, store: OffloadAllocator, device: torch.device):
        self.device = device
        self.side = store.side_stream(device)
        self.slots: list[Stored] = []  # free and used
        self.in_use = 0
        self.bytes_in_use = 0
        self._store = store
        self._free: dict[tuple[int, torch.dtype], list[Stored]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype) -> Stored:
        """Return a slot [numel] of this dtype: a free one, or a new one.

        Raises OffloadError if the store has no room.
        """
        free = self._free[numel, dtype]
        if free:
            slot = free.pop()
        else:
            slot = self._store.zeros(numel, dtype)
            self.slots.append(slot)
        self.in_use += 1
        self.bytes_in_use += slot.nbytes
        return slot

    def give_back(self, slot: Stored) -> None:
        """Make a slot [elements] free."""
        self.in_use -= 1
        self.bytes_in_use -= slot.nbytes
        self._free[slot.numel(), slot.dtype].append(slot)

    def send(self, slot: Stored, flat: Tensor) -> AsyncHandle[Any]:
        """Start to copy `flat` [elements] into the slot [elements]; `flat` must not change before `wait`."""
        if self.side is None:
            return start_writing(slot, flat)
        return self.side.start_copy(slot, flat)

    def fetch(self, slot: Stored) -> AsyncHandle[Tensor]:
        """Start to load the slot; `wait` returns the values on the device [elements]."""
        if self.side is not None:
            values = torch.empty(slot.numel(), dtype=slot.dtype, device=self.device)
            return self.side.start_copy(values, slot)
        reading = start_reading(slot)
        if isinstance(slot, Tensor):
            return AsyncHandle(lambda: reading.wait().clone())  # a copy, as the slot may be reused before the values

        def to_stage_device() -> Tensor:
            values = to_device(reading.wait(), self.device)
            set_memory_kind(ACTIVATIONS, [values])
            return values

        return AsyncHandle(to_stage_device)


class _Packer:
    """A hook that offloads the tensors that autograd saves for one layer.

    Each large storage is offloaded once, unless it is resident. resident: addresses of the storages that stay on the
    device anyway. device: of the storages, which may differ from what the tensors say.
    """

    def __init__(
        self, layer: _LayerStorages, slots: OffloadBufferPool, resident: set[int], smallest: int, device: torch.device
    ):
        self._layer = layer
        self._slots = slots
        self._resident = resident
        self._smallest = smallest
        self._device = device
        # (id of a storage, version) -> weak references to the storage and to its offloaded copy
        self._offloaded: dict[tuple[int, int], tuple[weakref.ref, weakref.ref]] = {}

    @torch.no_grad()
    def pack(self, x: Tensor) -> Any:
        """Return what autograd saves instead of `x`, of any shape: `x` itself if it stays on the device."""
        if x.layout is not torch.strided:
            return x
        storage = x.untyped_storage()
        if storage.device != self._device or storage._cdata in self._resident:
            return x
        nbytes = storage.nbytes()
        is_small = nbytes == 0 or nbytes < self._smallest * x.itemsize
        if is_small or nbytes % x.itemsize:
            return x
        return _OffloadedView(self._offload_once(storage, x), x.dtype, x.storage_offset(), x.shape, x.stride())

    def _offload_once(self, storage: torch.UntypedStorage, x: Tensor) -> OffloadedStorage:
        """Return the offloaded copy of this version of the storage; start the transfer if there is none yet."""
        key = storage._cdata, x._version
        known = self._offloaded.get(key)
        if known is not None:
            known_storage = known[0]()
            offloaded = known[1]()
            # A dead reference, or another storage: the address was reused.
            if known_storage is storage and offloaded is not None:
                return offloaded
        flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)  # [bytes of the storage]
        offloaded = self._layer.offload(self._slots, flat, x)
        self._offloaded[key] = weakref.ref(storage), weakref.ref(offloaded)
        return offloaded


class _OffloadedView(NamedTuple):
    """A saved tensor, as a view of an offloaded storage."""

    storage: OffloadedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    def get(self) -> Tensor:
        """Return the tensor [shape], loaded."""
        values = self.storage.get().view(self.dtype)  # [elements]
        return values.as_strided(self.shape, self.strides, values.storage_offset() + self.offset)  # [shape]


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _OffloadedView):
        return packed.get()
    return packed
