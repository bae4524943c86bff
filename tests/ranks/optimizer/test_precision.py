"""Half precision, loss scaling, optimizers and frozen parameters: what one process computes, every layout computes.

Two kinds of comparison. In float64 a layout may differ from one process by rounding alone (1e-10, as in test_parity). In half
precision it may differ by about as much as half precision itself differs from float32, which the tests measure beside it.
"""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, SEED, SEQ, VOCAB, Layout, my_pieces, put_together, runtime_for, sample
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DataParallelConfig, DistributedDataParallel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.cpu_half_precision_matmul import NATIVE, MatmulMode, MatmulModes
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import LossScaleConfig, make_grad_scaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupRule, ParamGroup, default_group
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.pipeline_parallel.loss_func_results import parse_loss_tuple
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.sharding.placement import Placement
from megatron.core.tensor_parallel.linear_autograd import accumulate_wgrad
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.checkpointing.check_same_model_and_optimizer import check_same_optimizer
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.monitor.training_log import StepNumbers, TrainingLog
from megatron.training.step import NotFiniteError, StepResult, train_step

TOLERANCE = 1e-10
BATCH = 24
FP32, FP16, BF16 = (
    replace(GPT2, fp64=False, num_layers=2, hidden_dropout=0.0, attention_dropout=0.0, **precision)
    for precision in ({}, {"fp16": True}, {"bf16": True})
)
EIGHT_RANKS = Layout(tp=2, pp=2, dp=2, m=3)


# ---------------------------------------------------------------- a run with everything that can be varied


def ragged_mask(number: int) -> Tensor:
    """Of sample `number`: nothing, one token, ... so that microbatches and ranks differ as much as they can."""
    return (torch.arange(SEQ) < (number * number) % (SEQ + 1)).double()


def token_sums(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses * mask.to(losses.dtype)).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach().double(), count))}


def mean_of_microbatch(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The older form of a loss function."""
    mean = (losses * mask.to(losses.dtype)).sum() / mask.sum().clamp(min=1.0)
    return mean, {"lm loss": mean.detach()}


@dataclass(frozen=True)
class Run:
    config: ModelConfig
    layout: Layout = field(default_factory=Layout)
    steps: int = 3
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(clip_grad=0.5, weight_decay=0.1))
    lr: float = 1e-2
    decoupled_lr: float | None = None
    group_of: GroupRule = default_group
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    frozen: Callable[[str], bool] = lambda name: False
    overflows: frozenset[tuple[int, int]] = frozenset()  # (rank, step) at which one gradient becomes infinite
    loss_func: Callable = token_sums
    mask_of: Callable[[int], Tensor] = lambda number: sample(number)["mask"]
    matmul_modes: MatmulModes = NATIVE


@dataclass
class Rank:
    """One rank's parts, and what has come of them."""

    mesh: Mesh
    chunk: DistributedDataParallel
    optimizer: FlatOptimizer
    pipeline: Pipeline
    results: list[StepResult] = field(default_factory=list)
    grads: list[list[tuple]] = field(default_factory=list)
    weights: list[list[tuple]] = field(default_factory=list)  # after each step


def start(mesh: Mesh, run: Run) -> Rank:
    pp, keys, store, config, layout = mesh["pp"], SampleDropoutKeys(SEED), WeightGradStore(), run.config, run.layout
    options = {"sequence_parallel": layout.sp, "weight_grads": store, "matmul_modes": run.matmul_modes, "fills": False}
    model = GPTModel(
        config,
        vocab_size=VOCAB,
        positions=SEQ,
        layers=split_layers(config.num_layers, pp.size)[pp.rank],
        context=LayerContext.from_mesh(mesh, config.params_dtype, keys, **options),
        pre_process=pp.is_first,
        post_process=pp.is_last,
    )
    initialize_parameters(model, SEED, mesh)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not run.frozen(name))
    chunk = DistributedDataParallel(model, mesh, run.data_parallel)
    scaler = make_grad_scaler(run.loss_scale, fp16=config.fp16)
    optimizer = FlatOptimizer(chunk.buffers, run.optimizer, mesh, group_of=run.group_of, scaler=scaler)
    batch = BatchShape(BATCH // layout.dp // layout.m, layout.m, SEQ)
    length = SEQ // layout.tp if layout.sp else SEQ
    spec = TensorSpec((length, batch.micro_batch_size, config.hidden_size), config.params_dtype)
    step = partial(forward_step, loss_func=run.loss_func)
    options = dict(boundary=(spec,), forward_step=step, keys=keys, weight_grads=store)
    pipeline = Pipeline({pp.rank: chunk}, mesh, batch, schedule_name=layout.schedule, **options)
    return Rank(mesh, chunk, optimizer, pipeline)


def forward_step(data: Iterator, model: nn.Module, loss_func: Callable) -> tuple[Tensor, partial]:
    batch = next(data)
    return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]), partial(loss_func, batch["mask"])


