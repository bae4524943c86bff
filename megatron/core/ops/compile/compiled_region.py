"""Functions of tensors that torch.compile compiles (`--compile`): regions, requirements, and the cost of compiling.

    half = Compiled(lambda x: (x / 2,))  a formula: no side effects, a tuple of tensors
    y, = half(x)                         compiled at the first call of each dtype; a second length makes lengths symbols

A `CompiledRegion` is a differentiable function of two formulas, forward and backward, with a declaration of what
it saves. torch.compile could derive the backward; but it would choose what to save while it compiles, unknown
before the first step.

torch.compile belongs to the process: ranks that run as threads share the compiled programs.
"""

import contextlib
import inspect
import os
import shutil
import stat
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._triton import has_triton

from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.ops.compile.skip_guards import Replay, call_kind, programs_called, replay_of, watched_backend
from megatron.core.ops.recomputable_tensors import mark_recomputable
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import is_accelerator
from megatron.core.parallel.rank_grid import Axis

Formula = Callable[..., tuple[Tensor | None, ...]]


# ---------------------------------------------------------------- requirements


@cache
def why_not(device: str) -> str | None:
    """Return the reason why this process cannot compile for a kind of device, None if it can."""
    if device == "cpu":
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "g++ or clang++")
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler {compiler}; CXX may name another"
        os.environ["CXX"] = compiler  # torch itself looks for one name only
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return "Python's headers are not installed (python3-dev)"
    elif is_accelerator(torch.device(device)) and not has_triton():
        return "torch finds no Triton for this device"
    return None


_lacking: set[str] = set()  # kinds of device for which some rank of the job cannot compile


def compiles(config: CompileConfig, device: torch.device | str) -> bool:
    """Return whether regions on this device run compiled."""
    kind = torch.device(device).type
    return config.compile != "off" and kind not in _lacking and why_not(kind) is None


def compile_if_all_ranks_can(config: CompileConfig, device: torch.device | str, world: Axis) -> list[str]:
    """Take one decision for all ranks of `world`: compile if all can. Returns its log lines. Every rank must call."""
    if config.compile == "off":
        return []
    kind = torch.device(device).type
    reason = why_not(kind)
    cache_note = ""
    if reason is None:
        cache_note, reason = settle_cache_folder()
    cannot = torch.tensor(float(reason is not None), device=device)
    if not collectives.all_reduce(cannot, world, "max").item():
        return [f"--compile {config.compile}: compiled code is kept in {inductor_cache_folder()}{cache_note}"]
    _lacking.add(kind)
    return [f"--compile {config.compile} is off: {reason or 'another rank lacks what it needs'}"]


def whole_layer_fallback_lines(models: Iterable[nn.Module]) -> list[str]:
    """Return log lines about layers that --compile layers cannot compile whole, with the reason."""
    compiled_layers = []
    for model in models:
        for module in model.modules():
            compiled_layer = _whole_of(module)
            if compiled_layer:
                compiled_layers.append(compiled_layer)
    reasons = Counter(layer.fallback_reason for layer in compiled_layers)
    lines = []
    for reason, count in reasons.items():
        if reason is not None:
            lines.append(
                f"--compile layers: {count} of {len(compiled_layers)} layers run as with regions, since {reason}"
            )
    return lines


class _Whole(Protocol):
    fallback_reason: str | None


def _whole_of(layer: nn.Module) -> _Whole | None:
    """Return the object that runs a transformer layer as a whole (`transformer/compile_before_and_after_attention.py`)."""
    return getattr(layer, "compiled_layer", None)


def inductor_cache_folder() -> Path:
    """Return the folder in which compiled code outlives the process.

    It is TORCHINDUCTOR_CACHE_DIR, else a folder in the user's cache folder.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        try:
            user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # in a container a user may have a number and no home
            user_cache = own_temporary_folder()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(user_cache / "megatron-anywhere" / "compiled")
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


class SettledCache(NamedTuple):
    """What is said of the folder of compiled code."""

    note: str  # why it is another than asked for; "" if it is not
    problem: str | None  # why there is none; None if there is one


def settle_cache_folder() -> SettledCache:
    """Take a folder below the temporary one for compiled code if the one that is asked for cannot be used.

    torch writes there at its first compilation, in the first step, and an error there ends the run.
    """
    asked = inductor_cache_folder()
    obstacle = why_no_cache(asked)
    if obstacle is None:
        return SettledCache("", None)
    instead = own_temporary_folder() / "compiled"
    if why_no_cache(instead) is not None:
        why = f"neither {asked} nor {instead} can keep compiled code: {obstacle}"
        return SettledCache("", f"{why}; name a folder as TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(instead)
    return SettledCache(
        f", for {asked} cannot be used: {obstacle}; TORCHINDUCTOR_CACHE_DIR may name a folder that lasts", None
    )


def why_no_cache(folder: Path) -> str | None:
    """Return why compiled code cannot be kept in a folder, which is made; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        forbids_code = os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "its file system runs no programs (noexec)" if forbids_code else None


