"""The first tensor of a step that is NaN or infinite is found by computing the step again.

A check follows each module.

Order: the weights before the step; then by microbatch, numbered over all ranks, its forward before its backward, in the
order of computation; then the summed gradients. Names are the model's, so they are the same in every layout.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.params_norm_and_zeros import owned_elements
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.core.pipeline_parallel.schedule.actions import Action, Op
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.training.step import StepWork

Order = tuple[int, ...]  # by which the tensors of a step are ordered
_LAST = 2**62


def first_nonfinite_tensor(work: StepWork, device: torch.device | str = "cpu") -> str:
    """Return a sentence that names the tensor, or says that none is found. Every rank must call.

    The step must not be updated afterwards: a model whose modules have hooks may round differently.
    """
    pipeline = work.pipeline
    mesh = pipeline.mesh
    chunks: list[DistributedDataParallel] = list(pipeline.chunks.values())

    # compute the step again, looking at weights, outputs, loss and gradients
    locator = _NanLocator(work)
    locator.check_elements((-1,), "the weight {}, before the step", owned_elements(chunks, mesh, grads=False))
    with locator.hooks_on(chunks):
        work.compute(locator.with_loss_check(pipeline.forward_step))
    gradients = owned_elements(chunks, mesh, grads=True)
    locator.check_elements((_LAST,), "the gradient of {}, summed over the step", gradients)

    # the first of all ranks
    matches = []
    for text in collectives.all_gather_texts(json.dumps(locator.first), mesh["world"], device):
        match = json.loads(text)
        if match is not None:
            matches.append(match)
    if not matches:
        return "No tensor was found that is not finite."
    _, name = min(matches)
    return f"The first tensor that is not finite: {name}."


class _NanLocator:
    """The first tensor on this rank that is not finite. first: (order, name), or None."""

    def __init__(self, work: StepWork):
        self.first: tuple[Order, str] | None = None
        self._work = work
        self._action = Action(Op.F, 0, 0)  # the running action of the pipeline
        self._num_checked = 0

    def _check(self, order: Order, name: Callable[[], str], tensor: Any) -> None:
        """Note a tensor that is not finite, if it comes before the noted one."""
        if self.first is not None and self.first[0] < order:
            return
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        if not bool(tensor.isfinite().all()):
            self.first = (order, name())

    def check_elements(self, order: Order, name: str, elements: Iterator[tuple[str, Tensor]]) -> None:
        """Check parts of parameters or gradients, of any shapes. name: with {} for the parameter's name."""
        for parameter_name, values in elements:
            self._check(order, partial(name.format, parameter_name), values)

    def _check_in_microbatch(self, what: str, tensor: Any) -> None:
        """Check a tensor of the running action."""
        self._num_checked += 1
        pipeline = self._work.pipeline
        action = self._action
        samples = pipeline.mesh.samples
        microbatch = action.microbatch * samples.size + samples.rank  # over all ranks
        if action.op is Op.F:
            order = (microbatch, 0, action.stage, self._num_checked)
        else:  # a backward passes the stages in reverse order
            order = (microbatch, 1, -action.stage, self._num_checked)

        def name() -> str:
            numbers = pipeline.batch.samples_of(self._work.first_sample, action.microbatch, samples)
            which = f"sample {numbers[0]}" if len(numbers) == 1 else f"samples {numbers[0]} to {numbers[-1]}"
            direction = "forward" if action.op is Op.F else "backward"
            when = f"the {direction} of microbatch {action.microbatch}"
            return f"{what}, in {when} ({which}) on rank {pipeline.mesh['world'].rank}"

        self._check(order, name, tensor)

    @contextmanager
    def hooks_on(self, chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
        """Check, in the block, the outputs of all modules and the gradients of these outputs."""
        handles = []
        for chunk in chunks:
            for name, module in chunk.module.named_modules():
                check = partial(self._check_output, name or "the model")
                handles.append(module.register_forward_hook(check, with_kwargs=True))

        pipeline: Pipeline = self._work.pipeline
        around = pipeline.around

        def note_action(action: Action) -> AbstractContextManager:
            self._action = action
            return around(action)

        pipeline.around = note_action
        try:
            yield
        finally:
            pipeline.around = around
            for handle in handles:
                handle.remove()

    def _check_output(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any], output: Any
    ) -> None:
        """Check a module's output, and its gradient once backward has computed it.

        What it was given and returns, as a layer does with its context, is another module's output.
        """
        outputs = output if isinstance(output, tuple | list) else (output,)
        came_in = {id(x) for x in (*inputs, *named_inputs.values())}
        for x in outputs:
            if len(outputs) > 1 and id(x) in came_in:
                continue
            self._check_in_microbatch(f"the output of {name}", x)
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._check_in_microbatch, f"the gradient of the output of {name}"))

    def with_loss_check(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the forward step, with a check of the loss."""

        def checked_forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            output, loss_func = forward_step(data_iterator, model)

            def checked_loss_func(output: Any) -> Any:
                loss = loss_func(output)
                self._check_in_microbatch("the loss", loss[0])
                return loss

            return output, checked_loss_func if callable(loss_func) else loss_func

        return checked_forward_step
