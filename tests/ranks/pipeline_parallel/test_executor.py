"""The executor: what a stage may hand on, what a loss function may return, and what an error says."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.stage_to_rank import loop
from megatron.core.pipeline_parallel.executor import Executor
from megatron.core.pipeline_parallel.loss_func_results import parse_loss_tuple
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, stages_in
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import forward_only, gpipe, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.schedule.lower import add_transfers
from megatron.core.pipeline_parallel.schedule.simulate import show_around
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport
from megatron.training.step import train_step

ROWS, WIDTH = 2, 4  # of a microbatch
BOUNDARY = (TensorSpec((ROWS, WIDTH), torch.float64),)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def number(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stage(nn.Module):
    """tanh(x W), from data on the first stage and from the stage before elsewhere."""

    def __init__(self, stage: int):
        super().__init__()
        self.stage, self.weight, self.x = stage, nn.Parameter(number(50 + stage, WIDTH, WIDTH)), None

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = x

    def forward(self, data: Tensor) -> Tensor:
        return torch.tanh((data if self.stage == 0 else self.x) @ self.weight)


def batch(i: int) -> Tensor:
    return number(i, ROWS, WIDTH)


def sum_loss(output: Tensor) -> tuple[Tensor, Tensor, dict]:
    return output.square().sum(), torch.tensor(float(output.numel())), {"lm loss": output.square().mean().detach()}


def forward_step(data, model):
    return model(next(data)), sum_loss


def execute(mesh, schedule, chunks, *, step=forward_step, boundary=BOUNDARY, training=True):
    """Run one rank's list; returns the executor and its totals."""
    executor = Executor(
        chunks,
        stages_in(schedule),
        transport=Transport(mesh, boundary),
        forward_step=step,
        data_iterators={stage: iter([batch(i) for i in range(8)]) for stage in chunks},
    )
    return executor, executor.run(schedule, mesh["pp"].rank, training=training)


def lowered(p: int, m: int, make=one_f_one_b):
    return add_transfers(make(p, m))


def plain(stages: int, m: int) -> tuple[float, list[Tensor]]:
    """Sum of the losses of m microbatches and the gradients of the weights, by autograd over the whole."""
    layers, total = [Stage(stage) for stage in range(stages)], 0.0
    for i in range(m):
        x = batch(i)
        for layer in layers:
            x = torch.tanh(x @ layer.weight)
        total = total + x.square().sum()
    total.backward()
    return total.item(), [layer.weight.grad for layer in layers]


# ---------------------------------------------------------------- values


@pytest.mark.full
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 6)])
def test_a_pipeline_equals_autograd_over_the_whole(p: int, m: int, make, delayed: bool):
    def work(mesh):
        rank = mesh["pp"].rank
        chunk = Stage(rank)
        _, totals = execute(mesh, lowered(p, m, make), {rank: chunk})
        return chunk.weight.grad, totals

    _, grads = plain(p, m)
    ranks = run_ranks({"pp": p}, work, delayed=delayed)
    for (grad, _), expected in zip(ranks, grads, strict=True):
        close(grad, expected)
    assert [float(totals.tokens) for _, totals in ranks] == [0.0] * (p - 1) + [m * ROWS * WIDTH]
    assert [list(totals.report) for _, totals in ranks] == [[]] * (p - 1) + [["lm loss"]]


@pytest.mark.parametrize(("p", "v", "m"), [(1, 2, 3), (2, 2, 2), (2, 2, 4), (2, 3, 4)])
def test_several_chunks_of_a_rank_equal_autograd_over_the_whole(p: int, v: int, m: int):
    def work(mesh):
        rank = mesh["pp"].rank
        chunks = {stage: Stage(stage) for stage in range(rank, p * v, p)}
        execute(mesh, add_transfers(interleaved(p, m, v)), chunks)
        return {stage: chunk.weight.grad for stage, chunk in chunks.items()}

    got = {stage: grad for rank in run_ranks({"pp": p}, work) for stage, grad in rank.items()}
    for stage, expected in enumerate(plain(p * v, m)[1]):
        close(got[stage], expected)