def microbatches(run: Run, batch: BatchShape, first_sample: int, mesh: Mesh) -> Iterator[dict[str, Tensor]]:
    for i in range(batch.num_microbatches):
        rows = [{**sample(n), "mask": run.mask_of(n)} for n in batch.samples_of(first_sample, i, mesh["dp"])]
        yield {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def overflow_in(chunk: DistributedDataParallel) -> None:
    """What a too large loss scale leaves on one rank, before anything is summed over ranks."""
    chunk.buffers[0].buckets[0].gradients[0] = float("inf")


def train(mesh: Mesh, run: Run, steps: range, rank: Rank | None = None) -> Rank:
    rank = rank or start(mesh, run)
    reduce = rank.chunk.start_grad_reduce
    for step in steps:
        strikes = (mesh["world"].rank, step) in run.overflows
        rank.chunk.start_grad_reduce = lambda strikes=strikes: (strikes and overflow_in(rank.chunk), reduce())
        data = {mesh["pp"].rank: microbatches(run, rank.pipeline.batch, step * BATCH, mesh)}
        rank.results.append(
            train_step(
                rank.pipeline, rank.optimizer, data, first_sample=step * BATCH, lr=run.lr, decoupled_lr=run.decoupled_lr
            )
        )
        rank.grads.append(my_pieces(rank.chunk.module, mesh, gradient_of))
        rank.weights.append(my_pieces(rank.chunk.module, mesh, lambda p: p.data))
    del rank.chunk.start_grad_reduce
    return rank


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)


def ranks_of(run: Run) -> list[Rank]:
    layout = run.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    ranks = run_ranks(sizes, partial(train, run=run, steps=range(run.steps)), delayed=layout.delayed)
    for name in ("grad_norm", "loss_scale", "skipped"):
        values = [[getattr(result, name) for result in rank.results] for rank in ranks]
        assert all(repr(value) == repr(values[0]) for value in values), f"ranks disagree on {name}"
    return ranks


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def outcome(run: Run) -> Outcome:
    ranks = ranks_of(run)
    return Outcome(
        [result.losses["lm loss"] for result in ranks[-1].results],
        [result.grad_norm for result in ranks[0].results],
        [put_together([rank.grads[step] for rank in ranks]) for step in range(run.steps)],
        put_together([rank.weights[-1] for rank in ranks]),
    )


def assert_same(got: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.norms == pytest.approx(expected.norms, rel=tolerance)
    pairs = [*zip(got.grads, expected.grads, strict=True), (got.weights, expected.weights)]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            worst = (mine[name] - value).abs().max().item()
            assert worst <= tolerance * value.abs().max().item(), f"{name} differs by {worst}"


# ---------------------------------------------------------------- float16 and its loss scale

SHORT = LossScaleConfig(initial_loss_scale=1024.0, loss_scale_window=2, hysteresis=2)
#              step    0       1      2      3      4       5       6
OVERFLOWS = (1, 2)
SCALES = [1024.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]


@pytest.mark.full
@pytest.mark.parametrize("victim", [3, *(pytest.param(rank, marks=pytest.mark.full) for rank in (0, 1, 2, 4, 5, 6, 7))])
def test_overflow_on_one_rank_skips_the_step_on_all(victim: int):
    """In the first element of its buffer, which on every second rank is a copy that the norm does not count."""
    run = Run(FP16, EIGHT_RANKS, steps=7, loss_scale=SHORT, overflows=frozenset((victim, step) for step in OVERFLOWS))
    ranks = ranks_of(run)
    for rank in ranks:
        assert [result.skipped for result in rank.results] == [step in OVERFLOWS for step in range(7)]
        assert [result.loss_scale for result in rank.results] == SCALES
        assert not any(result.is_nan for result in rank.results), "an overflow of the scale is no NaN of the model"
        assert rank.optimizer.step_count == 5
    weights = [put_together([rank.weights[step] for rank in ranks]) for step in range(7)]
    for step in range(1, 7):
        same = all(torch.equal(weights[step][name], weights[step - 1][name]) for name in weights[step])
        assert same == (step in OVERFLOWS), f"step {step}"
    for first in (rank for rank in ranks if rank.mesh["dp"].is_first):
        second = ranks[first.mesh["dp"].ranks[1]]
        for one, other in zip(first.optimizer.masters, second.optimizer.masters, strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors)), "data-parallel replicas drift apart"


