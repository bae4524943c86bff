"""Tensor-parallel layers and moves equal plain torch, forward and backward, in float64.

The loss is a fixed weighted sum of the whole output, so that every element of every gradient is checked. Tolerance:
another order of summation, 1e-12 of values near one.
"""

import math
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import collectives as comm
from megatron.core.sharding.placement import Normal
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_batch
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.tensor_parallel.embedding_grad_in_buffer_dtype import lookup
from megatron.core.tensor_parallel.linear_autograd import linear
from megatron.core.tensor_parallel.linear_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    local_sequence_slice,
)

S, B, IN, OUT = 8, 3, 8, 12
# tensor size, and whether a call completes at its wait only
RANKS = {"1": (1, False), "2": (2, False), "4": (4, False), "2 delayed": (2, True), "4 delayed": (4, True)}
over_ranks = pytest.mark.parametrize(("t", "delayed"), RANKS.values(), ids=RANKS)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def number(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(x: Tensor, mesh, dim: int) -> Tensor:
    return x.chunk(mesh["tp"].size, dim)[mesh["tp"].rank].contiguous()


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def fill(parameter: nn.Parameter, value: Tensor) -> None:
    assert parameter.shape == value.shape
    parameter.data.copy_(value)


def double(mesh, sp: bool = False) -> TensorParallel:
    return TensorParallel(mesh["tp"], sp, torch.float64)


X, WEIGHT, BIAS, PULL = number(1, S, B, IN), number(2, OUT, IN), number(3, OUT), number(4, S, B, OUT)


def plain_linear() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and the gradients of x, weight and bias."""
    x, weight, bias = leaf(X), leaf(WEIGHT), leaf(BIAS)
    y = functional.linear(x, weight, bias)
    (y * PULL).sum().backward()
    return y.detach(), x.grad, weight.grad, bias.grad


# ---------------------------------------------------------------- column-parallel


@over_ranks
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("gather", [False, True], ids=["", "gather"])
def test_column_parallel_equals_linear(t: int, delayed: bool, sp: bool, gather: bool):
    def work(mesh):
        layer = ColumnParallelLinear(IN, OUT, tp=double(mesh, sp), init=Normal(1.0), gather_output=gather)
        fill(layer.weight, part(WEIGHT, mesh, 0))
        fill(layer.bias, part(BIAS, mesh, 0))
        x = leaf(part(X, mesh, 0) if sp else X)
        y, bias = layer(x)
        assert bias is None
        (y * (PULL if gather else part(PULL, mesh, 2))).sum().backward()
        return y.detach(), x.grad, layer.weight.grad, layer.bias.grad

    y, dx, dw, db = plain_linear()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    if gather:
        for rank in ranks:
            close(rank[0], y)
    else:
        close(torch.cat([rank[0] for rank in ranks], 2), y)
    if sp:
        close(torch.cat([rank[1] for rank in ranks]), dx)
    else:
        for rank in ranks:
            close(rank[1], dx)
    close(torch.cat([rank[2] for rank in ranks]), dw)
    close(torch.cat([rank[3] for rank in ranks]), db)


@over_ranks
def test_column_parallel_hands_the_bias_on(t: int, delayed: bool):
    def work(mesh):
        layer = ColumnParallelLinear(IN, OUT, tp=double(mesh), init=Normal(1.0), skip_bias_add=True)
        fill(layer.weight, part(WEIGHT, mesh, 0))
        fill(layer.bias, part(BIAS, mesh, 0))
        y, bias = layer(X)
        assert bias is layer.bias
        return y.detach(), bias.detach()

    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    close(torch.cat([y for y, _ in ranks], 2), X @ WEIGHT.t())
    close(torch.cat([bias for _, bias in ranks]), BIAS)


def test_layers_without_bias_have_none():
    def work(mesh):
        tp = double(mesh)
        column = ColumnParallelLinear(IN, OUT, tp=tp, init=Normal(1.0), bias=False)
        row = RowParallelLinear(IN, OUT, tp=tp, init=Normal(1.0), bias=False)
        return [[name for name, _ in layer.named_parameters()] for layer in (column, row)]

    assert run_ranks({"tp": 2}, work) == [[["weight"], ["weight"]]] * 2


@pytest.mark.parametrize("t", [1, 2])
def test_a_fused_column_parallel_layer_divides_each_block(t: int):
    """[gate | up] of widths 4 and 8: each rank holds a part of both."""

    def work(mesh):
        layer = ColumnParallelLinear(IN, OUT, tp=double(mesh), init=Normal(1.0), bias=False, blocks=(4, 8))
        fill(layer.weight, torch.cat([part(block, mesh, 0) for block in WEIGHT.split((4, 8))]))
        return layer(X)[0].detach().split((4 // t, 8 // t), -1)

    ranks = run_ranks({"tp": t}, work)
    gate, up = (torch.cat(parts, -1) for parts in zip(*ranks))
    close(torch.cat((gate, up), -1), X @ WEIGHT.t())


@pytest.mark.parametrize("t", [1, 2])
def test_a_gathered_fused_layer_gives_whole_blocks(t: int):
    def work(mesh):
        tp = double(mesh)
        layer = ColumnParallelLinear(IN, OUT, tp=tp, init=Normal(1.0), bias=False, blocks=(4, 8), gather_output=True)
        fill(layer.weight, torch.cat([part(block, mesh, 0) for block in WEIGHT.split((4, 8))]))
        return layer(X)[0].detach()

    for y in run_ranks({"tp": t}, work):
        close(y, X @ WEIGHT.t())


# ---------------------------------------------------------------- row-parallel


@over_ranks
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_row_parallel_equals_linear(t: int, delayed: bool, sp: bool):
    def work(mesh):
        layer = RowParallelLinear(IN, OUT, tp=double(mesh, sp), init=Normal(1.0))
        fill(layer.weight, part(WEIGHT, mesh, 1))
        fill(layer.bias, BIAS)
        x = leaf(part(X, mesh, 2))
        z, bias = layer(x)
        assert bias is None
        (z * (part(PULL, mesh, 0) if sp else PULL)).sum().backward()
        return z.detach(), x.grad, layer.weight.grad, layer.bias.grad

    y, dx, dw, db = plain_linear()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    if sp:
        close(torch.cat([rank[0] for rank in ranks]), y)
        close(sum(rank[3] for rank in ranks), db)  # each rank's is a part, as its placement says
    else:
        for rank in ranks:
            close(rank[0], y)
            close(rank[3], db)
    close(torch.cat([rank[1] for rank in ranks], 2), dx)
    close(torch.cat([rank[2] for rank in ranks], 1), dw)


@over_ranks
def test_row_parallel_hands_the_bias_on(t: int, delayed: bool):
    def work(mesh):
        layer = RowParallelLinear(IN, OUT, tp=double(mesh), init=Normal(1.0), skip_bias_add=True)
        fill(layer.weight, part(WEIGHT, mesh, 1))
        fill(layer.bias, BIAS)
        z, bias = layer(part(X, mesh, 2))
        assert bias is layer.bias
        return z.detach()

    for z in run_ranks({"tp": t}, work, delayed=delayed):
        close(z, X @ WEIGHT.t())


@over_ranks
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_a_column_and_a_row_equal_an_mlp(t: int, delayed: bool, sp: bool):
    second = number(5, IN, OUT)

    def work(mesh):
        column = ColumnParallelLinear(IN, OUT, tp=double(mesh, sp), init=Normal(1.0))
        row = RowParallelLinear(OUT, IN, tp=double(mesh, sp), init=Normal(1.0), bias=False)
        fill(column.weight, part(WEIGHT, mesh, 0))
        fill(column.bias, part(BIAS, mesh, 0))
        fill(row.weight, part(second, mesh, 1))
        x = leaf(part(X, mesh, 0) if sp else X)
        z, _ = row(torch.tanh(column(x)[0]))
        (z * (part(X, mesh, 0) if sp else X)).sum().backward()
        return z.detach(), x.grad, column.weight.grad, row.weight.grad

    x, weight, out = leaf(X), leaf(WEIGHT), leaf(second)
    z = torch.tanh(functional.linear(x, weight, BIAS)) @ out.t()
    (z * X).sum().backward()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    together = torch.cat if sp else (lambda parts: parts[0])
    close(together([rank[0] for rank in ranks]), z.detach())
    close(together([rank[1] for rank in ranks]), x.grad)
    close(torch.cat([rank[2] for rank in ranks]), weight.grad)
    close(torch.cat([rank[3] for rank in ranks], 1), out.grad)


# ---------------------------------------------------------------- weight gradients


@pytest.mark.parametrize(("dtype", "buffer"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_weight_with_a_buffer_gets_its_gradient_there(dtype: torch.dtype, buffer: torch.dtype):
    weight = nn.Parameter(WEIGHT.to(dtype))
    weight.main_grad = torch.zeros(OUT, IN, dtype=buffer)
    x, pull = X.to(dtype), PULL.to(dtype)
    for _ in range(2):
        (linear(x, weight) * pull).sum().backward()
    assert weight.grad is None
    # The product is not rounded to the factors' type on its way; float32 itself sums with errors of about 1e-7.
    expected = 2 * (pull.double().flatten(0, 1).t() @ x.double().flatten(0, 1))
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0, atol=expected.abs().max().item() * 1e-6)


@over_ranks
def test_a_frozen_weight_costs_no_gradient_and_saves_no_input(t: int, delayed: bool):
    def work(mesh):
        saved: list[Tensor] = []
        layer = ColumnParallelLinear(IN, OUT, tp=double(mesh, sp=True), init=Normal(1.0), bias=False)
        fill(layer.weight, part(WEIGHT, mesh, 0))
        layer.weight.requires_grad_(False)
        x = leaf(part(X, mesh, 0))
        with mesh.ledger.record() as calls:
            with saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
                y = layer(x)[0]
            (y * part(PULL, mesh, 2)).sum().backward()
        assert [kept.data_ptr() for kept in saved] == [layer.weight.data_ptr()]
        return x.grad, layer.weight.grad, [call.op for call in calls]

    _, dx, _, _ = plain_linear()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    close(torch.cat([rank[0] for rank in ranks]), dx)
    assert all(rank[1] is None for rank in ranks)
    assert all(rank[2] == (["all_gather", "reduce_scatter"] if t > 1 else []) for rank in ranks)


# ---------------------------------------------------------------- embedding

TABLES = [(64, 64), (61, 64), (5, 8)]  # words, padded; with 4 ranks the last of 5 words' holds padding only


def padded(table: Tensor, rows: int, fill_value: float = 0.0) -> Tensor:
    return torch.cat((table, torch.full((rows - len(table), *table.shape[1:]), fill_value, dtype=table.dtype)))


@over_ranks
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(("words", "rows"), TABLES)
def test_vocab_parallel_embedding_equals_embedding(t: int, delayed: bool, sp: bool, words: int, rows: int):
    table, ids = number(6, words, IN), (torch.arange(S * B) * 7 % words).view(S, B)
    assert words > S * B or len(ids.unique()) == words

    def work(mesh):
        layer = VocabParallelEmbedding(words, IN, tp=double(mesh, sp), init=Normal(1.0), padded_size=rows)
        fill(layer.weight, part(padded(table, rows), mesh, 0))
        out = layer(ids)
        (out * (part(X, mesh, 0) if sp else X)).sum().backward()
        return out.detach(), layer.weight.grad

    weight = leaf(table)
    expected = functional.embedding(ids, weight)
    (expected * X).sum().backward()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    if sp:
        close(torch.cat([rank[0] for rank in ranks]), expected.detach())
    else:
        for rank in ranks:
            close(rank[0], expected.detach())
    close(torch.cat([rank[1] for rank in ranks]), padded(weight.grad, rows))


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("wrong", [5, 7, 8, 65541, -1])
def test_ids_outside_the_vocabulary_are_refused(t: int, wrong: int):
    """5 to 7 name rows of padding. As labels too, where a negative one is no word that anything is asked about."""
    ids = torch.tensor([[0, 4], [wrong, 1]])

    def work(mesh):
        layer = VocabParallelEmbedding(5, IN, tp=double(mesh), init=Normal(1.0), padded_size=8)
        scores = part(torch.zeros((2, 2, 8), dtype=torch.float64), mesh, 2)
        with pytest.raises(ConfigError, match=rf"(?s){wrong}.*5.*0.*4.*--tokenizer-type"):
            layer(ids)
        layer(ids.clamp(0, 4))
        if wrong < 0:
            return sharded_cross_entropy(scores, ids, mesh["tp"], 5)[0]
        with pytest.raises(ConfigError, match=rf"id {wrong}, .* only 5 tokens"):
            sharded_cross_entropy(scores, ids, mesh["tp"], 5)
        return sharded_cross_entropy(scores, ids.clamp(0, 4), mesh["tp"], 5)[0]

    for losses in run_ranks({"tp": t}, work):
        close(losses, torch.full((2,), math.log(5), dtype=torch.float64))


def test_a_table_is_tied_over_the_ends_of_the_pipeline_only_if_there_are_two():
    def work(mesh):
        layer = VocabParallelEmbedding(8, 4, tp=double(mesh), init=Normal(1.0), ends=mesh["embd"])
        return layer.weight.placement.replicated_over, layer.weight.placement.partial_grad

    assert run_ranks({"pp": 3}, work) == [(("embd",), ("embd",)), ((), ()), (("embd",), ("embd",))]
    assert run_ranks({}, work) == [((), ())]


# ---------------------------------------------------------------- cross entropy


@pytest.mark.full
@over_ranks
@pytest.mark.parametrize(("words", "rows"), TABLES)
@pytest.mark.parametrize("size", [1.0, 1e3], ids=["", "large scores"])
def test_sharded_cross_entropy_equals_cross_entropy(t: int, delayed: bool, words: int, rows: int, size: float):
    scores, target, pull = size * number(7, S, B, words), (torch.arange(S * B) * 5 % words).view(S, B), number(8, S, B)

    def work(mesh):
        x = leaf(part(torch.cat((scores, torch.full((S, B, rows - words), 1e6).double()), -1), mesh, 2))
        kept = x.detach().clone()
        losses = sharded_cross_entropy(x, target, mesh["tp"], words)
        (losses * pull).sum().backward()
        assert torch.equal(x.detach(), kept), "the scores are the caller's"
        return losses.detach(), x.grad

    x = leaf(scores)
    expected = functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    (expected * pull).sum().backward()
    ranks = run_ranks({"tp": t}, work, delayed=delayed)
    for rank in ranks:
        torch.testing.assert_close(rank[0], expected.detach(), rtol=1e-12, atol=1e-12 * size)
    got = torch.cat([rank[1] for rank in ranks], 2)
    close(got[..., :words], x.grad)
    assert not got[..., words:].any(), "padding gets no gradient"


@pytest.mark.parametrize("t", [1, 2])
def test_without_a_vocabulary_size_every_column_is_a_word(t: int):
    scores, target = number(7, S, B, 8), torch.arange(S * B).view(S, B) % 8
    expected = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    work = lambda mesh: sharded_cross_entropy(part(scores, mesh, 2), target, mesh["tp"])  # noqa: E731
    for losses in run_ranks({"tp": t}, work):
        close(losses, expected)


@pytest.mark.parametrize("t", [1, 2])
def test_half_precision_scores_have_a_float32_loss_and_a_gradient_of_their_own_kind(t: int):
    scores, target = number(7, S, B, 8).bfloat16(), torch.arange(S * B).view(S, B) % 8

    def work(mesh):
        x = leaf(part(scores, mesh, 2))
        losses = sharded_cross_entropy(x, target, mesh["tp"])
        losses.sum().backward()
        return losses.detach(), x.grad

    x = leaf(scores.float())
    expected = functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(S, B)
    expected.sum().backward()
    ranks = run_ranks({"tp": t}, work)
    for losses, grad in ranks:
        assert (losses.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], 2), x.grad.bfloat16(), rtol=1e-2, atol=1e-6)


# ---------------------------------------------------------------- the moves

# What each rank gets, from what all ranks have: lists over the ranks.
EVERY = lambda xs: [sum(xs)] * len(xs)  # noqa: E731
SAME = lambda xs: xs  # noqa: E731
JOIN = {dim: lambda xs, dim=dim: [torch.cat(xs, dim)] * len(xs) for dim in (0, -1)}
MINE = {dim: lambda xs, dim=dim: [x.chunk(len(xs), dim)[i] for i, x in enumerate(xs)] for dim in (0, -1)}
SCATTER = lambda xs: list(sum(xs).chunk(len(xs)))  # noqa: E731
MOVES = {  # name: (forward, backward)
    "copy": (SAME, EVERY),
    "reduce": (EVERY, SAME),
    "gather_sequence": (JOIN[0], SCATTER),
    "gather_replicated_sequence": (JOIN[0], MINE[0]),
    "reduce_scatter_sequence": (SCATTER, JOIN[0]),
    "scatter_sequence": (MINE[0], JOIN[0]),
    "scatter_last": (MINE[-1], JOIN[-1]),
    "gather_last": (JOIN[-1], MINE[-1]),
}


@over_ranks
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_move_is_its_pair_of_collectives(t: int, delayed: bool, name: str, layout: str):
    forward, backward = MOVES[name]
    xs = [number(10 + rank, S, B, IN) for rank in range(t)]
    ys = forward(xs)
    pulls = [number(20 + rank, *ys[rank].shape) for rank in range(t)]

    def strange(x: Tensor) -> Tensor:
        return x if layout == "contiguous" else x.transpose(0, 2).contiguous().transpose(0, 2)

    def work(mesh):
        rank = mesh["tp"].rank
        x = strange(xs[rank]).requires_grad_()
        kept = x.detach().clone()
        y = getattr(autograd_collectives, name)(x, mesh["tp"])
        (grad,) = torch.autograd.grad(y, x, strange(pulls[rank]))
        assert torch.equal(x.detach(), kept), "the input is the caller's"
        return y.detach(), grad

    for (y, grad), expected_y, expected_grad in zip(run_ranks({"tp": t}, work, delayed=delayed), ys, backward(pulls)):
        close(y, expected_y)
        close(grad, expected_grad)


def test_the_table_of_moves_is_complete():
    assert {
        name
        for name, value in vars(autograd_collectives).items()
        if isinstance(value, autograd_collectives.AutogradCollective)
    } == set(MOVES)


def test_a_gradient_that_another_use_shares_is_not_changed():
    """x is used twice: the all-reduce of one path must not reach the other's gradient."""

    def work(mesh):
        x = leaf(X)
        y = autograd_collectives.copy(x, mesh["tp"])
        (y + x).sum().backward()
        return x.grad

    for grad in run_ranks({"tp": 2}, work):
        close(grad, torch.full_like(X, 3.0))


# ---------------------------------------------------------------- batches and errors


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_batch_read_once_reaches_every_rank(t: int):
    data = {"tokens": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3) + 1, "other": torch.zeros(1)}

    def work(mesh):
        mine = data if mesh["tp"].is_first else None
        with mesh.ledger.record() as calls:
            got = broadcast_batch(["labels", "tokens"], mine, torch.float64, (2, 3), mesh["tp"])
        return got, [call.op for call in calls]

    for (labels, tokens), ops in run_ranks({"tp": t}, work):
        close(labels, data["labels"].double())
        close(tokens, data["tokens"].double())
        assert ops == (["broadcast"] if t > 1 else [])