def test_each_compute_action_and_each_reduction_is_announced():
    def work(mesh):
        rank, heard = mesh["pp"].rank, []
        executor = Executor(
            {rank: Stage(rank)},
            loop(2),
            transport=Transport(mesh, BOUNDARY),
            forward_step=forward_step,
            data_iterators={rank: iter([batch(i) for i in range(2)])},
            begin=lambda action: heard.append(str(action)),
            reduce=lambda stage: heard.append(f"reduce {stage}"),
        )
        schedule = lowered(2, 2)
        executor.run([[*row, Action(Op.REDUCE, stage)] for stage, row in enumerate(schedule)], rank)
        return heard

    assert run_ranks({"pp": 2}, work) == [
        ["F0.0", "F0.1", "B0.0", "B0.1", "reduce 0"],
        ["F1.0", "B1.0", "F1.1", "B1.1", "reduce 1"],
    ]


# ---------------------------------------------------------------- memory


class Sum(Stage):
    """x + the sum of W, whose backward needs nothing of what goes in or comes out."""

    def forward(self, data: Tensor) -> Tensor:
        return (data if self.stage == 0 else self.x) + self.weight.sum()


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 3), (3, 1, 5), (2, 2, 4)])
def test_what_was_sent_is_freed(p: int, v: int, m: int):
    """Bytes alive of outputs and of gradients of inputs, after each action: those of tensors made, and not yet said to have left."""
    begun = {Op.F: "outputs", Op.B: "grads"}
    left = {Op.SENT_F: Op.F, Op.SENT_B: Op.B}

    def work(mesh):
        rank, made, expected, counts = mesh["pp"].rank, {}, set(), []

        @contextmanager
        def around(action: Action):
            yield
            key = action.stage, action.microbatch
            for x in getattr(executor, begun[action.op]).get(key, ()) if action.op in begun else ():
                made[action.op, key] = StorageWeakRef(x.untyped_storage())
                expected.add((action.op, key))
            expected.discard((left.get(action.op), key))
            alive = {name for name, memory in made.items() if not memory.expired()}
            counts.append((str(action), len(alive), len(expected)))

        executor = Executor(
            {stage: Sum(stage) for stage in range(rank, p * v, p)},
            loop(p, v),
            transport=Transport(mesh, BOUNDARY),
            forward_step=forward_step,
            around=around,
            data_iterators={stage: iter([batch(i) for i in range(m)]) for stage in range(rank, p * v, p)},
        )
        executor.run(lowered(p, m) if v == 1 else add_transfers(interleaved(p, m, v)), rank)
        return counts, len(made)

    for rank, (counts, made) in enumerate(run_ranks({"pp": p}, work)):
        assert made == m * (2 * v - (rank == 0) - (rank == p - 1))
        assert [(action, n) for action, n, _ in counts] == [(action, n) for action, _, n in counts]


@pytest.mark.parametrize("poison", [False, True])
def test_what_is_to_be_received_is_poisoned_where_that_is_asked_for(poison: bool, monkeypatch):
    """Seen by a group that never fills it."""
    boundary = (*BOUNDARY, TensorSpec((3,), torch.int64))

    def work(mesh):
        given = []
        monkeypatch.setattr(collectives, "start_recv", lambda x, axis, source: given.append(x.clone()))
        monkeypatch.setattr(torch, "empty", torch.ones)  # what memory holds by chance
        Transport(mesh, boundary, poison=poison).post("forward", 0)
        return given

    ((floats, integers),) = run_ranks({}, work)
    assert bool(floats.isnan().all()) == poison and integers.tolist() == [1, 1, 1]


# ---------------------------------------------------------------- two tensors between stages


