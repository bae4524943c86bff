"""Functions of tensors run compiled by torch.compile: what `--compile` chooses, what it needs, what it has cost.

    half = Compiled(lambda x: (x / 2,))      a formula: no side effects, a tuple of tensors
    y, = half(x)                             compiled at the first call of each dtype; a second length makes lengths symbols

A `Region` is a differentiable function of two formulas, forward and backward, which says what it saves. torch.compile
could derive the backward; it would choose what to save while it compiles, and a prediction of memory could not know it.

torch.compile belongs to the process: ranks that run as threads share what it has compiled.
"""

import inspect
import os
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._triton import has_triton

from megatron.core.base.dataclass_flags import FlagConfig, knob
from megatron.core.ops.compile.skip_guards import Replay, call_kind, programs_called, replay_of, watched_backend
from megatron.core.ops.rematerialize import mark_made
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import is_accelerator
from megatron.core.parallel.grid import Axis

Formula = Callable[..., tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class CompileConfig(FlagConfig):
    """What torch.compile compiles."""

    compile: Literal["off", "regions", "layers"] = knob(
        "off",
        "torch.compile: regions: the work between matrix products (norms, activations, rotary positions, cross "
        "entropy); layers: "
        "a layer's products with it, where nothing stands in the way, which the log names; "
        "needs a C++ compiler for a CPU, Triton elsewhere, and is off without",
    )


# ---------------------------------------------------------------- whether it can


@cache
def why_not(device: str) -> str | None:
    """The reason why this process cannot compile for a kind of device, None if it can."""
    if device == "cpu":
        found = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "g++ or clang++")
        if shutil.which(found) is None:
            return f"there is no C++ compiler {found}; CXX may name another"
        os.environ["CXX"] = found  # torch itself looks for one name only
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return "Python's headers are not installed (python3-dev)"
    elif is_accelerator(torch.device(device)) and not has_triton():
        return "torch finds no Triton for this device"
    return None


_lacking: set[str] = set()  # kinds of device for which some rank of the job cannot compile


def compiles(config: CompileConfig, device: torch.device | str) -> bool:
    """Whether regions on this device run compiled."""
    kind = torch.device(device).type
    return config.compile != "off" and kind not in _lacking and why_not(kind) is None


def settle_compiling(config: CompileConfig, device: torch.device | str, world: Axis) -> list[str]:
    """One decision for all ranks of `world`; the log lines about it. Every rank must call."""
    if config.compile == "off":
        return []
    kind = torch.device(device).type
    reason = why_not(kind)
    lacks = torch.tensor(float(reason is not None), device=device)
    if not collectives.all_reduce(lacks, world, "max").item():
        return [f"--compile {config.compile}: compiled code is kept in {cache_folder()}"]
    _lacking.add(kind)
    return [f"--compile {config.compile} is off: {reason or 'another rank lacks what it needs'}"]


def news_of_layers(models: Iterable[nn.Module]) -> list[str]:
    """Log lines about layers that --compile layers leaves in parts, with the reason: their `compiled_whole.why_in_parts`."""
    asked = [held for model in models for layer in model.modules() if (held := _whole_of(layer))]
    reasons = Counter(held.why_in_parts for held in asked)
    return [
        f"--compile layers: {count} of {len(asked)} layers run as with regions, since {why}"
        for why, count in reasons.items()
        if why is not None
    ]


class _Whole(Protocol):
    why_in_parts: str | None


def _whole_of(layer: nn.Module) -> _Whole | None:
    """What runs a transformer layer as a whole (`transformer/compiled_layer.py`)."""
    return getattr(layer, "compiled_whole", None)


