"""The executor runs one rank's list of pipeline actions on tensors, in order.

A run without pipelining takes the same path: one rank runs F0.0 B0.0 F0.1 B0.1 ..., and evaluation is a list of
only forwards. The list, and so the order of F, B and the transfers, is the schedule's; the executor decides nothing of it.

Tensors are held by (stage, microbatch) between the actions that make and use them. On a rank with stage 1 of 3 (without
POST_B1.0 and the SENT that end the sends):

    POST_F1.0    transfers  <- the receive
    RECV_F1.0    inputs     <- transfers
    F1.0         outputs    <- inputs      roots <- the graph
    SEND_F1.0    transfers  <- outputs
    RECV_B1.0    grads      <- the output's gradient
    B1.0         grads      <- roots, grads, inputs: the input's gradient, under the same key
    SEND_B1.0    transfers  <- grads

An action takes what it reads out of its dictionary. Only F leaves its `inputs` entry, for B: the entry gives its tensor
away and is then the place for the tensor's gradient. So no entry keeps an activation for the backward, only the last
stage's loss; what the layers save is in the graph that `roots` starts. Where the next stage is on the same rank, F writes
that stage's `inputs`, and its B writes this stage's `grads`, without a transfer. The first stage has no inputs and the
last no outputs. I is B with weight gradients put off until W.

All of these tensors have the shapes and dtypes of the boundary between two stages, for most models one tensor [s, b, h].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.base.label_allocations_by_memory_kind import ACTIVATIONS, set_memory_kind
from megatron.core.ops.aux_loss_collector import AuxLosses, AuxLossTotals, MoEAuxLossAutoScaler, objective_of
from megatron.core.ops.weight_grad_store import WeightGradStore, Work
from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, LossTotals, parse_loss_tuple, read_step
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule
from megatron.core.pipeline_parallel.schedule.lower import BEGIN_OF, DIRECTION_OF, partner
from megatron.core.pipeline_parallel.schedule.simulate import show_around
from megatron.core.pipeline_parallel.stage_transport import Transfer, Transport

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(eq=False)
class Executor:
    """One rank's part of one step, with the tensors in flight by (stage, microbatch).

    chunks, data_iterators: by stage; an iterator may be None for a stage that reads no data.
    forward_step(data_iterator, model) -> (output, loss_func), as in Megatron.
    begin(action): called before each compute action (F, B, I, W). reduce(stage): called by the stage's REDUCE, once its
    last gradient is computed.
    around(action): returns a context for each action, such as a timer or a profiler range.
    weight_grads: the store of the chunks' linear layers, for schedules that defer weight gradients: it collects in I only.
    nominal_tokens: tokens of a full microbatch, the weight of a loss that is a mean.
    aux_losses: what the layers of the chunks add to the objective; aux_weight: the weight of one forward's, in tokens.
    aux_weight_in_graph: the same, of what layers add by `MoEAuxLossAutoScaler`.
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
    aux_losses: Sequence[AuxLosses] = ()
    device: torch.device | str = "cpu"
    aux_weight: float = 0.0
    aux_weight_in_graph: float = 0.0

    def __post_init__(self) -> None:
        self.inputs: dict[Key, tuple[_Input, ...]] = {}  # until the backward; in evaluation until the forward has ended
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}  # from the forward until SEND_F
        self.roots: dict[Key, tuple[Tensor | GradientEdge | None, ...]] = {}  # the start of each backward
        self.grads: dict[Key, tuple[Tensor, ...]] = {}  # of outputs until the backward, then of inputs until SEND_B
        self.weight_work: dict[Key, list[Work]] = {}  # deferred weight gradients, between I and W
        self.transfers: dict[Action, Transfer] = {}  # by the action that started each
        self.totals = LossTotals()
        self.training = True
        self.loss_scale = 1.0

    def run(self, schedule: Schedule, rank: int, *, training: bool = True, loss_scale: float = 1.0) -> LossTotals:
        """Run the actions of `schedule[rank]` in order. Return the totals of the last stage.

        On other ranks they are empty but for the auxiliary losses of their own layers (`LossTotals.aux`). Every pipeline
        rank must call with the same schedule. `loss_scale` multiplies the gradients, not the reported loss. An error
        carries the action and the part of the schedule around it; what is in flight then is not cleared, since an
        executor is made for each step.
        """
        self.training = training
        self.loss_scale = loss_scale
        self.totals = LossTotals()
        if training and self.aux_losses:
            self.totals.aux = AuxLossTotals(self.aux_losses[0], self.device)
        if training:
            scale = torch.tensor(self.aux_weight_in_graph * loss_scale, dtype=torch.float64)
            MoEAuxLossAutoScaler.set_loss_scale(scale)
        with torch.set_grad_enabled(training):
            for index, action in enumerate(schedule[rank]):
                try:
                    with self.around(action):
                        _HANDLERS[action.op](self, action)
                except Exception as error:
                    error.add_note(f"while running pipeline action {action}:\n{show_around(schedule, rank, index)}")
                    raise
        in_flight = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "roots": self.roots,
            "grads": self.grads,
            "weight_work": self.weight_work,
            "transfers": self.transfers,
        }
        # Every entry has its taker in a complete schedule, and every transfer its wait.
        left = {name: list(tensors) for name, tensors in in_flight.items() if tensors}
        assert not left, f"the schedule is incomplete; still in flight: {left}"
        return self.totals

    # ---------------------------------------------------------------- compute

    def forward(self, action: Action) -> None:
        """F: run a microbatch through a stage, and keep the root of its graph for the backward.

        Input and output are the tensors of the boundary, [s, b, h]; on the last stage the output is a loss of one
        number, [] or [1]. In evaluation no graph is recorded and no root is kept.
        """
        stage = action.stage
        key = action[1:]
        chunk = self.chunks[stage]
        is_last = stage == self.stages.last
        self.begin(action)

        # give the chunk its input: received tensors, or those of the stage before on this rank; None on the first stage
        inputs = tuple(x.enter() for x in self.inputs.get(key, ()))
        chunk.set_input_tensor(inputs[0] if len(inputs) == 1 else inputs or None)
        del inputs  # the executor keeps no reference, so the chunk can free its input early

        # run the script's forward step; its layers may add auxiliary losses, which are collected until it returns
        with ExitStack() as collecting:
            collected = []
            if self.training:
                collected = [collecting.enter_context(aux_losses.collecting()) for aux_losses in self.aux_losses]
            output, loss_func = read_step(self.forward_step(self.data_iterators[stage], chunk), is_last=is_last)
        chunk.set_input_tensor(None)  # the chunk would keep its input alive until its next microbatch

        # compute the loss on the last stage; what is reported is not multiplied by loss_scale
        if is_last:
            loss = parse_loss_tuple(loss_func(output), self.nominal_tokens)
            self.totals.add(loss)
            output = loss.objective if self.loss_scale == 1.0 else loss.objective * self.loss_scale  # [] or [1]

        # keep the start of the backward: of the last stage the loss itself, of others a place in the graph, which does
        # not keep the output's memory
        outputs = output if isinstance(output, tuple) else (output,)
        if not self.training:
            self.inputs.pop(key, None)
        elif is_last:
            self.roots[key] = outputs
        else:
            self.roots[key] = tuple(_root(x) for x in outputs)
        for aux in collected:
            self.totals.aux.add(aux)
            objective = objective_of(aux)  # []
            # The weighted sum of all terms that the layers added to one `AuxLosses`. On any stage it is one more root behind
            # those of the outputs, since two backwards would compute recomputed layers twice. None: no term has a gradient.
            if objective is not None:
                self.roots[key] += (objective * (self.aux_weight * self.loss_scale),)

        # hand the output to the next stage: on this rank at once, to another rank by SEND_F (also in evaluation)
        if stage + 1 in self.chunks:
            # Detached, as if received, in the same memory: each stage's backward is an action of its own.
            self.inputs[stage + 1, action.microbatch] = _as_inputs(outputs, self.training)
        elif not is_last:
            self.outputs[key] = outputs

    def backward(self, action: Action) -> None:
        """B: compute the gradients of the stage's input, shaped as it, and of its weights.

        One call of autograd for all roots. A root of None, an output that needs no gradient such as a frozen first
        stage's, has no backward. Gradients of weights go where their layers put them, `main_grad` or `.grad`.
        """
        stage = action.stage
        key = action[1:]
        self.begin(action)

        # run the backward from the stage's outputs: their gradients are received, or left by the next stage on this rank
        roots = self.roots.pop(key)
        output_grads = () if stage == self.stages.last else self.grads.pop(key)
        # the loss and auxiliary losses are scalars, whose backward starts with 1: weights and loss_scale are in them
        output_grads += (None,) * (len(roots) - len(output_grads))
        pairs = [(root, grad) for root, grad in zip(roots, output_grads, strict=True) if root is not None]
        inputs = self.inputs.pop(key, ())
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])

        # hand the gradients to the previous stage: on this rank at once, to another rank by SEND_B; none on the first stage
        input_grads = tuple(x.take_grad() for x in inputs)
        if stage - 1 in self.chunks:
            self.grads[stage - 1, action.microbatch] = input_grads
        elif stage > 0:
            self.grads[key] = input_grads

    def backward_input(self, action: Action) -> None:
        """I: the backward, with the weight gradients of linear layers put off until W.

        Other weights get their gradients now, unless their data parallelism puts them off too. What is put off keeps
        what it needs, such as a layer's input and output gradient.
        """
        with self.weight_grads.collect() as work:
            self.backward(action)
        self.weight_work[action[1:]] = work  # also an empty list, which W takes

    def backward_weight(self, action: Action) -> None:
        """W: compute the weight gradients that I has put off, in the order in which the backward met them."""
        self.begin(action)
        for work in self.weight_work.pop(action[1:]):  # the list, and what its work keeps, is freed after the last one
            work()

    # ---------------------------------------------------------------- transfers

    def send(self, action: Action) -> None:
        """SEND: start to send an output, or an input gradient. The transfer keeps it until SENT."""
        source = self.outputs if action.op is Op.SEND_F else self.grads
        # A transfer must not keep the graph alive behind the tensor that it sends.
        tensors = tuple(x.detach() for x in source.pop(action[1:]))
        self.transfers[action] = self.transport.send(DIRECTION_OF[action.op], self._peer(action), tensors)

    def post(self, action: Action) -> None:
        """POST: start to receive."""
        self.transfers[action] = self.transport.post(DIRECTION_OF[action.op], self._peer(action))

    def sent(self, action: Action) -> None:
        """SENT: wait for a send. From here on nothing here keeps the tensors, only the graph if it has saved them."""
        self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()

    def receive(self, action: Action) -> None:
        """RECV: wait for received tensors, and keep them for the stage's F (RECV_F), or its B or I (RECV_B)."""
        tensors = self.transfers.pop(action.with_op(BEGIN_OF[action.op])).wait()
        if action.op is Op.RECV_F:
            self.inputs[action[1:]] = _as_inputs(tensors, self.training)
        else:
            self.grads[action[1:]] = tensors

    def reduce_grads(self, action: Action) -> None:
        """REDUCE: start those reductions of the stage's gradients that its backwards have not started themselves.

        It does not wait for them: the caller does, after `run`.
        """
        self.reduce(action.stage)

    def _peer(self, transfer: Action) -> int:
        """Return the pipeline rank at the other end of a transfer."""
        return self.stages.ranks[partner(transfer).stage]