class Encoder(nn.Module):
    """First of two stages that share a boundary of two tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(number(60, WIDTH, WIDTH)), nn.Parameter(number(61, WIDTH, 3))

    def set_input_tensor(self, x) -> None:
        assert x is None, "the first stage has no input"

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(data @ self.a), torch.sin(data @ self.b)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.inputs = nn.Parameter(number(62, WIDTH, 3)), None

    def set_input_tensor(self, x) -> None:
        self.inputs = x

    def forward(self, data: Tensor) -> Tensor:
        x, y = self.inputs
        return x @ self.c * y


class OneSided(Decoder):
    """Looks at the first tensor only."""

    def forward(self, data: Tensor) -> Tensor:
        return self.inputs[0] @ self.c


class Through(nn.Module):
    """A middle stage that hands the second tensor on as it came."""

    def __init__(self):
        super().__init__()
        self.d, self.inputs = nn.Parameter(number(63, WIDTH, WIDTH)), None

    def set_input_tensor(self, x) -> None:
        self.inputs = x

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.inputs[0] @ self.d), self.inputs[1]


TWO = (BOUNDARY[0], TensorSpec((ROWS, 3), torch.float64))


def run_stages(kinds: list[type], m: int = 3, boundary=TWO, **options) -> list[dict[str, Tensor]]:
    """The gradients of each stage's parameters."""

    def work(mesh):
        rank = mesh["pp"].rank
        chunk = kinds[rank]()
        execute(mesh, lowered(len(kinds), m), {rank: chunk}, boundary=boundary)
        return {name: p.grad for name, p in chunk.named_parameters()}

    return run_ranks({"pp": len(kinds)}, work, **options)


def whole_gradients(kinds: list[type], m: int = 3) -> list[dict[str, Tensor]]:
    """The same by autograd over all stages at once."""
    stages, total = [kind() for kind in kinds], 0.0
    for i in range(m):
        out = stages[0](batch(i))
        for stage in stages[1:]:
            stage.set_input_tensor(out)
            out = stage(batch(i))
        total = total + out.square().sum()
    total.backward()
    return [{name: p.grad for name, p in stage.named_parameters()} for stage in stages]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    "kinds", [[Encoder, Decoder], [Encoder, Through, Decoder]], ids=["two stages", "handed through"]
)
def test_two_tensors_cross_a_boundary_both_ways(kinds: list[type], delayed: bool):
    for got, expected in zip(run_stages(kinds, delayed=delayed), whole_gradients(kinds), strict=True):
        assert got.keys() == expected.keys()
        for name, grad in got.items():
            close(grad, expected[name])


def test_a_tensor_that_the_next_stage_does_not_use_has_no_gradient():
    got, expected = run_stages([Encoder, OneSided])[0], whole_gradients([Encoder, OneSided])[0]
    close(got["a"], expected["a"])
    assert expected["b"] is None
    assert got["b"] is None or not got["b"].any()


