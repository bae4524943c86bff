"""Megatron's functions and layers, called with Megatron's arguments, give Megatron's values forward and backward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from tiny_run import SEQ, TINY_GPT2, VOCAB, my_pieces, put_together
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core import tensor_parallel as mt
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.parallel.global_state import defer_weight_initialization
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.initial_values import initialize_parameters, normal_box
from megatron.core.sharding.placement import Constant, pieces
from megatron.core.tensor_parallel import linear_layers
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from megatron.training.utils import average_losses_across_data_parallel_group, get_ltor_masks_and_position_ids

# Rank r holds x, is handed back the gradient g of the result, and ends with (y, dx). All by hand.
WHOLE = [[1.0, 2.0, 3.0, 4.0]]
REGIONS = {  # name: x, g, y, dx, each of both ranks
    "copy_to_tensor_model_parallel_region": (
        [[[1.0, 2.0]]] * 2,
        [[[1.0, 1.0]], [[2.0, 3.0]]],
        [[[1.0, 2.0]]] * 2,
        [[[3.0, 4.0]]] * 2,
    ),
    "reduce_from_tensor_model_parallel_region": (
        [[[1.0, 2.0]], [[10.0, 20.0]]],
        [[[5.0, 6.0]]] * 2,
        [[[11.0, 22.0]]] * 2,
        [[[5.0, 6.0]]] * 2,
    ),
    "scatter_to_tensor_model_parallel_region": (
        [WHOLE] * 2,
        [[[5.0, 6.0]], [[7.0, 8.0]]],
        [[[1.0, 2.0]], [[3.0, 4.0]]],
        [[[5.0, 6.0, 7.0, 8.0]]] * 2,
    ),
    "gather_from_tensor_model_parallel_region": (
        [[[1.0, 2.0]], [[3.0, 4.0]]],
        [[[5.0, 6.0, 7.0, 8.0]]] * 2,
        [WHOLE] * 2,
        [[[5.0, 6.0]], [[7.0, 8.0]]],
    ),
    "scatter_to_sequence_parallel_region": (
        [[[1.0], [2.0]]] * 2,
        [[[5.0]], [[7.0]]],
        [[[1.0]], [[2.0]]],
        [[[5.0], [7.0]]] * 2,
    ),
    # the gradients of the ranks are parts, and are summed
    "gather_from_sequence_parallel_region": (
        [[[1.0]], [[2.0]]],
        [[[1.0], [2.0]], [[10.0], [20.0]]],
        [[[1.0], [2.0]]] * 2,
        [[[11.0]], [[22.0]]],
    ),
    "reduce_scatter_to_sequence_parallel_region": (
        [[[1.0], [2.0]], [[10.0], [20.0]]],
        [[[5.0]], [[7.0]]],
        [[[11.0]], [[22.0]]],
        [[[5.0], [7.0]]] * 2,
    ),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
def test_a_region_on_two_ranks(name, delayed):
    case = dict(zip(("x", "g", "y", "dx"), ([torch.tensor(value) for value in values] for values in REGIONS[name])))

    def work(mesh):
        x = case["x"][mesh["tp"].rank].clone().requires_grad_()
        y = getattr(mt, name)(x)
        y.backward(case["g"][mesh["tp"].rank])
        return y.detach(), x.grad

    for rank, (y, dx) in enumerate(run_ranks({"tp": 2}, work, delayed=delayed)):
        assert torch.equal(y, case["y"][rank]) and torch.equal(dx, case["dx"][rank])


def test_regions_on_four_ranks():
    """x of rank r is r + 1, gradients are 10^r: sums over ranks are 10 and 1111."""

    def work(mesh):
        rank, found = mesh["tp"].rank, {}
        for name in ("copy_to_tensor", "reduce_from_tensor"):
            x = torch.tensor([rank + 1.0], requires_grad=True)
            y = getattr(mt, f"{name}_model_parallel_region")(x)
            y.backward(torch.tensor([10.0**rank]))
            found[name] = (y.item(), x.grad.item())
        x = torch.tensor([rank + 1.0], requires_grad=True)
        y = mt.gather_from_sequence_parallel_region(x)
        y.backward(torch.arange(4.0) * 10.0**rank)
        found["gather"] = (y.tolist(), x.grad.item())
        x = torch.tensor([rank + 1.0], requires_grad=True)
        mt.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False).backward(torch.arange(4.0))
        found["gather of copies"] = x.grad.item()
        return found

    for rank, found in enumerate(run_ranks({"tp": 4}, work)):
        assert found == {
            "copy_to_tensor": (rank + 1.0, 1111.0),
            "reduce_from_tensor": (10.0, 10.0**rank),
            "gather": ([1.0, 2.0, 3.0, 4.0], rank * 1111.0),
            "gather of copies": float(rank),
        }


# ---------------------------------------------------------------- layers

S, B, H, F, SEED = 4, 2, 6, 8, 5


class Config:
    """What Megatron's layers read of a config."""

    params_dtype, sequence_parallel = torch.float64, False


