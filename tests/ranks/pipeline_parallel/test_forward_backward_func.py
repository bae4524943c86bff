"""`get_forward_backward_func` gives a fork's loop the losses and gradients of our own train step."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from tiny_run import (
    GPT2,
    LLAMA,
    TINY_GPT2,
    Layout,
    assert_equal,
    build_chunks,
    forward_step,
    microbatches,
    pieces_of_chunks,
    put_together,
    run,
)

from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import ConstantGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.training.arguments import core_transformer_config_from_args

BATCH, SEQ = 24, 8
SHARDS = [
    DataParallelConfig(zero_stage=stage, overlap_grad_reduce=stage > 1, ddp_bucket_size=1500) for stage in (1, 2, 3)
]
LAYOUTS = [
    Layout(m=3),
    Layout(pp=2, m=4),
    Layout(pp=2, v=2, m=4, schedule="interleaved", tp=2, sp=True),
    Layout(dp=2, pp=2, m=2, delayed=True),
    Layout(cp=2, pp=2, m=2, delayed=True),
    *(Layout(dp=2, pp=2, m=2, delayed=True, data_parallel=shards) for shards in SHARDS),
    Layout(dp=2, tp=2, m=3, data_parallel=SHARDS[2]),
]
CASES = [
    pytest.param(
        layout,
        model,
        marks=[pytest.mark.full] * ((i > 3) and not (i == 6 and name == "gpt2")),
        id=f"{layout}-{layout.data_parallel.stage}-{name}",
    )
    for i, layout in enumerate(LAYOUTS)
    for name, model in (("gpt2", GPT2), ("llama", LLAMA))
]


def run_by_func(mesh, config, layout, **options):
    """One step's reports and gradients."""
    chunks, _, _ = build_chunks(mesh, config, layout)
    get_global_state().sequence_parallel = layout.sp
    batch = BatchShape(BATCH // layout.dp // layout.m, layout.m)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[microbatches(batch, 0, mesh) for _ in chunks],
        model=list(chunks.values()),
        num_microbatches=layout.m,
        seq_length=SEQ,
        micro_batch_size=batch.micro_batch_size,
        **options,
    )
    buffers = [buffer for chunk in chunks.values() for buffer in chunk.buffers]
    return reports, pieces_of_chunks(chunks, mesh, lambda p: p.main_grad, {"sums": buffers})


@pytest.mark.full
@pytest.mark.parametrize("layout, model", CASES)
def test_it_gives_the_losses_and_gradients_of_the_train_step(layout, model):
    """Dropout included. The train step runs on one rank: the oracle knows neither this layout nor this function."""
    expected = run(model, Layout(), steps=1, global_batch=BATCH, optimizer=OptimizerConfig(clip_grad=0.0))
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp}
    ranks = run_ranks(sizes, partial(run_by_func, config=model, layout=layout), delayed=layout.delayed)
    of_last = [reports for reports, _ in ranks if reports]
    assert len(of_last) == layout.tp * layout.dp * layout.cp and all(len(reports) == layout.m for reports in of_last)
    pairs = torch.stack([report["lm loss"] for reports in of_last[:: layout.tp] for report in reports]).sum(0)
    got = replace(
        expected, grads=[put_together([pieces for _, pieces in ranks])], losses=[(pairs[0] / pairs[1]).item()]
    )
    assert_equal(got, expected, 1e-10)


HYBRID = DataParallelConfig(zero_stage=2, num_distributed_optimizer_instances=2, ddp_bucket_size=1500)
OVERLAP = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1500)
FINALIZED = {
    "tp sp": Layout(tp=2, sp=True, m=2),
    "pp tied": Layout(pp=2, m=2),
    "hybrid 2": Layout(dp=4, m=2, data_parallel=HYBRID),
    "3": Layout(dp=2, m=2, delayed=True, data_parallel=SHARDS[2]),
    "overlap": Layout(dp=2, m=2, data_parallel=OVERLAP),
    "vpp sp": Layout(pp=2, v=2, tp=2, sp=True, m=2, schedule="interleaved"),
    "1 tp": Layout(dp=2, tp=2, m=2, data_parallel=SHARDS[0]),
    "fixed order": Layout(dp=2, pp=2, m=2, data_parallel=DataParallelConfig(fixed_order_grad_reduce=True)),
}
WAYS = ("never", "once", "twice with tokens", "by the config", "by the config and once", "after a validation")


