"""Megatron's small helpers whose feature is absent here: they answer that it is off, or hand back what they are given.

`moved_or_unbuilt_megatron_names` says at which paths a script finds them.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


# Fusion by a decorator. --compile chooses the fused operations of our layers; a script's own function runs as it is written.


def jit_fuser(func: Function) -> Function:
    """Return the function itself."""
    return func


noop_decorator = jit_fuser


def enable_jit_fuser() -> None:
    """Do nothing."""


disable_jit_fuser = enable_jit_fuser


# fp8. A config that asks for it is refused when a model is built.


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Return a context without effect."""
    return nullcontext()


def is_float8tensor(tensor: Any) -> bool:
    """Return False."""
    return False


# The files of --config-logger-dir, which is refused.


def has_config_logger_enabled(config: Any) -> bool:
    """Return False."""
    return False


# Ranges for NVIDIA's profiler, which Megatron too leaves out unless they are configured.


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Do nothing."""


nvtx_range_pop = nvtx_range_push


# Views. Megatron frees a stage's output through `.data`, which a view would keep in memory; here nothing is freed so.


def make_viewless_tensor(inp: Any, requires_grad: bool, keep_graph: bool) -> Any:
    """Return `inp`, a view or not. Without keep_graph: a view outside the graph, which requires a gradient or not."""
    if inp._base is None or keep_graph:
        return inp
    return inp.detach().requires_grad_(requires_grad)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return the tensor, or whatever else is given."""
    return tensor


def safely_set_viewless_tensor_data(tensor: Any, new_data_tensor: Any) -> None:
    """Set `tensor.data`."""
    tensor.data = new_data_tensor


class WrappedTensor:
    """A tensor that one `unwrap` takes out, so that the caller's frame does not keep it."""

    def __init__(self, tensor: Any):
        self._tensor = [tensor]

    def unwrap(self) -> Any:
        """Return the tensor; RuntimeError if it has been taken out."""
        if not self._tensor:
            raise RuntimeError("this WrappedTensor has been unwrapped before")
        return self._tensor.pop()


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """Return the context, or what is given by its older name."""
    if inference_context is None and inference_params is not None:
        warnings.warn("inference_params is the older name of inference_context")
        return inference_params
    return inference_context