class DividedConfig(Config):
    sequence_parallel = True


class Block(torch.nn.Module):
    """An embedding, a column- and a row-parallel layer, as a fork writes them."""

    def __init__(self, config):
        super().__init__()
        init = init_method_normal(0.5)
        self.table = mt.VocabParallelEmbedding(
            12, H, init_method=init, config=config, reduce_scatter_embeddings=config.sequence_parallel
        )
        self.up = mt.ColumnParallelLinear(H, F, config=config, init_method=init, skip_bias_add=True)
        self.down = mt.RowParallelLinear(
            F,
            H,
            config=config,
            init_method=scaled_init_method_normal(0.5, 2),
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, ids):
        x, bias = self.up(self.table(ids))
        out, none = self.down(torch.tanh(x + bias))
        assert none is None
        return out


def plain(ids):
    """The same with torch's own operations on whole tensors -> (out, gradients by name) for the sum of squares."""
    weights = {
        name: normal_box(shape, tuple((0, n) for n in shape), std, SEED, name).double().requires_grad_()
        for name, shape, std in (
            ("table.weight", (12, H), 0.5),
            ("up.weight", (F, H), 0.5),
            ("down.weight", (H, F), 0.25),
        )
    }
    out = torch.tanh(torch.nn.functional.embedding(ids, weights["table.weight"]) @ weights["up.weight"].t())
    out = out @ weights["down.weight"].t()
    out.square().sum().backward()
    return out.detach(), {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("tp, config", [(1, Config), (2, Config), (4, Config), (2, DividedConfig)])
def test_layers_with_megatrons_arguments_equal_plain_torch(tp, config):
    ids = torch.randint(0, 12, (S, B), generator=torch.Generator().manual_seed(1))
    expected, gradients = plain(ids)

    def work(mesh):
        block = Block(config())
        initialize_parameters(block, SEED, mesh)
        out = block(ids)
        out.square().sum().backward()
        for name, gradient in gradients.items():
            parameter = block.get_parameter(name)
            for box, local in pieces(parameter.placement, tuple(parameter.shape), mesh):
                torch.testing.assert_close(parameter.grad[slices(local)], gradient[slices(box)], rtol=1e-12, atol=1e-12)
        return out.detach()

    outs = run_ranks({"tp": tp}, work)
    whole = torch.cat(outs) if config.sequence_parallel else outs[0]
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_a_split_layer_is_one_class_with_both_contracts():
    """Where ours begins with `init`, its defaults are ours: row-parallel input, an embedding in parts under sequence parallelism."""

    def work(mesh):
        tp = LayerContext.from_mesh(mesh, torch.float64, sequence_parallel=True).tp
        for name in ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"):
            assert getattr(mt, name) is getattr(linear_layers, name)
        column, row, table = (
            kind(8, 4, tp=tp, init=Constant(0.5))
            for kind in (mt.ColumnParallelLinear, mt.RowParallelLinear, mt.VocabParallelEmbedding)
        )
        assert (column.gather_output, row.input_is_parallel, table.sequence_parallel) == (False, True, True)
        assert (column.weight == 0.5).all()
        column, row, table = (
            kind(8, 4, init_method=Constant(0.5))
            for kind in (mt.ColumnParallelLinear, mt.RowParallelLinear, mt.VocabParallelEmbedding)
        )
        assert (column.gather_output, row.input_is_parallel, table.sequence_parallel) == (True, False, False)

    run_ranks({"tp": 2}, work)


def test_the_order_of_arguments_of_version_2():
    """ColumnParallelLinear(in, out, bias, gather_output, init_method), whose output is gathered unless told otherwise."""

    def work(mesh):
        column = mt.ColumnParallelLinear(H, F, True, init_method=init_method_normal(0.1))
        row = mt.RowParallelLinear(F, H, bias=True, input_is_parallel=False)
        initialize_parameters(torch.nn.ModuleDict({"column": column, "row": row}), SEED, mesh)
        y, _ = column(torch.ones(S, B, H))
        z, _ = row(y)
        return y.shape, z

    one, two = run_ranks({}, work)[0], run_ranks({"tp": 2}, work)
    assert one[0] == two[0][0] == two[1][0] == (S, B, F)
    torch.testing.assert_close(two[0][1], one[1])


# ---------------------------------------------------------------- initial values

FILLS = {
    "none given": None,
    "normal": init_method_normal(0.5),
    "constant": Constant(2.0),
    "torch's": torch.nn.init.xavier_uniform_,
    "partial": partial(torch.nn.init.trunc_normal_, std=0.5),
    "orthogonal": torch.nn.init.orthogonal_,
    "lambda": lambda w: w.normal_().mul_(0.5),
    "a new tensor": lambda w: torch.rand(w.shape) + 1,
}


def made_layers(mesh, init):
    """Two of each kind, outside of `get_model`; their parameters by name, as they are right after construction."""
    torch.manual_seed(7)
    options = {"config": Config(), "init_method": init}
    layers = [
        layer
        for _ in range(2)
        for layer in (
            mt.ColumnParallelLinear(H, F, **options),
            mt.RowParallelLinear(F, H, **options),
            mt.VocabParallelEmbedding(12, H, **options),
        )
    ]
    return my_pieces(torch.nn.ModuleList(layers), mesh, lambda p: p.data), torch.rand(3)


@pytest.mark.full
@pytest.mark.parametrize("name", FILLS)
def test_a_layer_has_its_initial_values_at_once_and_the_same_in_every_layout(name):
    ((pieces_of_one, next_drawn),) = run_ranks({}, partial(made_layers, init=FILLS[name]))
    one = put_together([pieces_of_one])
    for tp in (2, 4):
        ranks = run_ranks({"tp": tp}, partial(made_layers, init=FILLS[name]))
        whole = put_together([mine for mine, _ in ranks])
        assert whole.keys() == one.keys() and all(torch.equal(whole[key], one[key]) for key in one)
        assert all(torch.equal(after, next_drawn) for _, after in ranks), "torch's generator depends on the layout"
    for key, value in one.items():
        if key.endswith("bias"):
            assert not value.any()
        elif name == "constant":
            assert bool((value == 2).all())
        else:
            assert value.unique().numel() > value.numel() / 2 and 0 < value.abs().max() < 5
    if name == "torch's":  # of the whole tensor's fans: 6 and 8
        largest = one["0.weight"].abs().max()
        assert 0.9 * (6 / 14) ** 0.5 < largest <= (6 / 14) ** 0.5
    if name != "constant":
        assert not torch.equal(one["0.weight"], one["3.weight"]), "two layers begin alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_made_by_hand_begins_as_one_process_has_it(dtype):
    """Norms, biases and padded words included."""
    config = replace(TINY_GPT2, fp64=False, bf16=dtype == torch.bfloat16)

    def work(mesh):
        torch.manual_seed(7)
        model = GPTModel(
            config,
            vocab_size=VOCAB,
            positions=SEQ,
            layers=range(config.num_layers),
            context=LayerContext.from_mesh(mesh, dtype),
            pre_process=True,
            post_process=True,
        )
        table = model.get_parameter("language_model.embedding.word_embeddings.weight")
        padding = table[max(0, VOCAB - mesh["tp"].rank * table.shape[0]) :]
        assert not padding.any()
        return my_pieces(model, mesh, lambda p: p.data)

    one, two = (put_together(run_ranks({"tp": tp}, work)) for tp in (1, 2))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert all(bool((value == 1).all()) for name, value in one.items() if name.endswith("norm.weight"))
    assert one["language_model.embedding.word_embeddings.weight"].float().std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_a_tied_table_made_by_hand_begins_alike_on_both_stages(sizes):
    """Though stages are seeded unlike, as Megatron seeds them."""

    def work(mesh):
        pp = mesh["pp"]
        torch.manual_seed(7 + 100 * pp.rank)
        model = GPTModel(
            TINY_GPT2,
            vocab_size=VOCAB,
            positions=SEQ,
            layers=[pp.rank],
            context=LayerContext.from_mesh(mesh, torch.float32),
            pre_process=pp.is_first,
            post_process=pp.is_last,
        )
        return mesh["tp"].rank, model.get_parameter("language_model.embedding.word_embeddings.weight").detach()

    tables = {}
    for part, table in run_ranks(sizes, work):
        assert table.any() and torch.equal(tables.setdefault(part, table), table)
    assert len(tables) == sizes.get("tp", 1)


def test_a_function_of_a_tensor_fills_a_named_model_the_same_in_every_layout():
    """As `get_model` fills it: by the parameter's name and not torch's generator."""

    def work(mesh, seed):
        torch.manual_seed(seed)
        with defer_weight_initialization():
            block = torch.nn.ModuleDict(
                {"up": mt.ColumnParallelLinear(H, F, init_method=torch.nn.init.kaiming_normal_)}
            )
        before = torch.default_generator.get_state()
        initialize_parameters(block, SEED, mesh)
        assert torch.equal(torch.default_generator.get_state(), before)
        return my_pieces(block, mesh, lambda p: p.data)

    one, two = (put_together(run_ranks({"tp": tp}, partial(work, seed=tp))) for tp in (1, 2))
    assert torch.equal(one["up.weight"], two["up.weight"])


OPTIONS_AND_SAID = [
    ({"init_method": "xavier"}, "init_method init_method_normal(std)"),
    ({"init_method": lambda w: None}, "48 8 6"),
    ({"stride": 2}, "stride=2 blocks"),
    ({"is_expert": True}, "is_expert"),
    ({"some_day": 1}, "some_day"),
]


@pytest.mark.parametrize("options, said", OPTIONS_AND_SAID)
def test_what_a_layer_cannot_do_is_refused(options, said):
    with pytest.raises(RuntimeError) as refused:
        run_ranks({}, lambda mesh: mt.ColumnParallelLinear(H, F, config=Config(), **options))
    assert tells(refused.value, said)


def test_cross_entropy_equals_torchs():
    logits = torch.randn(S, B, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.randint(0, 12, (S, B), generator=torch.Generator().manual_seed(3))
    leaf = logits.clone().requires_grad_()
    # Megatron smooths by e K / (K - 1), where torch's smoothing is e
    expected = torch.nn.functional.cross_entropy(
        leaf.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=0.1 * 12 / 11
    )
    expected.sum().backward()

    def work(mesh):
        mine = logits.chunk(4, dim=-1)[mesh["tp"].rank].clone().requires_grad_()
        loss = mt.vocab_parallel_cross_entropy(mine, target, 0.1)
        loss.sum().backward()
        return loss.detach(), mine.grad

    ranks = run_ranks({"tp": 4}, work)
    torch.testing.assert_close(ranks[0][0].flatten(), expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], dim=-1), leaf.grad)


