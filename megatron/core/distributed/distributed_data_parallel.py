"""Data parallelism: a model chunk whose gradients lie in contiguous buffers, summed over the ranks that hold its
copies.

    backward        every gradient is added to its parameter's `main_grad`, a view of a buffer
    REDUCE action   start_grad_reduce(): begins the sum over the data-parallel ranks; with `overlap` most of it is under way,
                    a bucket having begun as soon as its last gradient was written
    end of step     finish_grad_reduce(): waits, then sums what other ranks hold parts of: norms under sequence parallelism over
                    tp, a tied embedding over the first and the last stage
    after the       gather_params(): with ZeRO, where a rank has the sum of its shard only (reduce-scatter) and updates that,
    update          the ranks give one another what they updated

A buffer holds the parameters of one dtype that are reduced over one group; a tied embedding has a buffer of its own,
laid out alike on the first and the last stage. What is whole and what is in shards over the data-parallel ranks, and
what is sent, in a step of m microbatches (ZeRO, arXiv:1910.02054, section 5):

    stage   parameters   gradients   sums, masters, moments   sent
    0       whole        whole       whole                    all-reduce of gradients
    1       whole        whole       shard                    reduce-scatter of gradients, all-gather of parameters
    2       whole        passing     shard                    m reduce-scatters, all-gather
    3       passing      passing     shard                    m reduce-scatters, 2 m all-gathers (`fetch.py`)

With copies of the shards (hybrid sharding, arXiv:2304.11277: `GradAxes.replica`), an all-reduce of the summed shard
too. With masters and moments divided over those ranks as well (--outer-dp-sharding-strategy optim), a reduce-scatter
and an all-gather instead.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import flat_run
from megatron.core.current_mesh import current
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.buffer import ACROSS_STAGES, ParamAndGradBuffer
from megatron.core.distributed.call_order import UseOrder
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.fetch import ParamFetcher, units_of
from megatron.core.distributed.fixed_order import ReduceInFixedOrder
from megatron.core.distributed.plan import Cut, Item, lay_out, overlaps
from megatron.core.distributed.slot import ParamSlot
from megatron.core.distributed.uses import Uses
from megatron.core.distributed.zero import GradReduce, ParamGather, ReduceEachMicrobatch, ReduceOnce
from megatron.core.main_grad import grad_was_added, grad_was_put_off, open_main_grad
from megatron.core.mesh import GradAxes, Mesh
from megatron.core.placement import Placement, partial_axes, partial_grads
from megatron.core.storage.stored import Stored
from megatron.core.tiers.tier import Tier
from megatron.core.weight_grads import WeightGradStore


class DistributedDataParallel(nn.Module):
    """Wraps one model chunk. Every rank of the chunk's data- and tensor-parallel groups must wrap its own and call
    alike.

    A parameter without a placement (of a plain torch module) is taken to be whole on every rank. weight_grads: where
    the module's linear layers put off weight gradients, if a schedule asks for it; in stages 2 and 3 the gradients of
    its other layers follow.
    tier: where the shards of ZeRO stage 3 are kept; in the device's memory when None. whole: the names of
    parameters whose optimizer computes with whole tensors; a shard of ZeRO stage 1 has all of one, or nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        config: DataParallelConfig | None = None,
        weight_grads: WeightGradStore | None = None,
        *,
        tier: Tier | None = None,
        whole: Collection[str] = (),
    ):
        super().__init__()
        self.module, self.mesh = module, mesh
        self.config = config or DataParallelConfig()
        self._weight_grads = weight_grads or WeightGradStore()
        module.register_load_state_dict_pre_hook(_refuse_other_tensors)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if not hasattr(parameter, "placement"):
                parameter.placement = Placement(tuple(parameter.shape), init=None, replicated_over=("tp",))
            parameter.slot = ParamSlot(name, parameter)
            parameter.register_post_accumulate_grad_hook(self._move_to_main_grad)
        partial_over = set().union(*(partial_axes(p.placement) for p in trained.values())) - {ACROSS_STAGES}
        self._partial_over = [name for name in mesh if name in partial_over and mesh[name].size > 1]
        units = units_of(module)
        items = [Item(n, p.numel(), _buffer_key(p), units[n], n in whole) for n, p in trained.items()]
        self.buffers = [
            ParamAndGradBuffer(plan, trained, self._axes(plan.key), self.config, tier)
            for plan in lay_out(items, cut_of=self._cut)
        ]
        # Where gradients pass, ranks that divide a buffer must make its calls in one order.
        self._orders = {
            buffer.axes.shard: UseOrder(buffer.axes.shard, buffer.device, at_once=self.config.poison_released_buffers)
            for buffer in (self.buffers if self.config.zero.passes_grads else ())
        }
        self._buckets = [
            Bucket(buffer, number, self._orders.get(buffer.axes.shard))
            for buffer in self.buffers
            for number in range(len(buffer.plan.buckets))
        ]
        self._choose_strategies()
        self._frozen = {name: p for name, p in module.named_parameters() if name not in trained}
        # Parameters that pass have no memory to be at; their class sees to it that nobody gives them another.
        lasting = () if self.config.zero.passes_params else trained.values()
        self._addresses = {p.slot: p.data_ptr() for p in lasting}
        self.zero_grad_buffer()

    def _choose_strategies(self) -> None:
        """What the ZeRO stage does with gradients and with parameters."""
        config, buckets = self.config, self._buckets
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
        """Whether the gradients of the step are summed."""
        return self._grads.is_complete

    def _axes(self, key: tuple) -> GradAxes:
        config = self.config
        return self.mesh.grad_axes(key[0], shards=config.zero.shards_state, divides_outer=config.divides_over_outer)

    def _cut(self, key: tuple) -> Cut:
        """How the buffer of these parameters is divided."""
        axes = self._axes(key)
        shards = axes.shard.size * axes.outer.size
        return Cut(self.config.bucket_numel(axes.reduce.size), shards, by_unit=self.config.zero.passes_params)

    def _count_uses(self) -> Uses:
        """Gradients of one backward by bucket, as the model says it, and in which buckets it says nothing."""
        said = {bucket: [getattr(s.parameter, "uses", None) for s in bucket.slots] for bucket in self._buckets}
        guessed = [bucket for bucket, counts in said.items() if set(counts) == {None}]
        return Uses({bucket: sum(count or 1 for count in counts) for bucket, counts in said.items()}, guessed)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self._params.before_forward()
        return self.module(*inputs, **options)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.module.set_input_tensor(x)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient of the chunk."""
        for tensor in (tensor for buffer in self.buffers for tensor in buffer.sums.tensors):
            tensor.mul_(factor)

    def zero_grad_buffer(self, num_microbatches: int | None = None) -> None:
        """Forget the gradients of the step before, and what is left of one that an error ended.

        num_microbatches: those of the step to come. Where they are others than before, or unknown after an error,
        overlap begins again from not knowing how often a gradient is written.
        """
        self._check_parameters()
        self._params.begin_step()
        self._grads.begin_step(num_microbatches)

    def _check_parameters(self) -> None:
        """Raise RuntimeError where the model computes with something else than what is trained: it would go on, and
        learn nothing there."""
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{', '.join(thawed[:5])}: frozen when the model was wrapped in DistributedDataParallel, and so without a "
                "gradient buffer and an optimizer's state; call requires_grad_(True) before, and requires_grad_(False) "
                "after, where training begins later"
            )
        with torch._C.DisableTorchFunctionSubclass():  # which would wait for parameters that are on their way
            moved = [slot.name for slot, at in self._addresses.items() if slot.parameter.data_ptr() != at]
        if moved:
            raise RuntimeError(
                f"{', '.join(moved[:5])}: no longer in the buffer that is trained, since something has set `.data`, as "
                "module.to(dtype) does; do that before the model is wrapped in DistributedDataParallel, or copy values with "
                "parameter.data.copy_() before the optimizer is made"
            )

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """A forward or a backward of this microbatch follows."""
        self._grads.begin_microbatch(microbatch, backward=backward)
        self._params.begin_microbatch(backward=backward)

    def start_grad_reduce(self) -> None:
        """Begin to sum what is not under way; no backward of this chunk may follow before the next
        `zero_grad_buffer`."""
        self._grads.start()

    def finish_grad_reduce(self) -> None:
        """Every gradient, of which this rank may own a shard, is the sum over all samples of the step when this
        returns. A step is summed once, whoever asks for it and how often: later calls change nothing."""
        if self.is_complete:
            return
        if not self._grads.begun:
            self._grads.start()
        self._params.finish()  # what no forward has waited for would come on top of the update
        self._grads.finish()
        for name in self._partial_over:
            self._sum_partial(name)
        for buffer in self.buffers if not self._grads.sums_ends else ():
            for tensor in buffer.sums.tensors if buffer.is_tied else ():
                comm.all_reduce(tensor, self.mesh[ACROSS_STAGES])
        self._grads.is_complete = True

    # Megatron's names of these, for a fork's own loop.

    def no_sync(self) -> AbstractContextManager:
        """Nothing is to be held back: a sum begins with the last gradient of its step, or in stages 2 and 3 of its
        microbatch."""
        return nullcontext()

    def start_grad_sync(self) -> None:
        self.start_grad_reduce()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.finish_grad_reduce()

    def gather_params(self) -> None:
        """Fetch what the other ranks have updated. With `overlap_param_gather` this only begins, in the order of the
        next forward, where each module waits for its own; call `finish_param_gather` before anything else reads
        parameters. In stage 3 each forward fetches for itself, from ranks that hold a shard up to date."""
        self._params.updated()

    def finish_param_gather(self) -> None:
        """Every rank has all parameters of the chunk when this returns; in stage 3, its shards of them and nothing
        else."""
        self._params.finish()

    def param_shards(self) -> dict[str, tuple[tuple[int, int], Stored]]:
        """In stage 3, of each trained parameter the elements (start, stop), in row-major order, that this rank holds,
        and them, in memory or in a file."""
        return {
            slot.name: (buffer.held_params.elements(slot), buffer.held_params.values(slot))
            for buffer in self.buffers
            if buffer.zero.passes_params
            for slot in buffer.plan.slots
        }

    def _sum_partial(self, axis_name: str) -> None:
        """Sum the gradients of which each rank of the axis has a part (norms under sequence parallelism, shared
        key/value heads), in one message."""
        for buffer in self.buffers:
            parts = [
                buffer.sums.at(start, stop)
                for slot in buffer.plan.slots
                for first, last in _partial_runs(buffer.parameters[slot.name], axis_name)
                for start, stop in overlaps(buffer.sums.held, slot.start + first, slot.start + last)
            ]
            if not parts:
                continue
            flat = comm.all_reduce(torch.cat(parts), self.mesh[axis_name])
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total)

    def _move_to_main_grad(self, parameter: nn.Parameter) -> None:
        """Add what autograd has left in `.grad`. A linear layer has written into the buffer itself, and left nothing.
        Where weight gradients are put off, those of the other layers are too, else a bucket's memory would wait for its
        linear layers."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and self.config.zero.passes_grads and self._weight_grads.is_collecting:
            self._weight_grads.keep(partial(_add_to_main_grad, parameter, gradient))
            grad_was_put_off(parameter)
        elif gradient is not None:
            _add_to_main_grad(parameter, gradient)


