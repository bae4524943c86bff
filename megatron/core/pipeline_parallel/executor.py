"""Runs one rank's list of pipeline actions: the only file that knows both the schedule and tensors.

There is no separate path without pipelining: one rank runs F0.0 B0.0 F0.1 B0.1 ..., and evaluation is a list of forwards.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.pipeline_parallel.loss import LossTotals, read_loss
from megatron.core.pipeline_parallel.lower import partner
from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule
from megatron.core.pipeline_parallel.simulate import show
from megatron.core.pipeline_parallel.stage import Placement
from megatron.core.pipeline_parallel.transport import Transport

ForwardStep = Callable[[Iterator | None, nn.Module], tuple[Any, Callable[[Any], Any]]]
Key = tuple[int, int]  # (stage, microbatch)


class Executor:
    """One rank's part of one step. Holds what is in flight: inputs, outputs and gradients by (stage, microbatch).

    chunks: the model chunks of this rank by stage; data_iterators: likewise (None where a stage reads nothing).
    forward_step(data_iterator, model) -> (output, loss_func), as Megatron's.
    name_microbatch(stage, microbatch) is called before each forward; reduce(stage) once its last backward is done.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        num_stages: int,
        *,
        placement: Placement,
        transport: Transport,
        forward_step: ForwardStep,
        data_iterators: Mapping[int, Iterator | None],
        name_microbatch: Callable[[int, int], None] = lambda stage, microbatch: None,
        reduce: Callable[[int], None] = lambda stage: None,
    ):
        self.chunks, self.last_stage, self.placement, self.transport = chunks, num_stages - 1, placement, transport
        self.forward_step, self.data_iterators = forward_step, data_iterators
        self.name_microbatch, self.reduce = name_microbatch, reduce
        self.inputs: dict[Key, tuple[Tensor, ...]] = {}
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}
        self.grads: dict[Key, tuple[Tensor | None, ...]] = {}
        self.totals = LossTotals()
        self.training = True

    def run(self, schedule: Schedule, rank: int, *, training: bool = True) -> LossTotals:
        """Do every action of `schedule[rank]` in order. The totals are those of the last stage, empty elsewhere.

        Every pipeline rank must call with the same schedule. An error carries the action and the grid around it.
        """
        self.training, self.totals = training, LossTotals()
        with torch.set_grad_enabled(training):
            for index, action in enumerate(schedule[rank]):
                try:
                    _HANDLERS[action.op](self, action)
                except Exception as error:
                    error.add_note(f"while running pipeline action {action}:\n{show(schedule, rank, index)}")
                    raise
            self.transport.finish()
        left = [name for name in ("inputs", "outputs", "grads") if getattr(self, name)]
        assert not left, f"the schedule left {left} behind: it is not complete"
        return self.totals

    def forward(self, action: Action) -> None:
        _, stage, microbatch = action
        key, chunk = (stage, microbatch), self.chunks[stage]
        self.name_microbatch(stage, microbatch)
        inputs = self.inputs.get(key, ())
        chunk.set_input_tensor(inputs[0] if len(inputs) == 1 else inputs or None)
        output, loss_func = self.forward_step(self.data_iterators[stage], chunk)
        chunk.set_input_tensor(None)
        if stage == self.last_stage:
            loss = read_loss(loss_func(output))
            self.totals.add(loss)
            output = loss.objective
        outputs = output if isinstance(output, tuple) else (output,)
        if self.training:
            self.outputs[key] = outputs
        else:
            self.inputs.pop(key, None)
        if stage < self.last_stage:
            self._hand_on(stage, microbatch, outputs)

    def _hand_on(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        """To the next stage if that lives here too; else the outputs wait for their SEND."""
        if stage + 1 in self.chunks:
            self.inputs[stage + 1, microbatch] = _as_inputs(outputs, self.training)
        elif not self.training:
            self.outputs[stage, microbatch] = outputs

    def backward(self, action: Action) -> None:
        _, stage, microbatch = action
        key = (stage, microbatch)
        outputs, inputs = self.outputs.pop(key), self.inputs.pop(key, ())
        torch.autograd.backward(outputs, None if stage == self.last_stage else self.grads.pop(key))
        grads = tuple(x.grad for x in inputs)
        if stage - 1 in self.chunks:
            self.grads[stage - 1, microbatch] = grads
        elif stage > 0:
            self.grads[key] = grads  # until SEND_B

    def send_forward(self, action: Action) -> None:
        _, stage, microbatch = action
        key = (stage, microbatch)
        outputs = self.outputs[key] if self.training else self.outputs.pop(key)
        self.transport.send("forward", self._peer(action), tuple(x.detach() for x in outputs))

    def send_backward(self, action: Action) -> None:
        _, stage, microbatch = action
        self.transport.send("backward", self._peer(action), self.grads.pop((stage, microbatch)))

    def recv_forward(self, action: Action) -> None:
        _, stage, microbatch = action
        self.inputs[stage, microbatch] = _as_inputs(self.transport.recv("forward", self._peer(action)), self.training)

    def recv_backward(self, action: Action) -> None:
        _, stage, microbatch = action
        self.grads[stage, microbatch] = self.transport.recv("backward", self._peer(action))

    def reduce_grads(self, action: Action) -> None:
        self.reduce(action.stage)

    def _peer(self, transfer: Action) -> int:
        """The pipeline rank at the other end."""
        return self.placement(partner(transfer).stage)


def _as_inputs(tensors: tuple[Tensor, ...], training: bool) -> tuple[Tensor, ...]:
    """The tensors as leaves whose gradient the stage before wants."""
    return tuple(x.detach().requires_grad_(training and x.is_floating_point()) for x in tensors)


_HANDLERS: dict[Op, Callable[[Executor, Action], None]] = {
    Op.F: Executor.forward,
    Op.B: Executor.backward,
    Op.SEND_F: Executor.send_forward,
    Op.RECV_F: Executor.recv_forward,
    Op.SEND_B: Executor.send_backward,
    Op.RECV_B: Executor.recv_backward,
    Op.REDUCE: Executor.reduce_grads,
}