def test_a_model_that_does_not_scatter_its_embedding_is_told_of_sequence_parallelism():
    """Between its layers there is twice the sequence then, which the loss is the first to see."""
    ids = torch.randint(0, 12, (S, B), generator=torch.Generator().manual_seed(1))

    def work(mesh):
        block = Block(DividedConfig())
        block.table.sequence_parallel = False
        head = mt.ColumnParallelLinear(H, 12, config=DividedConfig(), bias=False)
        initialize_parameters(torch.nn.ModuleDict({"block": block, "head": head}), SEED, mesh)
        mt.vocab_parallel_cross_entropy(head(block(ids))[0], ids)

    with pytest.raises(RuntimeError, match=r"(?s)8.*2.*4.*2.*2.*--seq"):
        run_ranks({"tp": 2}, work)


def test_broadcast_data_needs_no_shapes():
    batch = {"text": torch.arange(10).view(2, 5), "types": torch.tensor([7, 8, 9])}

    def work(mesh):
        return mt.broadcast_data(["text", "types"], batch if mesh["tp"].is_first else None, torch.int64)

    for got in run_ranks({"tp": 4}, work):
        assert all(torch.equal(got[key], batch[key]) for key in batch)
    with pytest.raises(RuntimeError, match=r"torch\.float32"):
        run_ranks({}, lambda mesh: mt.broadcast_data(["text"], batch, torch.float32))


