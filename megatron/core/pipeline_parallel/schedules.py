"""Megatron's `get_forward_backward_func()` over the executor, for the training loop of a fork.

    forward_backward = get_forward_backward_func()
    reports = forward_backward(forward_step_func=forward_step, data_iterator=iterator, model=[chunk], num_microbatches=8,
                               seq_length=1024, micro_batch_size=4)

There is one function: without a pipeline it runs F0 B0 F1 B1 ..., with one 1F1B, with several chunks the interleaved schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core import comm
from megatron.core.current_mesh import get_mesh
from megatron.core.mesh import Mesh
from megatron.core.pipeline_parallel.executor import Executor, ForwardStep
from megatron.core.pipeline_parallel.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.schedule import forward_only as forwards
from megatron.core.pipeline_parallel.stage import loop_placement
from megatron.core.pipeline_parallel.transport import TensorSpec, Transport
from megatron.core.random import DropoutKeys
from megatron.core.utils import get_model_config, unwrap_model

# Megatron's further arguments: they steer its own transfers and groups, or how it warms up.
_WITHOUT_EFFECT = ("first_val_step", "p2p_communicator", "pg_collection", "force_all_reduce")
_SAMPLES = "samples of get_forward_backward_func"


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
    """One step's forwards and backwards; returns the report of each microbatch on the last stage, [] elsewhere. Every rank calls.

    Gradients are added to the chunks' buffers (to `.grad` of a chunk that no DistributedDataParallel wraps), summed over
    the data-parallel ranks, and divided by the tokens of the whole step: afterwards they are those of the mean loss, and not scaled. The
    caller zeroes them before (`zero_grad_buffer`), and updates after. `finalize_model_grads` may be called in between, or be the
    `finalize_model_grads_func` of the model's config, which is called here with the chunks and None: either changes nothing.

    grad_scale_func(loss) -> the loss times the loss scale, such as the optimizer's `scale_loss`; that of the model's config when left
    out. Gradients are then those of the mean loss times the scale, for the caller to take out again.

    model: this rank's chunk, or its chunks in order, with a data iterator each. Chunks have `set_input_tensor` and, in a
    pipeline, `config` with hidden_size and params_dtype. collect_non_loss_data: the list holds loss_func(output, non_loss_data=True)
    of each microbatch instead, and nothing is differentiated.
    """
    strange = {name: value for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None}
    if strange:
        raise TypeError(f"get_forward_backward_func: {sorted(strange)} are not built; leave them out")
    if decoder_seq_length not in (None, seq_length):
        raise ValueError(
            f"decoder_seq_length ({decoder_seq_length}) differs from seq_length ({seq_length}): models of an encoder and a decoder "
            "are not built yet"
        )
    chunks = list(model) if isinstance(model, Sequence) else [model]
    iterators = list(data_iterator) if isinstance(data_iterator, Sequence) else [data_iterator]
    if len(chunks) != len(iterators):
        raise ValueError(f"{len(chunks)} model chunk(s) but {len(iterators)} data iterator(s); give one for each chunk")
    mesh, reports = get_mesh(), []
    pp, training = mesh["pp"], not (forward_only or collect_non_loss_data)
    by_stage = {i * pp.size + pp.rank: chunk for i, chunk in enumerate(chunks)}
    scale = _loss_scale(grad_scale_func or _config_of(chunks[0], "grad_scale_func"), mesh) if training else None
    step_tokens = micro_batch_size * seq_length * num_microbatches * mesh.tokens.size
    executor = Executor(
        by_stage,
        len(chunks) * pp.size,
        placement=loop_placement(pp.size),
        transport=Transport(mesh, _boundary(chunks[0], mesh, seq_length, micro_batch_size), mesh.device),
        forward_step=keep_reports(forward_step_func, reports, non_loss=collect_non_loss_data),
        data_iterators=dict(zip(by_stage, iterators)),
        begin=_beginner(by_stage, mesh, micro_batch_size),
        reduce=lambda stage: _call(by_stage[stage], "start_grad_reduce"),
        nominal_tokens=micro_batch_size * seq_length,
    )
    actions = _actions(pp.size, num_microbatches, len(chunks), training=training)
    # A scaled loss is divided by the tokens before and not after the backward, so that a sum of losses overflows no float16.
    totals = executor.run(actions, pp.rank, training=training, loss_scale=1.0 if scale is None else scale / step_tokens)
    if training:
        _finish(chunks, mesh, totals.tokens, scaled_by=1.0 if scale is None else 1 / step_tokens)
        mesh.kept[_SAMPLES] = mesh.kept.get(_SAMPLES, 0) + num_microbatches * micro_batch_size * mesh.samples.size
    return reports


def keep_reports(forward_step: ForwardStep, into: list[Any], *, non_loss: bool = False) -> ForwardStep:
    """The same forward step, whose loss function also leaves its report in `into`. non_loss: what it returns when told
    `non_loss_data=True` instead, the loss being zero."""

    def step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Any, Any]:
        result = forward_step(data_iterator, model)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            return result  # before the last stage, or an error for the executor to name
        output, loss_func = result

        def keeping(given: Any) -> Any:
            if non_loss:
                into.append(loss_func(given, non_loss_data=True))
                return torch.zeros(()), 0, {}
            loss = loss_func(given)
            if isinstance(loss, tuple) and loss:
                into.append(loss[-1])
            return loss

        return output, keeping

    return step


def _actions(p: int, m: int, v: int, *, training: bool) -> Schedule:
    if not training:
        return add_transfers(forwards(p, m, v), loop_placement(p))
    schedule = one_f_one_b(p, m) if v == 1 else interleaved(p, m, v)
    return add_reduce(add_transfers(schedule, loop_placement(p)))


def _boundary(chunk: nn.Module, mesh: Mesh, seq_length: int, micro_batch_size: int) -> tuple[TensorSpec, ...]:
    """The hidden states that pass between two stages; nothing does without a pipeline."""
    if mesh["pp"].size == 1:
        return ()
    config = get_model_config(chunk)
    divided = getattr(config, "sequence_parallel", mesh.sequence_parallel)
    length = seq_length // mesh["tp"].size if divided else seq_length
    dtype = getattr(config, "residual_dtype", config.params_dtype)
    return (TensorSpec((length, micro_batch_size, config.hidden_size), dtype),)


def _config_of(chunk: nn.Module, name: str) -> Any:
    """What the model's config holds under this name; None where it has none."""
    return getattr(getattr(unwrap_model(chunk), "config", None), name, None)