@cache
def of_one_process():
    """The gradients of our own train step on one rank, of as many steps as there are ways."""
    return run(TINY_GPT2, Layout(), steps=len(WAYS), global_batch=8, optimizer=OptimizerConfig(clip_grad=0.0)).grads


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (i > 2)) for i, n in enumerate(FINALIZED)])
def test_a_loop_may_finalize_gradients_as_often_as_it_likes(name):
    """As Megatron's own loops do, once a step or twice or not at all: a step for each way, each of one process's gradients."""
    layout = FINALIZED[name]

    def work(mesh):
        chunks, _, _ = build_chunks(mesh, TINY_GPT2, layout)
        get_global_state().sequence_parallel, model = layout.sp, list(chunks.values())
        batch = BatchShape(8 // layout.dp // layout.m, layout.m)
        buffers = [buffer for chunk in model for buffer in chunk.buffers]
        optimizer = FlatOptimizer(
            buffers, OptimizerConfig(clip_grad=0.0), mesh, fixed_order=layout.data_parallel.fixed_order_grad_reduce
        )
        config = model[0].module.config = SimpleNamespace(**vars(TINY_GPT2), params_dtype=torch.float64)
        grads = []

        def forward_backward(step, **options):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[microbatches(batch, step * 8, mesh) for _ in chunks],
                model=model,
                num_microbatches=layout.m,
                seq_length=SEQ,
                micro_batch_size=batch.micro_batch_size,
                **options,
            )

        for step, way in enumerate(WAYS):
            for chunk in model:
                chunk.zero_grad_buffer()
            config.finalize_model_grads_func = finalize_model_grads if "config" in way else None
            if way == "after a validation":
                forward_backward(step, forward_only=True)
                finalize_model_grads(model)
            with model[0].no_sync():
                forward_backward(step)
            for tokens in {
                "never": [],
                "twice with tokens": [torch.tensor(7.0), torch.tensor(7.0)],
                "by the config": [],
            }.get(way, [None]):
                finalize_model_grads(model, tokens)
            grads.append(pieces_of_chunks(chunks, mesh, lambda p: p.main_grad, {"sums": buffers}))
            optimizer.step(1e-2)
            for chunk in model:
                chunk.gather_params()
                chunk.finish_param_gather()
        return grads

    ranks = run_ranks(layout.sizes, work, delayed=layout.delayed)
    for step, way in enumerate(WAYS):
        got = put_together([grads[step] for grads in ranks])
        for parameter, gradient in of_one_process()[step].items():
            worst, scale = (got[parameter] - gradient).abs().max(), gradient.abs().max()
            assert worst <= 1e-10 * scale, f"{way}: the gradient of {parameter} differs by {worst} of {scale}"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_without_the_function_sums_its_own_backwards(stage):
    """`finalize_model_grads(model, tokens)` alone: nobody has begun to sum, nor divided."""

    def work(mesh):
        module = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(module.weight)
        model = DistributedDataParallel(module, mesh, DataParallelConfig(zero_stage=stage))
        model.zero_grad_buffer()
        model(torch.tensor([[1.0, 2.0]], dtype=torch.float64) * (1 + mesh["dp"].rank)).sum().backward()
        for _ in range(2):
            finalize_model_grads([model], 3.0)
        return [x for buffer in model.buffers for tensor in buffer.sums.tensors for x in tensor.tolist()]

    ranks = run_ranks({"dp": 2}, work)
    whole = ranks[0] if stage == 0 else [x for rank in ranks for x in rank]
    assert [x for x in whole if x] == [0.5, 1.0]  # (1, 2) and (2, 4), by 3 tokens of each


def test_gradients_that_come_on_top_of_a_finished_step_are_refused():
    def work(mesh):
        chunks, _, _ = build_chunks(mesh, GPT2, Layout())
        for _ in range(2):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=microbatches(BatchShape(4, 1), 0, mesh),
                model=chunks[0],
                num_microbatches=1,
                seq_length=SEQ,
                micro_batch_size=4,
            )

    with pytest.raises(RuntimeError, match=r"call zero_grad_buffer\(\)"):
        run_ranks({}, work)


@pytest.mark.full
@pytest.mark.parametrize("shards", [DataParallelConfig(), *[pytest.param(s, marks=pytest.mark.full) for s in SHARDS]])
def test_a_scaled_loss_leaves_scaled_gradients(shards):
    """The optimizer's `scale_loss` in, `clip_grad_norm(scale)` out: as if nothing had been scaled."""
    layout, scale = Layout(dp=2, pp=2, m=2, data_parallel=shards), 3.0 * 2**10

    def work(mesh, scaler):
        optimizer = FlatOptimizer([], OptimizerConfig(), mesh, scaler=scaler)
        return run_by_func(mesh, GPT2, layout, grad_scale_func=optimizer.scale_loss)[1]

    sizes = {"pp": 2, "dp": 2}
    plain, scaled = (
        put_together(run_ranks(sizes, partial(work, scaler=scaler))) for scaler in (None, ConstantGradScaler(scale))
    )
    for name, gradient in plain.items():
        torch.testing.assert_close(scaled[name], gradient * scale, rtol=1e-10, atol=1e-12)