def test_losses_are_averaged_over_data_parallel_ranks():
    def work(mesh):
        rank = mesh["world"].rank
        return average_losses_across_data_parallel_group([torch.tensor(float(rank)), torch.tensor([10.0 * rank])])

    got = run_ranks({"tp": 2, "dp": 2}, work)  # dp joins ranks 0 and 2, 1 and 3
    assert [x.tolist() for x in got] == [[1.0, 10.0], [2.0, 20.0], [1.0, 10.0], [2.0, 20.0]]


# ---------------------------------------------------------------- generators


def test_a_fork_draws_from_a_state_of_its_own_and_leaves_the_other_alone():
    def work(mesh):
        mt.model_parallel_cuda_manual_seed(1234)
        tracker = mt.get_cuda_rng_tracker()
        outside = torch.rand(2)
        with tracker.fork():
            inside = torch.rand(2)
        after = torch.rand(2)
        with tracker.fork():
            inside_again = torch.rand(2)
        with pytest.raises(ValueError, match="in use"):
            tracker.add("model-parallel-rng", 1)
        with pytest.raises(ValueError, match="'mine'"), tracker.fork("mine"):
            pass
        return outside, after, inside, inside_again

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(2, generator=generator), torch.rand(2, generator=generator)

    for rank, (outside, after, *inside) in enumerate(run_ranks({"tp": 2}, work)):
        assert all(torch.equal(a, b) for a, b in zip((outside, after), drawn(1234)))
        assert all(torch.equal(a, b) for a, b in zip(inside, drawn(1234 + 2718 + rank)))


