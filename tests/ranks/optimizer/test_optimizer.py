"""The flat optimizer against torch's own AdamW and clip_grad_norm_, and what a bad gradient may not touch."""

import math
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import tiny_run
import torch
from local_ranks import run_ranks
from said import tells
from tiny_run import GPT2, LLAMA, SEQ, Layout, assert_equal, build, forward_step, microbatches, my_pieces, put_together
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import default_group
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import is_counted, pieces
from megatron.training.step import train_step

SHAPES = {"matrix": (7, 5), "bias": (7,), "table": (3, 4, 2), "gain": (9,), "scalar": ()}
HYPER = {"betas": (0.9, 0.95), "eps": 1e-6}
CONFIG = OptimizerConfig(weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.0)


class Shapes(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def plain_adamw(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    """Decay for what has two dimensions or more."""
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **HYPER, foreach=False, fused=False)


def alone(work):
    """What one rank returns."""
    return run_ranks({}, work)[0]


def flat(mesh, dtype: torch.dtype, config: OptimizerConfig = CONFIG) -> tuple[DistributedDataParallel, FlatOptimizer]:
    chunk = DistributedDataParallel(Shapes(dtype), mesh)
    return chunk, FlatOptimizer(chunk.buffers, config, mesh)


def give(chunk: DistributedDataParallel, grads: dict[str, Tensor]) -> None:
    for name, p in chunk.module.named_parameters():
        p.main_grad.copy_(grads[name])


# ---------------------------------------------------------------- the update


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_ten_steps_equal_torchs_adamw(dtype: torch.dtype, tolerance: float):
    def work(mesh):
        chunk, adam = flat(mesh, dtype)
        for step in range(10):
            give(chunk, gradients(step))
            adam.step(lr=1e-2 / (1 + step))
        assert adam.step_count == 10
        return {name: p.data.clone() for name, p in chunk.module.named_parameters()}

    expected = {name: p.detach().clone() for name, p in Shapes(dtype).named_parameters()}
    plain = plain_adamw(expected)
    for step in range(10):
        for group in plain.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for name, grad in gradients(step).items():
            expected[name].grad = grad.to(dtype)
        plain.step()
    for name, value in alone(work).items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def test_a_changing_weight_decay_is_torchs():
    """Step by step another one, for matrices only."""
    decays = [0.5 * step for step in range(4)]

    def work(mesh):
        chunk, adam = flat(mesh, torch.float64)
        for step, decay in enumerate(decays):
            give(chunk, gradients(step))
            adam.step(1e-2, weight_decay=decay)
        return {name: p.data.clone() for name, p in chunk.module.named_parameters()}

    expected = {name: p.detach().clone() for name, p in Shapes(torch.float64).named_parameters()}
    plain = plain_adamw(expected)
    for step, decay in enumerate(decays):
        for group, value in zip(plain.param_groups, (decay, 0.0), strict=True):
            group |= {"lr": 1e-2, "weight_decay": value}
        for name, grad in gradients(step).items():
            expected[name].grad = grad.double()
        plain.step()
    for name, value in alone(work).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-13, atol=1e-13)


def test_bfloat16_parameters_are_float32_masters_rounded():
    """Updates far below a bfloat16's resolution add up in the masters."""
    rate, steps = 1e-4, 50

    def work(mesh):
        chunk, adam = flat(mesh, torch.bfloat16)
        assert all(p.main_grad.dtype == torch.float32 for p in chunk.module.parameters())
        for step in range(steps):
            give(chunk, gradients(step % 2))
            adam.step(rate)
        masters = {name: x.clone() for name, x in adam.tensors()["master"].items()}
        return masters, {name: p.data.clone() for name, p in chunk.module.named_parameters()}

    start = {name: p.detach().clone() for name, p in Shapes(torch.bfloat16).named_parameters()}
    expected = {name: p.float() for name, p in start.items()}
    plain = plain_adamw(expected)
    for group in plain.param_groups:
        group["lr"] = rate
    for step in range(steps):
        for name, grad in gradients(step % 2).items():
            expected[name].grad = grad
        plain.step()
    masters, parameters = alone(work)
    for name, master in masters.items():
        torch.testing.assert_close(master, expected[name], rtol=2e-6, atol=2e-6)
        assert torch.equal(parameters[name], master.bfloat16())
        assert parameters[name].dtype == torch.bfloat16
    assert not torch.equal(masters["matrix"], start["matrix"].float())


def test_only_half_precision_keeps_masters():
    moments = {"exp_avg", "exp_avg_sq"}
    for dtype, kinds in {torch.float64: moments, torch.float32: moments, torch.bfloat16: moments | {"master"}}.items():
        assert alone(lambda mesh, dtype=dtype: set(flat(mesh, dtype)[1].tensors())) == kinds


