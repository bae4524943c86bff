"""The step of a loop of one's own: forwards and backwards, through the pipeline if there is one, and gradients of the
mean loss.

reports = run_step([chunk], [iterator], forward_step, mesh, BatchShape(4, num_microbatches=8, tokens_per_sample=1024))
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.ops.main_grad import DataParallelBase
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.stage_map import loop
from megatron.core.pipeline_parallel.microbatch_loss import ForwardStep, keep_reports
from megatron.core.pipeline_parallel.pipeline_driver import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec


def run_step(
    chunks: Sequence[nn.Module],
    data_iterators: Sequence[Iterator | None],
    forward_step: ForwardStep,
    mesh: Mesh,
    batch: BatchShape,
    *,
    boundary: tuple[TensorSpec, ...] = (),
    first_sample: int = 0,
    training: bool = True,
    non_loss: bool = False,
    loss_scale: float | None = None,
    before_reduce: Callable[[list[nn.Module]], Any] | None = None,
    device: torch.device | str = "cpu",
) -> list[Any]:
    """Returns the microbatches' reports on the last stage, [] on others. Every rank must call.

    chunks: this rank's, in order, each with its data iterator: 1F1B, or with several chunks interleaved 1F1B. boundary: the
    tensors that pass between stages. first_sample: the step's first, numbered over the run, which dropout masks follow from.
    training: False: only forwards. non_loss: the reports are loss_func(output, non_loss_data=True).

    Gradients accumulate in the chunks' buffers (in `.grad` without DistributedDataParallel), are summed over
    data-parallel ranks
    and divided by the tokens of the step. loss_scale: they stay multiplied by it. before_reduce(chunks): called before that.
    """
    stages, reports = loop(mesh["pp"].size, len(chunks)), []
    mine = stages.of_rank(mesh["pp"].rank)
    pipeline = Pipeline(
        dict(zip(mine, chunks, strict=True)),
        mesh,
        batch,
        boundary=boundary,
        forward_step=keep_reports(forward_step, reports, non_loss=non_loss),
        schedule_name="1f1b" if len(chunks) == 1 else "interleaved",
        device=device,
    )
    data = dict(zip(mine, data_iterators, strict=True))
    if not training or non_loss:
        pipeline.run(data, first_sample, training=False)
        return reports
    # With a loss scale the loss is divided by the tokens before the backward: a sum over tokens could overflow float16.
    tokens = 1 if loss_scale is None else batch.nominal_tokens * batch.num_microbatches * mesh.tokens.size
    totals = pipeline.run(data, first_sample, loss_scale=(loss_scale or 1.0) / tokens)
    share = 1.0 / (max(pipeline.share_totals(totals).tokens, 1.0) * (1 / tokens))
    if before_reduce is not None:
        before_reduce(list(chunks))
    for chunk in chunks:
        _reduce(chunk, share)
    return reports


def _reduce(chunk: nn.Module, share: float) -> None:
    """Sum a chunk's gradients over the ranks, and multiply them by `share`."""
    if isinstance(chunk, DataParallelBase):
        chunk.finish_grad_reduce()
        chunk.scale_gradients(share)
        return
    for parameter in chunk.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(share)
