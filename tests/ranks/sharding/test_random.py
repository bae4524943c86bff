"""Initial weights and dropout masks follow from names and positions; no generator's state is read or moved."""

import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from tiny_run import GPT2, LLAMA, SEED, VOCAB, Layout, build, my_pieces, put_together, run
from torch import Tensor, nn

import pretrain_gpt
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, HiddenDropout, SampleDropoutKeys
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.sharding import initial_values as draws
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.initial_values import TILE, initialize_parameters, normal_box, seed_of
from megatron.core.sharding.placement import Constant, Normal, Placement

SIGMAS = 5  # a bound that a right implementation misses once in two million draws; the seeds are fixed besides


def initial_weights(config, layout: Layout) -> dict[str, Tensor]:
    """Whole tensors, put together from what each rank starts with."""

    def work(mesh):
        return my_pieces(build(mesh, config, layout.sp)[0].module, mesh, lambda p: p.data)

    return put_together(run_ranks({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, work))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


# ---------------------------------------------------------------- initial weights


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=4, sp=True), Layout(pp=2), Layout(pp=4), Layout(dp=2), Layout(tp=2, sp=True, pp=2, dp=2)],
    ids=str,
)
def test_every_layout_starts_from_the_same_weights(style: str, layout: Layout):
    config = {"gpt2": GPT2, "llama": LLAMA}[style]
    assert_same(initial_weights(config, layout), initial_weights(config, Layout()))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_lower_precision_starts_from_the_same_weights_rounded(dtype: str):
    config = replace(GPT2, fp64=False, bf16=dtype == "bf16")
    exact = initial_weights(GPT2, Layout())
    rounded = {name: value.to(config.params_dtype) for name, value in exact.items()}
    assert_same(initial_weights(config, Layout()), rounded)
    assert_same(initial_weights(config, Layout(tp=4, pp=2)), rounded)


def test_weights_do_not_follow_torchs_settings():
    expected = initial_weights(GPT2, Layout())
    threads = torch.get_num_threads()
    try:
        for seed, default, count in ((0, torch.float32, 2), (7, torch.float64, 1), (9, torch.bfloat16, 2)):
            torch.manual_seed(seed)
            torch.set_default_dtype(default)
            torch.set_num_threads(count)
            assert_same(initial_weights(GPT2, Layout(tp=2)), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def test_the_seed_and_the_name_choose_the_weights():
    shape, box = (8, 8), ((0, 8), (0, 8))
    drawn = [normal_box(shape, box, 1.0, seed, name) for seed, name in product((1, 2), ("a.weight", "b.weight"))]
    assert all(not torch.equal(one, other) for one, other in combinations(drawn, 2))
    assert torch.equal(drawn[0], normal_box(shape, box, 1.0, 1, "a.weight"))


def test_no_two_tensors_and_no_two_layers_start_alike():
    weights = [w.flatten()[:32] for w in initial_weights(GPT2, Layout()).values() if w.dim() > 1]
    assert len(weights) == 2 + 4 * GPT2.num_layers
    assert all(not torch.equal(one, other) for one, other in combinations(weights, 2))


def test_any_box_is_the_same_part_of_the_same_tensor():
    """Boxes that start and end inside tiles, of tensors with several tiles."""
    draw = random.Random(1)
    for shape in ((2 * TILE + 44, TILE + 3), (TILE, TILE), (TILE + 1,), (3, 5, TILE + 9), (1, 1)):
        full = normal_box(shape, tuple((0, n) for n in shape), 0.02, SEED, "w")
        for _ in range(10):
            corners = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in shape]
            box = tuple((a, b) if a < b else (0, n) for (a, b), n in zip(corners, shape))
            assert torch.equal(normal_box(shape, box, 0.02, SEED, "w"), full[slices(box)])


def test_of_stacked_matrices_each_has_its_own_draws(monkeypatch):
    """A rank that has two of four experts draws two; no two are alike."""
    shape, box, drawn = (4, 5, 6), ((1, 3), (0, 5), (0, 6)), []
    whole = normal_box(shape, ((0, 4), (0, 5), (0, 6)), 1.0, 1, "experts")
    seed_of_tile = draws.seed_of
    monkeypatch.setattr(draws, "seed_of", lambda *key: drawn.append(key) or seed_of_tile(*key))
    assert torch.equal(normal_box(shape, box, 1.0, 1, "experts"), whole[1:3])
    assert [key[2:] for key in drawn] == [(1, 0, 0), (2, 0, 0)]
    assert not any(torch.equal(a, b) for a, b in combinations(whole, 2))