class _Input:
    """An input of a stage: the tensor until the forward takes it, then its gradient for the previous stage.

    A leaf tensor would serve, but the graph keeps a leaf alive until its end, even if the layers shard or offload
    their input.
    """

    def __init__(self, x: Tensor, training: bool):
        self._x: Tensor | None = x
        self._shape = x.shape
        self._dtype = x.dtype
        self._device = x.device
        self._wants_grad = training and x.is_floating_point()
        self._grads: list[Tensor] = []

    def enter(self) -> Tensor:
        """Return the tensor; in training, a floating-point one as the root of the stage's graph. May be called once."""
        x, self._x = self._x, None
        assert x is not None, "the forward of a microbatch ran twice"
        if not self._wants_grad:
            return x
        # The empty leaf makes autograd call the backward of _StageInput; the input itself stays no leaf.
        return _StageInput.apply(torch.empty(0, requires_grad=True), x, self._grads)

    def take_grad(self) -> Tensor:
        """Return the gradient, contiguous; zeros if the backward produced none. Same shape as the input."""
        if not self._grads:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._grads.pop().contiguous()  # the gradient of a sum is an expanded scalar


class _StageInput(torch.autograd.Function):
    """The first node of a stage's graph: identity forward; its backward puts the input's gradient into a list."""

    @staticmethod
    def forward(ctx, _: Tensor, x: Tensor, grads: list[Tensor]) -> Tensor:
        """x: any shape -> the same, in the same memory. grads: receives the gradient. _: an empty leaf."""
        ctx.grads = grads
        return x.detach()  # same shape and memory, in a new tensor that this node is the origin of

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, None]:
        """grad: the shape of x, appended to the list.

        Saved: the list alone. No tensor is needed, and a saved input would stay alive until here.
        """
        ctx.grads.append(grad)
        return None, None, None


def _as_inputs(tensors: tuple[Tensor, ...], training: bool) -> tuple[_Input, ...]:
    """Wrap the tensors that enter a stage, detached from the graph of the stage before."""
    set_memory_kind(ACTIVATIONS, tensors)
    return tuple(_Input(x.detach(), training) for x in tensors)


def _root(x: Tensor) -> GradientEdge | None:
    """Return the start of a backward from `x` without keeping its memory alive; None if `x` needs no gradient."""
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
