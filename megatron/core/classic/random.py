"""Megatron's generators, for the modules of a fork: one that all tensor-parallel ranks share and one that is each rank's own.

Our own layers use neither: their masks follow from names and positions (`megatron.core.random`). A fork's that draw inside
`get_cuda_rng_tracker().fork()` are as layout-dependent as they are with Megatron.
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
    """The module that has the default generator of this rank's device."""
    device = torch.device(current().device)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)


class RngTracker:
    """States of the device's default generator by name, swapped in for a block."""

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
        """A new state; neither its name nor its seed may be there already."""
        if name in self.states or seed in self.seeds:
            raise ValueError(f"a random state {name!r} or the seed {seed} is tracked already; choose others or reset()")
        self.seeds.add(seed)
        generator = _generator()
        before = generator.get_rng_state()
        generator.manual_seed(seed)
        self.states[name] = generator.get_rng_state()
        generator.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside the block; it goes on where it stood."""
        if name not in self.states:
            raise ValueError(f"no random state {name!r} is tracked; call model_parallel_cuda_manual_seed(seed) first")
        generator = _generator()
        before = generator.get_rng_state()
        generator.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = generator.get_rng_state()
            generator.set_rng_state(before)


def get_cuda_rng_tracker() -> RngTracker:
    """The tracker of this process, whatever its device."""
    here = current()
    here.rng_tracker = here.rng_tracker or RngTracker()
    return here.rng_tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator alike on all tensor-parallel ranks, and a state of its own for each (2718 and its rank on)."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    _generator().manual_seed(seed)
    tracker.add(DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + get_mesh()["tp"].rank)
    tracker.add(EXPERT_PARALLEL, seed + 1024)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """function(*args), computed again in the backward with the generators as they were, tracked ones too.

    distribute_saved_activations: of the first argument, of which all tensor-parallel ranks hold the same, each keeps a part, and
    the backward gathers them. It stays whole under sequence parallelism, where each rank has its own, and where the ranks do not
    divide it.
    """
    tracker, mesh = get_cuda_rng_tracker(), get_mesh()
    states, take = tracker.get_states(), None
    is_again = False
    # torch finds the device by the arguments, of which there may be none left: the state of its generator is ours to keep.
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
    return (
        isinstance(x, Tensor)
        and mesh["tp"].size > 1
        and not current().sequence_parallel
        and x.numel() % mesh["tp"].size == 0
    )