def test_a_fixed_scale_skips_and_stays_or_raises():
    run = Run(FP16, loss_scale=LossScaleConfig(loss_scale=256.0), overflows=frozenset({(0, 1)}))
    with pytest.raises(RuntimeError, match="norm"):
        ranks_of(run)

    def unchecked(mesh: Mesh) -> list[StepResult]:
        rank = start(mesh, run)
        reduce = rank.chunk.start_grad_reduce
        for step in range(3):
            rank.chunk.start_grad_reduce = lambda step=step: (step == 1 and overflow_in(rank.chunk), reduce())
            data = {0: microbatches(run, rank.pipeline.batch, 0, mesh)}
            rank.results.append(
                train_step(rank.pipeline, rank.optimizer, data, first_sample=0, lr=1e-3, check_finite=False)
            )
        return rank.results

    (results,) = run_ranks({}, unchecked)
    assert [(r.skipped, r.loss_scale) for r in results] == [(False, 256.0), (True, 256.0), (False, 256.0)]


PIPELINE = Layout(pp=2, dp=2, m=2)


@pytest.mark.parametrize("layout", [Layout(), PIPELINE, pytest.param(EIGHT_RANKS, marks=pytest.mark.full)], ids=str)
def test_a_nan_in_a_weight_is_no_overflow_of_the_loss_scale(layout: Layout):
    """In the first stage, as a broken checkpoint leaves it: every rank stops by name; unchecked, steps are skipped and the scale stays."""
    run = Run(FP16, layout, loss_scale=SHORT)

    def work(mesh: Mesh) -> tuple[str, float, list[StepResult]]:
        rank, said, results = start(mesh, run), "", []
        for name, parameter in rank.chunk.module.named_parameters():
            if name.endswith("layers.0.input_layernorm.weight"):
                parameter.data[1] = torch.nan
        for check in (True, False, False, False):
            data = {mesh["pp"].rank: microbatches(run, rank.pipeline.batch, 0, mesh)}
            try:
                results.append(
                    train_step(rank.pipeline, rank.optimizer, data, first_sample=0, lr=1e-3, check_finite=check)
                )
            except NotFiniteError as error:
                said = str(error)
        return said, rank.optimizer.scaler.scale, results

    for said, scale, results in run_ranks({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, work):
        assert "losses is nan" in said and "--no-check-for-nan-in-loss-and-grad" in said
        assert scale == SHORT.initial_loss_scale
        assert [(result.skipped, result.is_nan) for result in results] == [(True, True)] * 3


@pytest.mark.full
def test_overflows_in_a_row_at_the_lowest_scale_stop_the_run():
    """Where the scale can fall no more the gradient itself is not finite; one such step between good ones is skipped."""
    lowest = LossScaleConfig(initial_loss_scale=2.0, hysteresis=1)
    ranks = ranks_of(Run(FP16, PIPELINE, steps=4, loss_scale=lowest, overflows=frozenset({(0, 0), (0, 2)})))
    assert [result.skipped for result in ranks[3].results] == [True, False, True, False]
    assert [result.loss_scale for result in ranks[3].results] == [1.0] * 4
    with pytest.raises(RuntimeError, match="--min-loss-scale"):
        ranks_of(Run(FP16, PIPELINE, steps=2, loss_scale=lowest, overflows=frozenset({(0, 0), (0, 1)})))


@pytest.mark.full
def test_float16_settles_from_two_to_the_32_and_learns():
    """Real overflows, none injected: Megatron's initial scale is far too large, and comes down by itself."""
    (rank,) = ranks_of(Run(FP16, steps=40, mask_of=lambda n: torch.ones(SEQ), lr=3e-3))
    skipped = [result.skipped for result in rank.results]
    assert 5 < sum(skipped) < 30
    assert not any(skipped[30:]), "once it fits, it stays"
    (single,) = ranks_of(Run(FP32, steps=40 - sum(skipped), mask_of=lambda n: torch.ones(SEQ), lr=3e-3))
    # Other samples, the same number of updates of a task without signal: the loss nears that of uniform guesses.
    assert rank.results[-1].losses["lm loss"] == pytest.approx(single.results[-1].losses["lm loss"], rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(), EIGHT_RANKS, replace(EIGHT_RANKS, sp=True, delayed=True)], ids=str)
