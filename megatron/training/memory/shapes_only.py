"""Tensors with shapes and no values, on which the real code of a step runs in milliseconds and takes no memory.

    with ShapesOnly("cpu"):
        x = torch.randn(4096, 12288)    made on torch's meta device
        x.device                        cpu: code that asks chooses the kernels of that device
        x.sum().item()                  0.0: every number that is read is 0, every condition is false
    blocks_to_compute(...)          the largest block alone (`core/ops/torch_function_overrides.py`)

Other ranks are doubled by `SilentGroup`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatron.core.ops.torch_function_overrides import blocks_to_compute, determinism_check

META = torch.device("meta")


class ShapesOnly(TorchFunctionMode):
    """Inside the block, this thread creates tensors on the meta device. kind: "cpu", or "accelerator", whose tensors say
    "meta". most_ids: the rows of the largest table that is looked up in."""

    def __init__(self, kind: str = "cpu", most_ids: int = 2**62):
        super().__init__()
        self.most_ids = most_ids
        self.shown, self.on_cpu = torch.device("cpu") if kind == "cpu" else META, kind == "cpu"

    def hooks(self, pack: Callable, unpack: Callable) -> saved_tensors_hooks:
        """Hooks for saved tensors, which run inside too: torch calls them from what a mode handles, and has it off there."""

        def inside(x: Tensor) -> Any:
            with META, self:
                return pack(x)

        return saved_tensors_hooks(inside, unpack)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _BACKWARDS:  # a mode is off inside what it handles, and the backward is to be seen
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if func == _DEVICE:
            return self.shown if args[0].is_meta else func(*args)
        if func in _DECISIONS:
            return _DECISIONS[func](*args)
        if func in _KERNELS:
            return _KERNELS[func](self.on_cpu, *args, **kwargs)
        if func in _DISTINCT and args[0].is_meta:
            return _distinct(min(args[0].numel(), self.most_ids), *args, **kwargs)
        if func in _ANSWERS and (args[0].is_meta or func is Tensor.pin_memory):  # there may be no device to pin it for
            return _ANSWERS[func](*args, **kwargs)
        if func is torch.tensor and _is_count(*args, **kwargs):
            return func(*args, **kwargs | {"device": "cpu"})
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if func is Tensor.to:
            args = tuple(META if _is_device(x) else x for x in args)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device | str)


def _is_count(data: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """Whether `data` is a few integers. Ranks agree by such tensors, so they keep their values."""
    is_real = dtype is not None and dtype.is_floating_point  # a number to compute with, such as a count of tokens
    return not is_real and len(str(data)) < 100 and _integers(data)


def _integers(data: Any) -> bool:
    return all(map(_integers, data)) if isinstance(data, list | tuple) else type(data) is int


def _as_list(x: Tensor) -> Any:
    return _number(x) if x.dim() == 0 else [_as_list(row) for row in x]


def _number(x: Tensor) -> float | int:
    return 0.0 if x.is_floating_point() else 0


def _distinct(most: int, x: Tensor, return_inverse: bool = False, return_counts: bool = False, **_: Any) -> Any:
    """The result of torch.unique if as many elements as possible (`most`) differ. Counts: a real tensor, as if all
    were equal."""
    counts = torch.tensor([x.numel()], device="cpu") if return_counts else None
    found = [torch.empty(most, dtype=x.dtype), *([torch.empty_like(x)] if return_inverse else [])]
    found += [] if counts is None else [counts]
    return found[0] if len(found) == 1 else tuple(found)


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, gradient: Any = None, **kwargs: Any) -> None:
    """torch.autograd.backward from graph edges: a tensor as root would call this mode again."""
    grad_tensors = gradient if grad_tensors is None else grad_tensors
    tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
    torch.autograd.backward(
        [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in tensors], grad_tensors, *args, **kwargs
    )


class _Fused(torch.autograd.Function):
    """The memory of a fused attention kernel: it saves q, k, v, the output, and one float32 per row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        rows = q.shape[:3]  # [b, n, s]
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.empty(rows, dtype=torch.promote_types(q.dtype, torch.float32)), mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


def _attention(on_cpu: bool, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """The kernel that torch would choose, which the meta device has no choice of. A bool mask becomes numbers to be
    added."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    return _Fused.apply(q, k, v, attn_mask)


class _FusedRmsNorm(torch.autograd.Function):
    """The memory of a fused RMSNorm: it saves its input, its weight, and one float32 per row. torch's own kernel has no
    backward on the meta device, where it would save float32 copies of its input instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors[:2]
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(on_cpu: bool, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel on an accelerator, several operations on a CPU."""
    if on_cpu:
        return torch.rms_norm(x, shape, weight, eps)
    return _FusedRmsNorm.apply(x, weight, x.shape[: x.dim() - len(shape)])


_DEVICE = Tensor.device.__get__
_BACKWARDS: dict[Any, Callable] = {torch.autograd.backward: _backward, Tensor.backward: _backward}
_KERNELS: dict[Any, Callable] = {functional.scaled_dot_product_attention: _attention, functional.rms_norm: _rms_norm}
_ANSWERS: dict[Any, Callable] = {
    Tensor.item: _number,
    Tensor.__int__: _number,
    Tensor.__index__: _number,
    Tensor.__float__: _number,
    Tensor.__bool__: lambda x: False,
    Tensor.tolist: _as_list,
    Tensor.cpu: lambda x, *_, **__: x,
    Tensor.pin_memory: lambda x, *_: x,
    Tensor.data_ptr: lambda x: x.untyped_storage()._cdata + x.storage_offset() * x.itemsize,
}
_DECISIONS: dict[Any, Callable] = {
    # The largest block stands for all, since the memory of each ends with it.
    blocks_to_compute: lambda blocks, size: sorted(blocks, key=size, reverse=True)[:1],
    determinism_check: lambda: "none",  # it compares devices, and those of shapes have two names
}
_DISTINCT = (Tensor.unique, torch.unique, Tensor.unique_consecutive)


class Done:
    """A transfer that is complete at once."""

    def __init__(self, value: Any = None):
        self._value = value

    def wait(self) -> None:
        """Nothing is in flight."""

    def result(self) -> Any:
        return self._value


class SilentGroup:
    """A communicator whose other ranks send copies of this rank's data, or zeros. Allocates nothing."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor, op: str) -> Done:
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Done:
        for part in () if out.is_meta else out.view(self.size, -1):
            part.copy_(x.view(-1))
        return Done()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Done:
        out.view(-1).copy_(x.view(self.size, -1)[0])
        return Done()

    def all_to_all(self, out: Tensor, x: Tensor) -> Done:
        out.copy_(x)
        return Done()

    def broadcast(self, x: Tensor, source: int) -> Done:
        return Done() if source == self.rank else self.recv(x, source)

    def shift(self, out: Tensor, x: Tensor, to: int, source: int) -> Done:
        out.copy_(x)
        return Done()

    def send(self, x: Tensor, to: int) -> Done:
        return Done()

    def recv(self, x: Tensor, source: int) -> Done:
        x.zero_()
        return Done()