def own_temporary_folder() -> Path:
    """Return a folder below the temporary one that only this user can write to: code is loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"megatron-anywhere-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="megatron-anywhere-"))


# ---------------------------------------------------------------- the cost


@dataclass
class CompileCost:
    """The compilation of this process so far."""

    programs: int = 0
    seconds: float = 0.0  # wall-clock time, including the import of the compiler


_import_seconds = 0.0  # of the compiler; 0: not imported yet


def compile_cost() -> CompileCost:
    """Return the compilation of this process so far."""
    if not _import_seconds:
        return CompileCost()
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    seconds_by_phase = torch._dynamo.utils.calculate_time_spent()
    return CompileCost(programs, _import_seconds + seconds_by_phase.get("total_wall_time", 0.0))


_logged_programs = 0


def compile_cost_line() -> str | None:
    """Return a log line if something was compiled, or read from the cache folder, since the last call."""
    global _logged_programs
    cost = compile_cost()
    if cost.programs == _logged_programs:
        return None
    _logged_programs = cost.programs
    return (
        f"compiled: {cost.programs} programs so far, in {cost.seconds:.1f} s; a later start reads them from "
        f"{inductor_cache_folder()}"
    )


def _compile(formula: Formula) -> Formula:
    """Run torch.compile without a pool of compiling processes, which small programs one after the other do not repay.

    One formula serves many dtypes and kinds of argument.
    """
    global _import_seconds
    began = time.perf_counter()
    inductor_cache_folder()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # As an argument: a setting of torch's is one of the thread that made it, and ranks and backwards have threads of
    # their own.
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters  # torch 2.11 has the setting alone
    limit = {"recompile_limit": _MOST_PROGRAMS} if takes_limit else {}
    torch._dynamo.config.recompile_limit = _MOST_PROGRAMS
    run = torch.compile(formula, fullgraph=True, backend=watched_backend(BACKEND), **limit)
    if not _import_seconds:
        _import_seconds = time.perf_counter() - began
    return run


BACKEND = "inductor"  # of torch.compile; tests of many layouts trace with one that needs no C++
_MOST_PROGRAMS = 64  # of one formula; beyond it torch raises an error
_MOST_REPLAYS = 256  # of one formula: the many lengths of a generated sequence would fill memory


# ---------------------------------------------------------------- formulas and regions


class Compiled:
    """A formula that is compiled where it is called with tensors that have values.

    On the meta device it allocates its results and, as the compiled program, no intermediate tensor.
    """

    def __init__(self, formula: Formula):
        self.formula = formula
        self._runs: dict[str, Formula] = {}  # by backend
        self._replays: dict[Hashable, Replay | None] = {}  # by backend and kind of call

    def __call__(self, *inputs: Any) -> tuple[Tensor | None, ...]:
        """Return what the formula returns for these inputs, tensors and numbers, in the same shapes."""
        # Plain tensors of one kind: parameters, and tensors that require a gradient, would each be compiled anew.
        plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]

        # Modes, such as one that counts memory, see the results alone: as copies, which a mode sees allocated.
        if any(isinstance(x, Tensor) and x.is_meta for x in plain):
            with _disable_current_modes():
                outputs = self.formula(*plain)
            return tuple(None if x is None else torch.empty_like(x) for x in outputs)
        if is_in_torch_dispatch_mode():
            with _disable_current_modes():
                outputs = self._run(plain)
            return tuple(None if x is None else x.clone() for x in outputs)
        return self._run(plain)

    def _run(self, inputs: list[Any]) -> tuple[Tensor | None, ...]:
        # a kind of call that was seen before goes straight to its program
        kind_of_inputs = call_kind(inputs)
        kind = BACKEND, kind_of_inputs
        replay = self._replays.get(kind)
        if replay is not None:
            return replay(inputs)

        if BACKEND not in self._runs:
            self._runs[BACKEND] = _compile(self.formula)
        run = self._runs[BACKEND]
        has_no_replay = kind in self._replays  # it was watched, and cannot be replayed
        if kind_of_inputs is None or has_no_replay or len(self._replays) >= _MOST_REPLAYS:
            return run(*inputs)

        # watch the first call of this kind
        with programs_called() as calls:
            outputs = run(*inputs)
        self._replays[kind] = replay_of(calls, inputs, outputs)
        return outputs


@dataclass(frozen=True)
class CompiledRegion:
    """A differentiable function between two matrix products: its eager form, and the same as two formulas.

    eager(*inputs): by torch's operations, the reference.
    forward(*inputs) -> the results, then what the backward needs besides inputs ("extras").
    saved_inputs: the positions of the inputs that the backward needs.
    backward(*gradients of the results, *saved inputs, *extras) -> the gradient of each input, None for numbers.
    returns_residual: the first input is the first result too, as the residual stream is; backward then gets the
    gradient of both and adds them in the same pass.
    recompute_output(*saved inputs, *extras) -> the last result, which the backward recomputes in the same pass for a
    consumer that did not save it; None: as forward(*saved inputs) computes it.
    """

    eager: Callable[..., Any]
    forward: Formula
    backward: Formula
    saved_inputs: tuple[int, ...]
    num_results: int = 1  # of `forward`
    returns_residual: bool = False
    recompute_output: Callable[..., Tensor] | None = None
    backward_and_recompute: Formula = field(init=False)

    def __post_init__(self) -> None:
        forward = self.forward
        backward = self.backward
        recompute_output = self.recompute_output or (lambda *saved: forward(*saved)[0])
        num_grads = self.num_results + self.returns_residual

        def backward_and_recompute(*inputs: Any) -> tuple[Tensor | None, ...]:
            return *backward(*inputs), recompute_output(*inputs[num_grads:])

        # The instance is frozen; its formulas are replaced by compiled ones.
        formulas = {"forward": forward, "backward": backward, "backward_and_recompute": backward_and_recompute}
        for name, formula in formulas.items():
            object.__setattr__(self, name, Compiled(formula))

    def compiled(self, *inputs: Any) -> Any:
        """Return what `eager` returns, by the compiled formulas, in the same shapes.

        The result is marked as recomputable if the backward saves everything that it is computed from.
        """
        outputs = _RegionFunction.apply(self, *inputs)
        saves_all = all(i in self.saved_inputs for i, x in enumerate(inputs) if isinstance(x, Tensor))
        if self.num_results == 1 and saves_all:
            result = outputs[-1] if self.returns_residual else outputs
            if result.requires_grad:
                mark_recomputable(result, self.forward, inputs)
        return outputs

    def select(self, config: CompileConfig, device: torch.device | str) -> Callable[..., Any]:
        """Return the form of the region that runs on this device under this config."""
        return self.compiled if compiles(config, device) else self.eager


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: CompiledRegion, *inputs: Any) -> Any:
        """inputs: of the region's `forward`, tensors and numbers -> its results.

        With `returns_residual` the first input is the first result.
        """
        outputs = region.forward(*inputs)
        residual = inputs[:1] if region.returns_residual else ()
        results = (*residual, *outputs[: region.num_results])
        extras = outputs[region.num_results :]

        # Tensors are saved by autograd, numbers beside it.
        saved = [inputs[i] for i in region.saved_inputs]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved), *extras)
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.region = region
        ctx.requests = []  # consumers that want the recomputed output (`request_from_producer`)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """grads: of the results, in their shapes -> the gradients of the inputs, in theirs; None for a number.

        Saved: the region's `saved_inputs`, and the extras of its forward. They are all that its `backward` formula
        reads. A region declares what it saves, so that the prediction of memory knows it.
        """
        saved_tensors = ctx.saved_tensors  # read once: under recomputation, reading recomputes them
        numbers = ctx.numbers
        inputs = [number if x is None else x for x, number in zip(saved_tensors, numbers)]
        extras = saved_tensors[len(numbers) :]
        if not ctx.requests:
            return None, *ctx.region.backward(*grads, *inputs, *extras)
        *input_grads, output = ctx.region.backward_and_recompute(*grads, *inputs, *extras)
        while ctx.requests:
            use = ctx.requests.pop()
            use(output)
        return None, *input_grads