@pytest.mark.parametrize("loss_func", [token_sums, mean_of_microbatch])
def test_a_scaled_loss_changes_no_number(layout: Layout, loss_func: Callable):
    """In float64, so that nothing can hide: scale, nominal and true token counts cancel."""
    plain = Run(GPT2, layout, loss_func=loss_func, mask_of=ragged_mask)
    scaled = replace(plain, loss_scale=LossScaleConfig(loss_scale=1000.0))
    assert_same(outcome(scaled), outcome(plain))


def test_both_forms_of_a_loss_are_differentiated_at_one_size():
    losses, mask = torch.linspace(1.0, 2.0, 6 * SEQ), torch.ones(6 * SEQ)
    sums = parse_loss_tuple(token_sums(mask, losses), nominal_tokens=6 * SEQ)
    mean = parse_loss_tuple(mean_of_microbatch(mask, losses), nominal_tokens=6 * SEQ)
    assert mean.objective.item() == pytest.approx(sums.objective.item(), rel=1e-6)
    assert mean.tokens == sums.tokens == 6 * SEQ


@pytest.mark.full
def test_scaler_masters_and_moments_survive_a_save(tmp_path):
    """Stopped between the two overflows, when the scaler has lost its patience but not yet its scale."""
    run = Run(FP16, EIGHT_RANKS, steps=7, loss_scale=SHORT, overflows=frozenset((5, step) for step in OVERFLOWS))
    through = ranks_of(run)

    def stop(mesh: Mesh) -> None:
        rank = train(mesh, run, range(2))
        state = TrainState(2, 2 * BATCH, BATCH)
        save_and_load_run_state.save(runtime_for(mesh, FP16, tmp_path, BATCH), [rank.chunk], rank.optimizer, state, {})

    def go_on(mesh: Mesh) -> Rank:
        rank = start(mesh, run)
        state, _ = save_and_load_run_state.load(runtime_for(mesh, FP16, tmp_path, BATCH), [rank.chunk], rank.optimizer)
        assert (state.iteration, state.consumed_train_samples, state.scheduled_train_samples) == (2, 2 * BATCH, BATCH)
        return train(mesh, run, range(2, 7), rank)

    sizes = {"tp": 2, "pp": 2, "dp": 2}
    run_ranks(sizes, stop)
    for resumed, expected in zip(run_ranks(sizes, go_on), through, strict=True):
        assert repr(resumed.results) == repr(expected.results[2:]), "compared as text, since NaN equals nothing"
        for (name, _, _, got), (_, _, _, wanted) in zip(resumed.weights[-1], expected.weights[-1], strict=True):
            assert torch.equal(got, wanted), name


