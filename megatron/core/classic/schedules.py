"""Megatron's `get_forward_backward_func()` on our pipeline, for a script's own training loop.

    forward_backward = get_forward_backward_func()
    reports = forward_backward(forward_step_func=forward_step, data_iterator=iterator, model=[chunk], num_microbatches=8,
                               seq_length=1024, micro_batch_size=4)

One function covers all cases: without a pipeline F0 B0 F1 B1 ..., with a pipeline 1F1B, with several chunks interleaved 1F1B.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.classic.signatures import takes
from megatron.core.classic.utils import get_model_config, unwrap_model
from megatron.core.current_mesh import current
from megatron.core.mesh import Mesh
from megatron.core.pipeline_parallel.loss import ForwardStep, keep_reports
from megatron.core.pipeline_parallel.pipeline import BatchShape, Pipeline, tell
from megatron.core.pipeline_parallel.transport import TensorSpec
from megatron.core.stage_map import loop

# Megatron's arguments that only concern its own transfers, groups or warm-up.
_WITHOUT_EFFECT = ("first_val_step", "p2p_communicator", "pg_collection", "force_all_reduce")


@takes(pp_size=None, vp_size=None)
def get_forward_backward_func() -> Callable[..., list[Any]]:
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator | Sequence[Iterator | None] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **others: Any,
) -> list[Any]:
    """The forwards and backwards of one step. Returns the microbatches' reports on the last stage, [] on others. Every rank must
    call.

    Gradients accumulate in the chunks' buffers (in `.grad` without DistributedDataParallel), are summed over data-parallel ranks
    and divided by the tokens of the step: they are gradients of the mean loss. The caller zeroes them before
    (`zero_grad_buffer`) and updates after. `finalize_model_grads` has no effect, called by the script or as the
    `finalize_model_grads_func` of the model's config, which is called here with (chunks, None).

    grad_scale_func(loss) -> the loss times the loss scale, such as the optimizer's `scale_loss`; default: the function in the
    model's config. The caller must divide the gradients by the scale.

    model: this rank's chunk, or its chunks in order, each with a data iterator. Chunks have `set_input_tensor` and, in a
    pipeline, `config` with hidden_size and params_dtype. collect_non_loss_data: forwards only; returns
    loss_func(output, non_loss_data=True) of each microbatch.
    """
    strange = {name: value for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None}
    if strange:
        raise TypeError(f"get_forward_backward_func: {sorted(strange)} are not built; omit them")
    if decoder_seq_length not in (None, seq_length):
        lengths = f"decoder_seq_length ({decoder_seq_length}) differs from seq_length ({seq_length})"
        raise ValueError(f"{lengths}; encoder-decoder models are not built yet")
    chunks = list(model) if isinstance(model, Sequence) else [model]
    iterators = list(data_iterator) if isinstance(data_iterator, Sequence) else [data_iterator]
    if len(chunks) != len(iterators):
        raise ValueError(f"{len(chunks)} model chunk(s) but {len(iterators)} data iterator(s); give one for each chunk")
    here, reports = current(), []
    mesh = here.mesh
    batch, stages = BatchShape(micro_batch_size, num_microbatches, seq_length), loop(mesh["pp"].size, len(chunks))
    mine = stages.of_rank(mesh["pp"].rank)
    pipeline = Pipeline(
        dict(zip(mine, chunks)),
        mesh,
        batch,
        boundary=_boundary(chunks[0], mesh, seq_length, micro_batch_size),
        forward_step=keep_reports(forward_step_func, reports, non_loss=collect_non_loss_data),
        schedule_name="1f1b" if len(chunks) == 1 else "interleaved",
        device=here.device,
    )
    data, first_sample = dict(zip(mine, iterators)), here.samples
    if forward_only or collect_non_loss_data:
        pipeline.run(data, first_sample, training=False)
        return reports
    scale = _loss_scale(grad_scale_func or _config_of(chunks[0], "grad_scale_func"))
    rank_samples = num_microbatches * micro_batch_size
    # With a loss scale the loss is divided by the tokens before the backward: a sum over tokens could overflow float16.
    step_tokens = 1 if scale is None else rank_samples * seq_length * mesh.tokens.size
    totals = pipeline.run(data, first_sample, loss_scale=(scale or 1.0) / step_tokens)
    _finish(pipeline, pipeline.share_totals(totals).tokens, scaled_by=1 / step_tokens)
    here.samples += rank_samples * mesh.samples.size
    return reports


def _boundary(chunk: nn.Module, mesh: Mesh, seq_length: int, micro_batch_size: int) -> tuple[TensorSpec, ...]:
    """The hidden states that pass between two stages; () without a pipeline."""
    if mesh["pp"].size == 1:
        return ()
    config = get_model_config(chunk)
    divided = getattr(config, "sequence_parallel", current().sequence_parallel)
    length = seq_length // mesh["tp"].size if divided else seq_length
    dtype = next(
        filter(None, (getattr(config, name, None) for name in ("residual_dtype", "pipeline_dtype", "params_dtype")))
    )
    return (TensorSpec((length, micro_batch_size, config.hidden_size), dtype),)


def _config_of(chunk: nn.Module, name: str) -> Any:
    """A field of the model's config; None if there is none."""
    return getattr(getattr(unwrap_model(chunk), "config", None), name, None)


def _loss_scale(grad_scale_func: Callable | None) -> float | None:
    """The factor of `grad_scale_func`; None without one."""
    return None if grad_scale_func is None else float(grad_scale_func(torch.ones((), device=current().device)))


def _finish(pipeline: Pipeline, tokens: float, *, scaled_by: float) -> None:
    """Reduces the gradients, and divides them by the tokens of the step and by `scaled_by`, the factor of the loss."""
    chunks, share = list(pipeline.chunks.values()), 1.0 / (max(tokens, 1.0) * scaled_by)
    if (finalize := _config_of(chunks[0], "finalize_model_grads_func")) is not None:
        finalize(chunks, None)  # without tokens: the division follows here
    for chunk in chunks:
        tell(chunk, "finish_grad_reduce")
        if hasattr(chunk, "scale_gradients"):
            chunk.scale_gradients(share)
        else:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)


forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Releases the memory of a stage's output that has been sent, if told to; the autograd graph stays."""
    if out is not None and deallocate_pipeline_outputs:
        out.data = torch.empty((1,), device=out.device, dtype=out.dtype)
