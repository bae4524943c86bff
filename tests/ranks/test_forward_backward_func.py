"""`get_forward_backward_func` gives a fork's loop the losses and gradients of our own train step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import (
    GPT2,
    LLAMA,
    Layout,
    assert_equal,
    build_chunks,
    forward_step,
    microbatches,
    my_pieces,
    put_together,
    run,
)

from megatron.core.optimizer.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.train_step import BatchShape

BATCH, SEQ = 24, 8
LAYOUTS = [Layout(m=3), Layout(pp=2, m=4), Layout(pp=2, v=2, m=4, tp=2, sp=True), Layout(dp=2, pp=2, m=2, delayed=True)]


def run_by_func(mesh, config, layout):
    """One step's reports and gradients."""
    chunks, _, _ = build_chunks(mesh, config, layout)
    mesh.sequence_parallel = layout.sp
    batch = BatchShape(BATCH // layout.dp // layout.m, layout.m)
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[microbatches(batch, 0, mesh) for _ in chunks],
        model=list(chunks.values()),
        num_microbatches=layout.m,
        seq_length=SEQ,
        micro_batch_size=batch.micro_batch_size,
    )
    return reports, [p for chunk in chunks.values() for p in my_pieces(chunk.module, mesh, lambda p: p.main_grad)]


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_gives_the_losses_and_gradients_of_the_train_step(layout, model):
    """Dropout included. The train step runs on one rank: the oracle knows neither this layout nor this function."""
    expected = run(model, Layout(), steps=1, global_batch=BATCH, optimizer=OptimizerConfig(clip_grad=0.0))
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    ranks = run_ranks(sizes, partial(run_by_func, config=model, layout=layout), delayed=layout.delayed)
    of_last = [reports for reports, _ in ranks if reports]
    assert len(of_last) == layout.tp * layout.dp and all(len(reports) == layout.m for reports in of_last)
    pairs = torch.stack([report["lm loss"] for reports in of_last[:: layout.tp] for report in reports]).sum(0)
    got = replace(
        expected, grads=[put_together([pieces for _, pieces in ranks])], losses=[(pairs[0] / pairs[1]).item()]
    )
    assert_equal(got, expected, 1e-10)


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
            return model(next(data)), lambda y, non_loss_data=False: y.detach() if non_loss_data else (
                y.pow(2).mean(), {"loss": y.pow(2).mean().detach()}
            )  # fmt: skip

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


@pytest.mark.parametrize(
    "options, said",
    [
        ({"decoder_seq_length": 4}, "decoder_seq_length (4) differs from seq_length (8)"),
        ({"data_iterator": [None, None]}, "1 model chunk(s) but 2 data iterator(s)"),
        ({"adjust_tensor_shapes_fn": print}, "['adjust_tensor_shapes_fn'] are not built"),
    ],
)
def test_what_it_cannot_do_is_refused(options, said):
    usual = {
        "forward_step_func": forward_step, "data_iterator": None, "model": torch.nn.Linear(1, 1), "num_microbatches": 1,
        "seq_length": 8, "micro_batch_size": 1, "first_val_step": True,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as refused:
        get_forward_backward_func()(**(usual | options))
    assert said in str(refused.value)
