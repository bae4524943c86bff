"""The mesh and the settings of this process, and per-thread overrides for tests that run ranks as threads.

Only Megatron's functions, whose signatures carry no mesh, read them. All other code receives the `Axis`
objects it uses.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.parallel.mesh import Mesh


@dataclass(eq=False)
class GlobalState:
    """The implicit arguments of Megatron's functions: the mesh, the device, and how layers compute."""

    mesh: Mesh
    device: torch.device | str = "cpu"
    sequence_parallel: bool = False
    matmul_modes: Any = None  # the `MatmulModes` of a run; None: native
    virtual_rank: int | None = None  # the running model chunk
    micro_batch_size: int | None = None  # of the step that a `Pipeline` runs
    num_microbatches: int | None = None  # of the training step that a `Pipeline` runs
    defers_initialization: bool = False  # inside `defer_weight_initialization`
    samples: int = 0  # consumed by `get_forward_backward_func`
    rng_tracker: Any = None  # of Megatron's named random states
    seed: int | None = None  # of this stage, for the tracker's first use
    dropout_keys: Any = None  # of Megatron's layers outside a run
    memory_buffer: Any = None  # used by parallel_state
    run: Any = None  # the `Runtime` of a run, for Megatron's models, whose signatures carry none
    group_of_one: Any = None  # a torch.distributed group of this rank alone
    aux_losses_tracker: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `moe.aux_losses_tracker`

    @property
    def virtual_size(self) -> int | None:
        """Model chunks per pipeline rank; None if it is 1, as in Megatron."""
        return self.mesh.stages.chunks if self.mesh.stages.chunks > 1 else None


_process_state: GlobalState | None = None

# What mpu.set_... was given before the start: (axis, "size" or "rank") -> (name of the setter, value).
announced: dict[tuple[str, str], tuple[str, int]] = {}


class _ThreadState(threading.local):
    state: GlobalState | None = None  # None: that of the process


_override = _ThreadState()


def get_global_state() -> GlobalState:
    """Return the state of this thread if `set_thread_mesh` set one, else of this process.

    Raises RuntimeError before initialization.
    """
    state = _override.state or _process_state
    if state is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return state


def get_mesh() -> Mesh:
    """Return the mesh of this thread if `set_thread_mesh` set one, else of this process.

    Raises RuntimeError before initialization.
    """
    return get_global_state().mesh


def model_parallel_is_initialized() -> bool:
    return (_override.state or _process_state) is not None


def set_thread_mesh(mesh: Mesh | None) -> None:
    """Set the mesh of this thread only; None returns to the mesh of the process. For tests."""
    _override.state = None if mesh is None else GlobalState(mesh)


@contextlib.contextmanager
def mesh_override(mesh: Mesh) -> Iterator[GlobalState]:
    """Use `mesh` inside the block, in this thread: for a rank that is not this process's."""
    before = _override.state
    set_thread_mesh(mesh)
    try:
        yield _override.state
    finally:
        _override.state = before


def mesh_of_process() -> Mesh | None:
    return None if _process_state is None else _process_state.mesh


def set_mesh_of_process(mesh: Mesh | None) -> None:
    global _process_state
    _process_state = None if mesh is None else GlobalState(mesh)


@contextlib.contextmanager
def defer_weight_initialization() -> Iterator[None]:
    """Let layers made inside the block leave initial values to `initialize_parameters`, which seeds by name."""
    state = get_global_state()
    state.defers_initialization = True
    try:
        yield
    finally:
        state.defers_initialization = False
