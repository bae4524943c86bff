"""Megatron's random generators: one state shared by all tensor-parallel ranks, and one per rank.

Our layers use neither: their masks follow from names and positions (`megatron.core.random`). Layers that draw inside
`get_cuda_rng_tracker().fork()` depend on the layout, as in Megatron.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from megatron.core.current_mesh import current, get_mesh
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel.saved import SavedActivation

MODEL_PARALLEL, DATA_PARALLEL = "model-parallel-rng", "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"


def _generator() -> Any:
    """The module with the default generator of this rank's device."""
    device = torch.device(current().device)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


class RngTracker:
    """Named states of the device's default generator."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}
        self.seeds: set[int] = set()

    def reset(self) -> None:
        self.states, self.seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state with its own seed. ValueError if the name or the seed is in use."""
        if name in self.states or seed in self.seeds:
            raise ValueError(f"the random state {name!r} or the seed {seed} is in use; choose others or reset()")
        self.seeds.add(seed)
        generator = _generator()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self.states[name] = generator.get_rng_state()
        generator.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draws inside the block come from the named state, and advance it."""
        if name not in self.states:
            raise ValueError(f"there is no random state {name!r}; call model_parallel_cuda_manual_seed(seed) first")
        generator = _generator()
        before = generator.get_rng_state()
        generator.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = generator.get_rng_state()
            generator.set_rng_state(before)


def get_cuda_rng_tracker() -> RngTracker:
    """The tracker of this process, whatever its device. A run's has its states from the start, of its stage's seed."""
    here = current()
    if here.rng_tracker is None:
        here.rng_tracker = RngTracker()
        if here.seed is not None:
            _add_states(here.rng_tracker, here.seed)
    return here.rng_tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default generator equally on all tensor-parallel ranks, and a state per rank with seed + 2718 + rank."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    _generator().manual_seed(seed)
    _add_states(tracker, seed)


def _add_states(tracker: RngTracker, seed: int) -> None:
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + get_mesh()["tp"].rank)
    tracker.add(EXPERT_PARALLEL, seed + 1024)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """function(*args), recomputed in the backward with the same generator states, tracked ones included.

    distribute_saved_activations: shards the first argument over the tensor-parallel ranks, which all hold it, until the backward
    all-gathers it. Ignored under sequence parallelism, where the ranks hold different tensors, and if its size is not divisible.
    """
    tracker, mesh = get_cuda_rng_tracker(), get_mesh()
    states, take = tracker.get_states(), None
    is_again = False
    # torch finds the device from the arguments, but none may be left: so the generator's state is saved here.
    generator = _generator()
    before = generator.get_rng_state()
    if distribute_saved_activations and torch.is_grad_enabled() and _is_divisible(args[0], mesh):
        take, args = SavedActivation(args[0], mesh["tp"]).take, args[1:]

    def run(*inputs: Any) -> Any:
        nonlocal is_again
        inputs = inputs if take is None else (take(), *inputs)
        if not is_again:
            is_again = True
            return function(*inputs)
        now = tracker.get_states(), generator.get_rng_state()
        tracker.set_states(states)
        generator.set_rng_state(before)
        try:
            return function(*inputs)
        finally:
            tracker.set_states(now[0])
            generator.set_rng_state(now[1])

    return recompute(run, *args, use_reentrant=False)


def _is_divisible(x: Any, mesh: Mesh) -> bool:
    ranks = 1 if current().sequence_parallel else mesh["tp"].size
    return ranks > 1 and isinstance(x, Tensor) and x.numel() % ranks == 0