def test_a_batch_of_another_shape_is_an_error():
    def work(mesh):
        return broadcast_batch(["tokens"], {"tokens": torch.zeros(2, 5)}, torch.int64, (2, 3), mesh["tp"])

    with pytest.raises(RuntimeError) as error:
        run_ranks({"tp": 2}, work)
    assert "{'tokens': (2, 5)}" in str(error.value) and "(2, 3)" in str(error.value)


LAYERS = {
    "output size of a column-parallel layer (6)": lambda tp: ColumnParallelLinear(8, 6, tp=tp, init=Normal(1.0)),
    "output size of a column-parallel layer (2)": lambda tp: ColumnParallelLinear(
        8, 8, tp=tp, init=Normal(1.0), blocks=(2, 6)
    ),
    "input size of a row-parallel layer (6)": lambda tp: RowParallelLinear(6, 8, tp=tp, init=Normal(1.0)),
    "padded vocabulary (5)": lambda tp: VocabParallelEmbedding(5, 8, tp=tp, init=Normal(1.0)),
}


@pytest.mark.parametrize("what", LAYERS)
def test_a_size_that_the_ranks_do_not_divide_is_named(what: str):
    with pytest.raises(RuntimeError) as error:
        run_ranks({"tp": 4}, lambda mesh: LAYERS[what](double(mesh)))
    assert tells(error.value.__cause__, f"{what} 4")


