"""The arithmetic of mixtures of experts against vectors computed by hand and by megatron-core 0.16.1."""

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import transpose_chunks

Z = torch.tensor([[2, 1, 0, -1], [0, 0.5, 1, -0.5], [1, -1, 2, 0], [-1, 0, 1, 3]], dtype=torch.float64)
BIAS = torch.tensor([0, 0.3, -0.2, 0.1], dtype=torch.float64)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor | float, expected: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


PLAIN = [[0, 1], [2, 1], [2, 0], [3, 2]]
MODES = {
    "post": (
        {},
        {},
        PLAIN,
        (
            0.7310585786,
            0.2689414214,
            0.6224593312,
            0.3775406688,
            0.7310585786,
            0.2689414214,
            0.8807970780,
            0.1192029220,
        ),
    ),
    "pre": (
        {"pre_softmax": True},
        {},
        PLAIN,
        (
            0.6439142599,
            0.2368828181,
            0.4550542339,
            0.2760043447,
            0.6439142599,
            0.2368828181,
            0.8309526605,
            0.1124572137,
        ),
    ),
    "sigmoid": (
        {"function": "sigmoid"},
        {},
        PLAIN,
        (
            0.5464491032,
            0.4535508968,
            0.5401174032,
            0.4598825968,
            0.5464491032,
            0.4535508968,
            0.5657849980,
            0.4342150020,
        ),
    ),
    "sigmoid, bias, scaled": (
        {"function": "sigmoid"},
        {"expert_bias": BIAS},
        [[1, 0], [1, 2], [0, 2], [3, 1]],
        (
            1.1338772421,
            1.3661227579,
            1.1497064920,
            1.3502935080,
            1.1338772421,
            1.3661227579,
            1.6394587189,
            0.8605412811,
        ),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_choices_and_weights(mode: str):
    options, of_choice, chosen, weights = MODES[mode]
    ids = moe_utils.choose_experts(Z, 2, **options, **of_choice)
    assert ids.tolist() == chosen
    scaling = 2.5 if of_choice else None
    close(moe_utils.weights_of(Z, ids, **options, scaling=scaling).flatten(), doubles(*weights))


@pytest.mark.parametrize("mode", MODES)
def test_megatrons_routing_function_returns_the_same_choices_and_weights(mode: str):
    options, of_choice, chosen, weights = MODES[mode]
    named = {
        "score_function": options.get("function", "softmax"),
        "use_pre_softmax": "pre_softmax" in options,
        **of_choice,
    }
    if of_choice:
        named["scaling_factor"] = 2.5
    dense, ids = moe_utils.topk_routing_with_score_function(Z, 2, **named, dense_output=True)
    assert ids.tolist() == chosen
    close(dense.flatten(), doubles(*weights))
    probs, routing_map = moe_utils.topk_routing_with_score_function(Z, 2, **named, fused=True)
    assert [sorted(row) for row in chosen] == [row.nonzero().flatten().tolist() for row in routing_map]
    assert torch.equal(probs.gather(1, ids), dense) and probs.count_nonzero() == dense.numel()
    again = moe_utils.topk_routing_with_score_function(
        Z, 2, **named, dense_output=True, precomputed_indices=ids.flip(-1)
    )
    assert torch.equal(again[0], dense.flip(-1))


def test_megatrons_loss_has_the_arguments_of_each_release():
    """The vector of the specification, as core 0.14 and as core 0.13 are called."""
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(Z, 2, "softmax")
    counts = routing_map.sum(0)
    assert counts.tolist() == [2, 2, 3, 1]
    for given in ((4, 2, 4, 0.01), (2, 0.01)):
        close(moe_utils.switch_load_balancing_loss_func(scores, counts, *given), 0.010308597649458)
    close(
        moe_utils.switch_load_balancing_loss_func(probs=scores, tokens_per_expert=counts, topk=2, moe_aux_loss_coeff=1),
        1.0308597649458,
    )
    named = {"total_num_tokens": 4, "topk": 2, "num_experts": 4, "moe_aux_loss_coeff": 0.01, "fused": True}
    close(moe_utils.switch_load_balancing_loss_func(scores, counts, **named), 0.010308597649458)
    sigmoid = moe_utils.compute_routing_scores_for_aux_loss(Z, 2, "sigmoid")[1]
    close(moe_utils.switch_load_balancing_loss_func(sigmoid, counts, 2, 0.01), 0.010406411897810)
    for wrong in ({"topk": 2}, {"topk": 2, "moe_aux_loss_coeff": 1, "experts": 4}):
        with pytest.raises(
            TypeError, match="give total_num_tokens, topk, num_experts, moe_aux_loss_coeff, or as before"
        ):
            moe_utils.switch_load_balancing_loss_func(scores, counts, **wrong)
    with pytest.raises(ValueError, match="give one of softmax, sigmoid, sqrtsoftplus"):
        moe_utils.topk_routing_with_score_function(Z, 2, score_function="relu")
    with pytest.raises(NotImplementedError, match="router_replay"):
        moe_utils.topk_routing_with_score_function(Z, 2, router_replay=object())


@pytest.mark.parametrize(("policy", "kept"), [("probs", [0, 1, 2, 3]), ("position", [0, 0, 1, 3])])
def test_megatrons_dropping_keeps_the_tokens_of_the_specification(policy: str, kept: list[int]):
    probs, routing_map = moe_utils.topk_routing_with_score_function(Z, 2)
    weights, taken = moe_utils.apply_router_token_dropping(probs, routing_map, 2, 0.5, policy)
    assert taken.nonzero().tolist() == sorted([token, expert] for expert, token in enumerate(kept))
    assert torch.equal(weights, probs * taken)
    padded = moe_utils.apply_router_token_dropping(probs, routing_map, 2, 1.5, policy, pad_to_capacity=True)
    assert padded[1].sum(0).tolist() == [3] * 4 and torch.equal(padded[0], probs * padded[1])


def test_groups():
    z = torch.sin(1.7 * torch.arange(16, dtype=torch.float64)).view(2, 8)
    ids = moe_utils.choose_experts(z, 4, function="sigmoid", groups=4, group_topk=2)
    assert [sorted(row) for row in ids.tolist()] == [[0, 1, 4, 5]] * 2
    first = dict(zip(ids[0].tolist(), moe_utils.weights_of(z, ids, function="sigmoid")[0], strict=True))
    for expert, weight in {1: 0.2871558079, 5: 0.2715008344, 4: 0.2445039954, 0: 0.1968393623}.items():
        close(first[expert], weight)


def test_equal_scores_choose_the_first_experts():
    assert moe_utils.choose_experts(torch.zeros(3, 8), 3).tolist() == [[0, 1, 2]] * 3


def loss(function: str, tokens: Tensor = Z) -> Tensor:
    counts = moe_utils.count_tokens(moe_utils.top_k(tokens, 2).unsqueeze(1), 4)[0]
    sums = moe_utils.probabilities_of(tokens, function).sum(0)
    return moe_utils.balancing_loss(counts.double(), sums, len(tokens), 2)


def test_losses():
    assert moe_utils.count_tokens(moe_utils.top_k(Z, 2).unsqueeze(1), 4).tolist() == [[2, 2, 3, 1]]
    means = moe_utils.probabilities_of(Z, "softmax").mean(0)
    assert [round(p, 8) for p in means.tolist()] == [0.2658554, 0.14657912, 0.32464251, 0.26292298]
    close(0.01 * loss("softmax"), 0.010308597649458)
    close(0.01 * loss("sigmoid"), 0.010406411897810)
    close(0.01 * (loss("softmax", Z[:2]) + loss("softmax", Z[2:])) / 2, 0.012655586021957)
    close(0.001 * moe_utils.z_losses(Z).mean(), 0.006312254578413)
    z = Z.clone().requires_grad_()
    (0.01 * loss("softmax", z)).backward()
    close(z.grad.norm(), 7.272042060315699e-4)
    uniform = moe_utils.balancing_loss(doubles(2, 2, 2, 2), doubles(*[1.0] * 4), 4, 2)
    assert uniform == 1


def test_the_bias_moves_by_the_sign_of_the_difference_to_the_mean():
    close(moe_utils.updated_expert_bias(BIAS, torch.tensor([2, 2, 3, 1]), 1e-3), doubles(0, 0.3, -0.201, 0.101))


def test_capacity():
    ids = moe_utils.choose_experts(Z, 2).unsqueeze(1)  # [4, 1, 2]
    weights = moe_utils.weights_of(Z.unsqueeze(1), ids)
    assert moe_utils.get_capacity(4 * 2, 4, 0.5) == 1
    for policy, rows in {"probs": [0, 1, 2, 3], "position": [0, 0, 1, 3]}.items():
        kept = moe_utils.kept_tokens(ids, weights, 4, 1, policy)
        of_expert = [[token for token in range(4) if (kept & (ids == e))[token].any()] for e in range(4)]
        assert of_expert == [[row] for row in rows], policy
    assert moe_utils.kept_tokens(ids, weights, 4, 4, "probs").all()


def test_experts_in_turn_have_equal_numbers_of_tokens():
    ids = moe_utils.experts_in_turn(torch.arange(16), 3, 8)
    assert torch.bincount(ids.flatten()).tolist() == [6] * 8
    assert (ids.diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("received", "expected"),  # [ranks][experts]
    [
        ([[3]], [0, 1, 2]),
        ([[1, 2], [0, 4]], [0, 1, 2, 3, 4, 5, 6]),
        ([[1, 2], [2, 1]], [0, 3, 4, 1, 2, 5]),
        ([[0, 0], [0, 0]], []),
        ([[0, 0], [2, 1]], [0, 1, 2]),
        ([[2, 1, 1], [1, 0, 2]], [0, 1, 4, 2, 3, 5, 6]),
    ],
)
def test_chunks_of_ranks_become_chunks_of_experts_and_go_back(received: list, expected: list):
    rows = torch.arange(sum(map(sum, received))).unsqueeze(1)  # [rows, 1]
    by_expert = transpose_chunks(rows, received)
    assert by_expert.flatten().tolist() == expected
    assert (transpose_chunks(by_expert, list(zip(*received))) == rows).all()


def test_rows_by_expert_and_back():
    ids = torch.tensor([[0, 2], [1, 2], [0, 1]])
    order, counts = moe_utils.order_by_expert(ids, None, 3)
    assert order.tolist() == [0, 4, 2, 5, 1, 3] and counts.tolist() == [2, 2, 2]
    place = moe_utils.place_of_choices(order, (3, 2))
    assert (ids.flatten()[order][place] == ids).all()
    kept = torch.tensor([[True, False], [True, True], [False, True]])
    order, counts = moe_utils.order_by_expert(ids, kept, 3)
    assert counts.tolist() == [1, 2, 1] and order[:4].tolist() == [0, 2, 5, 3]
    assert moe_utils.place_of_choices(order[:4], (3, 2)).tolist() == [[0, 4], [1, 3], [4, 2]]


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 20.0])
def test_sinkhorn_scales_rows_and_columns_to_equal_sums(scale: float):
    logits = scale * torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = moe_utils.sinkhorn(logits)
    torch.testing.assert_close(scores.sum(0), torch.full((8,), 1 / 8, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(scores.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64), rtol=1e-3, atol=0)
    ratio = scores.log() - logits  # a term of the row plus a term of the column
    close(ratio - ratio[:1] - ratio[:, :1] + ratio[0, 0], torch.zeros(64, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [-40.0, -10.0, 10.0, 40.0, 1000.0])
def test_sinkhorn_ends_also_where_all_tokens_like_an_expert_or_none_does(offset: float, dtype: torch.dtype):
    """At -10 Megatron's iteration does not end."""
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected = moe_utils.sinkhorn(logits)
    logits[:, 0] += offset
    scores = moe_utils.sinkhorn(logits)
    if abs(offset) < 100:
        assert torch.equal(scores.argmax(1), expected.argmax(1))
    assert scores.isfinite().all()
    assert (
        moe_utils.sinkhorn(torch.full((4, 8), torch.nan, dtype=dtype)).isnan().all()
    )  # and where the run has diverged


def test_names_of_megatron_have_its_contract():
    """By the formulas in Megatron's docstrings; its layer is compared in tests/compat/test_megatron_moe.py."""
    assert moe_utils.get_capacity(64, 8, 1.2) == 10 and moe_utils.get_capacity(64, 8, 0.1, min_capacity=4) == 4
    losses = Z.exp().sum(-1).log().square()
    close(moe_utils.z_loss_func(Z, 0.001), 0.006312254578413)
    padding = torch.tensor([False, True, False, True])
    close(moe_utils.z_loss_func(Z, 0.5, padding_mask=padding), 0.25 * (losses[0] + losses[2]))
    scores, ids = moe_utils.group_limited_topk(Z, 2, 4, 4, num_groups=2, group_topk=1)
    assert ids.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    close(scores, Z.gather(-1, ids))
    with pytest.raises(NotImplementedError, match="permute: not built; experts are asked for by num_moe_experts"):
        moe_utils.permute(Z, Z > 0)


@pytest.mark.parametrize("levels", [3, 1000, None])
def test_the_largest_scores_are_those_of_a_stable_sort(levels: int | None):
    """levels: of integers, of which few give many ties; None: reals, with an infinity that many share."""
    torch.manual_seed(0)
    scores = torch.randn(40, 6, 16) if levels is None else torch.randint(levels, (40, 6, 16)).double()
    if levels is None:
        scores[..., 5:] = -torch.inf
    for k in (1, 2, 5, 8, 16):
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(moe_utils.top_k(scores, k), order[..., :k])


def test_counts_are_those_of_a_loop():
    torch.manual_seed(0)
    ids, kept = torch.randint(8, (30, 3, 2)), torch.rand(30, 3, 2) < 0.7
    for mask in (None, kept):
        expected = [[0] * 8 for _ in range(3)]
        for s in range(30):
            for b in range(3):
                for j in range(2):
                    expected[b][ids[s, b, j]] += 1 if mask is None else int(mask[s, b, j])
        assert moe_utils.count_tokens(ids, 8, mask).tolist() == expected
