"""The update slice by slice, for optimizer state that is offloaded, or is no plain tensor.

    the tier's thread   read 1 | read 2            | write 0, read 3 | write 1 ...
    this thread                  update 0           | update 1        | update 2 ...

At most three slices of each state are in memory, whatever the size of the model. An element's update has the
same bits in a slice as in a whole buffer: slices begin at multiples of the vector length, counted from the start
of a whole update.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, all_of, done
from megatron.core.base.label_allocations_by_memory_kind import ACTIVATIONS, memory_kind
from megatron.core.distributed.buffer_plan import ALIGN
from megatron.core.offload.optimizer_offload_fraction import SLICE, cut_in_slices
from megatron.core.offload.tensor_in_memory_or_file import Stored, start_reading, start_writing
from megatron.core.optimizer.adam_and_sgd import Update, UpdateStep
from megatron.core.optimizer.gather_full_matrices_over_tp import ShardedMatrix
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.parallel.accelerator import start_to_host


@dataclass(frozen=True)
class Segment:
    """Neighbouring elements of one group, in tensors of equal layout.

    parameters: the rounded copy of the masters that the model reads; None if it reads the masters themselves.
    is_offloaded: stored in a tier and updated on the host; otherwise updated on the gradients' device. All tensors are
    [elements], or with a full matrix [shape of the parameter on this rank].
    """

    group: ParamGroup
    master: Stored
    moments: dict[str, Stored]
    gradients: Tensor
    parameters: Stored | None
    is_offloaded: bool = False
    full_matrix: ShardedMatrix | None = None  # for an update that needs it: the tensors have the parameter's shape

    @property
    def is_resident(self) -> bool:
        """Whether the update can run in place."""
        return not self.is_offloaded and isinstance(self.master, Tensor)

    def part(self, start: int, stop: int) -> "Segment":
        """Return elements start .. stop of the segment, as views: tensors [stop - start]."""
        return replace(
            self,
            master=self.master[start:stop],
            moments={kind: stored[start:stop] for kind, stored in self.moments.items()},
            gradients=self.gradients[start:stop],
            parameters=None if self.parameters is None else self.parameters[start:stop],
        )


class SlicedUpdater:
    """Updates all segments and rounds them into the model's parameters.

    update_of: a group's update. length: elements per slice, a multiple of ALIGN.
    """

    def __init__(self, segments: Sequence[Segment], update_of: Callable[[ParamGroup], Update], length: int = SLICE):
        if length < 1 or length % ALIGN:
            raise ValueError(
                f"with slices of {length} elements, the last bits of an update would differ from those of an update "
                f"without slices; give a multiple of {ALIGN}"
            )
        self._update_of = update_of
        self._slices: list[Segment] = []
        for segment in segments:
            on_host = segment.is_offloaded or segment.gradients.device.type == "cpu"
            cuts = cut_in_slices(0, segment.gradients.numel(), length if on_host else length * _LONGER_ON_DEVICE)
            self._slices += [segment.part(*cut) for cut in cuts]

    @torch.no_grad()
    def step(self, step_of: Callable[[ParamGroup], UpdateStep]) -> None:
        """Update and write all segments. step_of: the numbers of each group's update.

        While one slice is updated, the next is read and the last is written.
        """
        reading = _start_reading(self._slices[0]) if self._slices else None
        writing: AsyncHandle[Any] = done()
        for current, following in zip(self._slices, [*self._slices[1:], None]):
            here = reading.wait()  # the slice as tensors on the device of its update
            reading = _start_reading(following) if following is not None else None
            states = {kind: [values] for kind, values in here.moments.items()}
            step = step_of(current.group)
            self._update_of(current.group)([here.master], [here.gradients], states, step)
            if here.gradients.data_ptr() != current.gradients.data_ptr():  # the update multiplied a copy on the host
                current.gradients.mul_(step.factor)
            writing.wait()
            writing = _start_writing(current, here)
        writing.wait()


_LONGER_ON_DEVICE = 8  # slices of 8 M elements on an accelerator: with fewer, kernel launches take longer than kernels


def _start_reading(part: Segment) -> AsyncHandle[Segment]:
    """Start to bring a slice, as tensors, to the device of its update."""
    start = _start_fetching if part.is_offloaded else start_reading
    master = start(part.master)
    gradients = start(part.gradients)
    moments = {kind: start(stored) for kind, stored in part.moments.items()}

    def wait() -> Segment:
        here = {kind: moment.wait() for kind, moment in moments.items()}
        return replace(part, master=master.wait(), moments=here, gradients=gradients.wait())

    return AsyncHandle(wait)


def _start_fetching(stored: Stored) -> AsyncHandle[Tensor]:
    """Start to copy a tensor to the host, unless it is there."""
    if isinstance(stored, SplitMaster):
        return stored.start_reading(_start_fetching)
    if isinstance(stored, Tensor):
        return start_to_host(stored)
    return start_reading(stored)


@memory_kind(ACTIVATIONS)  # counted, unlike other memory of an update; the step's activations are gone by then
def _start_writing(part: Segment, values: Segment) -> AsyncHandle[Any]:
    """Start to write an updated slice to where it is stored, and its masters into the parameters."""
    writing = [start_writing(part.moments[kind], moment) for kind, moment in values.moments.items()]
    writing.append(start_writing(part.master, values.master))
    if part.parameters is not None:
        writing.append(start_writing(part.parameters, values.master))
    return all_of(writing)
