"""Slots of equal size in one device buffer; a slot is in use while any tensor views it.

    | slot 0: microbatch 0, group 0 | slot 1: microbatch 0, group 1 | slot 2: free | slot 3: microbatch 1, group 0 |

The buffer is allocated once, so that long-lived recompute inputs do not fragment memory (M_D of ZeRO-R, arXiv:1910.02054,
section 6.3).
"""

import weakref
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

_ALIGN = 512  # bytes, as in torch's allocators: kernels see the same alignment with and without slots


class SlotBuffer:
    """As many slots as `reserve` sets, of the first tensor's size; without `reserve` it grows on demand."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._nbytes = 0  # of a slot
        self._free: list[torch.UntypedStorage] = []
        self._made = 0

    @property
    def in_use(self) -> int:
        return self._made - len(self._free)

    def reserve(self, count: int) -> None:
        """Sets the number of slots. Call between steps, when none is in use."""
        if count != self._count:
            self._count, self._made = count, 0
            self._free = []

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Copies `x` into a free slot; the returned function gives a view of it. RuntimeError if no slot is free."""
        flat, strides = as_flat(x), strides_like(x)
        storage = self._take(flat)
        kept = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (flat.numel(),), (1,))
        kept.copy_(flat)
        shape = x.shape
        return lambda: kept.as_strided(shape, strides)

    def _take(self, flat: Tensor) -> torch.UntypedStorage:
        if not self._made:
            self._nbytes = -(-flat.nbytes // _ALIGN) * _ALIGN
            if self._count is not None:
                self._make(self._count, flat.device)
        if flat.nbytes > self._nbytes:
            raise RuntimeError(
                f"contiguous checkpointing: an input of {flat.nbytes} bytes does not fit a slot of the first input's size "
                f"({self._nbytes} bytes); give the model inputs of one size, or omit --contiguous-checkpointing"
            )
        if not self._free and self._count is None:
            self._make(1, flat.device)
        if not self._free:
            raise RuntimeError(
                f"contiguous checkpointing: all {self._made} slots are in use, the schedule's peak of recompute inputs; some "
                "code keeps an input after its backward; omit --contiguous-checkpointing"
            )
        memory = self._free.pop()
        slot = _part(memory, 0, self._nbytes)  # a new storage object: it dies with the last tensor that views it
        weakref.finalize(slot, self._free.append, memory).atexit = False
        return slot

    def _make(self, count: int, device: torch.device) -> None:
        memory = self._memory = torch.empty(count * self._nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._free += [_part(memory, i * self._nbytes, (i + 1) * self._nbytes) for i in reversed(range(count))]
        self._made += count


def _part(memory: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
    """A storage of its own over these bytes. torch cuts no storage of the meta device, which has no memory."""
    return torch.UntypedStorage(stop - start, device="meta") if memory.device.type == "meta" else memory[start:stop]


def as_flat(x: Tensor) -> Tensor:
    """The elements of `x` in memory order; a view if they have no gaps."""
    x = x.detach()
    if x.stride() == strides_like(x):
        return x.as_strided((x.numel(),), (1,))
    return x.contiguous().view(-1)


def strides_like(x: Tensor) -> tuple[int, ...]:
    """The strides of `x` if its elements have no gaps in memory, else those of a contiguous tensor."""
    strides, shape = x.stride(), x.shape
    step = 1
    for dim in sorted((dim for dim, size in enumerate(shape) if size != 1), key=strides.__getitem__):
        if strides[dim] != step:
            return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        step *= shape[dim]
    return strides
