"""Data parallelism: a model chunk with gradients in contiguous buffers, reduced over the ranks that hold its copies.

    backward        adds every gradient to its parameter's `main_grad`, a view of a buffer
    REDUCE action   start_grad_reduce(): starts the reduction over the data-parallel ranks; with `overlap` most buckets
    are in
                    flight already, each since its last gradient was written
    end of step     finish_grad_reduce(): waits, then sums partial gradients: norms under sequence parallelism over tp, a
    tied
                    embedding over the first and the last stage; `fills_grad`: the sums are in `.grad` as well
    after update    gather_params(): with ZeRO each rank has updated its shard, and an all-gather distributes it

A buffer holds the parameters of one dtype that are reduced over one group. A tied embedding has a buffer of its own,
with one layout on the first and the last stage. Memory and communication of a step of m microbatches (ZeRO,
arXiv:1910.02054, section 5):

    stage   parameters   gradients   sums, masters, moments   communication
    0       whole        whole       whole                    all-reduce of gradients
    1       whole        whole       shard                    reduce-scatter of gradients, all-gather of parameters
    2       whole        transient   shard                    m reduce-scatters, all-gather
    3       transient    transient   shard                    m reduce-scatters, 2 m all-gathers (`zero3_param_fetcher.py`)

With copies of the shards (hybrid sharding, arXiv:2304.11277: `GradAxes.replica`), an all-reduce of the reduced shard
is added. If masters and moments are sharded over those ranks as well (--outer-dp-sharding-strategy optim), a
reduce-scatter and an all-gather are added instead.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.buffer_plan import Cut, Item, lay_out, overlaps
from megatron.core.distributed.collective_order import UseOrder
from megatron.core.distributed.comm_volume import Flat
from megatron.core.distributed.contiguous_buffers import ACROSS_STAGES, ParamAndGradBuffer, grads_come_late
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.fixed_order_reduce import ReduceInFixedOrder
from megatron.core.distributed.grad_count import Uses
from megatron.core.distributed.param_grad_state import ParamSlot, is_lent, uses_of
from megatron.core.distributed.zero import GradReduce, ParamGather, ReduceEachMicrobatch, ReduceOnce
from megatron.core.distributed.zero3_param_fetcher import ParamFetcher, units_of
from megatron.core.offload.offload_tiers import Tier
from megatron.core.offload.stored_tensor import Stored
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.main_grad_interface import (
    DataParallelBase,
    grad_was_added,
    grad_was_put_off,
    open_main_grad,
    set_slot,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import GradAxes, Mesh
from megatron.core.sharding.boxes import flat_run
from megatron.core.sharding.placement import Placement, partial_axes, partial_grads, placement_of


class DistributedDataParallel(DataParallelBase):
    """Wraps one model chunk. Every rank of the chunk's data- and tensor-parallel groups must wrap its own and make the
    same calls.

    A parameter without a placement (of a plain torch module) counts as whole on every rank. weight_grads: the store of
    deferred weight gradients, if the schedule defers them; in stages 2 and 3 the module's other gradients follow.
    tier: storage of the shards of stage 3; None: the device's memory. whole: names of parameters whose optimizer needs
    the whole tensor; in stage 1 each lies in one shard. fills_grad: stage 0, for an optimizer of torch.optim: gradients
    that are complete are in `.grad` too, and a forward after the optimizer's `zero_grad()` begins a step.
    """

    @memory_kind("communication")
    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        config: DataParallelConfig | None = None,
        weight_grads: WeightGradStore | None = None,
        *,
        tier: Tier | None = None,
        whole: Collection[str] = (),
        fills_grad: bool = False,
    ):
        super().__init__()
        self.module, self.mesh = module, mesh
        self.fills_grad = fills_grad
        # Of the module's buffers, by name, when the model was built; None: not noted. Checkpoints of the loop lack buffers.
        self.buffers_at_start: dict[str, str] | None = None
        self.settings = config or DataParallelConfig()
        self._weight_grads = weight_grads or WeightGradStore()
        module.register_load_state_dict_pre_hook(_refuse_other_tensors)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if placement_of(parameter) is None:
                parameter.placement = Placement(tuple(parameter.shape), init=None, replicated_over=("tp",))
            set_slot(parameter, ParamSlot(name, parameter))
            parameter.register_post_accumulate_grad_hook(self._move_to_main_grad)
        partial_over = set().union(*(partial_axes(p.placement) for p in trained.values())) - {ACROSS_STAGES}
        self._partial_over = [name for name in mesh if name in partial_over and mesh[name].size > 1]
        if fills_grad and self.settings.zero.shards_state:
            raise ConfigError(
                f"fills_grad needs whole gradients; ZeRO stage {self.settings.stage} keeps shards of them"
            )
        units = units_of(module)
        items = [Item(n, p.numel(), _buffer_key(p), units[n], n in whole) for n, p in trained.items()]
        self.buffers = [
            ParamAndGradBuffer(plan, trained, self._axes(plan.key), self.settings, tier)
            for plan in lay_out(items, cut_of=self._cut)
        ]
        # With transient gradients, all ranks of a shard axis must use the model in one order.
        self._orders = {
            buffer.axes.shard: UseOrder(buffer.axes.shard, buffer.device, at_once=self.settings.poison_released_buffers)
            for buffer in (self.buffers if self.settings.zero.passes_grads else ())
        }
        self._buckets = [
            Bucket(buffer, number, self._orders.get(buffer.axes.shard))
            for buffer in self.buffers
            for number in range(len(buffer.plan.buckets))
        ]
        self._choose_strategies()
        self._trained, self._is_filled = list(trained.values()), False
        self._frozen = {name: p for name, p in module.named_parameters() if name not in trained}
        # Transient parameters have no fixed memory; their class refuses an assignment to `.data`.
        lasting = () if self.settings.zero.passes_params else trained.values()
        self._addresses = {p.slot: p.data_ptr() for p in lasting}
        self.zero_grad_buffer()

    def _choose_strategies(self) -> None:
        """Choose the gradient and parameter strategy of the ZeRO stage."""
        config, buckets = self.settings, self._buckets
        uses, ahead = self._count_uses(), config.overlap_param_gather
        self._params: ParamGather = (
            ParamFetcher(self.module, buckets, uses, ahead=ahead)
            if config.zero.passes_params
            else ParamGather(self.module, buckets, overlap=ahead)
        )
        self._grads: GradReduce
        if config.fixed_order_grad_reduce:
            self._grads = ReduceInFixedOrder(buckets, self.mesh[ACROSS_STAGES])
        elif config.zero.passes_grads:
            store, orders = self._weight_grads, self._orders.values()
            self._grads = ReduceEachMicrobatch(
                buckets, self._params, uses, orders, store, overlap=config.overlap_grad_reduce
            )
        else:
            self._grads = ReduceOnce(buckets, overlap=config.overlap_grad_reduce)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the step are reduced."""
        return self._grads.is_complete

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has added any since `zero_grad_buffer`."""
        return self._grads.has_gradients

    def _axes(self, key: tuple) -> GradAxes:
        config = self.settings
        return self.mesh.grad_axes(key[0], shards=config.zero.shards_state, divides_outer=config.divides_over_outer)

    def _cut(self, key: tuple) -> Cut:
        """How the buffer of these parameters is cut into buckets and shards."""
        axes = self._axes(key)
        shards = axes.shard.size * axes.outer.size
        by_unit = self.settings.zero.passes_params or grads_come_late(axes, self.settings)
        return Cut(self.settings.bucket_numel(axes.reduce.size), shards, by_unit=by_unit)

    def _count_uses(self) -> Uses:
        """Gradients of one backward by bucket, as the model declares them, and the buckets without a declaration."""
        said = {bucket: [uses_of(s.parameter) for s in bucket.slots] for bucket in self._buckets}
        guessed = [bucket for bucket, counts in said.items() if set(counts) == {None}]
        return Uses({bucket: sum(count or 1 for count in counts) for bucket, counts in said.items()}, guessed)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self._begin_if_zeroed()
        self._params.before_forward()
        return self.module(*inputs, **options)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.module.set_input_tensor(x)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient of the chunk."""
        for tensor in (tensor for buffer in self.buffers for tensor in buffer.sums.tensors):
            tensor.mul_(scaling_factor)
        self._fill()

    def zero_grad_buffer(self, num_microbatches: int | None = None) -> None:
        """Forget the gradients of the last step, which may have ended in an error.

        num_microbatches: of the next step. If the number changes, or is unknown after an error, overlap learns anew
        how many gradients each parameter gets.
        """
        self._check_parameters()
        self._params.begin_step()
        self._grads.begin_step(num_microbatches)
        for parameter in self._trained if self._is_filled else ():
            parameter.grad = None
        self._is_filled = False

    def _fill(self) -> None:
        """Put the gradients into `.grad`, if there are any: the buffer's own memory where it has the parameter's dtype."""
        self._is_filled = self.fills_grad and self._grads.has_gradients
        for parameter in self._trained if self._is_filled else ():
            parameter.grad = parameter.main_grad.to(parameter.dtype) if parameter.requires_grad else None

    def _begin_if_zeroed(self) -> None:
        if self._is_filled and all(parameter.grad is None for parameter in self._trained):
            self.zero_grad_buffer()

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the model computes with other tensors than the optimizer trains; it would learn
        nothing."""
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{', '.join(thawed[:5])}: frozen when the model was wrapped in DistributedDataParallel, so without a gradient "
                "buffer and optimizer state; to train it later, wrap it with requires_grad_(True), then call "
                "requires_grad_(False)"
            )
        with torch._C.DisableTorchFunctionSubclass():  # else data_ptr would wait for parameters in flight
            moved = [slot.name for slot, at in self._addresses.items() if slot.parameter.data_ptr() != at]
        if moved:
            raise RuntimeError(
                f"{', '.join(moved[:5])}: no longer a view of the trained buffer, since `.data` was set, as module.to(dtype) "
                "does; do that before the model is wrapped in DistributedDataParallel, or copy values with "
                "parameter.data.copy_() before the optimizer is made"
            )

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Called before a forward or backward of this microbatch."""
        self._begin_if_zeroed()
        self._grads.begin_microbatch(microbatch, backward=backward)
        self._params.begin_microbatch(backward=backward)

    def start_grad_reduce(self) -> None:
        """Start every reduction that is not in flight. No backward of this chunk may follow before the next
        `zero_grad_buffer`."""
        self._grads.start()

    @memory_kind("communication")
    def finish_grad_reduce(self) -> None:
        """Wait until this rank's shard of every gradient is the sum over all samples of the step. Later calls change
        nothing."""
        if self.is_complete:
            return
        if not self._grads.begun:
            self._grads.start()
        self._params.finish()  # a gather that no forward has waited for would overwrite the update
        self._grads.finish()
        for name in self._partial_over:
            self._sum_partial(name)
        for buffer in self.buffers if not self._grads.sums_ends else ():
            for tensor in buffer.sums.tensors if buffer.is_tied else ():
                collectives.all_reduce(tensor, self.mesh[ACROSS_STAGES])
        self._grads.is_complete = True
        self._fill()

    # Megatron's names, for a fork's own loop.

    def no_sync(self) -> AbstractContextManager:
        """Nothing to hold back: a reduction starts with the last gradient of its step, or in stages 2 and 3 of its
        microbatch."""
        return nullcontext()

    def start_grad_sync(self, *_: Any) -> None:
        self.start_grad_reduce()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.finish_grad_reduce()

    def gather_params(self) -> None:
        """All-gather the shards that the other ranks have updated.

        With `overlap_param_gather` the all-gathers only start, in the order of the next forward, where each module
        waits for its own. Call `finish_param_gather` before any other use of the parameters. In stage 3 each forward
        gathers for itself.
        """
        self._params.updated()

    def finish_param_gather(self) -> None:
        """Wait until this rank has all parameters of the chunk; in stage 3, release all but its shards."""
        self._params.finish()

    def param_shards(self) -> dict[str, tuple[tuple[int, int], Stored]]:
        """Stage 3: parameter name -> ((start, stop) in row-major order, values) of this rank's shard, in memory or in a
        file."""
        return {
            slot.name: (buffer.held_params.elements(slot), buffer.held_params.values(slot))
            for buffer in self.buffers
            if buffer.zero.passes_params
            for slot in buffer.plan.slots
        }

    def flats(self) -> list[Flat]:
        """Each buffer by the numbers that its traffic follows from."""
        twice = [bucket for bucket in self._buckets if any(is_lent(s.parameter) for s in bucket.slots)]
        result = []
        for buffer in self.buffers:
            lent = sum(b.plan.stop - b.plan.start for b in twice if b.buffer is buffer)
            widths = [kind.itemsize for kind in (buffer.dtype, buffer.master_dtype, buffer.grad_dtype)]
            if self.settings.grad_reduce_in_bf16:
                widths[2] = torch.bfloat16.itemsize
            result.append(Flat(buffer.plan.numel, lent, *widths, self.settings.reduce_scatter_with_fp32_accumulation))
        return result

    def _sum_partial(self, axis_name: str) -> None:
        """Sum partial gradients over the axis (norms under sequence parallelism, shared key/value heads), in one
        message per buffer."""
        for buffer in self.buffers:
            sums = buffer.sums
            parts = [
                sums.at(start, stop)
                for slot in buffer.plan.slots
                for first, last in _partial_runs(buffer.parameters[slot.name], axis_name)
                for start, stop in overlaps(sums.held, slot.start + first, slot.start + last)
            ]
            if not parts:
                continue
            # Norms and biases are small: one message costs less than the latency of many.
            flat = collectives.all_reduce(torch.cat(parts), self.mesh[axis_name])
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total)

    def _move_to_main_grad(self, parameter: nn.Parameter) -> None:
        """Add a gradient that autograd left in `.grad`. Linear layers write into the buffer themselves and leave none.

        While weight gradients are deferred, the gradients of other layers are deferred too; otherwise their buckets
        would stay resident until the linear layers' gradients come.
        """
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self.settings.zero.passes_grads and self._weight_grads.is_collecting:
            self._weight_grads.keep(partial(_add_to_main_grad, parameter, gradient))
            grad_was_put_off(parameter)
        else:
            _add_to_main_grad(parameter, gradient)


def _refuse_other_tensors(module: nn.Module, state: dict, prefix: str, metadata: dict, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace parameters, which are views of contiguous buffers; leave out "
            "assign=True, or load before the model is wrapped"
        )


def _partial_runs(parameter: nn.Parameter, axis_name: str) -> list[tuple[int, int]]:
    """The runs (start, stop) of elements whose gradient is partial on each rank of the axis."""
    shape = tuple(parameter.shape)
    return [flat_run(box, shape) for box in partial_grads(parameter.placement, shape, axis_name)]


def _buffer_key(parameter: nn.Parameter) -> tuple:
    placement = parameter.placement
    return placement.reduce_over, parameter.dtype, ACROSS_STAGES in placement.partial_grad


def _add_to_main_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    open_main_grad(parameter).add_(gradient)
    grad_was_added(parameter)
