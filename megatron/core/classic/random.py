"""Megatron's random generators: one state shared by all tensor-parallel ranks, and one per rank.

Layers that draw inside `get_cuda_rng_tracker().fork()` depend on the layout, as in Megatron.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.signatures import takes
from megatron.core.parallel.global_state import current, get_mesh, model_parallel_is_initialized
from megatron.core.tensor_parallel.random import RngTracker, recomputed_with_states

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

    distribute_saved_activations: shards the first argument over the tensor-parallel ranks, which all hold it, until the backward
    all-gathers it. Ignored under sequence parallelism, where the ranks hold different tensors, and if its size is not divisible.
    Megatron 2 had no such argument: a tensor in its place is the function's first.
    """
    if isinstance(distribute_saved_activations, Tensor):
        distribute_saved_activations, args = False, (distribute_saved_activations, *args)
    tp, x = get_mesh()["tp"], args[0]
    can_divide = tp.size > 1 and not current().sequence_parallel and isinstance(x, Tensor) and x.numel() % tp.size == 0
    axis = tp if distribute_saved_activations and can_divide else None
    return recomputed_with_states(function, get_cuda_rng_tracker(), *args, parts_over=axis)