def test_tiles_differ_from_each_other():
    full = normal_box((2 * TILE, 2 * TILE), ((0, 2 * TILE), (0, 2 * TILE)), 1.0, SEED, "w")
    tiles = [full[i : i + TILE, j : j + TILE] for i, j in product((0, TILE), repeat=2)]
    for one, other in combinations(tiles, 2):
        assert abs((one * other).mean().item()) < SIGMAS / TILE, "independent draws do not correlate"


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_draws_are_normal_of_the_asked_deviation(std: float):
    n = 500 * 400
    x = normal_box((500, 400), ((0, 500), (0, 400)), std, SEED, "w").double() / std
    assert abs(x.mean().item()) < SIGMAS / n**0.5
    assert abs(x.var().item() - 1) < SIGMAS * (2 / n) ** 0.5
    assert abs((x**4).mean().item() - 3) < SIGMAS * (96 / n) ** 0.5
    within = (x.abs() < 1).double().mean().item()
    assert abs(within - 0.682689) < SIGMAS * (0.682689 * 0.317311 / n) ** 0.5


def test_each_tensor_of_a_model_has_its_deviation():
    """0.02, but 0.02 / sqrt(2 x layers) where a block writes into the residual stream; norms one, biases zero."""
    config = replace(GPT2, hidden_size=128)
    narrow = 0.02 / (2 * config.num_layers) ** 0.5
    for name, weight in initial_weights(config, Layout(tp=2, pp=2)).items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, float("norm.weight" in name))), name
            continue
        std = narrow if "linear_proj" in name or "linear_fc2" in name else 0.02
        n = weight.numel()
        assert abs(weight.std().item() / std - 1) < SIGMAS / (2 * n) ** 0.5, name
        assert abs(weight.mean().item()) < SIGMAS * std / n**0.5, name


def test_a_run_draws_each_weight_once_and_by_its_name(monkeypatch):
    """A layer made alone draws when it is made; those of a model that `get_model` builds wait for their names."""
    drawn: list[str] = []

    def counted(shape, box, std, seed, name):
        drawn.append(name)
        return normal_box(shape, box, std, seed, name)

    monkeypatch.setattr(draws, "normal_box", counted)

    def work(mesh):
        flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 1 --lr 1e-3 --train-iters 1 "
        flags += "--mock-data --tokenizer-type NullTokenizer --vocab-size 7 --device cpu --eval-iters 0"
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False) as trainer:
            return [
                name for name, p in trainer.model[0].module.named_parameters() if isinstance(p.placement.init, Normal)
            ]

    (expected,) = run_ranks({}, work)
    assert drawn == expected and len(expected) == 2 + 2 * 4


def test_padding_starts_at_zero():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 3), float("nan")))
            self.weight.placement = Placement((13, 3), Normal(1.0), shard={"tp": 0})

    def work(mesh):
        table = Table()
        initialize_parameters(table, SEED, mesh)
        return table.weight.data

    whole = torch.cat(run_ranks({"tp": 4}, work))
    assert not whole[13:].any()
    assert torch.equal(whole[:13], normal_box((13, 3), ((0, 13), (0, 3)), 1.0, SEED, "weight"))


def test_a_constant_fills_and_no_init_leaves_alone():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.filled, self.mine = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.full((3,), 7.0))
            self.filled.placement = Placement((3,), Constant(2.5))
            self.mine.placement = Placement((3,), None)

    def work(mesh):
        two = Two()
        initialize_parameters(two, SEED, mesh)
        return two.filled.tolist(), two.mine.tolist()

    assert run_ranks({}, work) == [([2.5] * 3, [7.0] * 3)]


def test_keys_give_seeds_that_generators_take():
    keys = [(1,), (11,), (1, 1), ("1", 1, 1), (1, "a"), (1, "a", 0), (1, "a", 1), ("a", 1)]
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1234, "embedding", 0, 5) == seed_of(1234, "embedding", 0, 5)


# ---------------------------------------------------------------- dropout


def keys_of(*samples: int, seed: int = SEED) -> SampleDropoutKeys:
    keys = SampleDropoutKeys(seed)
    keys.samples = samples
    return keys


def hidden_kept(samples=(0,), *, seed=SEED, site="embedding", layer=0, shape=(8, 1, 32), p=0.5) -> Tensor:
    dropout = HiddenDropout(p, keys_of(*samples, seed=seed), site, layer, SequenceShard())
    return dropout(torch.ones(shape, dtype=torch.float64)) != 0