def test_checkpoint_draws_the_same_again():
    def work(mesh):
        mt.model_parallel_cuda_manual_seed(7)
        tracker, masks = mt.get_cuda_rng_tracker(), []

        def run(x):
            with tracker.fork():
                masks.append(torch.rand(4))
            masks.append(torch.rand(4))
            return (x * masks[-1] * masks[-2]).square()

        x = torch.ones(4, requires_grad=True)
        out = mt.checkpoint(run, False, x)
        with tracker.fork():
            between = torch.rand(1)
        out.sum().backward()
        with tracker.fork():
            after = torch.rand(1)
        assert len(masks) == 4 and torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
        torch.testing.assert_close(x.grad, 2 * (masks[0] * masks[1]) ** 2)
        return between, after

    ((between, after),) = run_ranks({}, work)
    generator = torch.Generator().manual_seed(7 + 2718)
    drawn = torch.rand(4, generator=generator), torch.rand(1, generator=generator), torch.rand(1, generator=generator)
    assert torch.equal(between, drawn[1]) and torch.equal(after, drawn[2])


@pytest.mark.parametrize(("rows", "is_divided"), [(4, True), (3, False)])
def test_checkpoint_keeps_its_first_input_in_parts(rows: int, is_divided: bool):
    """A rank keeps half of it, whose bytes the backward gathers; values and gradients are those of all kept. Of 15 elements no
    rank can keep half."""
    numbers = torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))

    def work(mesh, divides):
        mt.model_parallel_cuda_manual_seed(7)
        leaf, scale = numbers.clone().requires_grad_(), torch.full((5,), 3.0, requires_grad=True)
        x = leaf * 2
        memory = StorageWeakRef(x.untyped_storage())
        with mesh.ledger.record() as calls:
            out = mt.checkpoint(lambda x, scale, power: (x * scale).tanh() ** power, divides, x, scale, 3)
            del x
            is_kept = not memory.expired()
            assert not calls
            out.sum().backward()
        return out.detach(), leaf.grad, scale.grad, is_kept, [(call.op, call.axis, call.bytes) for call in calls]

    ways = zip(*(run_ranks({"tp": 2}, partial(work, divides=divides)) for divides in (True, False)))
    for (*divided, is_kept, calls), (*plain, plain_is_kept, _) in ways:
        assert all(torch.equal(a, b) for a, b in zip(divided, plain))
        assert plain_is_kept and is_kept != is_divided
        assert calls == ([("all_gather", "tp", rows * 5 * 4 // 2)] if is_divided else [])


# ---------------------------------------------------------------- small arithmetic


def test_vocabulary_ranges_and_splits():
    assert [VocabUtility.vocab_range_from_global_vocab_size(12, r, 3) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
    a, b = mt.split_tensor_along_last_dim(torch.arange(8).view(2, 4), 2, contiguous_split_chunks=True)
    assert a.tolist() == [[0, 1], [4, 5]] and b.tolist() == [[2, 3], [6, 7]] and a.is_contiguous()
    with pytest.raises(ValueError, match=r"7 .* 2"):
        mt.divide(7, 2)


E = 9  # the end of a document


@pytest.mark.parametrize("reset", [False, True])
def test_left_to_right_masks(reset):
    tokens = torch.tensor([[1, 2, E, 3, 4], [E, 5, 6, E, E]])
    attention, loss, positions = get_ltor_masks_and_position_ids(tokens, E, reset, reset, True)
    assert loss.tolist() == [[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]] and loss.dtype == torch.float32
    documents = [[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]]
    expected = [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]] if reset else [[0, 1, 2, 3, 4]] * 2
    assert positions.tolist() == expected
    for row, mask in enumerate(attention[:, 0]):
        for query in range(5):
            for key in range(5):
                apart = reset and documents[row][query] != documents[row][key]
                assert bool(mask[query, key]) == (key > query or apart)
    assert attention.shape == ((2 if reset else 1), 1, 5, 5)
    assert get_ltor_masks_and_position_ids(tokens, E, reset, reset, False)[1].min() == 1
