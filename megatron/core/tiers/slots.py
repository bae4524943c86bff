"""Equal pieces of one buffer on the device, each lent until nothing looks into it any more.

    | slot 0: microbatch 0, group 0 | slot 1: microbatch 0, group 1 | slot 2: free | slot 3: microbatch 1, group 0 |

Memory is asked for once, so that inputs which live long lie side by side and not between what comes and goes (ZeRO-R's M_D,
arXiv:1910.02054, section 6.3). A slot is free again when the last tensor over its memory dies, and not when somebody believes so.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_ALIGN = 512  # bytes, as accelerators' allocators do: kernels see what they would see without


class SlotBuffer:
    """As many slots as `reserve` said, of the size of the first tensor; without `reserve`, as many as are asked for."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._nbytes = 0  # of a slot
        self._free: list[torch.UntypedStorage] = []
        self._made = 0

    @property
    def in_use(self) -> int:
        return self._made - len(self._free)

    def reserve(self, count: int) -> None:
        """From here on there are so many. Called between steps, when none is in use."""
        if count != self._count:
            self._count, self._made = count, 0
            self._free = []

    def keep(self, x: Tensor) -> Callable[[], Tensor]:
        """Copy `x` into a free slot; the call that is returned gives a tensor over the slot. Raises RuntimeError where none is
        free."""
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
                f"contiguous checkpointing: an input of {flat.nbytes} bytes does not fit a slot, whose size the first one set "
                f"({self._nbytes} bytes); give the model inputs of one size, or leave out --contiguous-checkpointing"
            )
        if not self._free and self._count is None:
            self._make(1, flat.device)
        if not self._free:
            raise RuntimeError(
                f"contiguous checkpointing: each of the {self._made} slots is in use, as many as the schedule has inputs of "
                "recomputed layers alive at once; something keeps one of them after its backward; leave out "
                "--contiguous-checkpointing"
            )
        memory = self._free.pop()
        slot = _part(memory, 0, self._nbytes)  # a storage of its own, whose end says that no tensor is left over it
        weakref.finalize(slot, self._free.append, memory).atexit = False
        return slot

    def _make(self, count: int, device: torch.device) -> None:
        memory = self._memory = torch.empty(count * self._nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._free += [_part(memory, i * self._nbytes, (i + 1) * self._nbytes) for i in reversed(range(count))]
        self._made += count


def _part(memory: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
    """A storage of its own over these bytes."""
    return torch.UntypedStorage(stop - start, device="meta") if memory.device.type == "meta" else memory[start:stop]


def as_flat(x: Tensor) -> Tensor:
    """The elements of `x` in the order in which they lie in memory, without a copy where there are no gaps between them."""
    x = x.detach()
    if x.stride() == strides_like(x):
        return x.as_strided((x.numel(),), (1,))
    return x.contiguous().view(-1)


def strides_like(x: Tensor) -> tuple[int, ...]:
    """Those of `x`, where its elements fill a run of memory, else those of a contiguous tensor."""
    return torch.empty_like(x, device="meta").stride()
