"""The one `Mesh` of this process, or of this thread where a test runs ranks as threads.

Code below the composition root is handed the `Axis` objects that it uses. Only Megatron's functions, which are not, ask here.
"""

import threading

from megatron.core.mesh import Mesh

_mesh: Mesh | None = None
_override = threading.local()


def get_mesh() -> Mesh:
    """The mesh of this process (of this thread, inside `use_mesh`)."""
    mesh = _mesh_here()
    if mesh is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return mesh


def has_mesh() -> bool:
    return _mesh_here() is not None


def use_mesh(mesh: Mesh | None) -> None:
    """Make `mesh` the current one of this thread only; None goes back to the process' own. For tests."""
    _override.mesh = mesh


def mesh_of_process() -> Mesh | None:
    return _mesh


def set_mesh_of_process(mesh: Mesh | None) -> None:
    global _mesh
    _mesh = mesh


def _mesh_here() -> Mesh | None:
    return getattr(_override, "mesh", None) or _mesh
