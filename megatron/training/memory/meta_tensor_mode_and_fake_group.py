"""Tensors have shapes but no values here: the real code of a step runs on them in milliseconds and takes no memory.

    with ShapesOnly("cpu"):
        x = torch.randn(4096, 12288)    made on torch's meta device
        x.device                        says cpu, so that code chooses the kernels of that device
        x.sum().item()                  0.0: every number that is read is 0, every condition is false
    row_counts(counts, total, ...)  the most rows that the layer says, else as if rows were spread evenly
    blocks_to_compute(...)          the largest block alone (`core/ops/decisions_overridable_for_memory_prediction.py`)

`FakeGroup` takes the place of a process group, so no other rank is needed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megatron.core.ops.decisions_overridable_for_memory_prediction import (
    blocks_to_compute,
    checkpoint_determinism_check,
    row_counts,
)

META = torch.device("meta")


class ShapesOnly(TorchFunctionMode):
    """Create this thread's tensors on the meta device, inside the block.

    kind: the device whose kernels are chosen. With "cpu" tensors report the device cpu; with "accelerator" meta.
    most_ids: the rows of the largest embedding, so the most distinct values that `unique` can find.
    """

    def __init__(self, kind: str = "cpu", most_ids: int = 2**62):
        super().__init__()
        self.most_ids = most_ids
        self.on_cpu = kind == "cpu"
        self.reported_device = torch.device("cpu") if self.on_cpu else META

    def hooks(self, pack: Callable, unpack: Callable) -> saved_tensors_hooks:
        """Return hooks for saved tensors that run in this mode.

        torch calls `pack` from inside an operator that this mode handles, where the mode is off.
        """

        def pack_in_mode(x: Tensor) -> Any:
            with META, self:
                return pack(x)

        return saved_tensors_hooks(pack_in_mode, unpack)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})

        # functions that this mode answers or replaces
        if func in _BACKWARDS:  # torch turns a mode off inside a function it handles; the backward needs it on
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if func == _DEVICE:
            return self.reported_device if args[0].is_meta else func(*args)
        if func in _DECISIONS:
            return _DECISIONS[func](*args, **kwargs)
        if func in _KERNELS:
            return _KERNELS[func](self.on_cpu, *args, **kwargs)
        if func in _DISTINCT and args[0].is_meta:
            return _distinct(min(args[0].numel(), self.most_ids), *args, **kwargs)
        # pin_memory: of real tensors too, since there may be no device to pin them for
        if func in _ANSWERS and (args[0].is_meta or func is Tensor.pin_memory):
            return _ANSWERS[func](*args, **kwargs)
        if _is_collective(func):
            return DoneWork()
        if func is torch.tensor and _is_count(*args, **kwargs):
            return func(*args, **kwargs | {"device": "cpu"})

        # all others run, on the meta device
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if func is Tensor.to:
            args = tuple(META if _is_device(x) else x for x in args)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _is_collective(func: Any) -> bool:
    """Whether a script calls torch's collective itself: nothing is communicated, since no other rank takes part."""
    return getattr(func, "__module__", None) == "torch.distributed.distributed_c10d"


class SizesFromDataError(Exception):
    """A step with values asked for sizes that depend on the data."""


