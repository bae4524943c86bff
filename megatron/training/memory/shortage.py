"""An allocation that failed, as advice: how much was asked for and where, what the run was predicted to need, which
flags make it less."""

import re
import traceback
from collections.abc import Iterator, Sequence

import torch

from megatron.core import parallel_state
from megatron.training.memory.host_memory import free_on_machine
from megatron.training.memory.report import amount
from megatron.training.memory.room import ACTIVATIONS, STATE, less_with
from megatron.training.memory.timeline import DEVICE, IN_MEMORY, RankMemory, worst
from megatron.training.runtime import Runtime


class OutOfMemory(RuntimeError):
    """The message is all there is to know."""


# Of torch's CPU allocator on Linux and elsewhere, of accelerators, of C++ itself.
_SAID = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", re.IGNORECASE)


def in_words(
    error: BaseException, runtime: Runtime | None, predicted: Sequence[RankMemory] | None = None
) -> BaseException:
    """`error`; or where it came of memory that was not to be had, an `OutOfMemory` with advice. predicted: of the
    run's ranks, if that is
    known; None before the model is built."""
    cause = next((one for one in _chain(error) if _is_shortage(one)), None)
    if cause is None or runtime is None:
        return error
    advice = _advice(runtime, predicted)
    lines = [f"out of memory: {_asked(cause)}{_place(cause)}{_free(runtime)}", *_doing(cause), *advice]
    short = OutOfMemory("\n  ".join(lines))
    short.__cause__ = error  # whose frames are let go of with it
    return short


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def _asked(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    if found is None:
        return "memory was asked for"
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", found[1]).groups()
    return f"{amount(float(number)) if unit == 'bytes' else found[1]} were asked for at once"


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor Python's."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not re.search(r"-packages/|/lib/python", f.filename)
    ]
    if not frames:
        return ""
    path = "/".join(frames[-1].filename.split("/")[-3:])
    return f" in {frames[-1].name} ({path}:{frames[-1].lineno})"


def _doing(error: BaseException) -> list[str]:
    """The pipeline's action, which the executor notes."""
    return [note.splitlines()[0].rstrip(":") for note in getattr(error, "__notes__", ())[:1]]


def _free(runtime: Runtime) -> str:
    on_cpu = runtime.device.torch_device.type == "cpu"
    size = free_on_machine() if on_cpu else runtime.device.memory_bytes
    if size is None:
        return ""
    return f"; this machine has {amount(size)} free" if on_cpu else f"; this device has {amount(size)} in all"


def _advice(runtime: Runtime, predicted: Sequence[RankMemory] | None) -> list[str]:
    """What the run was predicted to need, where that is known, and the flags that make less of it, of the larger part first."""
    lines, on_cpu = [], runtime.device.torch_device.type == "cpu"
    kinds = [STATE] if predicted is None else [ACTIVATIONS, STATE]
    if predicted:
        one, tiers = worst(predicted), IN_MEMORY if on_cpu else (DEVICE,)
        held = one.within(*tiers)
        parts = {STATE: one.state_within(*tiers)} | {kind: held[kind] for kind in (ACTIVATIONS, "communication")}
        listed = ", ".join(f"{kind} {amount(size)}" for kind, size in parts.items())
        lines.append(f"a rank was predicted to need {amount(sum(parts.values()))}: {listed}")
        kinds.sort(key=parts.__getitem__, reverse=True)
    shares = parallel_state.launched().local_size if on_cpu else 0
    config, world_size = runtime.config, runtime.world_size
    return [*lines, *(f"{kind}: less with {less_with(config, world_size, kind, shares=shares)}" for kind in kinds)]