def test_weight_decay_is_for_matrices_only():
    """With no gradient an update is the decay alone: w (1 - lr * decay)."""

    def work(mesh):
        chunk, adam = flat(mesh, torch.float64)
        before = {name: p.data.clone() for name, p in chunk.module.named_parameters()}
        adam.step(lr=0.5)
        return {name: p.data / before[name] for name, p in chunk.module.named_parameters()}

    expected = {"matrix": 0.95, "bias": 1.0, "table": 0.95, "gain": 1.0, "scalar": 1.0}
    for name, ratio in alone(work).items():
        torch.testing.assert_close(ratio, torch.full_like(ratio, expected[name]), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=2, sp=True, pp=2)], ids=str)
def test_what_decays_does_not_follow_the_layout(layout: Layout):
    """A vector divided over ranks is a vector still; a matrix with one local row is a matrix."""

    def work(mesh):
        named = build(mesh, GPT2, layout.sp)[0].module.named_parameters()
        return {n: default_group(n, p.placement).weight_decay_multiplier == 1.0 for n, p in named}

    ranks = run_ranks({"tp": layout.tp, "pp": layout.pp}, work)
    got = {name: decay for rank in ranks for name, decay in rank.items()}
    assert len(got) == 2 + 12 * GPT2.num_layers + 2
    for name, decay in got.items():
        assert decay == (name.endswith("weight") and "norm" not in name), name


def test_going_on_from_saved_state_equals_going_on():
    def work(mesh):
        chunk, adam = flat(mesh, torch.bfloat16)
        for step in range(3):
            give(chunk, gradients(step))
            adam.step(1e-2)
        other_chunk, other = flat(mesh, torch.bfloat16)
        for kind, tensors in adam.tensors().items():
            for name, value in tensors.items():
                other.tensors()[kind][name].copy_(value)
        other.step_count = adam.step_count
        other.publish_masters()
        for one, part in ((adam, chunk), (other, other_chunk)):
            give(part, gradients(3))
            one.step(1e-2)
        return adam.tensors(), other.tensors(), chunk.buffers[0].params.data, other_chunk.buffers[0].params.data

    first, second, weights, other_weights = alone(work)
    assert torch.equal(weights, other_weights)
    assert all(torch.equal(first[kind][name], second[kind][name]) for kind, name in product(first, SHAPES))


# ---------------------------------------------------------------- norm and clipping


