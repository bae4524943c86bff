"""Named states of a device's random generator, for layers of scripts whose random numbers differ between ranks.

Our layers need none: their masks follow from names and positions (`megatron.core.ops.layout_invariant_dropout`). A
layer that draws from torch's generator inside `tracker.fork(name)` draws from a state of its own, which a recomputation
restores (`recomputed_with_states`). Megatron's functions follow, which ask the current mesh for tracker and ranks.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel.global_state import get_global_state, get_mesh, model_parallel_is_initialized
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel.distribute_saved_activations_over_tp import SavedActivation


def rng_module_of(device: torch.device | str) -> Any:
    """Return the module with the default generator of a device: torch.random, torch.cuda, ..."""
    device = torch.device(device)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


class RngTracker:
    """Named states of the default generator of `device`, each a uint8 tensor [bytes] on the CPU.

    default: the state that `fork()` takes.
    """

    def __init__(self, device: torch.device | str = "cpu", default: str = "default") -> None:
        self.generator = rng_module_of(device)
        self.default = default
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name, uint8 [bytes] each."""
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states by these, uint8 [bytes] each."""
        self.states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state with its own seed. ValueError if the name or the seed is in use."""
        if name in self.states or seed in self.seeds:
            raise ValueError(
                f"the random state {name!r} or the seed {seed} is already in use; give others, or call reset()"
            )
        self.seeds.add(seed)
        with self._preserving_generator():
            self.generator.manual_seed(seed)
            self.states[name] = self.generator.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name: str | None = None) -> Iterator[None]:
        """Draw from the named state inside the block, and advance it. ValueError for an unknown name."""
        name = name or self.default
        if name not in self.states:
            raise ValueError(
                f"there is no random state {name!r}; add it, or call model_parallel_cuda_manual_seed(seed) first"
            )
        with self._preserving_generator():
            self.generator.set_rng_state(self.states[name])
            try:
                yield
            finally:
                self.states[name] = self.generator.get_rng_state()

    @contextlib.contextmanager
    def as_at(self, states: dict[str, Tensor], state: Tensor) -> Iterator[None]:
        """Restore an earlier moment inside the block.

        states: the named states at that moment; state: the generator's own; uint8 [bytes] each.
        """
        states_before = self.get_states()
        self.set_states(states)
        with self._preserving_generator():
            self.generator.set_rng_state(state)
            try:
                yield
            finally:
                self.set_states(states_before)

    @contextlib.contextmanager
    def _preserving_generator(self) -> Iterator[None]:
        """Give the generator the state back that it had before the block."""
        before = self.generator.get_rng_state()
        try:
            yield
        finally:
            self.generator.set_rng_state(before)


def recomputed_with_states(
    function: Callable[..., Any], tracker: RngTracker, *inputs: Any, parts_over: Axis | None = None
) -> Any:
    """Return function(*inputs), recomputed in the backward with the same states, those of the tracker included.

    inputs: tensors of any shapes, and other objects. parts_over: ranks with equal copies of the first input, whose
    number must divide its elements; each saves a shard [numel / t], which the backward gathers, so all of them
    must run it.
    """
    # torch would find the device from the arguments, but there may be none: so the generator's state is saved here.
    states = tracker.get_states()
    state = tracker.generator.get_rng_state()

    # The sharded first input is no argument of torch's checkpoint, which would save all of it.
    take_first = None
    if parts_over is not None and torch.is_grad_enabled():
        take_first = SavedActivation(inputs[0], parts_over).take
        inputs = inputs[1:]

    is_recomputation = False

    def run(*arguments: Any) -> Any:
        nonlocal is_recomputation
        if take_first is not None:
            arguments = (take_first(), *arguments)
        with tracker.as_at(states, state) if is_recomputation else contextlib.nullcontext():
            is_recomputation = True
            return function(*arguments)

    return torch_checkpoint.checkpoint(run, *inputs, use_reentrant=False)


# ---------------------------------------------------------------- Megatron's names


MODEL_PARALLEL = "model-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"


class CudaRNGStatesTracker(RngTracker):
    """Named states of the default generator of this process's device, a CPU's too."""

    @accepts_defaults_only(use_cudagraphable_rng=False, is_inference_rng_tracker=False)
    def __init__(self) -> None:
        device = get_global_state().device if model_parallel_is_initialized() else None
        device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
        super().__init__(device, MODEL_PARALLEL)


_TRACKER_KINDS = {"inference_rng_tracker": False, "use_cudagraphable_rng": False}  # Megatron's other trackers


@accepts_defaults_only(use_te_rng_tracker=False, **_TRACKER_KINDS)
def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker of this process, whatever its device.

    A run's tracker has states from the start, by its stage's seed.
    """
    process = get_global_state()
    if process.rng_tracker is None:
        process.rng_tracker = CudaRNGStatesTracker()
        if process.seed is not None:
            _add_states(process.rng_tracker, process.seed)
    return process.rng_tracker


class _TrackerOfProcess:
    """The tracker of the mesh that is current at each access, for scripts that import the object."""

    def __getattr__(self, name: str) -> Any:
        return getattr(get_cuda_rng_tracker(), name)

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name, uint8 [bytes] each; none before there is a mesh."""
        return get_cuda_rng_tracker().get_states() if model_parallel_is_initialized() else {}


_CUDA_RNG_STATE_TRACKER = _TrackerOfProcess()


@accepts_defaults_only(
    te_rng_tracker=False, **_TRACKER_KINDS, tp_rank=None, ep_rank=None, etp_rank=None, force_reset_rng=False
)
def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator equally on all tensor-parallel ranks, and a state per rank with seed + 2718 + rank."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.generator.manual_seed(seed)
    _add_states(tracker, seed)


def _add_states(tracker: RngTracker, seed: int) -> None:
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + get_mesh()["tp"].rank)
    tracker.add(EXPERT_PARALLEL, seed + 1024)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool | Tensor, *args: Any) -> Any:
    """Return function(*args), recomputed in the backward with the same generator states, tracked ones included.

    args: tensors of any shapes, and other objects. distribute_saved_activations: shard the first argument, of which all
    tensor-parallel ranks have a copy, until the backward all-gathers it, in which every rank must take part. Ignored
    under sequence parallelism, where the ranks have different tensors, and if its size does not divide. Early Megatron
    had no such argument: a tensor in its place is the function's first argument.
    """
    if isinstance(distribute_saved_activations, Tensor):
        args = (distribute_saved_activations, *args)
        distribute_saved_activations = False
    tp = get_mesh()["tp"]
    x = args[0]
    ranks_have_copies = tp.size > 1 and not get_global_state().sequence_parallel
    divides = isinstance(x, Tensor) and x.numel() % tp.size == 0
    axis = tp if distribute_saved_activations and ranks_have_copies and divides else None
    return recomputed_with_states(function, get_cuda_rng_tracker(), *args, parts_over=axis)


__getattr__ = names_of_megatron(__name__)
