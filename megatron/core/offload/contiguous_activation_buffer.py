"""Slots of equal size in one device buffer; a slot is in use while any tensor views it.

    | slot 0: microbatch 0, group 0 | slot 1: microbatch 0, group 1 | slot 2: free | slot 3: microbatch 1, group 0 |

The buffer is allocated once, so that long-lived recompute inputs do not fragment memory (M_D of ZeRO-R,
arXiv:1910.02054, section 6.3).
"""

import weakref
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

_ALIGN = 512  # bytes, as in torch's allocators: kernels see the same alignment with and without slots


class RecomputeInputSlots:
    """Slots of equal size in one buffer: as many as `reserve` sets, of the first tensor's size.

    Without `reserve` the buffer grows on demand.
    """

    def __init__(self) -> None:
        self._count: int | None = None  # set by `reserve`
        self._allocated = 0  # slots, free and used
        self._slot_bytes = 0
        self._free: list[torch.UntypedStorage] = []

    @property
    def in_use(self) -> int:
        """The number of slots that are not free."""
        return self._allocated - len(self._free)

    def reserve(self, count: int) -> None:
        """Set the number of slots. Call between steps, when none is in use."""
        if count != self._count:
            self._count = count
            self._allocated = 0
            self._free = []

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Copy `x`, of any shape, into a free slot; the returned function gives a view of it, in x's shape and strides.

        Raises RuntimeError if no slot is free, or if `x` is larger than a slot.
        """
        flat = as_flat(x)  # [elements of x]
        strides = strides_like(x)
        shape = x.shape
        slot = self._take(flat)
        saved = torch.empty(0, dtype=x.dtype, device=x.device).set_(slot, 0, (flat.numel(),), (1,))  # [elements]
        saved.copy_(flat)
        return lambda: saved.as_strided(shape, strides)

    def _take(self, flat: Tensor) -> torch.UntypedStorage:
        """Return a free slot. It becomes free again with the last tensor that views it."""
        # the first tensor sets the size
        if not self._allocated:
            self._slot_bytes = -(-flat.nbytes // _ALIGN) * _ALIGN
            if self._count is not None:
                self._allocate(self._count, flat.device)
        if flat.nbytes > self._slot_bytes:
            raise RuntimeError(
                f"contiguous checkpointing: an input of {flat.nbytes} bytes does not fit a slot, which has the size "
                f"of the first input ({self._slot_bytes} bytes); give the model inputs of one size, or leave out "
                "--contiguous-checkpointing"
            )

        # without `reserve`, grow
        if not self._free and self._count is None:
            self._allocate(1, flat.device)
        if not self._free:
            raise RuntimeError(
                f"contiguous checkpointing: all {self._allocated} slots of saved inputs are in use, as many as the "
                "schedule needs at once; some code keeps an input after its backward; leave out "
                "--contiguous-checkpointing"
            )

        # A new storage object over the slot's memory, so that its end tells that no tensor views the slot any more.
        memory = self._free.pop()
        slot = _part(memory, 0, self._slot_bytes)
        weakref.finalize(slot, self._free.append, memory).atexit = False
        return slot

    def _allocate(self, count: int, device: torch.device) -> None:
        memory = torch.empty(count * self._slot_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self._memory = memory  # keeps it alive
        for i in reversed(range(count)):
            self._free.append(_part(memory, i * self._slot_bytes, (i + 1) * self._slot_bytes))
        self._allocated += count


def _part(memory: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
    """Return a storage of its own over bytes start:stop of `memory`."""
    device = memory.device
    if device.type == "meta":  # torch cuts no storage of the meta device, which has no memory
        return torch.UntypedStorage(stop - start, device=device)
    return memory[start:stop]


def as_flat(x: Tensor) -> Tensor:
    """Return the elements of `x`, of any shape, in memory order: [elements], a view if they have no gaps."""
    x = x.detach()
    if x.stride() == strides_like(x):
        return x.as_strided((x.numel(),), (1,))
    return x.contiguous().view(-1)


def strides_like(x: Tensor) -> tuple[int, ...]:
    """Return the strides of `x` if its elements have no gaps in memory, else those of a contiguous tensor.

    x: of any shape; its dimensions may be in any order in memory.
    """
    shape = x.shape
    strides = x.stride()
    # from the innermost dimension outwards, each stride must be the number of elements inside it
    expected = 1
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    for dim in sorted(dims, key=strides.__getitem__):
        if strides[dim] != expected:
            return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        expected *= shape[dim]
    return strides