def _loss_scale(grad_scale_func: Callable | None, mesh: Mesh) -> float | None:
    """What the function multiplies by; None where nothing is scaled."""
    return None if grad_scale_func is None else float(grad_scale_func(torch.ones((), device=mesh.device)))


def _beginner(by_stage: Mapping[int, nn.Module], mesh: Mesh, micro_batch_size: int) -> Callable[[Action], None]:
    """What precedes each compute action: the running chunk, the samples that dropout is keyed by, whose gradients are written."""
    found = (getattr(m, "keys", None) for chunk in by_stage.values() for m in chunk.modules())
    keys = {id(one): one for one in found if isinstance(one, DropoutKeys)}.values()
    pp, samples, first_sample = mesh["pp"], mesh.samples, mesh.kept.get(_SAMPLES, 0)

    def begin(action: Action) -> None:
        mesh.virtual_rank = action.stage // pp.size
        first = first_sample + (action.microbatch * samples.size + samples.rank) * micro_batch_size
        for one in keys:
            one.samples = tuple(range(first, first + micro_batch_size))
        _call(by_stage[action.stage], "begin_microbatch", action.microbatch, backward=action.op is not Op.F)

    return begin


def _finish(chunks: Sequence[nn.Module], mesh: Mesh, tokens: torch.Tensor | float, *, scaled_by: float) -> None:
    """Make the gradients whole, and those of the mean over all tokens of the step. scaled_by: what the sum of losses was."""
    total = torch.as_tensor(tokens, dtype=torch.float64).reshape(1).to(mesh.device)
    for axis in (mesh.tokens, mesh["pp"]):
        total = comm.all_reduce(total.clone(), axis)
    share = 1.0 / (max(total.item(), 1.0) * scaled_by)
    if (finalize := _config_of(chunks[0], "finalize_model_grads_func")) is not None:
        finalize(chunks, None)  # no tokens: the gradients are divided here
    for chunk in chunks:
        _call(chunk, "finish_grad_reduce")
        if hasattr(chunk, "scale_gradients"):
            chunk.scale_gradients(share)
        else:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)


def _call(chunk: nn.Module, method: str, *arguments: Any, **named: Any) -> None:
    """A method that DistributedDataParallel has and a plain module has not."""
    if hasattr(chunk, method):
        getattr(chunk, method)(*arguments, **named)