def attention_kept(samples=(0,), *, seed=SEED, layer=0, first_head=0, shape=(1, 2, 8, 8), p=0.5) -> Tensor:
    dropout = AttentionDropout(p, keys_of(*samples, seed=seed), layer, first_head)
    return dropout(torch.ones(shape, dtype=torch.float64)) != 0


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p_and_the_mean_is_kept(probability: float):
    n, keep = 64 * 4 * 256, 1 - probability
    bound = SIGMAS * (probability * keep / n) ** 0.5
    x = torch.ones(64, 4, 256, dtype=torch.float64)
    hidden = HiddenDropout(probability, keys_of(3, 4, 5, 6), "after mlp", 2, SequenceShard())(x)
    scores = AttentionDropout(probability, keys_of(3, 4, 5, 6), 2, 0)(x.view(4, 4, 64, 64))
    for out in (hidden, scores):
        assert abs((out != 0).double().mean().item() - keep) < bound
        assert torch.equal(out[out != 0], torch.full_like(out[out != 0], 1.0) / keep)
        assert abs(out.mean().item() - 1) < bound / keep


def test_masks_differ_by_sample_layer_site_and_seed():
    changes = [
        {},
        {"samples": (1,)},
        {"samples": (2,)},
        {"layer": 1},
        {"layer": 2},
        {"site": "after mlp"},
        {"site": "after attention"},
        {"seed": 4},
    ]
    masks = [hidden_kept(**change) for change in changes]
    for one, other in combinations(masks, 2):
        # Two fair masks agree on half of 256 elements, give or take 8.
        assert abs((one == other).double().mean().item() - 0.5) < SIGMAS / 2 / 256**0.5
    heads = [attention_kept(**change) for change in ({}, {"samples": (1,)}, {"layer": 1}, {"seed": 4})]
    heads = [head for mask in heads for head in mask.flatten(0, 1)]
    assert all(not torch.equal(one, other) for one, other in combinations(heads, 2))


def test_a_mask_is_the_samples_own_wherever_its_row_lies():
    together = hidden_kept((7, 3, 5), shape=(8, 3, 32))
    for row, sample in enumerate((7, 3, 5)):
        assert torch.equal(together[:, row], hidden_kept((sample,))[:, 0])
    together = attention_kept((7, 3), shape=(2, 2, 8, 8))
    assert torch.equal(together[1], attention_kept((3,))[0])


def test_recomputing_draws_the_same_mask():
    dropout = HiddenDropout(0.5, keys_of(1, 2), "embedding", 0, SequenceShard())
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropout(x), dropout(x))


def test_the_gradient_passes_where_the_value_did():
    dropout = HiddenDropout(0.25, keys_of(1, 2), "embedding", 0, SequenceShard())
    x = torch.ones(4, 2, 8, dtype=torch.float64, requires_grad=True)
    out = dropout(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("t", [2, 4])
def test_a_sequence_part_keeps_its_part_of_the_mask(t: int):
    expected = hidden_kept((7, 3), shape=(8, 2, 32))

    def work(mesh):
        dropout = HiddenDropout(0.5, keys_of(7, 3), "embedding", 0, SequenceShard(sp=mesh["tp"]))
        return dropout(torch.ones(8 // t, 2, 32)) != 0

    assert torch.equal(torch.cat(run_ranks({"tp": t}, work)), expected)


@pytest.mark.parametrize("t", [2, 4])
def test_heads_keep_their_masks_wherever_they_lie(t: int):
    expected = attention_kept((7, 3), shape=(2, 4, 8, 8))

    def work(mesh):
        return attention_kept((7, 3), first_head=mesh["tp"].rank * 4 // t, shape=(2, 4 // t, 8, 8))

    assert torch.equal(torch.cat(run_ranks({"tp": t}, work), dim=1), expected)


def test_no_dropout_in_evaluation_or_at_probability_zero():
    x, keys = torch.ones(2, 1, 4), SampleDropoutKeys(SEED)  # no sample is named: a mask could not be drawn
    assert HiddenDropout(0.0, keys, "embedding", 0, SequenceShard())(x) is x
    assert HiddenDropout(0.5, keys, "embedding", 0, SequenceShard()).eval()(x) is x
    assert AttentionDropout(0.5, keys, 0, 0).eval()(x) is x


def test_a_row_without_a_named_sample_is_our_mistake():
    with pytest.raises(AssertionError, match=r"row 1.* 1 sample"):
        hidden_kept((5,), shape=(8, 2, 32))


def test_masks_do_not_follow_torchs_settings():
    expected, threads = attention_kept(shape=(1, 2, 8, 2**15)), torch.get_num_threads()
    try:
        torch.manual_seed(99)
        torch.set_default_dtype(torch.float64)
        for count in (1, 3):  # which choose the blocks
            torch.set_num_threads(count)
            assert torch.equal(attention_kept(shape=(1, 2, 8, 2**15)), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def test_training_leaves_every_global_generator_alone():
    """Building, initialising and two steps with dropout, TP 2 x SP x PP 2."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    run(GPT2, Layout(tp=2, sp=True, pp=2, m=2), steps=2, global_batch=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_the_vocabulary_has_padding_in_these_tests():
    assert GPT2.padded_vocab_size(VOCAB, 1) == 64 > VOCAB