def test_another_optimizers_state_is_refused(tmp_path):
    (mesh,) = run_ranks({}, lambda mesh: mesh)
    mine = runtime_for(mesh, FP16, tmp_path, BATCH)
    saved = mine.config.as_json()
    check_same_optimizer(mine, {"config": saved})
    for settings, message in (
        ({"optimizer": "sgd"}, "has the state of --optimizer adam, but this run uses sgd; --no-load-optim"),
        ({"optimizer": "sgd", "sgd_momentum": 0.9}, "has no momentum_buffer (--sgd-momentum was 0.0); --no-load-optim"),
    ):
        theirs = saved
        if "sgd_momentum" in settings:
            theirs = {**saved, "optimizer": {**saved["optimizer"], "optimizer": "sgd", "sgd_momentum": 0.0}}
        mine.config = replace(mine.config, optimizer=OptimizerConfig(**settings))
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_same_optimizer(mine, {"config": theirs})


@pytest.mark.parametrize(
    ("before", "now", "lacking"),
    [
        ({}, {"muon_scalar_optimizer": "sgd"}, "has no momentum_buffer (--muon-scalar-optimizer was adam)"),
        (
            {"muon_scalar_optimizer": "sgd", "sgd_momentum": 0.0},
            {"muon_scalar_optimizer": "sgd"},
            "has no momentum_buffer (--sgd-momentum was 0.0)",
        ),
        ({"muon_scalar_optimizer": "sgd"}, {}, "has no exp_avg, exp_avg_sq (--muon-scalar-optimizer was sgd)"),
        ({"muon_scalar_optimizer": "sgd"}, {"muon_scalar_optimizer": "sgd", "sgd_momentum": 0.0}, None),
        ({}, {"muon_scalar_optimizer": "adam-l2"}, None),
    ],
    ids=str,
)
def test_what_another_optimizer_beside_muon_lacks_is_named(before: dict, now: dict, lacking: str | None, tmp_path):
    """Muon's momentum is of matrices alone: under the same name sgd keeps one of the other parameters."""
    (mesh,) = run_ranks({}, lambda mesh: mesh)
    run = runtime_for(mesh, FP32, tmp_path, BATCH, OptimizerConfig(optimizer="muon", **before))
    saved = run.config.as_json()
    run.config = replace(run.config, optimizer=OptimizerConfig(optimizer="muon", **now))
    if lacking is None:
        check_same_optimizer(run, {"config": saved})
        return
    with pytest.raises(ConfigError, match=re.escape(lacking)):
        check_same_optimizer(run, {"config": saved})


def test_the_log_counts_skipped_steps_and_leaves_out_their_losses():
    log = TrainingLog(train_iters=10, log_interval=3)
    log.add({"lm loss": 2.0})
    log.add({"lm loss": 7.0}, skipped=True)
    resumed = TrainingLog(10, 3)
    resumed.load_state(json.loads(json.dumps(log.state())))
    resumed.add({"lm loss": 4.0})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        resumed.line_if_due(StepNumbers(3, 12, 4, 0.5, decoupled_lr=0.25, loss_scale=512.0))
    expected = (
        "learning rate: 5.000000E-01 | decoupled learning rate: 2.500000E-01 | global batch size:     4 | "
        "lm loss: 3.000000E+00 | loss scale: 512.0 | number of skipped iterations:   1 | number of nan iterations:   0 |"
    )
    assert out.getvalue().rstrip("\n").endswith(expected)
    assert resumed.skipped_steps == 0


# ---------------------------------------------------------------- half precision over layouts

SGD = OptimizerConfig(optimizer="sgd", clip_grad=0.0, weight_decay=0.0)
LAYOUTS = [
    Layout(m=4),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4, sp=True, m=2),
    Layout(pp=2, m=3),
    Layout(dp=2, m=2),
    Layout(tp=2, sp=True, pp=2, dp=2, m=3),
]


def steep(config: ModelConfig, layout: Layout, matmul_modes: MatmulModes = NATIVE) -> Run:
    """Steps long enough to change weights by much more than rounding does. Plain SGD: Adam's first steps are signs of the
    gradient, and where that is rounding noise two equally good runs part by a whole step."""
    scale = LossScaleConfig(initial_loss_scale=2.0**12)
    return Run(config, layout, optimizer=SGD, lr=0.5, loss_scale=scale, matmul_modes=matmul_modes)


@cache
def of_one_process(precision: str, way: MatmulMode = "native") -> Outcome:
    return outcome(steep({"fp32": FP32, "fp16": FP16, "bf16": BF16}[precision], Layout(), MatmulModes.all(way)))


