"""Named states of a device's random generator, for layers that draw their own numbers and differ between ranks.

Our layers need none: their masks follow from names and positions (`megatron.core.ops.dropout`). A layer that draws from
torch's
generator inside `tracker.fork(name)` draws from a state of its own, which a recomputation restores
(`recomputed_with_states`). Megatron's functions, which ask the current mesh for tracker and ranks, are found here too.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import takes
from megatron.core.parallel.global_state import current, get_mesh, model_parallel_is_initialized
from megatron.core.parallel.grid import Axis
from megatron.core.tensor_parallel.saved_activations import SavedActivation


def generator_of(device: torch.device | str) -> Any:
    """The module with the default generator of a device."""
    device = torch.device(device)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


class RngTracker:
    """Named states of the default generator of `device`. default: the state that `fork()` takes."""

    def __init__(self, device: torch.device | str = "cpu", default: str = "default") -> None:
        self.generator, self.default = generator_of(device), default
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state with its own seed. ValueError if the name or the seed is in use."""
        if name in self.states or seed in self.seeds:
            raise ValueError(f"the random state {name!r} or the seed {seed} is in use; choose others or reset()")
        self.seeds.add(seed)
        with self._kept():
            self.generator.manual_seed(seed)
            self.states[name] = self.generator.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name: str | None = None) -> Iterator[None]:
        """Draws inside the block come from the named state, and advance it."""
        name = name or self.default
        if name not in self.states:
            raise ValueError(
                f"there is no random state {name!r}; add it, or call model_parallel_cuda_manual_seed(seed) first"
            )
        with self._kept():
            self.generator.set_rng_state(self.states[name])
            try:
                yield
            finally:
                self.states[name] = self.generator.get_rng_state()

    @contextlib.contextmanager
    def as_at(self, states: dict[str, Tensor], state: Tensor) -> Iterator[None]:
        """Inside, the named states and the generator's own are those of an earlier moment."""
        now = self.get_states()
        self.set_states(states)
        with self._kept():
            self.generator.set_rng_state(state)
            try:
                yield
            finally:
                self.set_states(now)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """The generator's state after the block is that before it."""
        before = self.generator.get_rng_state()
        try:
            yield
        finally:
            self.generator.set_rng_state(before)


def recomputed_with_states(
    function: Callable[..., Any], tracker: RngTracker, *inputs: Any, parts_over: Axis | None = None
) -> Any:
    """function(*inputs), recomputed in the backward with the same states, those of the tracker included.

    parts_over: ranks with equal copies of the first input, which each saves a shard of, and the backward gathers.
    """
    # torch finds the device from the arguments, but none may be left: so the generator's state is saved here.
    states, state = tracker.get_states(), tracker.generator.get_rng_state()
    take, is_again = None, False
    if parts_over is not None and torch.is_grad_enabled():
        take, inputs = SavedActivation(inputs[0], parts_over).take, inputs[1:]

    def run(*again: Any) -> Any:
        nonlocal is_again
        again = again if take is None else (take(), *again)
        with tracker.as_at(states, state) if is_again else contextlib.nullcontext():
            is_again = True
            return function(*again)

    return torch_checkpoint.checkpoint(run, *inputs, use_reentrant=False)


MODEL_PARALLEL, DATA_PARALLEL = "model-parallel-rng", "data-parallel-rng"


EXPERT_PARALLEL = "expert-parallel-rng"


class CudaRNGStatesTracker(RngTracker):
    """States of the default generator of this process's device, a CPU's too."""

    @takes(use_cudagraphable_rng=False, is_inference_rng_tracker=False)
    def __init__(self) -> None:
        own = current().device if model_parallel_is_initialized() else None
        super().__init__(own or torch.accelerator.current_accelerator(check_available=True) or "cpu", MODEL_PARALLEL)


_KINDS = {"inference_rng_tracker": False, "use_cudagraphable_rng": False}


@takes(use_te_rng_tracker=False, **_KINDS)
def get_cuda_rng_tracker() -> RngTracker:
    """The tracker of this process, whatever its device. A run's has its states from the start, of its stage's seed."""
    here = current()
    if here.rng_tracker is None:
        here.rng_tracker = CudaRNGStatesTracker()
        if here.seed is not None:
            _add_states(here.rng_tracker, here.seed)
    return here.rng_tracker


class _TrackerOfProcess:
    """The tracker of whatever mesh is there when it is asked, for scripts that import the object."""

    def __getattr__(self, name: str) -> Any:
        return getattr(get_cuda_rng_tracker(), name)

    def get_states(self) -> dict[str, Tensor]:
        """None before there is a mesh."""
        return get_cuda_rng_tracker().get_states() if model_parallel_is_initialized() else {}


_CUDA_RNG_STATE_TRACKER = _TrackerOfProcess()


@takes(te_rng_tracker=False, **_KINDS, tp_rank=None, ep_rank=None, etp_rank=None, force_reset_rng=False)
def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default generator equally on all tensor-parallel ranks, and a state per rank with seed + 2718 + rank."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.generator.manual_seed(seed)
    _add_states(tracker, seed)


def _add_states(tracker: RngTracker, seed: int) -> None:
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + get_mesh()["tp"].rank)
    tracker.add(EXPERT_PARALLEL, seed + 1024)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool | Tensor, *args: Any) -> Any:
    """function(*args), recomputed in the backward with the same generator states, tracked ones included.

    distribute_saved_activations: shards the first argument over the tensor-parallel ranks, which all hold it, until the
    backward
    all-gathers it. Ignored under sequence parallelism, where the ranks hold different tensors, and if its size is not
    divisible.
    Megatron 2 had no such argument: a tensor in its place is the function's first.
    """
    if isinstance(distribute_saved_activations, Tensor):
        distribute_saved_activations, args = False, (distribute_saved_activations, *args)
    tp, x = get_mesh()["tp"], args[0]
    can_divide = tp.size > 1 and not current().sequence_parallel and isinstance(x, Tensor) and x.numel() % tp.size == 0
    axis = tp if distribute_saved_activations and can_divide else None
    return recomputed_with_states(function, get_cuda_rng_tracker(), *args, parts_over=axis)


__getattr__ = names_of_megatron(__name__)