# ---------------------------------------------------------------- communication itself


def test_an_axis_of_one_rank_is_free_and_unnoted():
    def work(mesh):
        tp, x = mesh["tp"], leaf(X)
        with mesh.ledger.record() as calls:
            moved = [getattr(autograd_collectives, name)(x, tp) for name in MOVES]
            x = x.detach()
            moved += [comm.all_reduce(x, tp), comm.all_gather(x, tp), comm.all_gather(x, tp, dim=-1)]
            moved += [comm.reduce_scatter(x, tp), comm.broadcast(x, tp), comm.start_all_reduce(x, tp, "max").wait()]
            moved += [comm.start_all_gather(x, tp).wait(), comm.start_reduce_scatter(x, tp).wait()]
            assert all(y.data_ptr() == x.data_ptr() for y in moved), "not even a copy is made"
            comm.barrier(tp)
            assert comm.broadcast_text("text", tp) == "text"
            with comm.raise_together(tp):
                pass
            assert local_sequence_slice(S, TensorParallel(tp, True)) == slice(0, S)
            ColumnParallelLinear(IN, OUT, tp=double(mesh, sp=True), init=Normal(1.0))(X)
        assert tp.group is None
        return calls, list(mesh.ledger.flight_recorder)

    assert run_ranks({}, work) == [([], [])]


