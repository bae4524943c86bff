"""A failed allocation as advice: the size and place of the allocation, the prediction of the run, the flags that
reduce it."""

import re
import traceback
from collections.abc import Iterator, Sequence

import torch

from megatron.core import parallel_state
from megatron.training.global_vars import Runtime
from megatron.training.memory.bytes_by_tier import amount
from megatron.training.memory.host_memory import free_on_machine
from megatron.training.memory.memory_advice import less_with
from megatron.training.memory.peak_along_schedule import ACTIVATIONS, DEVICE, IN_MEMORY, STATE, RankMemory, worst


class OutOfMemory(RuntimeError):
    """Shown without a traceback: the message is complete."""


# The messages of torch's CPU allocator on Linux and elsewhere, of accelerators, and of C++.
_SAID = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)


def in_words(
    error: BaseException, runtime: Runtime | None, predicted: Sequence[RankMemory] | None = None
) -> BaseException:
    """An `OutOfMemory` with advice if a failed allocation caused `error`, else `error`. predicted: the run's ranks; empty if
    unknown, None before the model is built."""
    cause = next((one for one in _chain(error) if _is_shortage(one)), None)
    if cause is None or runtime is None:
        return error
    asked = _ASKED.search(str(cause))
    size = asked and (amount(float(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}")
    said = f"{size} were asked for at once" if size else "memory was asked for"
    # The executor notes the pipeline's action on the error.
    action = [note.splitlines()[0].rstrip(":") for note in getattr(cause, "__notes__", ())[:1]]
    lines = [f"out of memory: {said}{_place(cause)}{_free(runtime)}", *action, *_advice(runtime, predicted)]
    short = OutOfMemory("\n  ".join(lines))
    short.__cause__ = error  # its frames, and their tensors, are freed with it
    return short


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_shortage(error: BaseException) -> bool:
    said = isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _place(error: BaseException) -> str:
    """The innermost frame outside torch and Python's library."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not re.search(r"-packages/|/lib/python", frame.filename)]
    if not ours:
        return ""
    path = "/".join(ours[-1].filename.split("/")[-3:])
    return f" in {ours[-1].name} ({path}:{ours[-1].lineno})"


def _free(runtime: Runtime) -> str:
    on_cpu = runtime.device.torch_device.type == "cpu"
    size = free_on_machine() if on_cpu else runtime.device.memory_bytes
    if size is None:
        return ""
    return f"; this machine has {amount(size)} free" if on_cpu else f"; this device has {amount(size)} in all"


def _advice(runtime: Runtime, predicted: Sequence[RankMemory] | None) -> list[str]:
    """The prediction, if there is one, and the flags that reduce each kind, the larger first."""
    lines, on_cpu = [], runtime.device.torch_device.type == "cpu"
    kinds = [STATE] if predicted is None else [ACTIVATIONS, STATE]
    if predicted:
        parts = worst(predicted).parts_within(*(IN_MEMORY if on_cpu else (DEVICE,)))
        listed = ", ".join(f"{kind} {amount(size)}" for kind, size in parts.items())
        lines.append(f"a rank was predicted to need {amount(sum(parts.values()))}: {listed}")
        kinds.sort(key=parts.__getitem__, reverse=True)
    shares = parallel_state.launched().local_size if on_cpu else 0
    less = [(kind, less_with(runtime.config, runtime.world_size, kind, shares=shares)) for kind in kinds]
    return [*lines, *(f"{kind}: less with {flags}" for kind, flags in less)]
