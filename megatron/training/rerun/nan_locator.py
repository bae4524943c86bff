"""The first tensor of a step that is NaN or infinite, found by computing the step again with a check after each module.

Order: the weights before the step; then by microbatch, numbered over all ranks, its forward before its backward, in the
order of
computation; then the summed gradients. Names are the model's, so they are the same in every layout.
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


def first_bad_tensor(work: StepWork, device: torch.device | str = "cpu") -> str:
    """A sentence that names it, or says that none is found. Every rank must call; the step must not be updated
    afterwards, as a
    model whose modules are watched may round differently."""
    pipeline, mesh = work.pipeline, work.pipeline.mesh
    chunks: list[DistributedDataParallel] = list(pipeline.chunks.values())
    look = _Look(work)
    look.at_elements((-1,), "the weight {}, before the step", owned_elements(chunks, mesh, grads=False))
    with look.watching(chunks):
        work.compute(look.at_loss(pipeline.forward_step))
    look.at_elements((_LAST,), "the gradient of {}, summed over the step", owned_elements(chunks, mesh, grads=True))
    found = [json.loads(text) for text in collectives.all_gather_texts(json.dumps(look.first), mesh["world"], device)]
    first = min((pair for pair in found if pair is not None), default=None)
    return (
        "No tensor was found that is not finite."
        if first is None
        else f"The first tensor that is not finite: {first[1]}."
    )


class _Look:
    """What this rank finds. first: (key, name), or None."""

    def __init__(self, work: StepWork):
        self.first: tuple[Order, str] | None = None
        self._work, self._action = work, Action(Op.F, 0, 0)
        self._number = 0

    def _at(self, key: Order, name: Callable[[], str], *tensors: Any) -> None:
        if self.first is not None and self.first[0] < key:
            return
        if any(isinstance(x, Tensor) and x.is_floating_point() and not bool(x.isfinite().all()) for x in tensors):
            self.first = key, name()

    def at_elements(self, key: Order, name: str, elements: Iterator[tuple[str, Tensor]]) -> None:
        for label, part in elements:
            self._at(key, partial(name.format, label), part)

    def _in_microbatch(self, what: str, *tensors: Any) -> None:
        """Look at tensors of the running action."""
        self._number += 1
        pipeline, action = self._work.pipeline, self._action
        samples = pipeline.mesh.samples
        number = action.microbatch * samples.size + samples.rank
        forward = action.op is Op.F
        key = (number, 0 if forward else 1, action.stage if forward else -action.stage, self._number)

        def name() -> str:
            rows = pipeline.batch.samples_of(self._work.first_sample, action.microbatch, samples)
            which = f"sample {rows[0]}" if len(rows) == 1 else f"samples {rows[0]} to {rows[-1]}"
            when = f"the {'forward' if forward else 'backward'} of microbatch {action.microbatch}"
            return f"{what}, in {when} ({which}) on rank {pipeline.mesh['world'].rank}"

        self._at(key, name, *tensors)

    @contextmanager
    def watching(self, chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
        """Look at the outputs of all modules, and at their gradients."""
        pipeline: Pipeline = self._work.pipeline
        handles, around = [], pipeline.around
        for chunk in chunks:
            for name, module in chunk.module.named_modules():
                handles.append(module.register_forward_hook(partial(self._at_output, name or "the model")))

        def note(action: Action) -> AbstractContextManager:
            self._action = action
            return around(action)

        pipeline.around = note
        try:
            yield
        finally:
            pipeline.around = around
            for handle in handles:
                handle.remove()

    def _at_output(self, name: str, module: nn.Module, inputs: object, output: Any) -> None:
        for x in output if isinstance(output, tuple | list) else (output,):
            self._in_microbatch(f"the output of {name}", x)
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._in_microbatch, f"the gradient of the output of {name}"))

    def at_loss(self, forward_step: ForwardStep) -> ForwardStep:
        """The forward step with a look at the loss."""

        def step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
            output, loss_func = forward_step(data_iterator, model)

            def looked_at(given: Any) -> Any:
                loss = loss_func(given)
                self._in_microbatch("the loss", loss[0])
                return loss

            return output, looked_at if callable(loss_func) else loss_func

        return step