class ValuesWithKnownSizes(TorchFunctionMode):
    """Refuse sizes that depend on data, inside the block: with values they are those of these data, not the largest."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is row_counts:
            raise SizesFromDataError
        if _is_collective(func):
            return DoneWork()
        return func(*args, **(kwargs or {}))


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device | str)


def _is_count(data: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """Whether `data` is a few integers. Ranks agree on decisions by such tensors, so these keep their values."""
    if dtype is not None and dtype.is_floating_point:  # a number to compute with, such as a number of tokens
        return False
    return len(str(data)) < 100 and _holds_integers(data)


def _holds_integers(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return all(_holds_integers(part) for part in data)
    return type(data) is int


def _as_list(x: Tensor) -> Any:
    if x.dim() == 0:
        return _number(x)
    return [_as_list(row) for row in x]


def _number(x: Tensor) -> float | int:
    return 0.0 if x.is_floating_point() else 0


def _distinct(most: int, x: Tensor, return_inverse: bool = False, return_counts: bool = False, **_: Any) -> Any:
    """Return the result of torch.unique for `most` distinct elements: [most], with the inverse in the shape of x.

    The counts are a real tensor, because code loops over them: [1], as if all elements were equal.
    """
    counts = torch.tensor([x.numel()], device="cpu") if return_counts else None  # [1]
    results = [torch.empty(most, dtype=x.dtype, device=x.device)]  # [most]
    if return_inverse:
        results.append(torch.empty_like(x))
    if counts is not None:
        results.append(counts)
    return results[0] if len(results) == 1 else tuple(results)


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, gradient: Any = None, **kwargs: Any) -> None:
    """Run torch.autograd.backward from graph edges: a tensor as root would call this mode again."""
    if grad_tensors is None:
        grad_tensors = gradient
    if isinstance(tensors, Tensor):
        tensors = (tensors,)
    roots = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in tensors]
    torch.autograd.backward(roots, grad_tensors, *args, **kwargs)


class _Fused(torch.autograd.Function):
    """A fused attention kernel without values: it saves q, k, v, the output, and one float32 per row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [b, n, s, d]; k, v [b, groups, keys, d]; mask: of numbers that are added, or None -> [b, n, s, d]."""
        # The output's memory is [b, s, n, d], as that of torch's kernel: the heads of a token side by side.
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)  # [b, n, s, d]
        logsumexp = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))  # [b, n, s]
        ctx.save_for_backward(q, k, v, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [b, n, s, d] -> the gradients of q, k and v, in their shapes.

        Saved: what the fused kernel saves; here only for its memory, and for the shapes of the gradients.
        """
        # Saved: what the fused kernel saves; here only for its memory, and for the shapes of the gradients.
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _attention(on_cpu: bool, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Stand for the fused attention kernel: [b, n, s, d] -> [b, n, s, d]. On the meta device torch chooses none.

    A bool mask becomes a mask of numbers to be added, as in that kernel.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    return _Fused.apply(q, k, v, attn_mask)


class _FusedRmsNorm(torch.autograd.Function):
    """A fused RMSNorm without values: it saves its input, its weight, and one float32 per row.

    torch's own kernel has no backward on the meta device, where it would save float32 copies of its input instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        """x: [.., h], weight: [h] or None; rows: the shape of x without the normalized dimensions -> [.., h]."""
        rms = torch.empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))  # x.shape without normalized dims
        ctx.save_for_backward(x, weight, rms)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [.., h] -> the gradients of x [.., h] and of the weight [h].

        Saved: the input, the weight and one number per row, as in the fused kernel; here only for their memory.
        """
        # Saved: the input, the weight and one number per row, as in the fused kernel; here only for their memory.
        x, weight = ctx.saved_tensors[:2]
        grad_x = torch.empty_like(x)
        grad_weight = None if weight is None else torch.empty_like(weight)
        return grad_x, grad_weight, None


def _rms_norm(on_cpu: bool, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run one kernel for an accelerator, torch's several operations for a CPU."""
    if on_cpu:
        return torch.rms_norm(x, shape, weight, eps)
    return _FusedRmsNorm.apply(x, weight, x.shape[: x.dim() - len(shape)])


def _grouped_mm(on_cpu: bool, x: Tensor, matrices: Tensor, **options: Any) -> Tensor:
    """Stand for one product for each group of rows: x [rows, in], matrices [groups, in, out] -> [rows, out].

    On the meta device torch has it in bfloat16 alone. One product has the same shapes.
    """
    if x.dtype == torch.bfloat16 or matrices.dim() != 3 or x.dim() != 2:
        return torch._grouped_mm(x, matrices, **options)
    return x @ matrices[0]


_DEVICE = Tensor.device.__get__
_BACKWARDS: dict[Any, Callable] = {torch.autograd.backward: _backward, Tensor.backward: _backward}
_KERNELS: dict[Any, Callable] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch._grouped_mm: _grouped_mm,  # what functional.grouped_mm calls
}
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
    # The largest block stands for all, since the memory of each is freed at its end.
    row_counts: lambda counts, total, at_most=None: _even_row_counts(counts, total) if at_most is None else at_most,
    blocks_to_compute: lambda blocks, size: sorted(blocks, key=size, reverse=True)[:1],
    checkpoint_determinism_check: lambda: "none",  # it compares devices, and those of shapes have two names
}
_DISTINCT = (Tensor.unique, torch.unique, Tensor.unique_consecutive)


def _even_row_counts(counts: Tensor, total: int) -> Any:
    """Return `total` rows spread evenly, in nested lists of the shape of `counts`; the first have those that are left."""
    number = counts.numel()
    even = torch.tensor([total // number + (i < total % number) for i in range(number)], device="cpu")  # [number]
    return even.view(counts.shape).tolist()


class DoneWork:
    """The handle of a transfer that is complete at once."""

    def __init__(self, value: Any = None):
        self._value = value

    def wait(self) -> None:
        """Return at once: nothing is in flight."""

    def result(self) -> Any:
        return self._value


class FakeGroup:
    """A process group without other ranks: they seem to send copies of this rank's data, or zeros. Allocates nothing.

    torch's `fake_pg` cannot be used beside a real process group.
    """

    def __init__(self, size: int, rank: int):
        self.size = size
        self.rank = rank

    def all_reduce(self, x: Tensor, op: str) -> DoneWork:
        """Leave x [..] as it is: the others seem to have zeros."""
        return DoneWork()

    def all_gather(self, out: Tensor, x: Tensor) -> DoneWork:
        """Fill out [ranks x elements of x], in any shape, with copies of x [..]."""
        if not out.is_meta:
            for shard in out.view(self.size, -1):
                shard.copy_(x.view(-1))
        return DoneWork()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> DoneWork:
        """Fill out [..] with the first part of x [ranks x elements of out], in any shape."""
        out.view(-1).copy_(x.view(self.size, -1)[0])
        return DoneWork()

    def all_to_all(self, out: Tensor, x: Tensor) -> DoneWork:
        """Copy x [..] to out [..]."""
        out.copy_(x)
        return DoneWork()

    def all_to_all_v(self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> DoneWork:
        """Copy as many rows of x [sent rows, ..] as out [received rows, ..] takes; the others seem to send zeros."""
        out.zero_()
        rows = min(len(x), len(out))
        out[:rows].copy_(x[:rows])
        return DoneWork()

    def broadcast(self, x: Tensor, source: int) -> DoneWork:
        """Leave x [..] as it is on the source, else set it to zeros."""
        if source == self.rank:
            return DoneWork()
        return self.recv(x, source)

    def shift(self, out: Tensor, x: Tensor, to: int, source: int) -> DoneWork:
        """Copy x [..] to out [..]."""
        out.copy_(x)
        return DoneWork()

    def send(self, x: Tensor, to: int) -> DoneWork:
        """Send nothing of x [..]."""
        return DoneWork()

    def recv(self, x: Tensor, source: int) -> DoneWork:
        """Set x [..] to zeros."""
        x.zero_()
        return DoneWork()
