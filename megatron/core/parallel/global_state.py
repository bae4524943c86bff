"""The current `Mesh` of this process, and per-thread overrides for tests that run ranks as threads.

Only Megatron's functions, whose signatures carry no mesh, read it. All other code receives the `Axis` objects that it uses.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.parallel.mesh import Mesh


@dataclass(eq=False)
class Current:
    """The implicit arguments of Megatron's functions."""

    mesh: Mesh
    device: torch.device | str = "cpu"
    sequence_parallel: bool = False
    products: Any = None  # the `Products` of a run; None: native
    virtual_rank: int | None = None  # the running model chunk
    fills_by_name: bool = False  # inside `filling_by_name`
    samples: int = 0  # consumed by `get_forward_backward_func`
    rng_tracker: Any = None  # of Megatron's named random states
    seed: int | None = None  # of this stage, for the tracker's first use
    dropout_keys: Any = None  # of Megatron's layers outside a run
    memory_buffer: Any = None  # used by parallel_state
    run: Any = None  # the `Runtime` of a run, for Megatron's models, which are told of none
    group_of_one: Any = None  # a torch.distributed group of this rank alone

    @property
    def virtual_size(self) -> int | None:
        """Model chunks per pipeline rank; None if it is 1, as in Megatron."""
        return self.mesh.stages.chunks if self.mesh.stages.chunks > 1 else None


_of_process: Current | None = None


class _OfThread(threading.local):
    current: Current | None = None


_override = _OfThread()


def current() -> Current:
    """The `Current` of this thread if `use_mesh` set one, else of this process. RuntimeError before initialization."""
    found = _override.current or _of_process
    if found is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return found


def get_mesh() -> Mesh:
    """The mesh of this thread if `use_mesh` set one, else of this process. RuntimeError before initialization."""
    return current().mesh


def model_parallel_is_initialized() -> bool:
    return (_override.current or _of_process) is not None


def use_mesh(mesh: Mesh | None) -> None:
    """Sets the mesh of this thread only; None returns to the mesh of the process. For tests."""
    _override.current = None if mesh is None else Current(mesh)


@contextlib.contextmanager
def acting_on(mesh: Mesh) -> Iterator[Current]:
    """Inside, in this thread, `mesh` is the current one: for a rank that is not this process'."""
    before = _override.current
    use_mesh(mesh)
    try:
        yield _override.current
    finally:
        _override.current = before


def mesh_of_process() -> Mesh | None:
    return None if _of_process is None else _of_process.mesh


def set_mesh_of_process(mesh: Mesh | None) -> None:
    global _of_process
    _of_process = None if mesh is None else Current(mesh)


@contextlib.contextmanager
def filling_by_name() -> Iterator[None]:
    """Layers made inside the block leave initial values to `initialize_parameters`, which seeds each parameter by its
    name."""
    here = current()
    here.fills_by_name = True
    try:
        yield
    finally:
        here.fills_by_name = False
