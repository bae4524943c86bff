"""The executor: runs one rank's list of pipeline actions on tensors.

A run without pipelining takes the same path: one rank runs F0.0 B0.0 F0.1 B0.1 ..., and evaluation is a list of forwards.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.base.memory_category import ACTIVATIONS, set_memory_kind
from megatron.core.ops.deferred_wgrad import WeightGradStore, Work
from megatron.core.parallel.stage_map import StageMap
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, LossTotals, read_loss, read_step
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule
from megatron.core.pipeline_parallel.schedule.lower import BEGIN_OF, DIRECTION_OF, partner
from megatron.core.pipeline_parallel.schedule.simulate import show
from megatron.core.pipeline_parallel.stage_transport import Transfer, Transport

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(eq=False)
class Executor:
    """One rank's part of one step. Holds the tensors in flight by (stage, microbatch).

    chunks, data_iterators: by stage; an iterator may be None for a stage that reads no data.
    forward_step(data_iterator, model) -> (output, loss_func), as in Megatron.
    begin(action) is called before each compute action, reduce(stage) once the stage's gradients are complete.
    around(action):
    a context for each action, such as a timer or a profiler range.
    weight_grads: the store of the chunks' linear layers, for schedules that defer weight gradients.
    nominal_tokens: tokens of a full microbatch, the weight of a loss that is a mean.
    """

    chunks: Mapping[int, nn.Module]
    stages: StageMap
    _: KW_ONLY
    transport: Transport
    forward_step: ForwardStep
    data_iterators: Mapping[int, Iterator | None]
    begin: Callable[[Action], None] = lambda action: None
    reduce: Callable[[int], None] = lambda stage: None
    weight_grads: WeightGradStore = field(default_factory=WeightGradStore)
    nominal_tokens: float = 1.0
    around: Callable[[Action], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        self.inputs: dict[Key, tuple[_Input, ...]] = {}
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}  # until sent
        self.roots: dict[Key, tuple[Tensor | GradientEdge, ...]] = {}  # the start of each backward
        self.grads: dict[Key, tuple[Tensor | None, ...]] = {}
        self.weight_work: dict[Key, list[Work]] = {}
        self.transfers: dict[Action, Transfer] = {}
        self.totals = LossTotals()
        self.training, self.loss_scale = True, 1.0

    def run(self, schedule: Schedule, rank: int, *, training: bool = True, loss_scale: float = 1.0) -> LossTotals:
        """Runs the actions of `schedule[rank]` in order. Returns the totals of the last stage; empty on other ranks.

        Every pipeline rank must call with the same schedule. `loss_scale` multiplies the gradients, not the reported loss.
        An error carries the action and the part of the schedule around it.
        """
        self.training, self.loss_scale = training, loss_scale
        self.totals = LossTotals()
        with torch.set_grad_enabled(training):
            for index, action in enumerate(schedule[rank]):
                try:
                    with self.around(action):
                        _HANDLERS[action.op](self, action)
                except Exception as error:
                    error.add_note(f"while running pipeline action {action}:\n{show(schedule, rank, index)}")
                    raise
        held = ("inputs", "outputs", "roots", "grads", "weight_work", "transfers")
        left = {name: list(getattr(self, name)) for name in held if getattr(self, name)}
        assert not left, f"the schedule is incomplete; still in flight: {left}"
        return self.totals

    # ---------------------------------------------------------------- compute

    def forward(self, action: Action) -> None:
        stage, key = action.stage, action[1:]
        chunk = self.chunks[stage]
        self.begin(action)
        inputs = tuple(x.enter() for x in self.inputs.get(key, ()))
        chunk.set_input_tensor(inputs[0] if len(inputs) == 1 else inputs or None)
        del inputs  # the executor keeps no reference, so the chunk can free its input early
        is_last = stage == self.stages.last
        output, loss_func = read_step(self.forward_step(self.data_iterators[stage], chunk), is_last=is_last)
        # The chunk would keep this input alive until its next microbatch.
        chunk.set_input_tensor(None)
        if is_last:
            loss = read_loss(loss_func(output), self.nominal_tokens)
            self.totals.add(loss)
            output = loss.objective if self.loss_scale == 1.0 else loss.objective * self.loss_scale
        outputs = output if isinstance(output, tuple) else (output,)
        if self.training:
            self.roots[key] = outputs if is_last else tuple(_root(x) for x in outputs)
        else:
            self.inputs.pop(key, None)
        if stage + 1 in self.chunks:  # the next stage is on this rank: no transfer
            # Detached, as if received: each stage's backward is an action of its own.
            self.inputs[stage + 1, action.microbatch] = _as_inputs(outputs, self.training)
        elif not is_last:
            self.outputs[key] = outputs

    def backward(self, action: Action) -> None:
        """Gradients of the stage's input and weights. A root of None, of a frozen stage, has no backward."""
        stage, key = action.stage, action[1:]
        self.begin(action)
        roots, inputs = self.roots.pop(key), self.inputs.pop(key, ())
        # None: a loss is a scalar, whose backward starts with 1.
        incoming = (None,) * len(roots) if stage == self.stages.last else self.grads.pop(key)
        pairs = [(root, grad) for root, grad in zip(roots, incoming) if root is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        grads = tuple(x.take_grad() for x in inputs)
        if stage - 1 in self.chunks:
            self.grads[stage - 1, action.microbatch] = grads
        elif stage > 0:
            self.grads[key] = grads  # until SEND_B

    def backward_input(self, action: Action) -> None:
        with self.weight_grads.collect() as work:
            self.backward(action)
        self.weight_work[action[1:]] = work

    def backward_weight(self, action: Action) -> None:
        self.begin(action)
        for work in self.weight_work.pop(action[1:]):
            work()

    # ---------------------------------------------------------------- transfers

    def send(self, action: Action) -> None:
        held = self.outputs if action.op is Op.SEND_F else self.grads
        # A transfer must not keep the graph alive behind the tensor that it sends.
        tensors = tuple(x.detach() for x in held.pop(action[1:]))
        self.transfers[action] = self.transport.send(DIRECTION_OF[action.op], self._peer(action), tensors)

    def post(self, action: Action) -> None:
        self.transfers[action] = self.transport.post(DIRECTION_OF[action.op], self._peer(action))

    def sent(self, action: Action) -> None:
        """Ends a send: from here on only the autograd graph keeps the tensors."""
        self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()

    def receive(self, action: Action) -> None:
        tensors = self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()
        if action.op is Op.RECV_F:
            self.inputs[action[1:]] = _as_inputs(tensors, self.training)
        else:
            self.grads[action[1:]] = tensors

    def reduce_grads(self, action: Action) -> None:
        self.reduce(action.stage)

    def _peer(self, transfer: Action) -> int:
        """The pipeline rank at the other end of a transfer."""
        return self.stages.ranks[partner(transfer).stage]


class _Input:
    """An input of a stage: the tensor until the forward takes it, then its gradient for the previous stage.

    A leaf tensor would serve, but the graph keeps a leaf alive until its end, even if the layers shard or offload their
    input.
    """

    def __init__(self, x: Tensor, training: bool):
        self._x: Tensor | None = x
        self._shape = x.shape
        self._dtype, self._device = x.dtype, x.device
        self._wants_grad = training and x.is_floating_point()
        self._grads: list[Tensor] = []

    def enter(self) -> Tensor:
        """The tensor as the root of the stage's graph. May be called once."""
        x, self._x = self._x, None
        assert x is not None, "the forward of a microbatch ran twice"
        # The empty leaf makes autograd call _Start's backward; the input itself stays no leaf.
        return _Start.apply(torch.empty(0, requires_grad=True), x, self._grads) if self._wants_grad else x

    def take_grad(self) -> Tensor:
        """The gradient, contiguous; zeros if the backward produced none."""
        if not self._grads:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._grads.pop().contiguous()  # the gradient of a sum is an expanded scalar


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _: Tensor, x: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, None]:
        ctx.grads.append(grad)
        return None, None, None


def _as_inputs(tensors: tuple[Tensor, ...], training: bool) -> tuple[_Input, ...]:
    set_memory_kind(ACTIVATIONS, tensors)
    return tuple(_Input(x.detach(), training) for x in tensors)


def _root(x: Tensor) -> GradientEdge | None:
    """The start of a backward from `x` that does not keep its memory alive; None if `x` needs no gradient."""
    return get_gradient_edge(x) if x.requires_grad else None


_HANDLERS: dict[Op, Callable[[Executor, Action], None]] = {
    Op.F: Executor.forward,
    Op.B: Executor.backward,
    Op.I: Executor.backward_input,
    Op.W: Executor.backward_weight,
    Op.SEND_F: Executor.send,
    Op.SEND_B: Executor.send,
    Op.SENT_F: Executor.sent,
    Op.SENT_B: Executor.sent,
    Op.POST_F: Executor.post,
    Op.POST_B: Executor.post,
    Op.RECV_F: Executor.receive,
    Op.RECV_B: Executor.receive,
    Op.REDUCE: Executor.reduce_grads,
}
