"""An update slice by slice, over state that need not be in memory, nor be tensors as they are.

    the tier's thread   read 1 | read 2            | write 0, read 3 | write 1 ...
    this thread                  update 0           | update 1        | update 2 ...

Of each kind three slices are in memory at a time, whatever the size of the model. An element's update has the same bits
in a slice as in a whole buffer: slices begin at multiples of what a vector holds, counted from where a whole update
begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import start_to_host
from megatron.core.distributed.plan import ALIGN
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.optimizer.update import Update, UpdateStep
from megatron.core.optimizer.whole import WholeTensor
from megatron.core.pending import Pending, all_of, done
from megatron.core.storage.stored import Stored, start_reading, start_writing
from megatron.core.tiers.plan import SLICE, cut_in_slices


@dataclass(frozen=True)
class Segment:
    """Neighbouring elements that are updated alike, each tensor laid out like the others.

    parameters: the rounded copy of the masters that the model reads; None where writing the masters is writing that.
    is_away: kept in a tier, and updated on the host; else where the gradients are.
    """

    group: ParamGroup
    master: Stored
    moments: dict[str, Stored]
    gradients: Tensor
    parameters: Stored | None
    is_away: bool = False
    whole: WholeTensor | None = None  # of a parameter that is updated as such: the tensors have its shape

    @property
    def is_tensors(self) -> bool:
        """Whether it can be updated where it lies."""
        return not self.is_away and isinstance(self.master, Tensor)

    def part(self, start: int, stop: int) -> "Segment":
        return replace(
            self,
            master=self.master[start:stop],
            moments={kind: stored[start:stop] for kind, stored in self.moments.items()},
            gradients=self.gradients[start:stop],
            parameters=None if self.parameters is None else self.parameters[start:stop],
        )


class SlicedUpdater:
    """`step` updates all segments, and what the model reads of them. update_of: how those of a group are updated.
    length: elements of a slice, a multiple of ALIGN."""

    def __init__(self, segments: Sequence[Segment], update_of: Callable[[ParamGroup], Update], length: int = SLICE):
        if length < 1 or length % ALIGN:
            raise ValueError(
                f"slices of {length} elements: an update is computed in vectors, and a slice that ends within one has other "
                f"bits than a whole update; give a multiple of {ALIGN}"
            )
        self._update_of = update_of
        self._slices: list[Segment] = []
        for segment in segments:
            on_host = segment.is_away or segment.gradients.device.type == "cpu"
            cuts = cut_in_slices(0, segment.gradients.numel(), length if on_host else length * _LONGER_ON_DEVICE)
            self._slices += [segment.part(*cut) for cut in cuts]

    @torch.no_grad()
    def step(self, step_of: Callable[[ParamGroup], UpdateStep]) -> None:
        """step_of: the numbers of each group's update. All is written when it returns."""
        reading = _start_reading(self._slices[0]) if self._slices else None
        writing: Pending[Any] = done()
        for current, following in zip(self._slices, [*self._slices[1:], None]):
            here = reading.wait()
            reading = _start_reading(following) if following is not None else None
            states = {kind: [values] for kind, values in here.moments.items()}
            step = step_of(current.group)
            self._update_of(current.group)([here.master], [here.gradients], states, step)
            if here.gradients.data_ptr() != current.gradients.data_ptr():  # a copy on the host was multiplied
                current.gradients.mul_(step.factor)
            writing.wait()
            writing = _start_writing(current, here)
        writing.wait()


_LONGER_ON_DEVICE = 8  # of an accelerator: 8 M elements, else starting kernels would take longer than they do


def _start_reading(part: Segment) -> Pending[Segment]:
    """Begin to bring a slice to where it is updated, as tensors."""
    start = _start_fetching if part.is_away else start_reading
    master, gradients = start(part.master), start(part.gradients)
    moments = {kind: start(stored) for kind, stored in part.moments.items()}

    def wait() -> Segment:
        here = {kind: moment.wait() for kind, moment in moments.items()}
        return replace(part, master=master.wait(), moments=here, gradients=gradients.wait())

    return Pending(wait)


def _start_fetching(stored: Stored) -> Pending[Tensor]:
    """Begin to copy to the host what is not there."""
    if isinstance(stored, SplitMaster):
        return stored.start_reading(_start_fetching)
    return start_to_host(stored) if isinstance(stored, Tensor) else start_reading(stored)


def _start_writing(part: Segment, values: Segment) -> Pending[Any]:
    writing = [start_writing(part.moments[kind], moment) for kind, moment in values.moments.items()]
    for stored in (part.master, part.parameters) if part.parameters is not None else (part.master,):
        writing.append(start_writing(stored, values.master))
    return all_of(writing)