@pytest.mark.parametrize("delayed", [False, True])
def test_collectives_do_what_their_names_say(delayed: bool):
    def work(mesh):
        tp = mesh["tp"]
        x = torch.arange(6.0).view(3, 2) + 10 * tp.rank
        return {
            "sum": comm.all_reduce(x.clone(), tp),
            "max": comm.all_reduce(x.clone(), tp, "max"),
            "gather": comm.all_gather(x, tp),
            "gather last": comm.all_gather(x, tp, dim=-1),
            "gather dim 1": comm.all_gather(x, tp, dim=1),
            "scatter": comm.reduce_scatter(x, tp),
            "broadcast": comm.broadcast(x.clone(), tp, source=2),
            "text": comm.broadcast_text("gr\u00fc\u00df dich" if tp.rank == 1 else None, tp, source=1),
            "no text": comm.broadcast_text("", tp),
        }

    xs = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(3)]
    for rank, got in enumerate(run_ranks({"tp": 3}, work, delayed=delayed)):
        assert torch.equal(got["sum"], sum(xs))
        assert torch.equal(got["max"], xs[2])
        assert torch.equal(got["gather"], torch.cat(xs))
        assert torch.equal(got["gather last"], torch.cat(xs, -1))
        assert torch.equal(got["gather dim 1"], torch.cat(xs, 1))
        assert torch.equal(got["scatter"], sum(xs)[rank : rank + 1])
        assert torch.equal(got["broadcast"], xs[2])
        assert (got["text"], got["no text"]) == ("gr\u00fc\u00df dich", "")


