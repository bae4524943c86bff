"""Saved activations of a stage's layers, offloaded to a tier or kept in slots of one device buffer.

    forward    layer 0 | layer 1          | layer 2             a layer's activations leave while the next layer computes
                         layer 0 offloads   layer 1 offloads
    backward   layer 2          | layer 1          | layer 0    and return while the layer above computes its backward
                 layer 1 loads     layer 0 loads

A recomputed layer offloads its input. Any other layer offloads each large storage that autograd saves, as a whole, so
that all
saved views of it keep their strides. Slots in a tier are reused by tensors of the same size.
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
from megatron.core.base.memory_category import ACTIVATIONS, set_memory_kind
from megatron.core.offload.contiguous_activation_buffer import SlotBuffer, as_flat, strides_like
from megatron.core.offload.offload_tiers import HostTier, Tier
from megatron.core.offload.stored_tensor import Stored, start_reading, start_writing
from megatron.core.parallel.accelerator import to_device

# Takes a tensor; returns a function that gives its values, any number of times.
Keep = Callable[[Tensor], Callable[[], Tensor]]


class StageActivations:
    """The saved activations of one stage.

    offloaded: number of leading layers whose activations go to the tier. contiguous: keep the inputs of further recomputed
    layers in slots on the device. smallest: elements of the smallest storage to offload. tier: default host memory.
    """

    def __init__(self, offloaded: int = 0, *, smallest: int = 0, contiguous: bool = False, tier: Tier | None = None):
        self.offloaded, self.smallest = offloaded, smallest
        self.contiguous, self.slots = contiguous, SlotBuffer()
        self.hooks = torch.autograd.graph.saved_tensors_hooks
        self._tier = tier
        self._room: TierRoom | None = None
        self._last: Callable[[], _Layer | None] = lambda: None

    def keep_in(self, tier: Tier) -> None:
        """From here on in another tier; before anything is there."""
        self._tier = tier

    def room(self, device: torch.device) -> "TierRoom":
        """The stage's slots in the tier, made on first use."""
        if self._room is None:
            self._room = TierRoom(self._tier or HostTier(device), device)
        return self._room

    def keeper(self, layer: int) -> Keep | None:
        """How the recomputed group that begins with this layer keeps its input; None: without help. Layers are numbered
        within
        the stage, and must be asked for in order."""
        if layer < self.offloaded:
            return partial(_keep, self._next(first=layer == 0), self.room)
        return self.slots.keep if self.contiguous else None

    @contextlib.contextmanager
    def saving(self, layer: int, x: Tensor, beside: Iterable[Tensor | None]) -> Iterator[None]:
        """Inside the block, tensors that autograd saves for this layer are offloaded. x: its input; beside: tensors that
        stay
        resident anyway, such as parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # asks a released parameter of ZeRO stage 3 for its storage only
            stays = {other.untyped_storage()._cdata for other in beside if other is not None}
        memory, room = x.untyped_storage().device, self.room(x.device)
        packer = _Packer(self._next(first=layer == 0), room, stays, self.smallest, memory)
        with self.hooks(packer.pack, _unpack):
            yield

    def end(self, x: Tensor) -> None:
        """Call after the layers. x: their output; its gradient starts the load of the last layer's activations."""
        if (last := self._last()) is not None and x.requires_grad:
            x.register_hook(lambda _: last.start())

    def _next(self, *, first: bool) -> "_Layer":
        """The next layer. At most two layers are in flight to the tier: this one and, in the same forward, the
        previous one."""
        before = self._last()
        for earlier in (before if first else None, before.before if before else None):
            if earlier is not None:
                earlier.settle()
        layer = _Layer(None if first else before)
        self._last = weakref.ref(layer)
        return layer


class HoldsActivations(nn.Module):
    """A module whose layers save their inputs in a `StageActivations`; a schedule tells it the microbatches in flight."""

    activations: StageActivations

    def reserve(self, microbatches: int) -> None:
        """Allocate slots for saved inputs of `microbatches` microbatches in flight, and no more."""
        raise NotImplementedError


def _keep(layer: "_Layer", room: Callable[[torch.device], "TierRoom"], x: Tensor) -> Callable[[], Tensor]:
    return _Looking(layer.send(room(x.device), as_flat(x), x), x.dtype, 0, x.shape, strides_like(x)).get


class _Layer:
    """The offloaded storages of one layer. The autograd graph keeps them alive, and they keep the layer."""

    def __init__(self, before: "_Layer | None"):
        self.before = before
        self._parts: list[weakref.ref[Away]] = []

    def send(self, room: "TierRoom", flat: Tensor, x: Tensor) -> "Away":
        """Starts to offload `flat`, the storage of x."""
        away = Away(room, flat, x, self)
        self._parts.append(weakref.ref(away))
        return away

    def start(self) -> None:
        """Starts to load the storages that are still needed."""
        for away in self._living():
            away.start()

    def settle(self) -> None:
        """Waits until this layer's storages are offloaded."""
        for away in self._living():
            away.settle()

    def _living(self) -> list["Away"]:
        return [away for part in self._parts if (away := part()) is not None]