@pytest.mark.parametrize(("limit", "is_clipped"), [(0.5, True), (1e9, False), (0.0, False)])
def test_clipping_equals_torchs(limit: float, is_clipped: bool):
    def work(mesh):
        chunk, adam = flat(mesh, torch.float64, replace(CONFIG, clip_grad=limit))
        give(chunk, gradients(0, torch.float64))
        norm = adam.clip_grad_norm()
        return norm, {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}

    expected = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    for name, grad in gradients(0, torch.float64).items():
        expected[name].grad = grad
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), limit or math.inf)
    got, grads = alone(work)
    assert got == pytest.approx(norm.item(), rel=1e-12), "the norm before clipping"
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name].grad, rtol=1e-12, atol=0.0)
    after = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
    assert after == pytest.approx(limit if is_clipped else got, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", "untied", "llama"])
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=4, sp=True), Layout(pp=2), Layout(pp=4), Layout(tp=2, sp=True, pp=2, dp=2), Layout(dp=2)],
    ids=str,
)
def test_the_norm_counts_each_parameter_once(model: str, layout: Layout):
    """Every gradient one: the square of the norm is the number of parameters, without padding."""
    config = {"tied": GPT2, "untied": replace(GPT2, untie_embeddings_and_output_weights=True), "llama": LLAMA}[model]

    def work(mesh):
        chunk, _ = build(mesh, config, layout.sp)
        for p in chunk.module.parameters():
            for _, local in pieces(p.placement, tuple(p.shape), mesh):
                p.main_grad[slices(local)] = 1.0
        return FlatOptimizer(chunk.buffers, OptimizerConfig(), mesh).grad_norm()

    h, f, words = config.hidden_size, config.ffn_size, 61
    qkv = h + 2 * config.query_groups * config.head_width
    per_layer = (h * qkv + h * h + 3 * h * f + 2 * h) if model == "llama" else (12 * h * h + 13 * h)
    count = config.num_layers * per_layer + words * h
    count += (words * h + h) if model == "llama" else (SEQ * h + 2 * h + (words * h if model == "untied" else 0))
    norms = run_ranks({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, work)
    assert [norm**2 for norm in norms] == pytest.approx([count] * len(norms), rel=1e-12)


def test_each_element_of_a_model_has_one_speaker():
    """Tied table under TP 2 x PP 2: the first stage speaks for it, and the last one keeps quiet."""

    def work(mesh):
        chunk, _ = build(mesh, GPT2, False)
        return {name: is_counted(p.placement, mesh) for name, p in chunk.module.named_parameters() if "word" in name}

    ranks = run_ranks({"tp": 2, "pp": 2}, work)
    assert [list(rank.values()) for rank in ranks] == [[True], [True], [False], [False]]
    whole = put_together(
        run_ranks(
            {"tp": 2, "pp": 2}, lambda mesh: my_pieces(build(mesh, GPT2, False)[0].module, mesh, lambda p: p.data)
        )
    )
    assert whole["language_model.embedding.word_embeddings.weight"].shape == (61, 32)


# ---------------------------------------------------------------- a gradient that is not finite


def poisoned_step(mesh, layout: Layout, bad: float, where: int, check_finite: bool = True) -> dict:
    """A good step, then one whose loss is spoiled in one microbatch of one data-parallel rank."""
    config = replace(GPT2, fp64=False, bf16=True)
    chunk, keys = build(mesh, config, layout.sp)
    adam = FlatOptimizer(chunk.buffers, OptimizerConfig(clip_grad=1.0), mesh)
    batch = BatchShape(1, 2)
    spec = TensorSpec((SEQ // layout.tp if layout.sp else SEQ, 1, config.hidden_size), config.params_dtype)
    forwards, spoiled = [0], 2 + 1  # the second microbatch of the second step

    def step_function(data, model):
        output, loss_func = forward_step(data, model)
        forwards[0] += 1
        if forwards[0] == spoiled + 1 and mesh["dp"].rank == where and mesh["pp"].is_last:
            return output, partial(spoil, loss_func)
        return output, loss_func

    def spoil(loss_func, output):
        total, count, report = loss_func(output)
        return total * bad, count, report

    stage = mesh["pp"].rank
    pipeline = Pipeline({stage: chunk}, mesh, batch, boundary=(spec,), forward_step=step_function, keys=keys)
    train_step(pipeline, adam, {stage: microbatches(batch, 0, mesh)}, first_sample=0, lr=1e-2)
    before = snapshot(chunk, adam)
    outcome: dict = {}
    try:
        data = {stage: microbatches(batch, 2 * layout.dp, mesh)}
        outcome["result"] = train_step(
            pipeline, adam, data, first_sample=2 * layout.dp, lr=1e-2, check_finite=check_finite
        )
    except FloatingPointError as error:
        outcome["error"] = str(error)
    after = snapshot(chunk, adam)
    outcome["unchanged"] = [torch.equal(a, b) for a, b in zip(before, after)]
    outcome["finite"] = all(p.isfinite().all() for p in chunk.module.parameters())
    return outcome


def snapshot(chunk: DistributedDataParallel, adam: FlatOptimizer) -> list[Tensor]:
    tensors = [value.clone() for kind in adam.tensors().values() for value in kind.values()]
    steps = [torch.tensor(adam.step_count)]
    return tensors + steps + [p.data.clone() for p in chunk.module.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True, pp=2, dp=2)], ids=str)
def test_a_bad_gradient_stops_every_rank_before_anything_is_updated(layout: Layout, bad: float):
    work = partial(poisoned_step, layout=layout, bad=bad, where=layout.dp - 1)
    for outcome in run_ranks({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, work):
        message = outcome["error"]
        cause = f"the sum of the step's losses is {bad}, and the gradient's norm is "
        assert message.startswith((f"{cause}nan (losses on this rank: {{", f"{cause}inf ("))
        assert tells(message, "--lr --no-check-for-nan-in-loss-and-grad")
        assert all(outcome["unchanged"])


def test_without_the_check_a_bad_step_is_reported_and_done():
    (outcome,) = run_ranks({}, partial(poisoned_step, layout=Layout(), bad=math.nan, where=0, check_finite=False))
    assert outcome["result"].is_nan
    assert not outcome["finite"], "as asked"


@cache
def unweighted(layout: Layout) -> tiny_run.Outcome:
    return tiny_run.run(GPT2, layout)


@pytest.mark.parametrize("factor", [pytest.param(1e-4, marks=pytest.mark.full), -0.5])
@pytest.mark.full
def test_the_count_of_a_step_may_be_a_fraction_or_negative(factor: float, monkeypatch):
    """A loss that weights its tokens: the mean is that of the weights times any factor. float64, three steps."""
    layout, loss_func = Layout(pp=2, dp=2, m=3), tiny_run.loss_func
    expected = unweighted(layout)
    monkeypatch.setattr(tiny_run, "loss_func", lambda mask, losses: loss_func(mask * factor, losses))
    assert_equal(tiny_run.run(GPT2, layout), expected, 1e-9)


def test_a_step_without_tokens_changes_nothing_but_what_decays(monkeypatch):
    """A count of exactly 0 has no mean: gradients are taken as they are, and here they are zeros."""
    loss_func = tiny_run.loss_func
    monkeypatch.setattr(tiny_run, "loss_func", lambda mask, losses: loss_func(mask * 0, losses))
    outcome = tiny_run.run(GPT2, Layout(dp=2, m=3), steps=1)
    assert outcome.norms == [0.0] and outcome.losses == [None]