def test_float16_gradients_that_would_vanish_are_scaled_by_what_the_models_config_holds():
    """A gradient of 2^-26 is no number of float16 (its smallest is 2^-24), one of 2^-26 x 2^10 is; the input is 1."""

    class Model(torch.nn.Linear):
        def set_input_tensor(self, x): ...

    def work(mesh, scale):
        model = Model(1, 1, bias=False, dtype=torch.float16)
        model.config = core_transformer_config_from_args(SimpleNamespace(fp16=True))
        if scale is not None:
            model.config.grad_scale_func = lambda loss: loss * scale
        get_forward_backward_func()(
            forward_step_func=lambda data, model: (
                model(torch.ones(1, 1, dtype=torch.float16)),
                lambda y: (y.float().sum() * 2**-26, 1, {}),
            ),
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )
        return model.weight.grad.item()

    assert [run_ranks({}, partial(work, scale=scale))[0] for scale in (None, 2.0**10)] == [0.0, 2**-16]


def test_without_a_wrapper_gradients_are_left_in_grad():
    """A model of torch's own layers, in one process: the gradient of the mean loss by plain autograd."""
    weight = torch.arange(6.0).view(2, 3)
    rows = [torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, 1.0], [1.0, 1.0, 1.0]])]

    class Model(torch.nn.Linear):
        def set_input_tensor(self, x):
            assert x is None

    def work(mesh):
        model = Model(3, 2, bias=False)
        model.weight.data.copy_(weight)
        options = {"model": model, "num_microbatches": 2, "seq_length": 1, "micro_batch_size": 2}
        func = get_forward_backward_func()

        def step(data, model):
            return (
                model(next(data)),
                lambda y, non_loss_data=False: (
                    y.detach() if non_loss_data else (y.pow(2).mean(), {"loss": y.pow(2).mean().detach()})
                ),
            )

        reports = func(forward_step_func=step, data_iterator=iter(rows), **options)
        gradient = model.weight.grad.clone()
        forwards = func(forward_step_func=step, data_iterator=iter(rows), forward_only=True, **options)
        outputs = func(forward_step_func=step, data_iterator=iter(rows), collect_non_loss_data=True, **options)
        assert torch.equal(model.weight.grad, gradient), "a forward has left a gradient"
        return reports, forwards, outputs, gradient

    ((reports, forwards, outputs, gradient),) = run_ranks({}, work)
    assert reports == forwards == [{"loss": torch.tensor(v)} for v in _losses(weight, rows)]
    assert all(torch.equal(out, row @ weight.t()) for out, row in zip(outputs, rows, strict=True))
    plain = weight.clone().requires_grad_()
    (sum((row @ plain.t()).pow(2).mean() for row in rows) / 2).backward()
    torch.testing.assert_close(gradient, plain.grad)


def _losses(weight, rows):
    return [(row @ weight.t()).pow(2).mean().item() for row in rows]


OPTIONS_AND_SAID = [
    ({"decoder_seq_length": 4}, "decoder_seq_length 4 seq_length 8"),
    ({"data_iterator": [None, None]}, "1 2"),
    ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn"),
]


@pytest.mark.parametrize("options, said", OPTIONS_AND_SAID)
def test_what_it_cannot_do_is_refused(options, said):
    usual = {
        "forward_step_func": forward_step,
        "data_iterator": None,
        "model": torch.nn.Linear(1, 1),
        "num_microbatches": 1,
        "seq_length": 8,
        "micro_batch_size": 1,
        "first_val_step": True,
    }
    with pytest.raises((ValueError, TypeError)) as refused:
        get_forward_backward_func()(**(usual | options))
    assert tells(refused.value, said)


def test_a_config_without_a_dtype_of_the_tensors_between_stages_is_refused():
    """Megatron refuses a pipeline without `pipeline_dtype`, too."""
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(hidden_size=4, sequence_parallel=False, pipeline_dtype=None, params_dtype=None)
    usual = {"data_iterator": None, "model": model, "num_microbatches": 1, "seq_length": 8, "micro_batch_size": 1}

    def work(mesh):
        with pytest.raises(ValueError, match="pipeline_dtype"):
            get_forward_backward_func()(forward_step_func=forward_step, **usual)

    run_ranks({"pp": 2}, work)