def cache_folder() -> Path:
    """Where compiled code outlives the process: TORCHINDUCTOR_CACHE_DIR, else in the user's cache folder."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(users / "megatron-anywhere" / "compiled")
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


# ---------------------------------------------------------------- what it has cost


@dataclass
class Spent:
    """Compilation in this process so far."""

    programs: int = 0
    seconds: float = 0.0  # by the clock, including the import of the compiler


_imported_in = 0.0


def spent() -> Spent:
    if not _imported_in:
        return Spent()
    of_phases = torch._dynamo.utils.calculate_time_spent()
    return Spent(
        torch._dynamo.utils.counters["stats"]["unique_graphs"], _imported_in + of_phases.get("total_wall_time", 0.0)
    )


_told = 0  # programs


def news_of_compiling() -> str | None:
    """A log line if something was compiled, or read from the cache folder, since the last call."""
    global _told
    now = spent()
    if now.programs == _told:
        return None
    _told = now.programs
    took = f"{now.programs} programs so far, in {now.seconds:.1f} s"
    return f"compiled: {took}; a later start reads them from {cache_folder()}"


def _compile(formula: Formula) -> Formula:
    """torch.compile, prepared: small programs one after the other do not repay a pool of compiling processes, and one
    formula
    serves many dtypes and kinds of argument."""
    global _imported_in
    began = time.perf_counter()
    cache_folder()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # As an argument: a setting of torch's is one of the thread that made it, and ranks and backwards have threads of
    # their own.
    known = "recompile_limit" in inspect.signature(torch.compile).parameters  # torch 2.11 knows the setting alone
    limit = {"recompile_limit": _MOST_PROGRAMS} if known else {}
    torch._dynamo.config.recompile_limit = _MOST_PROGRAMS
    run = torch.compile(formula, fullgraph=True, backend=watched_backend(BACKEND), **limit)
    if not _imported_in:
        _imported_in = time.perf_counter() - began
    return run


BACKEND = "inductor"  # of torch.compile; tests of many layouts trace with one that needs no C++
_MOST_PROGRAMS = 64  # of one formula; beyond it torch raises an error
_MOST_REPLAYS = 256  # of one formula: lengths of a generation's sequence would fill memory


# ---------------------------------------------------------------- what is compiled


class Compiled:
    """A formula that is compiled where it is called with tensors that have values.

    On the meta device it makes its results and, as the compiled program, nothing in between.
    """

    def __init__(self, formula: Formula):
        self.formula = formula
        self._runs: dict[str, Formula] = {}  # by backend
        self._replays: dict[Hashable, Replay | None] = {}  # by backend and kind of call

    def __call__(self, *inputs: Any) -> tuple[Tensor | None, ...]:
        # Plain tensors of one kind: parameters, and what requires a gradient, would each be compiled anew.
        plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        if any(isinstance(x, Tensor) and x.is_meta for x in plain):
            with _disable_current_modes():
                made = self.formula(*plain)
            return tuple(None if x is None else torch.empty_like(x) for x in made)
        if not is_in_torch_dispatch_mode():
            return self._run(plain)
        with (
            _disable_current_modes()
        ):  # a mode that counts memory sees results alone, as copies of what it saw nothing make
            made = self._run(plain)
        return tuple(None if x is None else x.clone() for x in made)

    def _run(self, inputs: list[Any]) -> tuple[Tensor | None, ...]:
        kind = BACKEND, call_kind(inputs)
        if (replay := self._replays.get(kind)) is not None:
            return replay(inputs)
        if BACKEND not in self._runs:
            self._runs[BACKEND] = _compile(self.formula)
        run = self._runs[BACKEND]
        if kind[1] is None or kind in self._replays or len(self._replays) >= _MOST_REPLAYS:
            return run(*inputs)
        with programs_called() as calls:
            made = run(*inputs)
        self._replays[kind] = replay_of(calls, inputs, made)
        return made


@dataclass(frozen=True)
class Region:
    """A differentiable function between two products: its eager form, and the same as two formulas.

    eager(*inputs): by torch's operations, the reference. forward(*inputs) -> its results, then what the backward needs
    beside
    the inputs in `reads` (their positions). backward(*gradients of the results, *read inputs, *kept) -> the gradient of each
    input, None for numbers. carries: the first input is the first result too, as the residual stream is; backward then gets
    the gradient of both and adds them in the same pass. again(*read inputs, *kept) -> the last result, which the
    backward makes
    in the same pass for a reader that does not keep it; None: as forward(*read inputs) makes it.
    """

    eager: Callable[..., Any]
    forward: Formula
    backward: Formula
    reads: tuple[int, ...]
    results: int = 1
    carries: bool = False
    again: Callable[..., Tensor] | None = None
    backward_and_again: Formula = field(init=False)

    def __post_init__(self) -> None:
        forward, backward = self.forward, self.backward
        again, grads = self.again or (lambda *read: forward(*read)[0]), self.results + self.carries
        formulas = {
            "forward": forward,
            "backward": backward,
            "backward_and_again": lambda *inputs: (*backward(*inputs), again(*inputs[grads:])),
        }
        for name, formula in formulas.items():
            object.__setattr__(self, name, Compiled(formula))

    def compiled(self, *inputs: Any) -> Any:
        """What `eager` gives, by the compiled formulas. The result is marked if the backward keeps all that it is
        made from."""
        made = _Differentiable.apply(self, *inputs)
        if self.results == 1 and all(i in self.reads for i, x in enumerate(inputs) if isinstance(x, Tensor)):
            result = made[-1] if self.carries else made
            if result.requires_grad:
                mark_made(result, self.forward, inputs)
        return made

    def chosen(self, config: CompileConfig, device: torch.device | str) -> Callable[..., Any]:
        return self.compiled if compiles(config, device) else self.eager


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, *inputs: Any) -> Any:
        made, read = region.forward(*inputs), [inputs[i] for i in region.reads]
        ctx.region, ctx.numbers = region, [None if isinstance(x, Tensor) else x for x in read]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in read), *made[region.results :])
        ctx.asked = []
        results = (*inputs[: region.carries], *made[: region.results])
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, numbers = ctx.saved_tensors, ctx.numbers
        read = [number if x is None else x for x, number in zip(saved, numbers)]
        given, uses = (*grads, *read, *saved[len(numbers) :]), ctx.asked
        if not uses:
            return None, *ctx.region.backward(*given)
        *of_inputs, again = ctx.region.backward_and_again(*given)
        while uses:
            uses.pop()(again)
        return None, *of_inputs