class Counted(nn.Module):
    """Hands on hidden states and integers: which rows count."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(number(60, WIDTH, WIDTH))

    def set_input_tensor(self, x) -> None: ...

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(data @ self.a), (data[:, 0] > 0).to(torch.int64)


class Weighted(OneSided):
    def forward(self, data: Tensor) -> Tensor:
        x, rows = self.inputs
        return x @ self.c * rows.unsqueeze(1)


def test_integers_may_cross_a_boundary():
    kinds, boundary = [Counted, Weighted], (BOUNDARY[0], TensorSpec((ROWS,), torch.int64))
    for got, expected in zip(run_stages(kinds, boundary=boundary), whole_gradients(kinds), strict=True):
        for name, grad in got.items():
            close(grad, expected[name])


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("p", [1, 2, 3])
def test_evaluation_leaves_no_gradients_and_nothing_behind(p: int):
    def work(mesh):
        rank = mesh["pp"].rank
        chunk, seen = Stage(rank), []

        def step(data, model):
            output = model(next(data))
            seen.append((output.requires_grad, torch.is_grad_enabled()))
            return output, sum_loss

        executor, totals = execute(mesh, lowered(p, 3, forward_only), {rank: chunk}, step=step, training=False)
        assert seen == [(False, False)] * 3
        assert chunk.weight.grad is None
        assert not (executor.inputs or executor.outputs or executor.grads)
        assert torch.is_grad_enabled(), "only the run is without gradients"
        return totals

    totals = run_ranks({"pp": p}, work)
    report = totals[-1].report["lm loss"].tolist()
    assert report[0] == pytest.approx(plain(p, 3)[0] / (ROWS * WIDTH), rel=1e-12)
    assert report[1] == 3
    assert all(not rank.report for rank in totals[:-1])


@pytest.mark.parametrize("kinds", [[Encoder, Decoder]])
def test_evaluation_takes_two_tensors_too(kinds: list[type]):
    def work(mesh):
        rank = mesh["pp"].rank
        chunk = kinds[rank]()
        _, totals = execute(mesh, lowered(2, 2, forward_only), {rank: chunk}, boundary=TWO, training=False)
        assert all(p.grad is None for p in chunk.parameters())
        return float(totals.tokens)

    assert run_ranks({"pp": 2}, work) == [0.0, 2 * ROWS * 3]


# ---------------------------------------------------------------- loss functions


def pair_step(data, model):
    """The older contract: (loss, report), each loss the mean over the rows that count in its own microbatch."""

    def loss_func(keep: Tensor, output: Tensor) -> tuple[Tensor, dict]:
        loss = (output.square().sum(-1) * keep).sum() / keep.sum()
        return loss, {"lm loss": loss.detach(), "pair": torch.stack((3 * keep.sum(), keep.sum()))}

    x, keep = next(data)
    return model(x), partial(loss_func, keep)


@pytest.mark.parametrize(("p", "dp", "m"), [(1, 1, 1), (1, 1, 4), (1, 2, 2), (2, 2, 2)])
def test_the_older_pair_gives_the_mean_of_microbatch_means(p: int, dp: int, m: int):
    """Although the microbatches have one and two rows that count."""
    keeps = [torch.tensor([1.0, float(i % 2)], dtype=torch.float64) for i in range(8)]

    def work(mesh):
        rank = mesh["pp"].rank
        chunk = DistributedDataParallel(Stage(rank), mesh)
        adam = FlatOptimizer(chunk.buffers, OptimizerConfig(clip_grad=0.0), mesh)
        pipeline = Pipeline(
            {rank: chunk},
            mesh,
            BatchShape(ROWS, m),
            boundary=BOUNDARY,
            forward_step=pair_step,
            keys=SampleDropoutKeys(0),
        )
        mine = [i * dp + mesh["dp"].rank for i in range(m)]
        data = {rank: iter([(batch(i), keeps[i]) for i in mine])}
        result = train_step(pipeline, adam, data, first_sample=0, lr=0.0)
        return result.losses, chunk.module.weight.main_grad.clone()

    layers, losses = [Stage(stage) for stage in range(p)], []
    for i in range(m * dp):
        x = batch(i)
        for layer in layers:
            x = torch.tanh(x @ layer.weight)
        losses.append((x.square().sum(-1) * keeps[i]).sum() / keeps[i].sum())
    expected = torch.stack(losses).mean()
    expected.backward()
    for rank, (reported, grad) in enumerate(run_ranks({"pp": p, "dp": dp}, work)):
        stage = rank // dp
        close(grad, layers[stage].weight.grad)
        assert reported == (pytest.approx({"lm loss": expected.item(), "pair": 3.0}) if stage == p - 1 else {})


ONE = torch.ones((), requires_grad=True)
FORM = "loss_func loss_sum num_tokens"
WRONG = [
    (ONE, f"{FORM} Tensor 1"),
    ([ONE, {}], f"{FORM} list 1"),
    ((ONE,), f"{FORM} tuple 1"),
    ((ONE, ONE), f"{FORM} tuple 2"),
    ((ONE, ONE, ONE, {}), f"{FORM} tuple 4"),
    (None, f"{FORM} NoneType 1"),
    ((torch.ones(2, 3), {}), "loss 2 3"),
    ((torch.ones(2), ONE, {}), "loss 2"),
    ((ONE, {"lm loss": torch.ones(3)}), "report 3"),
    ((ONE, ONE, {"lm loss": torch.ones(0)}), "report 0"),
]


@pytest.mark.parametrize(("result", "message"), WRONG)
def test_a_wrong_loss_is_explained(result, message: str):
    with pytest.raises(TypeError) as error:
        parse_loss_tuple(result)
    assert tells(error.value, message)


@pytest.mark.parametrize(
    "result",
    [(1.5, {}), (ONE, torch.ones(2), {}), (ONE, {"lm loss": "low"}), ({}, {})],
    ids=["a float", "two counts", "a word", "two reports"],
)
def test_any_other_wrong_loss_is_a_type_error(result):
    with pytest.raises(TypeError, match=r"loss|report"):
        parse_loss_tuple(result)


def test_a_loss_is_read_as_sums():
    loss = parse_loss_tuple((ONE, torch.tensor(5), {"a": 2, "b": torch.tensor([3.0, 4.0]), "c": torch.tensor([1.5])}))
    assert loss.objective is ONE
    assert (loss.tokens.item(), loss.tokens.dtype) == (5.0, torch.float64)
    assert {name: pair.tolist() for name, pair in loss.report.items()} == {"a": [2, 1], "b": [3, 4], "c": [1.5, 1]}
    assert parse_loss_tuple((ONE, {})).tokens.item() == 1.0
    assert parse_loss_tuple((ONE, 7, {})).tokens.item() == 7.0


# ---------------------------------------------------------------- errors


def error_of(work, sizes: dict) -> BaseException:
    with pytest.raises(RuntimeError) as error:
        run_ranks(sizes, work)
    return error.value.__cause__


@pytest.mark.parametrize(("rank", "microbatch", "action"), [(0, 0, "F0.0"), (1, 2, "F1.2")])
def test_an_error_in_a_forward_carries_its_action_and_the_grid_around_it(rank: int, microbatch: int, action: str):
    schedule = lowered(2, 3)

    def work(mesh):
        mine, count = mesh["pp"].rank, iter(range(3))

        def step(data, model):
            if (mine, next(count)) == (rank, microbatch):
                raise ZeroDivisionError("by nought")
            return forward_step(data, model)

        execute(mesh, schedule, {mine: Stage(mine)}, step=step)

    error = error_of(work, {"pp": 2})
    assert (type(error), str(error)) == (ZeroDivisionError, "by nought")
    index = [str(a) for a in schedule[rank]].index(action)
    assert error.__notes__ == [f"while running pipeline action {action}:\n{show_around(schedule, rank, index)}"]
    assert action in error.__notes__[0].split("\n", 1)[1]


def test_an_error_in_a_backward_carries_its_action():
    def work(mesh):
        execute(
            mesh,
            lowered(1, 2),
            {0: Stage(0)},
            step=lambda data, model: (model(next(data)), lambda y: (ONE.detach(), {})),
        )

    error = error_of(work, {})
    assert tells(error.__notes__[0], "B0.0")


def test_a_wrong_loss_carries_its_action():
    error = error_of(
        lambda mesh: execute(
            mesh, lowered(1, 1), {0: Stage(0)}, step=lambda data, model: (model(next(data)), lambda y: y)
        ),
        {},
    )
    assert isinstance(error, TypeError)
    assert tells(error.__notes__[0], "F0.0")


@pytest.mark.parametrize(
    ("boundary", "agreed"),
    [
        ((TensorSpec((ROWS, WIDTH + 1), torch.float64),), "(TensorSpec(shape=(2, 5), dtype=torch.float64),)"),
        ((TensorSpec((ROWS, WIDTH), torch.float32),), "(TensorSpec(shape=(2, 4), dtype=torch.float32),)"),
        (
            BOUNDARY * 2,
            "(TensorSpec(shape=(2, 4), dtype=torch.float64), TensorSpec(shape=(2, 4), dtype=torch.float64))",
        ),
    ],
    ids=["shape", "dtype", "number"],
)
def test_what_the_stages_did_not_agree_on_is_not_sent(boundary: tuple, agreed: str):
    def work(mesh):
        execute(mesh, lowered(2, 1), {mesh["pp"].rank: Stage(mesh["pp"].rank)}, boundary=boundary)

    error = error_of(work, {"pp": 2})
    assert isinstance(error, ValueError)
    assert "(TensorSpec(shape=(2, 4), dtype=torch.float64),)" in str(error) and str(error).endswith(agreed)
    assert tells(error.__notes__[0], "SEND_F0.0")


@pytest.mark.parametrize(("agreed", "why"), [(ROWS // 2, "2 --sequence-parallel"), (ROWS * 4, "4 --sequence-parallel")])
def test_a_model_that_forgets_sequence_parallelism_is_told_of_it(agreed: int, why: str):
    def work(mesh):
        boundary = (TensorSpec((agreed, WIDTH), torch.float64),)
        execute(mesh, lowered(2, 1), {mesh["pp"].rank: Stage(mesh["pp"].rank)}, boundary=boundary)

    assert tells(error_of(work, {"pp": 2}), why)


def test_a_schedule_that_leaves_work_behind_is_our_mistake():
    with pytest.raises(RuntimeError, match=r"\{'roots': \[\(0, 0\)\]\}"):
        run_ranks({}, lambda mesh: execute(mesh, [[Action(Op.F, 0, 0)]], {0: Stage(0)}))
