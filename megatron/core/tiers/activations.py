"""What the layers of one stage keep for the backward, elsewhere: in a tier, or in slots of one buffer on the device.

    forward of a microbatch   layer 0 | layer 1            | layer 2              a layer's part leaves while the next computes
                                        layer 0's goes out   layer 1's goes out
    its backward              layer 2            | layer 1            | layer 0   and comes back while the one after it does
                              layer 1's comes in   layer 0's comes in

A recomputed layer keeps its input; of any other, each memory of some size that autograd saves goes, whole, so that every tensor
that looks into it comes back with the same strides. Room in a tier is used again by what has the same size.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.device import to_device
from megatron.core.pending import Pending
from megatron.core.storage.stored import Stored, start_reading, start_writing
from megatron.core.tiers.slots import SlotBuffer, as_flat, strides_like
from megatron.core.tiers.tier import HostTier, Tier

# Takes a tensor; returns a function that gives its values, any number of times.
Keep = Callable[[Tensor], Callable[[], Tensor]]


class StageActivations:
    """Where the layers of a stage keep what their backwards need. `offloaded`: the first so many layers, in a tier; `contiguous`:
    the inputs of recomputed layers behind these, in slots on the device. smallest: elements of the least memory that is worth
    moving. tier: memory of the host when None."""

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
        """What is in the tier; made when something first goes there."""
        if self._room is None:
            self._room = TierRoom(self._tier or HostTier(device), device)
        return self._room

    def keeper(self, layer: int) -> Keep | None:
        """How the recomputed group that begins with this layer keeps its input; None for as it likes. Layers count from the
        stage's first, and are asked for in order."""
        if layer < self.offloaded:
            return partial(_keep, self._next(first=layer == 0), self.room)
        return self.slots.keep if self.contiguous else None

    @contextlib.contextmanager
    def saving(self, layer: int, x: Tensor, beside: Iterable[Tensor | None]) -> Iterator[None]:
        """Inside, what autograd saves for this layer goes away. x: its input; beside: what stays alive anyway, as parameters
        do."""
        with torch._C.DisableTorchFunctionSubclass():  # asks a released parameter of ZeRO stage 3 for its storage only
            stays = {other.untyped_storage()._cdata for other in beside if other is not None}
        packer = _Packer(
            self._next(first=layer == 0), self.room(x.device), stays, self.smallest, x.untyped_storage().device
        )
        with self.hooks(packer.pack, _unpack):
            yield

    def end(self, x: Tensor) -> None:
        """After the layers, whose output is x: when its gradient comes, the last layer's part is sent for."""
        if (last := self._last()) is not None and x.requires_grad:
            x.register_hook(lambda _: last.start())

    def _next(self, *, first: bool) -> "_Layer":
        """The layer that comes now. Two may be on their way out at a time: this one and, in the same forward, the one before."""
        before = self._last()
        for earlier in (before if first else None, before.before if before else None):
            if earlier is not None:
                earlier.settle()
        layer = _Layer(None if first else before)
        self._last = weakref.ref(layer)
        return layer


def _keep(layer: "_Layer", room: Callable[[torch.device], "TierRoom"], x: Tensor) -> Callable[[], Tensor]:
    return _Looking(layer.send(room(x.device), as_flat(x), x), x.dtype, 0, x.shape, strides_like(x)).get


class _Layer:
    """What one layer has away. The graph keeps its parts alive, and they keep it."""

    def __init__(self, before: "_Layer | None"):
        self.before = before
        self._parts: list[weakref.ref[Away]] = []

    def send(self, room: "TierRoom", flat: Tensor, x: Tensor) -> "Away":
        """flat: the memory of x that is to go."""
        away = Away(room, flat, x, self)
        self._parts.append(weakref.ref(away))
        return away

    def start(self) -> None:
        """Begin to bring back what is still needed."""
        for away in self._living():
            away.start()

    def settle(self) -> None:
        """What is on its way out has left."""
        for away in self._living():
            away.settle()

    def _living(self) -> list["Away"]:
        return [away for part in self._parts if (away := part()) is not None]