@pytest.mark.parametrize(
    ("precision", "way", "layout"),
    [
        pytest.param(precision, way, layout, id=f"{precision}-{way}-{layout}", marks=[pytest.mark.full] * (often > 0))
        for i, precision in enumerate(("fp16", "bf16"))
        for j, layout in enumerate(LAYOUTS)
        for way, often in (("native", (i + j) % 4), ("widened", (i + j + 1) % 4))
    ],
)
def test_half_precision_layouts_agree_as_well_as_half_precision_can(precision: str, way: MatmulMode, layout: Layout):
    """Where a layout sums in another order, other numbers are rounded: two half-precision runs differ by as much as each differs
    from float32. If both are off by about e in random directions, they are sqrt(2) e apart; measured: up to 1.9 e, at most 3 e
    allowed. e itself is up to 8 roundings of a tensor's norm (16 allowed: 6 % in bfloat16, 0.8 % in float16); a missing or
    doubled term would be of the size of the gradient."""
    got, expected, exact = (
        outcome(steep({"fp16": FP16, "bf16": BF16}[precision], layout, MatmulModes.all(way))),
        of_one_process(precision, way),
        of_one_process("fp32"),
    )
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    assert got.losses == pytest.approx(exact.losses, rel=rounding)
    assert got.norms == pytest.approx(exact.norms, rel=4 * rounding)
    pairs = [*zip(got.grads, expected.grads, exact.grads), (got.weights, expected.weights, exact.weights)]
    for mine, theirs, true in pairs:
        for name, value in true.items():
            error = (theirs[name].float() - value).norm().item()
            apart = (mine[name].float() - theirs[name].float()).norm().item()
            assert apart <= 3 * error, f"{name}: {apart} apart, {error} from float32, {value.norm().item()} in size"
            assert error <= 16 * rounding * value.norm().item(), f"{name}: {error} of {value.norm().item()}"


def test_gradients_may_travel_in_bf16():
    layout = Layout(dp=2, m=2)
    whole, rounded = (
        replace(steep(FP32, layout), steps=1, data_parallel=DataParallelConfig(grad_reduce_in_bf16=bf16))
        for bf16 in (False, True)
    )

    def work(mesh: Mesh, run: Run) -> tuple[Rank, int]:
        with mesh.ledger.record() as calls:
            rank = train(mesh, run, range(1))
        return rank, sum(c.bytes for c in calls if c.axis == "dp" and c.bytes > 100)

    (exact, many), (got, few) = (run_ranks({"dp": 2}, partial(work, run=run))[0] for run in (whole, rounded))
    assert many == 2 * few
    for (name, _, _, mine), (_, _, _, theirs) in zip(got.grads[0], exact.grads[0], strict=True):
        worst, largest = (mine - theirs).abs().max().item(), theirs.abs().max().item()
        assert 0 < worst <= 4 * 2.0**-9 * largest, f"{name}: two parts and their sum are rounded to 8 bits"
    one = replace(rounded, layout=Layout())
    assert_same(outcome(one), outcome(replace(whole, layout=Layout())), 0.0)  # nothing travels, nothing is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_gradient_is_accumulated_in_float32(dtype: torch.dtype):
    """A thousand small products onto a large sum: in half precision each would vanish or be rounded."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.zeros(16, 8, dtype=dtype)
    weight.main_grad = torch.full((16, 8), 4096.0)
    exact = weight.main_grad.double()
    for _ in range(50):
        grad, x = (torch.randn(6, 2, n, generator=generator).to(dtype) for n in (16, 8))
        assert accumulate_wgrad(weight, grad, x) is None
        exact += grad.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    # float32 has 24 bits: each of the 50 sums near 4096 is rounded by at most 2^-12.
    assert (weight.main_grad - exact).abs().max() <= 50 * 2.0**-12
    del weight.main_grad
    assert accumulate_wgrad(weight, grad, x).dtype == dtype


# ---------------------------------------------------------------- optimizers, norm, groups


class Parts(nn.Module):
    """A table, a matrix, a bias and a norm, as they lie in one flat buffer."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        shapes = {"word_embeddings.weight": (11, 6), "dense.weight": (5, 6), "dense.bias": (5,), "norm.weight": (6,)}
        for name, shape in shapes.items():
            holder, _, leaf = name.partition(".")
            if not hasattr(self, holder):
                self.add_module(holder, nn.Module())
            parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            parameter.placement = Placement(shape, init=None)
            getattr(self, holder).register_parameter(leaf, parameter)


