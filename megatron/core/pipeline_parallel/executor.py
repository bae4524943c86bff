"""Runs one rank's list of pipeline actions: the only file that knows both the schedule and tensors.

There is no separate path without pipelining: one rank runs F0.0 B0.0 F0.1 B0.1 ..., and evaluation is a list of forwards.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.loss import ForwardStep, LossTotals, read_loss, read_step
from megatron.core.pipeline_parallel.lower import BEGIN_OF, DIRECTION_OF, partner
from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule
from megatron.core.pipeline_parallel.simulate import show
from megatron.core.pipeline_parallel.transport import Transfer, Transport
from megatron.core.stage_map import StageMap
from megatron.core.weight_grads import WeightGradStore, Work

Key = tuple[int, int]  # (stage, microbatch)


class Executor:
    """One rank's part of one step. Holds what is in flight, by (stage, microbatch).

    chunks: the model chunks of this rank by stage; data_iterators: likewise (None where a stage reads nothing).
    forward_step(data_iterator, model) -> (output, loss_func), as Megatron's.
    begin(action) is called before each compute action, reduce(stage) once a stage's gradients are complete; each action runs
    inside around(action), if that is given: a timer, a profiler's range.
    weight_grads: the store of the chunks' linear layers, for schedules that put weight gradients off.
    nominal_tokens: those of a full microbatch, the weight of a loss that is a mean.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        stages: StageMap,
        *,
        transport: Transport,
        forward_step: ForwardStep,
        data_iterators: Mapping[int, Iterator | None],
        begin: Callable[[Action], None] = lambda action: None,
        reduce: Callable[[int], None] = lambda stage: None,
        weight_grads: WeightGradStore | None = None,
        nominal_tokens: float = 1.0,
        around: Callable[[Action], AbstractContextManager] | None = None,
    ):
        self.chunks, self.stages = chunks, stages
        self.transport, self.nominal_tokens = transport, nominal_tokens
        self.forward_step, self.data_iterators = forward_step, data_iterators
        self.begin, self.reduce = begin, reduce
        self.weight_grads = weight_grads or WeightGradStore()
        self.around = around
        self.inputs: dict[Key, tuple[_Input, ...]] = {}
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}  # until they are sent
        self.roots: dict[Key, tuple[Tensor | GradientEdge, ...]] = {}  # where a backward starts
        self.grads: dict[Key, tuple[Tensor | None, ...]] = {}
        self.weight_work: dict[Key, list[Work]] = {}
        self.transfers: dict[Action, Transfer] = {}
        self.totals = LossTotals()
        self.training, self.loss_scale = True, 1.0

    def run(self, schedule: Schedule, rank: int, *, training: bool = True, loss_scale: float = 1.0) -> LossTotals:
        """Do every action of `schedule[rank]` in order. The totals are those of the last stage, empty elsewhere.

        Every pipeline rank must call with the same schedule. `loss_scale` multiplies what is differentiated, not what is
        reported. An error carries the action and the grid around it.
        """
        self.training, self.loss_scale = training, loss_scale
        self.totals = LossTotals()
        with torch.set_grad_enabled(training):
            for index, action in enumerate(schedule[rank]):
                try:
                    self._do(action)
                except Exception as error:
                    error.add_note(f"while running pipeline action {action}:\n{show(schedule, rank, index)}")
                    raise
        held = ("inputs", "outputs", "roots", "grads", "weight_work", "transfers")
        left = {name: list(getattr(self, name)) for name in held if getattr(self, name)}
        assert not left, f"the schedule is not complete, it leaves {left}"
        return self.totals

    def _do(self, action: Action) -> None:
        if self.around is None:
            _HANDLERS[action.op](self, action)
            return
        with self.around(action):
            _HANDLERS[action.op](self, action)

    # ---------------------------------------------------------------- compute

    def forward(self, action: Action) -> None:
        stage, microbatch = action[1:]
        key, chunk = (stage, microbatch), self.chunks[stage]
        self.begin(action)
        inputs = tuple(x.enter() for x in self.inputs.get(key, ()))
        chunk.set_input_tensor(inputs[0] if len(inputs) == 1 else inputs or None)
        del inputs  # what the stage does not keep is freed as soon as it has gone on
        output, loss_func = read_step(
            self.forward_step(self.data_iterators[stage], chunk), is_last=stage == self.stages.last
        )
        chunk.set_input_tensor(None)
        if stage == self.stages.last:
            loss = read_loss(loss_func(output), self.nominal_tokens)
            self.totals.add(loss)
            output = loss.objective if self.loss_scale == 1.0 else loss.objective * self.loss_scale
        outputs = output if isinstance(output, tuple) else (output,)
        if self.training:
            self.roots[key] = outputs if stage == self.stages.last else tuple(_root(x) for x in outputs)
        else:
            self.inputs.pop(key, None)
        if stage + 1 in self.chunks:  # the next stage lives here too
            self.inputs[stage + 1, microbatch] = _as_inputs(outputs, self.training)
        elif stage < self.stages.last:
            self.outputs[key] = outputs

    def backward(self, action: Action) -> None:
        """Gradients of the stage's input and weights. A stage of which nothing is trained has neither."""
        stage, microbatch = action[1:]
        key = (stage, microbatch)
        self.begin(action)
        roots, inputs = self.roots.pop(key), self.inputs.pop(key, ())
        incoming = (None,) * len(roots) if stage == self.stages.last else self.grads.pop(key)
        pairs = [(root, grad) for root, grad in zip(roots, incoming) if root is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        grads = tuple(x.take_grad() for x in inputs)
        if stage - 1 in self.chunks:
            self.grads[stage - 1, microbatch] = grads
        elif stage > 0:
            self.grads[key] = grads  # until SEND_B

    def backward_input(self, action: Action) -> None:
        with self.weight_grads.collect() as work:
            self.backward(action)
        self.weight_work[action.stage, action.microbatch] = work

    def backward_weight(self, action: Action) -> None:
        self.begin(action)
        for work in self.weight_work.pop((action.stage, action.microbatch)):
            work()

    # ---------------------------------------------------------------- transfers

    def send(self, action: Action) -> None:
        held = self.outputs if action.op is Op.SEND_F else self.grads
        tensors = tuple(x.detach() for x in held.pop((action.stage, action.microbatch)))
        self.transfers[action] = self.transport.send(DIRECTION_OF[action.op], self._peer(action), tensors)

    def post(self, action: Action) -> None:
        self.transfers[action] = self.transport.post(DIRECTION_OF[action.op], self._peer(action))

    def sent(self, action: Action) -> None:
        """The tensors have left: only what a backward needs of them stays alive."""
        self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()

    def receive(self, action: Action) -> None:
        tensors = self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()
        if action.op is Op.RECV_F:
            self.inputs[action.stage, action.microbatch] = _as_inputs(tensors, self.training)
        else:
            self.grads[action.stage, action.microbatch] = tensors

    def reduce_grads(self, action: Action) -> None:
        self.reduce(action.stage)

    def _peer(self, transfer: Action) -> int:
        """The pipeline rank at the other end."""
        return self.stages.ranks[partner(transfer).stage]


class _Input:
    """What came from the stage before: the tensor until a forward takes it, then only the gradient that the stage before wants.

    A leaf would do for both, but the graph holds a leaf to its end, also where the layers keep their input elsewhere or in parts.
    """

    def __init__(self, x: Tensor, training: bool):
        self._x: Tensor | None = x
        self._like = torch.empty_like(x, device="meta")
        self._device, self._wants_grad = x.device, training and x.is_floating_point()
        self._grads: list[Tensor] = []

    def enter(self) -> Tensor:
        """The tensor, once, as the start of the stage's graph."""
        x, self._x = self._x, None
        assert x is not None, "the forward of a microbatch runs once"
        return _Start.apply(torch.empty(0, requires_grad=True), x, self._grads) if self._wants_grad else x

    def take_grad(self) -> Tensor:
        """Zeros where the backward had none."""
        if not self._grads:
            return torch.zeros_like(self._like, device=self._device)
        return self._grads.pop().contiguous()  # a sum's gradient is one number, expanded


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
    return tuple(_Input(x.detach(), training) for x in tensors)


def _root(x: Tensor) -> GradientEdge | None:
    """Where a backward from `x` starts, without keeping the tensor's memory; None if nothing behind it is trained."""
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
