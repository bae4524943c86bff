"""A failed allocation becomes a message: its size and place, the prediction of the run, and flags that take less."""

import re
import traceback
from collections.abc import Iterator, Sequence

import torch

from megatron.core import parallel_state
from megatron.training.global_vars import Runtime
from megatron.training.memory.flags_that_reduce_memory import flags_that_reduce
from megatron.training.memory.forecast_memory_along_schedule import (
    ACTIVATIONS,
    DEVICE,
    IN_MEMORY,
    STATE,
    RankMemory,
    worst,
)
from megatron.training.memory.read_free_host_memory import free_on_machine
from megatron.training.memory.zero_state_bytes_by_tier import amount


class OutOfMemory(RuntimeError):
    """Shown without a traceback: the message is complete."""


# The messages of torch's CPU allocator on Linux and elsewhere, of accelerators, and of C++.
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)
_SIZE = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)


def in_words(
    error: BaseException, runtime: Runtime | None, predicted: Sequence[RankMemory] | None = None
) -> BaseException:
    """Return an `OutOfMemory` with advice if a failed allocation caused `error`, else `error`.

    predicted: the run's ranks; empty if unknown, None before the model is built.
    """
    cause = next((exception for exception in _chain(error) if _is_out_of_memory(exception)), None)
    if cause is None or runtime is None:
        return error

    # the size of the allocation
    requested = "memory was asked for"
    match = _SIZE.search(str(cause))
    if match:
        number, unit = match.groups()
        size = amount(float(number)) if unit == "bytes" else f"{number} {unit}"
        requested = f"{size} were asked for at once"

    # the pipeline's action, which the executor notes on the error
    notes = getattr(cause, "__notes__", ())
    action = [note.splitlines()[0].rstrip(":") for note in notes[:1]]

    lines = [f"out of memory: {requested}{_place(cause)}{_free(runtime)}", *action, *_advice(runtime, predicted)]
    short = OutOfMemory("\n  ".join(lines))
    short.__cause__ = error  # its frames, and their tensors, are freed with it
    return short


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _place(error: BaseException) -> str:
    """Return the innermost frame outside torch and Python's library, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not re.search(r"-packages/|/lib/python", frame.filename)]
    if not ours:
        return ""
    path = "/".join(ours[-1].filename.split("/")[-3:])
    return f" in {ours[-1].name} ({path}:{ours[-1].lineno})"


def _free(runtime: Runtime) -> str:
    """Return the free memory of the machine, or all memory of the device, in words."""
    on_cpu = runtime.device.torch_device.type == "cpu"
    size = free_on_machine() if on_cpu else runtime.device.memory_bytes
    if size is None:
        return ""
    return f"; this machine has {amount(size)} free" if on_cpu else f"; this device has {amount(size)} in all"


def _advice(runtime: Runtime, predicted: Sequence[RankMemory] | None) -> list[str]:
    """Return lines with the prediction, if any, and with the flags that reduce each kind, the largest first."""
    on_cpu = runtime.device.torch_device.type == "cpu"
    lines = []
    kinds = [STATE] if predicted is None else [ACTIVATIONS, STATE]
    if predicted:
        parts = worst(predicted).parts_within(*(IN_MEMORY if on_cpu else (DEVICE,)))
        listed = ", ".join(f"{kind} {amount(size)}" for kind, size in parts.items())
        lines.append(f"a rank was predicted to need {amount(sum(parts.values()))}: {listed}")
        kinds.sort(key=parts.__getitem__, reverse=True)
    shares = parallel_state.launched().local_size if on_cpu else 0
    for kind in kinds:
        flags = flags_that_reduce(runtime.config, runtime.world_size, kind, shares=shares)
        lines.append(f"{kind}: less with {flags}")
    return lines