def fork_rule(name: str, placement: Placement) -> ParamGroup:
    """A fork's own: the norm at a tenth of the rate, twice the decay on the matrix."""
    if name == "norm.weight":
        return ParamGroup(lr_multiplier=0.1)
    return ParamGroup(weight_decay_multiplier=2.0) if name == "dense.weight" else default_group(name, placement)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "sgd", "sgd without momentum"])
@pytest.mark.parametrize("rule", [default_group, fork_rule])
def test_flat_segments_are_updated_as_torch_updates_parameters(kind: str, dtype: torch.dtype, rule: GroupRule):
    momentum = 0.0 if kind == "sgd without momentum" else 0.9
    config = OptimizerConfig(optimizer=kind[:4].strip(), sgd_momentum=momentum, weight_decay=0.1, clip_grad=1.0)

    def work(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        chunk = DistributedDataParallel(Parts(dtype), mesh)
        ours = FlatOptimizer(chunk.buffers, config, mesh, group_of=rule)
        named = dict(chunk.module.named_parameters())
        main = torch.promote_types(dtype, torch.float32)
        copies = {name: nn.Parameter(p.data.to(main).clone()) for name, p in named.items()}
        theirs = torchs(config, copies, rule, named)
        generator = torch.Generator().manual_seed(SEED + 1)
        for step in range(5):
            for name, p in named.items():
                copies[name].grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(main)
                p.main_grad.copy_(copies[name].grad)
            expected = torch.nn.utils.clip_grad_norm_(copies.values(), 1.0).item()
            assert ours.clip_grad_norm() == pytest.approx(expected, rel=1e-6 if main == torch.float32 else 1e-14)
            for name, p in named.items():
                torch.testing.assert_close(p.main_grad, copies[name].grad)  # clipped alike
                copies[name].grad.copy_(p.main_grad)
            for group in theirs.param_groups:
                group["lr"] = group["share"] * (0.5 if group["decoupled"] else 1.0) / (step + 10)
            ours.step(1.0 / (step + 10), 0.5 / (step + 10))
            theirs.step()
        masters = ours.tensors().get("master", {name: p.data for name, p in named.items()})
        for name, p in named.items():
            assert torch.equal(p.data, masters[name].to(dtype)), "the parameter is its rounded master"
        return masters, {name: copy.data for name, copy in copies.items()}

    ((ours, theirs),) = run_ranks({}, work)
    exact = dtype == torch.float64
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-14 if exact else 1e-6, atol=1e-15 if exact else 1e-7)


def torchs(config: OptimizerConfig, copies: dict[str, nn.Parameter], rule: GroupRule, named) -> torch.optim.Optimizer:
    groups = []
    for name, copy in copies.items():
        group = rule(name, named[name].placement)
        decay = config.weight_decay * group.weight_decay_multiplier
        groups.append(
            {"params": [copy], "weight_decay": decay, "share": group.lr_multiplier, "decoupled": group.decoupled}
        )
    if config.optimizer == "adam":
        return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    return torch.optim.SGD(groups, lr=1.0, momentum=config.sgd_momentum)


@pytest.mark.full
@pytest.mark.parametrize("layout", [EIGHT_RANKS, Layout(tp=2, sp=True, pp=4, m=6)], ids=str)
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["tied", "untied"])
def test_sgd_and_decoupled_rates_equal_one_process(layout: Layout, model: ModelConfig):
    run = Run(model, optimizer=replace(SGD, clip_grad=0.5, weight_decay=0.1), lr=0.5, decoupled_lr=0.05)
    assert_same(outcome(replace(run, layout=layout)), outcome(run))


def test_a_decoupled_rate_moves_only_the_word_table_and_the_output_layer():
    plain = Run(LLAMA, steps=1)
    before, after = outcome(plain).weights, outcome(replace(plain, decoupled_lr=1e-4)).weights
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == {"language_model.embedding.word_embeddings.weight", "language_model.output_layer.weight"}