class Away:
    """A storage of tensor `x` in the tier; its slot is freed with this object."""

    _leaving: AsyncHandle[Any] | None = None  # of an object whose construction failed
    _coming: AsyncHandle[Tensor] | None = None

    def __init__(self, room: "TierRoom", flat: Tensor, x: Tensor, layer: _Layer):
        self._room, self._layer = room, layer
        self._slot = room.take(flat.numel(), flat.dtype)
        self._source, self._version = x.detach(), x._version  # `detach` shares x's version counter
        self._leaving = room.send(self._slot, flat)
        self._seen: tuple[Callable[[], torch.UntypedStorage | None], int] | None = None  # memory, first element
        weakref.finalize(self, room.give_back, self._slot).atexit = False

    def start(self) -> None:
        """Starts to load it, unless that has been started."""
        if self._coming is None and self._seen is None:
            self._fetch()

    def get(self) -> Tensor:
        """The values on the device. Starts to load the rest of the layer, and the previous layer."""
        values = self._still_there()
        if values is None:
            if self._coming is None:
                self._fetch()
            values, self._coming = self._coming.wait(), None
            self._seen = weakref.ref(values.untyped_storage()), values.storage_offset()
        self._layer.start()
        if self._layer.before is not None:
            self._layer.before.start()
        return values

    def _still_there(self) -> Tensor | None:
        """The loaded values while any tensor views them: queries, keys and values of one storage are loaded once."""
        memory = self._seen[0]() if self._seen is not None else None
        if memory is None:
            return None
        values = torch.empty(0, dtype=self._slot.dtype, device=memory.device)
        return values.set_(memory, self._seen[1], (self._slot.numel(),), (1,))

    def settle(self) -> None:
        """Waits until it is offloaded, and frees the source. RuntimeError if the source was changed in place meanwhile."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        source, self._source = self._source, None
        leaving.wait()
        if source._version != self._version:
            raise RuntimeError(
                f"a saved tensor of shape {tuple(source.shape)} was changed in place after its forward; avoid that, as without "
                "--cpu-offloading-num-layers"
            )

    def _fetch(self) -> None:
        self.settle()
        self._coming = self._room.fetch(self._slot)

    def __del__(self) -> None:
        for under_way in (self._leaving, self._coming):
            if under_way is not None and self._room.side is not None:
                under_way.wait()  # else the allocator would reuse the device memory during the copy


class TierRoom:
    """A stage's slots in a tier, and transfers to them in one order, so that a freed slot may be reused while a transfer
    from it
    is in flight. An accelerator copies to host memory on a side stream."""

    def __init__(self, tier: Tier, device: torch.device):
        self._tier, self.device = tier, device
        self._free: dict[tuple[int, torch.dtype], list[Stored]] = defaultdict(list)
        self.side = tier.side_stream(device)
        self.slots: list[Stored] = []  # free and used
        self.in_use = self.bytes_in_use = 0

    def take(self, numel: int, dtype: torch.dtype) -> Stored:
        free = self._free[numel, dtype]
        if not free:
            free.append(self._tier.zeros(numel, dtype))
            self.slots.append(free[0])
        self.in_use += 1
        self.bytes_in_use += free[-1].nbytes
        return free.pop()

    def give_back(self, slot: Stored) -> None:
        self.in_use -= 1
        self.bytes_in_use -= slot.nbytes
        self._free[slot.numel(), slot.dtype].append(slot)

    def send(self, slot: Stored, flat: Tensor) -> AsyncHandle[Any]:
        """Starts to copy `flat` into the slot; `flat` must not change before `wait`."""
        return start_writing(slot, flat) if self.side is None else self.side.start_copy(slot, flat)

    def fetch(self, slot: Stored) -> AsyncHandle[Tensor]:
        """Starts to load the slot."""
        if self.side is not None:
            return self.side.start_copy(torch.empty(slot.numel(), dtype=slot.dtype, device=self.device), slot)
        reading = start_reading(slot)
        if isinstance(slot, Tensor):
            return AsyncHandle(lambda: reading.wait().clone())  # the slot may be reused before the values

        def arrive() -> Tensor:
            values = to_device(reading.wait(), self.device)
            set_memory_kind(ACTIVATIONS, [values])
            return values

        return AsyncHandle(arrive)


class _Packer:
    """Offloads the tensors that autograd saves for one layer: each storage once, if it is large and not resident anyway."""

    def __init__(self, layer: _Layer, room: TierRoom, stays: set[int], smallest: int, device: torch.device):
        self._layer, self._room = layer, room
        self._stays = stays
        self._smallest, self._device = smallest, device  # of the memory, which need not be what the tensors say
        # (address of the memory, version) -> the memory, and its `Away`
        self._sent: dict[tuple[int, int], tuple[weakref.ref, weakref.ref]] = {}

    @torch.no_grad()
    def pack(self, x: Tensor) -> Any:
        if x.layout is not torch.strided:
            return x
        memory = x.untyped_storage()
        nbytes = memory.nbytes() if memory.device == self._device else 0
        if memory._cdata in self._stays or nbytes < self._smallest * x.itemsize or nbytes % x.itemsize or not nbytes:
            return x
        away = self._find(memory, x)
        return _Looking(away, x.dtype, x.storage_offset(), x.shape, x.stride())

    def _find(self, memory: torch.UntypedStorage, x: Tensor) -> Away:
        """The `Away` of this version of the storage, new if needed. Weak references detect an address that was reused."""
        key = memory._cdata, x._version
        of, away = (ref() for ref in self._sent.get(key, (lambda: None, lambda: None)))
        if of is not memory or away is None:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
            away = self._layer.send(self._room, whole, x)
            self._sent[key] = weakref.ref(memory), weakref.ref(away)
        return away


class _Looking(NamedTuple):
    """A saved tensor as a view of an offloaded storage."""

    away: Away
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    def get(self) -> Tensor:
        memory = self.away.get().view(self.dtype)
        return memory.as_strided(self.shape, self.strides, memory.storage_offset() + self.offset)


def _unpack(packed: Any) -> Tensor:
    return packed.get() if isinstance(packed, _Looking) else packed
