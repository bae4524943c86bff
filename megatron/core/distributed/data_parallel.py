"""Data parallelism: a model chunk with gradients in contiguous buffers, reduced over the ranks that hold its copies.

    backward        adds every gradient to its parameter's `main_grad`, a view of a buffer
    REDUCE action   start_grad_reduce(): starts the reduction over the data-parallel ranks; with `overlap` most buckets
                    are in flight already, each since its last gradient was written
    end of step     finish_grad_reduce(): waits, then sums partial gradients: norms under sequence parallelism over tp,
                    a tied embedding over the first and the last stage; `fills_grad`: the sums are in `.grad` as well;
                    the copies of the module's persistent buffers agree (`sync_persistent_module_buffers.py`)
    after update    gather_params(): with ZeRO each rank has updated its shard, and an all-gather distributes it

A buffer holds the parameters of one dtype that are reduced over one group. A tied embedding has a buffer of its own,
with one layout on the first and the last stage. Memory and communication of a step of m microbatches (ZeRO,
arXiv:1910.02054, section 5):

    stage   parameters   gradients   sums, masters, moments   communication
    0       whole        whole       whole                    all-reduce of gradients
    1       whole        whole       shard                    reduce-scatter of gradients, all-gather of parameters
    2       whole        releasable  shard                    m reduce-scatters, all-gather
    3       releasable   releasable  shard                    m reduce-scatters, 2 m all-gathers
                                                              (`zero3_param_fetcher.py`)

Frozen parameters (requires_grad False when the chunk is wrapped) have no gradients, no masters and no moments. In stage 3
they are in shards as the others are, in buffers of their own: m all-gathers for the forwards, and m for the backwards of
units through which a gradient passes. In other stages they stay whole, where they are.

With copies of the shards (hybrid sharding, arXiv:2304.11277: `GradAxes.replica`), an all-reduce of the reduced shard is
added. If masters and moments are sharded over those ranks as well (--outer-dp-sharding-strategy optim), a
reduce-scatter and an all-gather are added instead.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.bucket_reduce_and_gather import Bucket, ParamBucket
from megatron.core.distributed.buffer_plan import BucketSpec, ParamSpec, overlaps, plan_buffers
from megatron.core.distributed.contiguous_buffers import (
    ACROSS_STAGES,
    ParamAndGradBuffer,
    ParamBuffer,
    grads_need_no_buffer,
)
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.grad_count import GradCounter
from megatron.core.distributed.param_grad_state import (
    ParamGradSink,
    ParamInBucket,
    declared_num_grads,
    is_tied,
    put_in_bucket,
)
from megatron.core.distributed.reduce_in_microbatch_order import ReduceInMicrobatchOrder
from megatron.core.distributed.sync_persistent_module_buffers import BufferSync, ChangesAtStepEnd
from megatron.core.distributed.zero3_param_fetcher import ParamFetcher, units_of
from megatron.core.distributed.zero_collective_order_check import CollectiveOrderCheck
from megatron.core.distributed.zero_stage_comm_volume import BufferSizes
from megatron.core.distributed.zero_stage_strategies import GradReduce, ParamGather, ReduceEachMicrobatch, ReduceOnce
from megatron.core.offload.host_and_file_stores import OffloadAllocator
from megatron.core.offload.tensor_in_memory_or_file import Stored
from megatron.core.ops.main_grad_interface import (
    DataParallelChunkInterface,
    grad_was_added,
    grad_was_deferred,
    open_main_grad,
    set_grad_sink,
)
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import GradAxes, Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import rows_to_flat_range
from megatron.core.sharding.buffer_placement_and_sync import Values, buffer_values
from megatron.core.sharding.placement import Placement, partial_axes, partial_grads, placement_of


class DistributedDataParallel(DataParallelChunkInterface):
    """Wraps one model chunk. forward(inputs of any shapes) -> the chunk's outputs, in their shapes.

    Every rank of the chunk's data- and tensor-parallel groups must wrap its own and make the same calls. A parameter
    without a placement (of a plain torch module) counts as whole on every rank.

    weight_grads: the store of deferred weight gradients, if the schedule defers them; in stages 2 and 3 the module's
    other gradients are deferred too.
    offload_store: storage of the shards of stage 3; None: the device's memory.
    unsplit: names of parameters whose optimizer needs the whole tensor; in stage 1 each is in one shard.
    fills_grad: stage 0, for an optimizer of torch.optim: gradients that are complete are in `.grad` too, and a forward
    after the optimizer's `zero_grad()` begins a step. In other stages ConfigError.
    """

    @memory_kind("communication")
    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        config: DataParallelConfig | None = None,
        weight_grads: WeightGradStore | None = None,
        *,
        offload_store: OffloadAllocator | None = None,
        unsplit: Collection[str] = (),
        fills_grad: bool = False,
    ):
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.fills_grad = fills_grad
        # The module's extra states, by name, when the model was built; None: not noted. Checkpoints lack them.
        self.extra_states_at_start: dict[str, str] | None = None
        self.settings = config or DataParallelConfig()
        zero = self.settings.zero
        self._weight_grads = weight_grads or WeightGradStore()
        module.register_load_state_dict_pre_hook(_refuse_other_tensors)

        # every parameter gets a placement; every trained one a sink, and a hook for gradients that autograd leaves in `.grad`
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in module.named_parameters() if name not in trained}
        for parameter in (*trained.values(), *self._frozen.values()):
            if placement_of(parameter) is None:
                parameter.placement = Placement(tuple(parameter.shape), init=None, replicated_over=("tp",))
        for name, parameter in trained.items():
            sink = ParamGradSink(name, parameter)
            set_grad_sink(parameter, sink)
            put_in_bucket(parameter, sink)
            parameter.register_post_accumulate_grad_hook(self._make_param_hook(parameter))
        partial_over = set().union(*(partial_axes(p.placement) for p in trained.values())) - {ACROSS_STAGES}
        self._partial_over = [name for name in mesh if name in partial_over and mesh[name].size > 1]
        if fills_grad and zero.shards_state:
            raise ConfigError(
                f"fills_grad=True needs complete gradients, but ZeRO stage {self.settings.stage} shards them; use "
                "stage 0"
            )

        # trained parameters move into buffers
        units = units_of(module)
        specs = [ParamSpec(n, p.numel(), _buffer_key(p), units[n], n in unsplit) for n, p in trained.items()]
        self.buffers = [
            ParamAndGradBuffer(plan, trained, self._grad_axes(plan.key), self.settings, offload_store)
            for plan in plan_buffers(specs, bucket_spec_of=self._bucket_spec)
        ]

        # so do frozen ones in stage 3; in other stages they stay as they are
        self.frozen_buffers: list[ParamBuffer] = []
        if zero.shards_params:
            for name, parameter in self._frozen.items():
                put_in_bucket(parameter, ParamInBucket(name, parameter))
            specs = [ParamSpec(n, p.numel(), _frozen_buffer_key(p), units[n]) for n, p in self._frozen.items()]
            self.frozen_buffers = [
                ParamBuffer(plan, self._frozen, self._frozen_axes(plan.key), self.settings, offload_store)
                for plan in plan_buffers(specs, bucket_spec_of=self._frozen_bucket_spec)
            ]

        # With releasable gradients, all ranks of a shard axis must use the model in one order.
        self._orders: dict[Axis, CollectiveOrderCheck] = {}
        if zero.shards_grads:
            for buffer in (*self.buffers, *self.frozen_buffers):
                axis = buffer.axes.shard
                at_once = self.settings.poison_released_buffers
                self._orders[axis] = CollectiveOrderCheck(axis, buffer.device, at_once=at_once)
        self._buckets = [
            Bucket(buffer, number, self._orders.get(buffer.axes.shard))
            for buffer in self.buffers
            for number in range(len(buffer.plan.buckets))
        ]
        self._frozen_buckets = [
            ParamBucket(buffer, number, self._orders.get(buffer.axes.shard))
            for buffer in self.frozen_buffers
            for number in range(len(buffer.plan.buckets))
        ]
        self._choose_strategies()

        # what _check_parameters compares
        self._trained = list(trained.values())
        self._is_filled = False  # the gradients are in `.grad`
        # Releasable parameters have no fixed memory; their class refuses an assignment to `.data`.
        lasting = () if zero.shards_params else trained.values()
        self._addresses = {p.grad_sink: p.data_ptr() for p in lasting}
        self.buffer_sync: BufferSync | None = None  # None: the module has no buffers
        if any(child._buffers or isinstance(child, ChangesAtStepEnd) for child in module.modules()):
            self.buffer_sync = BufferSync(module, mesh)
        self.zero_grad_buffer()

    def _grad_axes(self, key: tuple) -> GradAxes:
        """Return the axes of the buffer with this key: the ranks that sum its gradients, and those that shard it."""
        config = self.settings
        return self.mesh.grad_axes(key[0], shards=config.zero.shards_state, divides_outer=config.divides_over_outer)

    def _bucket_spec(self, key: tuple) -> BucketSpec:
        """Return how the buffer with this key is cut into buckets and shards."""
        axes = self._grad_axes(key)
        shards = axes.shard.size * axes.outer.size
        by_unit = self.settings.zero.shards_params or grads_need_no_buffer(axes, self.settings)
        return BucketSpec(self.settings.bucket_numel(axes.reduce.size), shards, by_unit=by_unit)

    def _frozen_axes(self, key: tuple) -> GradAxes:
        """Return the axes of the frozen buffer with this key. There is no state that `axes.outer` would divide."""
        return self.mesh.grad_axes(key[0], shards=True)

    def _frozen_bucket_spec(self, key: tuple) -> BucketSpec:
        """Return how the frozen buffer with this key is cut into buckets and shards."""
        return BucketSpec(shards=self._frozen_axes(key).shard.size, by_unit=True)

    def _choose_strategies(self) -> None:
        """Choose the gradient and parameter strategy of the ZeRO stage."""
        config = self.settings
        buckets = self._buckets
        counter = self._make_grad_counter()

        self._param_gather: ParamGather
        if config.zero.shards_params:
            self._param_gather = ParamFetcher(
                self.module, buckets, self._frozen_buckets, counter, ahead=config.overlap_param_gather
            )
        else:
            self._param_gather = ParamGather(self.module, buckets, overlap=config.overlap_param_gather)

        self._grad_reduce: GradReduce
        if config.fixed_order_grad_reduce:
            self._grad_reduce = ReduceInMicrobatchOrder(buckets, self.mesh[ACROSS_STAGES])
        elif config.zero.shards_grads:
            self._grad_reduce = ReduceEachMicrobatch(
                buckets,
                self._param_gather,
                counter,
                self._orders.values(),
                self._weight_grads,
                overlap=config.overlap_grad_reduce,
            )
        else:
            self._grad_reduce = ReduceOnce(buckets, overlap=config.overlap_grad_reduce)

    def _make_grad_counter(self) -> GradCounter:
        """Return the counter of the gradients of one backward, with the numbers that the model declares."""
        declared: dict[Bucket, int] = {}
        inferred: list[Bucket] = []
        for bucket in self._buckets:
            counts = [declared_num_grads(sink.parameter) for sink in bucket.sinks]
            declared[bucket] = sum(count or 1 for count in counts)
            if set(counts) == {None}:
                inferred.append(bucket)
        return GradCounter(declared, inferred)

    def buffer_values(self) -> Values:
        """Return copies of the persistent buffers' values, of any shapes, for `set_buffer_values`."""
        return [] if self.buffer_sync is None else buffer_values(self.buffer_sync.buffers)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the step are reduced."""
        return self._grad_reduce.is_complete

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has added any since `zero_grad_buffer`."""
        return self._grad_reduce.has_gradients

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self._begin_if_zeroed()
        self._param_gather.before_forward()
        return self.module(*inputs, **options)

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Set the chunk's input: the hidden states [s, b, h] of the previous stage, or what its `boundary` says."""
        self.module.set_input_tensor(x)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient of the chunk."""
        for buffer in self.buffers:
            for tensor in buffer.sums.tensors:
                tensor.mul_(scaling_factor)
        self._fill()

    def zero_grad_buffer(self, num_microbatches: int | None = None) -> None:
        """Forget the gradients of the last step, which may have ended in an error.

        num_microbatches: of the next step. If the number changes, or is unknown after an error, overlap learns anew
        how many gradients each parameter gets.
        """
        self._check_parameters()
        self._param_gather.begin_step()
        self._grad_reduce.begin_step(num_microbatches)
        if self.buffer_sync is not None:
            self.buffer_sync.begin_step()
        if self._is_filled:
            for parameter in self._trained:
                parameter.grad = None
        self._is_filled = False

    def _fill(self) -> None:
        """Put the gradients into `.grad` (`fills_grad`), if there are any.

        They are in the buffer's own memory where it has the parameter's dtype.
        """
        self._is_filled = self.fills_grad and self._grad_reduce.has_gradients
        if not self._is_filled:
            return
        for parameter in self._trained:
            parameter.grad = parameter.main_grad.to(parameter.dtype) if parameter.requires_grad else None

    def _begin_if_zeroed(self) -> None:
        """Begin a step if an optimizer of torch.optim has set every `.grad` to None."""
        if self._is_filled and all(parameter.grad is None for parameter in self._trained):
            self.zero_grad_buffer()

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the model computes with other tensors than the optimizer trains.

        Such a model would learn nothing.
        """
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{', '.join(thawed[:5])}: frozen when the model was wrapped in DistributedDataParallel, so it has "
                "no gradient buffer and no optimizer state; to train it later, wrap the model while it has "
                "requires_grad_(True), and only then call requires_grad_(False)"
            )
        with torch._C.DisableTorchFunctionSubclass():  # else data_ptr would wait for parameters in flight
            moved = [sink.name for sink, address in self._addresses.items() if sink.parameter.data_ptr() != address]
        if moved:
            raise RuntimeError(
                f"{', '.join(moved[:5])}: not a view of the trained buffer any more, because `.data` was set, as "
                "module.to(dtype) does; do that before the model is wrapped in DistributedDataParallel, or copy "
                "values with parameter.data.copy_() before the optimizer is made"
            )

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Prepare a forward or backward of this microbatch; the schedule calls it before each."""
        self._begin_if_zeroed()
        self._grad_reduce.begin_microbatch(microbatch, backward=backward)
        self._param_gather.begin_microbatch(backward=backward)

    def start_grad_reduce(self) -> None:
        """Start every reduction that is not in flight. Every rank must call.

        No backward of this chunk may follow before the next `zero_grad_buffer`.
        """
        self._grad_reduce.start()

    @memory_kind("communication")
    def finish_grad_reduce(self) -> None:
        """Wait until this rank's shard of every gradient is the sum over all samples of the step. Every rank must call.

        Later calls change nothing.
        """
        if self.is_complete:
            return
        if not self._grad_reduce.reduction_started:
            self._grad_reduce.start()
        self._param_gather.finish()  # a gather that no forward has waited for would overwrite the update
        self._grad_reduce.finish()
        for name in self._partial_over:
            self._sum_partial(name)
        if not self._grad_reduce.sums_tied_embedding:
            for buffer in self.buffers:
                if buffer.is_tied:
                    for tensor in buffer.sums.tensors:
                        collectives.all_reduce(tensor, self.mesh[ACROSS_STAGES])
        self._grad_reduce.is_complete = True
        self._fill()
        if self.buffer_sync is not None:
            self.buffer_sync.end_step()

    # Megatron's names, for a fork's own loop.

    def no_sync(self) -> AbstractContextManager:
        """Return a context that does nothing.

        A reduction starts with the last gradient of its step, or in stages 2 and 3 of its microbatch, so nothing needs
        to be held back.
        """
        return nullcontext()

    def start_grad_sync(self, *_: Any) -> None:
        self.start_grad_reduce()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.finish_grad_reduce()

    def gather_params(self) -> None:
        """All-gather the shards that the other ranks have updated. Every rank must call.

        With `overlap_param_gather` the all-gathers only start, in the order of the next forward, where each module
        waits for its own. Call `finish_param_gather` before any other use of the parameters. In stage 3 each forward
        gathers for itself.
        """
        self._param_gather.updated()

    def finish_param_gather(self) -> None:
        """Wait until this rank has all parameters of the chunk; in stage 3, release all but its shards."""
        self._param_gather.finish()

    def param_shards(self) -> dict[str, tuple[tuple[int, int], Stored]]:
        """Return this rank's shard of every parameter, trained or frozen, in stage 3, else {}.

        parameter name -> ((start, stop) in row-major order, its values, flat [stop - start], in memory or in a file)
        """
        return {
            param_range.name: (buffer.param_shard.elements(param_range), buffer.param_shard.values(param_range))
            for buffer in (*self.buffers, *self.frozen_buffers)
            if buffer.zero.shards_params
            for param_range in buffer.plan.param_ranges
        }

    def buffer_sizes(self) -> list[BufferSizes]:
        """Return the sizes of each buffer, from which its communication volume follows, and of all frozen parameters."""
        buckets_used_twice = [
            bucket for bucket in self._buckets if any(is_tied(sink.parameter) for sink in bucket.sinks)
        ]
        result = []
        for buffer in self.buffers:
            shared_numel = sum(b.plan.stop - b.plan.start for b in buckets_used_twice if b.buffer is buffer)
            sent_dtype = torch.bfloat16 if self.settings.grad_reduce_in_bf16 else buffer.grad_dtype
            result.append(
                BufferSizes(
                    buffer.plan.numel,
                    shared_numel,
                    param_bytes=buffer.dtype.itemsize,
                    sum_bytes=buffer.master_dtype.itemsize,
                    sent_bytes=sent_dtype.itemsize,
                    sums_wide=self.settings.reduce_scatter_with_fp32_accumulation,
                    ranks=self._group_sizes(buffer.plan.key),
                )
            )
        for key in dict.fromkeys(map(_frozen_buffer_key, self._frozen.values())):
            frozen = [parameter for parameter in self._frozen.values() if _frozen_buffer_key(parameter) == key]
            result.append(
                BufferSizes(
                    sum(parameter.numel() for parameter in frozen),
                    sum(parameter.numel() for parameter in frozen if is_tied(parameter)),
                    param_bytes=frozen[0].dtype.itemsize,
                    sum_bytes=0,
                    sent_bytes=0,
                    is_frozen=True,
                    ranks=self._group_sizes(key),
                )
            )
        return result

    def _group_sizes(self, key: tuple) -> tuple[int, int]:
        """Return (ranks that share one copy of the shards, such groups) of buffers with this key, in a sharding stage."""
        axes = self.mesh.grad_axes(key[0], shards=True)
        return axes.shard.size, axes.reduce.size // axes.shard.size

    def _sum_partial(self, axis_name: str) -> None:
        """Sum partial gradients over the axis (norms under sequence parallelism, shared key/value heads).

        It is one message per buffer.
        """
        for buffer in self.buffers:
            sums = buffer.sums
            parts = []  # views of this rank's sums
            for param_range in buffer.plan.param_ranges:
                parameter = buffer.parameters[param_range.name]
                shape = tuple(parameter.shape)
                for box in partial_grads(parameter.placement, shape, axis_name):
                    first, last = rows_to_flat_range(box, shape)
                    for run in overlaps(sums.runs, param_range.start + first, param_range.start + last):
                        parts.append(sums.at(*run))
            if not parts:
                continue
            # Norms and biases are small: one message costs less than the latency of many.
            flat = collectives.all_reduce(torch.cat(parts), self.mesh[axis_name])
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total)

    def _make_param_hook(self, parameter: nn.Parameter) -> Callable[[nn.Parameter], None]:
        """Return the hook that takes a gradient that autograd leaves in `.grad`: one for all parameters."""
        del parameter
        return self._move_to_main_grad

    def _move_to_main_grad(self, parameter: nn.Parameter) -> None:
        """Add a gradient that autograd left in `.grad`. Linear layers write into the buffer themselves and leave none.

        While weight gradients are deferred, the gradients of other layers are deferred too; otherwise their buckets
        would stay resident until the linear layers' gradients are written.
        """
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if self.settings.zero.shards_grads and self._weight_grads.is_collecting:
            self._weight_grads.put(partial(_add_to_main_grad, parameter, gradient))
            grad_was_deferred(parameter)
        else:
            _add_to_main_grad(parameter, gradient)


def _refuse_other_tensors(module: nn.Module, state: dict, prefix: str, metadata: dict, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace the parameters, which are views of contiguous buffers; leave "
            "out assign=True, or load before the model is wrapped"
        )


def _buffer_key(parameter: nn.Parameter) -> tuple:
    """Return the key of the parameter's buffer.

    The parameters of a buffer have in common the axes of their sums, the dtype, and whether two pipeline
    stages share them.
    """
    placement = parameter.placement
    return placement.reduce_over, parameter.dtype, ACROSS_STAGES in placement.partial_grad


def _frozen_buffer_key(parameter: nn.Parameter) -> tuple:
    """Return the key of a frozen parameter's buffer: it has no gradient that stages could share."""
    return parameter.placement.reduce_over, parameter.dtype


def _add_to_main_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient, shaped as the parameter, to its `main_grad`."""
    open_main_grad(parameter).add_(gradient)
    grad_was_added(parameter)