def test_the_ledger_notes_local_bytes():
    def work(mesh):
        x, tp = torch.zeros(4, 2, dtype=torch.float32), mesh["tp"]
        with mesh.ledger.record() as calls:
            comm.all_reduce(x, tp)
            comm.all_gather(x, tp)
            comm.reduce_scatter(x, tp)
            comm.broadcast(x, tp)
            if tp.is_first:
                comm.start_send(x, tp, 1).wait()
            else:
                comm.start_recv(x, tp, 0).wait()
        return [(*call, comm.bytes_sent(call)) for call in calls]

    collectives = [
        ("all_reduce", "tp", 32, 2, 32.0),
        ("all_gather", "tp", 32, 2, 32),
        ("reduce_scatter", "tp", 32, 2, 16.0),
        ("broadcast", "tp", 32, 2, 16.0),
    ]
    first, second = run_ranks({"tp": 2}, work)
    assert first == [*collectives, ("send", "tp", 32, 2, 32)]
    assert second == [*collectives, ("recv", "tp", 32, 2, 0)]


def test_a_dimension_that_the_ranks_do_not_divide_is_an_error():
    with pytest.raises(RuntimeError) as error:
        run_ranks({"tp": 4}, lambda mesh: comm.reduce_scatter(torch.zeros(6), mesh["tp"]))
    assert tells(error.value.__cause__, "6 4 tp")