def _refuse_other_tensors(module: nn.Module, state: dict, prefix: str, metadata: dict, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put tensors of its own where parameters are views of contiguous buffers; "
            "leave out assign=True, or load before the model is wrapped"
        )


def _partial_runs(parameter: nn.Parameter, axis_name: str) -> list[tuple[int, int]]:
    """The elements (start, stop) of whose gradient each rank of the axis has a part."""
    shape = tuple(parameter.shape)
    return [flat_run(box, shape) for box in partial_grads(parameter.placement, shape, axis_name)]


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: Tensor | float | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """The end of a step's gradient sums, over all chunks of this rank. Every rank must call; of a step that is
    finished, as `get_forward_backward_func` leaves it, nothing is summed or divided again.

    num_tokens: this rank's tokens of the step, of which those on the last stage count, to divide the sums by their sum.
    pg_collection, force_all_reduce: without effect; the chunks know their groups, and which shards they need.
    """
    chunks = [chunk for chunk in model if not chunk.is_complete]
    for chunk in chunks:
        chunk.finish_grad_reduce()
    if num_tokens is None or not chunks:
        return
    mesh = chunks[0].mesh
    counted = num_tokens if mesh.has_last_stage else 0.0
    total = torch.as_tensor(counted, dtype=torch.float64).detach().reshape(1).clone().to(current().device)
    for axis in (mesh.tokens, mesh["pp"]):
        comm.all_reduce(total, axis)
    for chunk in chunks:
        chunk.scale_gradients(1.0 / (total.item() or 1.0))


def _buffer_key(parameter: nn.Parameter) -> tuple:
    placement = parameter.placement
    return placement.reduce_over, parameter.dtype, ACROSS_STAGES in placement.partial_grad


def _add_to_main_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    open_main_grad(parameter).add_(gradient)
    grad_was_added(parameter)