# ---------------------------------------------------------------- frozen parameters


def in_embedding(name: str) -> bool:
    return "embedding" in name


def in_first_half(name: str) -> bool:
    return "embedding" in name or "layers.0." in name or "layers.1." in name


def in_second_half(name: str) -> bool:
    return not in_first_half(name)


FREEZING = [
    pytest.param(layout, frozen, model, marks=[] if (i + j + k) % 5 == 0 and i < 2 else pytest.mark.full)
    for i, layout in enumerate([Layout(pp=2, m=3), EIGHT_RANKS, Layout(tp=2, sp=True, pp=4, m=6)])
    for j, frozen in enumerate([in_embedding, in_first_half, in_second_half])
    for k, model in enumerate([GPT2, LLAMA])  # tied, untied
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "frozen", "model"), FREEZING)
def test_what_is_not_frozen_trains_as_in_one_process(layout: Layout, frozen: Callable, model: ModelConfig):
    run = Run(model, frozen=frozen)
    got, expected = outcome(replace(run, layout=layout)), outcome(run)
    assert_same(got, expected)
    (initial,) = run_ranks({}, lambda mesh: dict(start(mesh, run).chunk.module.named_parameters()))
    for name, weight in got.weights.items():
        unchanged = torch.equal(weight, initial[name].data[: len(weight)])
        assert unchanged == frozen(name), name


# ---------------------------------------------------------------- uneven loss masks


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(m=12), Layout(dp=4, m=6), replace(EIGHT_RANKS, sp=True)], ids=str)
def test_uneven_masks_give_the_mean_over_tokens(layout: Layout):
    assert_same(outcome(replace(RAGGED, layout=layout)), ragged_in_one_process())


RAGGED = Run(replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0), mask_of=ragged_mask, steps=2)


@cache
def ragged_in_one_process() -> Outcome:
    """Some microbatches of a single sample have no token at all, some have eight. Right, as autograd says."""
    counts = [int(ragged_mask(n).sum()) for n in range(BATCH)]
    assert {0, 1} < set(counts) and sum(counts) < BATCH * SEQ // 2
    one = outcome(RAGGED)

    def by_hand(mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
        """The mean over tokens, differentiated by autograd without any of our accumulation."""
        module, total = start(mesh, RAGGED).chunk.module.eval(), 0.0
        for number in range(BATCH):
            row = {key: value[None] for key, value in sample(number).items()}
            total = total + (module(row["tokens"], row["positions"], None, row["labels"]) * ragged_mask(number)).sum()
        mean = total / sum(counts)
        for parameter in module.parameters():
            parameter.main_grad.zero_()
        mean.backward()
        return mean.item(), dict(my_grads(module, mesh))

    ((loss, grads),) = run_ranks({}, by_hand)
    assert one.losses[0] == pytest.approx(loss, rel=1e-12)
    scale = min(1.0, 0.5 / (one.norms[0] + 1e-6))
    for name, expected in grads.items():
        worst = (one.grads[0][name] - scale * expected).abs().max().item()
        assert worst <= 1e-12 * expected.abs().max().item(), name
    return one


def my_grads(module: nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    for name, _, _, values in my_pieces(module, mesh, lambda p: p.main_grad):
        yield name, values


def test_flags_of_classic_scripts_are_understood():
    flags = "--fp16 --loss-scale-window 500 --hysteresis 3 --optimizer sgd --decoupled-lr 1e-3 --grad-reduce-in-bf16"
    config, _, _ = parse_args([*flags.split(), "--lr", "1e-2", "--min-loss-scale", "2", "--sgd-momentum", "0.5"])
    assert config.transformer.params_dtype == torch.float16
    assert config.loss_scaling == LossScaleConfig(loss_scale_window=500, hysteresis=3, min_loss_scale=2.0)
    assert config.optimizer.moments == ("momentum_buffer",) and config.data_parallel.grad_reduce_in_bf16
    with pytest.raises(ConfigError, match=r"(?s)--bf16.*--fp16"):
        parse_args(["--bf16", "--fp16"])
