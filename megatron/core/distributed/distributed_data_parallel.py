"""Data parallelism: a model chunk whose gradients lie in contiguous buffers, summed over the ranks that hold its copies.

    backward        every gradient is added to its parameter's `main_grad`, a view of a buffer
    REDUCE action   start_grad_reduce(): begins the sum over the data-parallel ranks; with `overlap` most of it is under way,
                    a bucket having begun as soon as its last gradient was written
    end of step     finish_grad_reduce(): waits, then sums what other ranks hold parts of: norms under sequence parallelism over
                    tp, a tied embedding over the first and the last stage

A buffer holds the parameters of one dtype that are reduced over one group; a tied embedding has a buffer of its own, laid out
alike on the first and the last stage.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import slices
from megatron.core.config import ConfigError, knob
from megatron.core.distributed.fixed_order import MicrobatchGrads
from megatron.core.distributed.memory_buffer import ParamAndGradBuffer
from megatron.core.distributed.plan import Item, buckets, lay_out
from megatron.core.parallel_state import Mesh
from megatron.core.placement import Placement, partial_grads

ACROSS_STAGES = "embd"  # the one axis whose ranks finish their backward at different times


@dataclass(frozen=True)
class DataParallelConfig:
    """Data parallelism."""

    overlap_grad_reduce: bool = knob(False, "reduce a bucket of gradients as soon as the last backward has filled it")
    ddp_bucket_size: int | None = knob(
        None, "elements in a bucket; the larger of 40,000,000 and 1,000,000 per rank when unset"
    )
    grad_reduce_in_bf16: bool = knob(
        False, "send gradients between data-parallel ranks in bfloat16: half the bytes, and sums rounded to 8 bits; a rank "
        "still adds up its own microbatches in float32",
    )  # fmt: skip
    fixed_order_grad_reduce: bool = knob(
        False, "sum gradients microbatch by microbatch, in one order for every number of ranks, so that layouts that differ in "
        "data or pipeline parallelism agree to the bit; keeps every microbatch's gradients, for debugging",
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = []
        if self.ddp_bucket_size is not None and self.ddp_bucket_size < 1:
            problems.append(f"--ddp-bucket-size is {self.ddp_bucket_size}; it must be at least 1")
        if self.overlap_grad_reduce and self.fixed_order_grad_reduce:
            problems.append("--fixed-order-grad-reduce sums at the end of a step; leave out --overlap-grad-reduce")
        if self.grad_reduce_in_bf16 and self.fixed_order_grad_reduce:
            problems.append("--fixed-order-grad-reduce sums exactly what was computed; leave out --grad-reduce-in-bf16")
        if problems:
            raise ConfigError(problems)

    def bucket_numel(self, ranks: int) -> int | None:
        """Elements in a bucket; None for one bucket, where nothing overlaps."""
        return (self.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)) if self.overlap_grad_reduce else None


class Bucket:
    """A part of a gradient buffer that is reduced by one call, once all its parameters are written.

    `rounds`: a bfloat16 copy travels instead of the gradients, and its sum is copied back.
    """

    def __init__(self, buffer: ParamAndGradBuffer, start: int, stop: int, missing: set[str], *, rounds: bool = False):
        self.grads, self.axis, self.missing = buffer.grads.data[start:stop], buffer.reduce_axis, missing
        self.rounds = rounds and self.axis.size > 1
        self.pending: comm.Pending | None = None

    def start(self) -> None:
        if self.pending is None:
            self.pending = comm.start_all_reduce(self.grads.bfloat16() if self.rounds else self.grads, self.axis)

    def wait(self) -> None:
        if self.pending is not None:
            total = self.pending.wait()
            if self.rounds:
                self.grads.copy_(total)


class DistributedDataParallel(nn.Module):
    """Wraps one model chunk. Every rank of the chunk's data- and tensor-parallel groups must wrap its own and call alike.

    A parameter without a placement (of a plain torch module) is taken to be whole on every rank.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, config: DataParallelConfig | None = None):
        super().__init__()
        self.module, self.mesh, self.config = module, mesh, config or DataParallelConfig()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if not hasattr(parameter, "placement"):
                parameter.placement = Placement(tuple(parameter.shape), init=None, replicated_over=("tp",))
            parameter.grad_written = partial(self._count_gradient, name)
            parameter.register_post_accumulate_grad_hook(_move_to_main_grad)
        items = [Item(name, p.numel(), _buffer_key(p)) for name, p in trained.items()]
        self.buffers = [
            ParamAndGradBuffer(plan, trained, mesh.over(trained[plan.slots[0].name].placement.reduce_over))
            for plan in lay_out(items)
        ]
        self._microbatches = [MicrobatchGrads(b) for b in self.buffers] if self.config.fixed_order_grad_reduce else []
        self._written: Counter[str] = Counter()  # gradients added to each parameter in this step
        self._expected: Counter[str] | None = None  # in the step before, which is what overlap goes by
        self._bucket_of: dict[str, Bucket] = {}
        self._buckets: list[Bucket] = []
        self.zero_grad_buffer()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.module.set_input_tensor(x)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the step before."""
        self._expected, self._written = self._written or None, Counter()
        self._buckets, self._bucket_of = [], {}
        for buffer in self.buffers:
            buffer.grads.zero()
            numel = self.config.bucket_numel(buffer.reduce_axis.size)
            for start, stop, names in buckets(buffer.plan.slots, buffer.plan.numel, numel):
                missing = {name for name in names if self._expected is None or self._expected[name] > 0}
                self._buckets.append(Bucket(buffer, start, stop, missing, rounds=self.config.grad_reduce_in_bf16))
                self._bucket_of |= dict.fromkeys(names, self._buckets[-1])

    def begin_microbatch(self, microbatch: int) -> None:
        """A backward of this microbatch follows; only a reduction in fixed order asks which."""
        for grads in self._microbatches:
            grads.begin(microbatch)

    def start_grad_reduce(self) -> None:
        """Begin to sum what is not under way; no backward of this chunk may follow before `finish_grad_reduce`."""
        if not self._microbatches:
            for bucket in self._buckets:
                bucket.start()

    def finish_grad_reduce(self) -> None:
        """Every gradient is the sum over all samples of the step when this returns."""
        for bucket in self._buckets:
            bucket.wait()
        for grads in self._microbatches:
            grads.sum_in_order(self.mesh[ACROSS_STAGES] if _is_tied(grads.buffer) else None)
        for name in self.mesh:
            if name != ACROSS_STAGES:
                self._sum_partial(name)
        if not self._microbatches:
            for buffer in filter(_is_tied, self.buffers):
                comm.all_reduce(buffer.grads.data, self.mesh[ACROSS_STAGES])

    def _count_gradient(self, name: str) -> None:
        """A backward has added to the gradient of `name`. It says so itself: a hook could not know whether more will come.

        A step writes as often as the step before; a bucket whose parameters all have what they expect is complete.
        """
        self._written[name] += 1
        if self._expected is None or not self.config.overlap_grad_reduce:
            return
        if self._written[name] > self._expected[name]:
            raise RuntimeError(
                f"the gradient of {name} was written {self._written[name]} times in this step and {self._expected[name]} times in "
                "the one before, so it may be on its way already; leave out --overlap-grad-reduce for such a model"
            )
        if self._written[name] == self._expected[name]:
            self._bucket_of[name].missing.discard(name)
            self._start_complete_buckets()

    def _start_complete_buckets(self) -> None:
        """Begin to sum buckets in their order, which is the same on all ranks, up to the first incomplete one."""
        for bucket in self._buckets:
            if bucket.missing:
                return
            bucket.start()

    def _sum_partial(self, axis_name: str) -> None:
        """Sum the gradients of which each rank of the axis has a part (norms under sequence parallelism, shared key/value
        heads), in one message."""
        for buffer in self.buffers:
            parts = [
                p.main_grad[slices(box)]
                for p in buffer.parameters.values()
                for box in partial_grads(p.placement, tuple(p.shape), axis_name)
            ]
            if not parts or self.mesh[axis_name].size == 1:
                continue
            flat = comm.all_reduce(torch.cat([part.reshape(-1) for part in parts]), self.mesh[axis_name])
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total.view_as(part))


def _buffer_key(parameter: nn.Parameter) -> tuple:
    placement = parameter.placement
    return placement.reduce_over, parameter.dtype, ACROSS_STAGES in placement.partial_grad


def _is_tied(buffer: ParamAndGradBuffer) -> bool:
    """Whether the buffer is that of a table which the first and the last stage share."""
    return ACROSS_STAGES in next(iter(buffer.parameters.values())).placement.partial_grad


def _move_to_main_grad(parameter: nn.Parameter) -> None:
    """Add what autograd has left in `.grad`. A linear layer has written into the buffer itself, and left nothing."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        parameter.grad_written()