class Away:
    """Flat memory of a tensor `x` in a tier, for as long as anybody refers to this."""

    def __init__(self, room: "TierRoom", flat: Tensor, x: Tensor, layer: _Layer):
        self._room, self._layer = room, layer
        self._slot = room.take(flat.numel(), flat.dtype)
        self._source, self._version = x.detach(), x._version  # which shares x's count of changes
        self._leaving: Pending[Any] | None = room.send(self._slot, flat)
        self._coming: Pending[Tensor] | None = None
        self._seen: tuple[Callable[[], torch.UntypedStorage | None], int] | None = None  # memory, first element
        weakref.finalize(self, room.give_back, self._slot).atexit = False

    def start(self) -> None:
        """Begin to bring it back, unless it has been asked for already."""
        if self._coming is None and self._seen is None:
            self._fetch()

    def get(self) -> Tensor:
        """The values, on the device. Those of the rest of its layer, and of the layer before, are sent for."""
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
        """What was brought back, while any tensor looks into it: queries, keys and values are brought once."""
        memory = self._seen[0]() if self._seen is not None else None
        if memory is None:
            return None
        return torch.empty(0, dtype=self._slot.dtype, device=memory.device).set_(
            memory, self._seen[1], (self._slot.numel(),), (1,)
        )

    def settle(self) -> None:
        """It has left, and what it was may be freed. Raises RuntimeError where that was changed on the way."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        source, self._source = self._source, None
        leaving.wait()
        if source._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(source.shape)} that a backward needs was changed in place after the forward that "
                "needs it; leave that out, as without --cpu-offloading-num-layers"
            )

    def _fetch(self) -> None:
        self.settle()
        self._coming = self._room.fetch(self._slot)

    def __del__(self) -> None:
        for under_way in (getattr(self, "_leaving", None), getattr(self, "_coming", None)):
            if under_way is not None and self._room.side is not None:
                under_way.wait()  # else the device's memory would be used again before it was read or filled


class TierRoom:
    """A stage's room in a tier and the way there, which one piece takes after the other: so a slot may be lent again while what
    it held is on its way. To memory of the host an accelerator copies on a stream of its own."""

    def __init__(self, tier: Tier, device: torch.device):
        self._tier, self.device = tier, device
        self._free: dict[tuple[int, torch.dtype], list[Stored]] = defaultdict(list)
        self.side = None if device.type == "cpu" or tier.name == "file" else _SideStream(device)
        self.slots: list[Stored] = []  # all of them
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

    def send(self, slot: Stored, flat: Tensor) -> Pending[Any]:
        """Begin to move `flat` there, which may not change until that is done."""
        return start_writing(slot, flat) if self.side is None else self.side.start_copy(slot, flat)

    def fetch(self, slot: Stored) -> Pending[Tensor]:
        """Begin to bring back what lies there."""
        if self.side is not None:
            return self.side.start_copy(torch.empty(slot.numel(), dtype=slot.dtype, device=self.device), slot)
        reading = start_reading(slot)
        if isinstance(slot, Tensor):
            return Pending(lambda: reading.wait().clone())  # the slot may be lent again while the values are in use
        return Pending(lambda: to_device(reading.wait(), self.device))


class _SideStream:
    """Copies beside what an accelerator computes. Memory is allocated and freed on the stream that computes, which waits for
    the copy first: left to the allocator, memory would be free when the host happens to notice."""

    def __init__(self, device: torch.device):
        self._module, self._device = None if device.type == "meta" else torch.get_device_module(device), device
        self._stream = self._module and self._module.Stream(device)

    def start_copy(self, target: Tensor, source: Tensor) -> Pending[Tensor]:
        """Begin to copy into `target`, the result. Waiting makes the stream that computes wait, and lets go of both."""
        held = [target, source]
        if self._module is None:  # a dry run: shapes only
            return Pending(held.pop)
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()

        def finish() -> Tensor:
            self._module.current_stream(self._device).wait_event(done)
            return target

        return Pending(finish, source)


class _Packer:
    """Sends what autograd saves for one layer away, each memory once, if it is worth it and is the layer's own."""

    def __init__(self, layer: _Layer, room: TierRoom, stays: set[int], smallest: int, device: torch.device):
        self._layer, self._room = layer, room
        self._stays = stays
        self._smallest, self._device = smallest, device  # of the memory: in a dry run it is not the tensors'
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
        """A version that was sent before, or else this. An address means nothing once its memory is freed: hence the
        references."""
        key = memory._cdata, x._version
        of, away = (ref() for ref in self._sent.get(key, (lambda: None, lambda: None)))
        if of is not memory or away is None:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
            away = self._layer.send(self._room, whole, x)
            self._sent[key] = weakref.ref(memory), weakref.ref(away)
        return away


class _Looking(NamedTuple):
    """How a saved tensor looks into memory that is away."""

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