# failing ranks -> whose message the others hear
TOGETHER = [((0,), 0), ((3,), 3), ((1, 2), 1), ((0, 1, 2, 3), 0)]


@pytest.mark.parametrize(("failing", "first"), TOGETHER)
@pytest.mark.parametrize("message", ["cannot read \u00abx\u00bb", ""])
def test_if_one_rank_fails_all_raise_with_the_first_ones_message(failing, first, message):
    def work(mesh):
        rank = mesh["world"].rank
        try:
            with comm.raise_together(mesh["world"]):
                if rank in failing:
                    raise OSError(f"{message}{rank}" if message else "")
        except Exception as error:
            comm.barrier(mesh["world"])  # everyone is here, and in step
            return type(error), str(error)
        return None

    got = run_ranks({"tp": 2, "dp": 2}, work)
    for rank, outcome in enumerate(got):
        if rank in failing:
            assert outcome == (OSError, f"{message}{rank}" if message else "")
        else:
            assert outcome == (comm.PeerError, f"rank {first}: " + (f"{message}{first}" if message else ""))


def test_if_nobody_fails_nobody_raises():
    def work(mesh):
        with comm.raise_together(mesh["world"]), mesh.ledger.record() as calls:
            pass
        return len(calls)

    assert run_ranks({"dp": 3}, work) == [0, 0, 0]


