"""The one `Mesh` of this process, or of this thread where a test runs ranks as threads, and how the process computes.

Code below the composition root is handed the `Axis` objects that it uses. Only Megatron's functions, which are not, ask here.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.mesh import Mesh
from megatron.core.products import NATIVE, Products


@dataclass(eq=False)
class Current:
    """What Megatron's functions find where they are told nothing."""

    mesh: Mesh
    device: torch.device | str = "cpu"
    sequence_parallel: bool = False
    products: Products = NATIVE
    virtual_rank: int | None = None  # the chunk that is running
    fills_by_name: bool = False  # inside `filling_by_name`
    samples: int = 0  # that `get_forward_backward_func` has trained on
    rng_tracker: Any = None  # of classic.random
    memory_buffer: Any = None  # of parallel_state
    group_of_one: Any = None  # of torch.distributed

    @property
    def virtual_size(self) -> int | None:
        """Model chunks of each pipeline rank; None where it is one."""
        return self.mesh.stages.chunks if self.mesh.stages.chunks > 1 else None


_of_process: Current | None = None
_override = threading.local()


def current() -> Current:
    """That of this process (of this thread, inside `use_mesh`)."""
    found = getattr(_override, "current", None) or _of_process
    if found is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return found


def get_mesh() -> Mesh:
    """The mesh of this process (of this thread, inside `use_mesh`)."""
    return current().mesh


def has_mesh() -> bool:
    return (getattr(_override, "current", None) or _of_process) is not None


def use_mesh(mesh: Mesh | None) -> None:
    """Make `mesh` the current one of this thread only; None goes back to the process' own. For tests."""
    _override.current = None if mesh is None else Current(mesh)


def mesh_of_process() -> Mesh | None:
    return None if _of_process is None else _of_process.mesh


def set_mesh_of_process(mesh: Mesh | None) -> None:
    global _of_process
    _of_process = None if mesh is None else Current(mesh)


@contextlib.contextmanager
def filling_by_name() -> Iterator[None]:
    """Layers made inside leave their parameters to `initialize_parameters`, which draws each once, by its name."""
    here = current()
    here.fills_by_name = True
    try:
        yield
    finally:
        here.fills_by_name = False
