"""Megatron's `get_forward_backward_func()` on our pipeline, for a script's own training loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.signatures import takes
from megatron.core.parallel.global_state import current
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.forward_backward import run_step
from megatron.core.pipeline_parallel.microbatch_loss import ForwardStep
from megatron.core.pipeline_parallel.pipeline_driver import BatchShape
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.utils import get_model_config, unwrap_model

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
    """The forwards and backwards of one step. Returns the microbatches' reports on the last stage, [] on others. Every
    rank must
    call.

    Gradients accumulate in the chunks' buffers (in `.grad` without DistributedDataParallel), are summed over
    data-parallel ranks
    and divided by the tokens of the step: they are gradients of the mean loss. The caller zeroes them before
    (`zero_grad_buffer`) and updates after. `finalize_model_grads` has no effect, called by the script or as the
    `finalize_model_grads_func` of the model's config, which is called here with (chunks, None).

    grad_scale_func(loss) -> the loss times the loss scale, such as the optimizer's `scale_loss`; default: the function
    in the
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
    here, trains = current(), not (forward_only or collect_non_loss_data)
    scale = grad_scale_func or _config_of(chunks[0], "grad_scale_func") if trains else None
    finalize = _config_of(chunks[0], "finalize_model_grads_func")
    tokens = seq_length // here.mesh.sequence.size  # of a sample on this rank
    reports = run_step(
        chunks,
        iterators,
        forward_step_func,
        here.mesh,
        BatchShape(micro_batch_size, num_microbatches, tokens),
        boundary=_boundary(chunks[0], here.mesh, tokens, micro_batch_size),
        first_sample=here.samples,
        training=trains,
        non_loss=collect_non_loss_data,
        loss_scale=None if scale is None else float(scale(torch.ones((), device=here.device))),
        before_reduce=None if finalize is None else lambda chunks: finalize(chunks, None),  # the division follows
        device=here.device,
    )
    here.samples += num_microbatches * micro_batch_size * here.mesh.samples.size if trains else 0
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


forward_backward_no_pipelining = forward_backward


forward_backward_pipelining_without_interleaving = forward_backward


forward_backward_pipelining_with_interleaving = forward_backward


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Releases the memory of a stage's output that has been sent, if told to; the autograd graph stays."""
    if out is not None and deallocate_pipeline_outputs:
        out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


__getattr__ = names_of_megatron(__name__)