def test_one_rank_alone_raises_its_own_error():
    def work(mesh):
        with pytest.raises(OSError, match="mine"), comm.raise_together(mesh["world"]):
            raise OSError("mine")

    run_ranks({}, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_frequent_word_gets_its_whole_gradient(dtype: torch.dtype):
    """4,096 times 0.01 is 41, also where 4 + 0.01 rounds to 4."""
    table = nn.Parameter(torch.zeros(3, 8, dtype=dtype))
    table.main_grad = torch.zeros(3, 8, dtype=torch.promote_types(dtype, torch.float32))
    ids = torch.ones(64, 64, dtype=torch.long)
    ids[0, 0] = 2
    lookup(ids, table).backward(torch.full((64, 64, 8), 0.01, dtype=dtype))
    step = torch.tensor(0.01, dtype=dtype).double().item()
    for row, times in enumerate((0, 4095, 1)):
        assert table.main_grad[row].double() == pytest.approx([times * step] * 8, rel=1e-5)
    assert table.grad is None


def test_a_table_without_a_buffer_leaves_its_gradient_to_autograd():
    table = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    ids = torch.tensor([[0, 3], [3, 3]])
    pull = torch.randn(2, 2, 4, dtype=torch.float64)
    lookup(ids, table).backward(pull)
    expected = torch.zeros(5, 4, dtype=torch.float64).index_add_(0, ids.flatten(), pull.flatten(0, 1))
    torch.testing.assert_close(table.grad, expected)
