"""Mixtures of experts in any layout train as one process: losses, norms, every gradient and weight, and the experts' biases."""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product

import pytest
import torch
from expert_layouts import LAYOUTS, RANKS, Trained, outcome, worst_difference
from expert_models import BATCH, GPT2, LLAMA, ROUTERS, SUBJECT, unmasked, zero
from local_ranks import run_ranks
from moe_matrix import DIMENSIONS, MODELS, NEW, MoECase, covering_cases, difference
from parity_cases import TOLERANCE
from tiny_run import SEQ, Layout, TinyTrainer, assert_equal
from torch import Tensor

from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.router import ParallelRouter


def config_of(model: str, router: str) -> ModelConfig:
    return replace(MODELS[model], **ROUTERS[router])


@cache
def one_process(model: str, router: str) -> Trained:
    return outcome(config_of(model, router), Layout(m=2))


# zb-v is run with llama, whose embeddings are not tied
CASES = [
    (layout, list(MODELS)[(i + (layout.schedule == "zb-v")) % 2], list(ROUTERS)[i % len(ROUTERS)])
    for i, layout in enumerate(LAYOUTS)
]


@pytest.mark.full
@pytest.mark.parametrize("case", covering_cases(2, NEW), ids=str)
def test_every_pair_of_choices_trains_as_one_process(case: MoECase):
    """The other pairs, and triples: tests/campaigns/moe_matrix.py"""
    worst, where = difference(case)
    assert worst <= TOLERANCE, where


@pytest.mark.sweep
def test_the_matrix_has_every_pair_and_triple_that_fits():
    apart = [{("sp", True), ("tp", 1)}, {("groups", 2), ("stage", 0)}, {("groups", 2), ("dp", 1)}]
    apart += [{("ahead", True), ("stage", 0)}, {("pipeline", "zb-v"), ("model", "gpt2"), ("stage", 3)}]
    apart += [{("balance", "bias"), ("scores", scores)} for scores in ("softmax", "pre-softmax")]
    apart += [{("balance", "sinkhorn"), ("scores", scores)} for scores in ("sigmoid", "sqrtsoftplus")]
    apart += [{("balance", "sinkhorn"), ("capacity", policy)} for policy in ("probs", "position")]
    too_few_ranks = [("tp", 1), ("cp", 1), ("etp", None), ("etp", 2)]
    apart += [{("dp", 1), ("ep", 4), few} for few in too_few_ranks]
    for strength in (2, 3):
        cases = covering_cases(strength)
        found = {some for case in cases for some in combinations(zip(DIMENSIONS, case.choices), strength)}
        every = [
            {*zip(names, chosen)}
            for names in combinations(DIMENSIONS, strength)
            for chosen in product(*map(DIMENSIONS.get, names))
        ]
        assert len(found) == sum(not any(refused <= some for refused in apart) for some in every)
        assert max(case.ranks for case in cases) == RANKS
        assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    ("layout", "model", "router"),
    [pytest.param(*case, id=f"{case[0]}-zero{case[0].data_parallel.stage}-{case[1]}-{case[2]}") for case in CASES],
)
def test_every_layout_trains_as_one_process(layout: Layout, model: str, router: str):
    got = outcome(config_of(model, router), layout)
    worst, where = worst_difference(got, one_process(model, router))
    assert worst <= TOLERANCE, where
    assert router != "bias" or any(value.any() for value in got.biases.values())


# of microbatches of 4 samples, which Sinkhorn's iteration balances
SINKHORN = [
    Layout(cp=2, tp=2, sp=True, ep=2, etp=1, m=2, recompute="uniform 2", data_parallel=zero(0)),
    Layout(tp=2, dp=2, ep=4, etp=1, m=1, data_parallel=zero(2)),
]


@pytest.mark.sweep
def test_sinkhorn_balances_a_microbatch_alike_in_every_layout():
    """Megatron balances the tokens of each rank, so that tensor- and context-parallel ranks change the choice there.

    The pairs above have Sinkhorn routing with every axis of experts; here it comes with a z-loss and jitter."""
    options = {"moe_router_load_balancing_type": ["sinkhorn"], "moe_z_loss_coeff": 0.01, "moe_input_jitter_eps": 0.1}
    config = replace(LLAMA, num_layers=2, **options)
    expected = outcome(config, Layout(m=2)).whole
    without = outcome(replace(config, moe_router_load_balancing_type=["none"]), Layout(m=2), 1).whole
    assert abs(expected.losses[0] - without.losses[0]) > 1e-6
    for layout in SINKHORN:
        assert_equal(outcome(config, layout).whole, expected, 1e-10)


# ---------------------------------------------------------------- what Megatron's layouts change, by name

BALANCED = {"moe_aux_loss_coeff": [0.3]}
SCALED_LAYOUTS = [Layout(dp=4, ep=2, m=2), Layout(tp=2, sp=True, cp=2, ep=2, etp=1, m=4)]


@pytest.mark.full
def test_balancing_losses_have_one_scale_in_every_layout():
    """Pull request 3768 of Megatron-LM names four scales that one coefficient has there: by the type of the loss, by the size of a
    microbatch, by tensor- and context-parallel ranks, and by data-parallel ranks. If all samples are equal, all types have one value."""
    equal_samples = replace(SUBJECT, sample=lambda number, texts=None: unmasked(0, texts))
    expected = outcome(replace(LLAMA, **BALANCED), Layout(m=1), 1, equal_samples).whole
    without = outcome(LLAMA, Layout(m=1), 1, equal_samples).whole
    assert abs(expected.norms[0] - without.norms[0]) > 1e-3 * without.norms[0]
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        config = replace(LLAMA, **BALANCED, moe_router_load_balancing_type=[kind])
        for layout in SCALED_LAYOUTS:
            assert_equal(outcome(config, layout, 1, equal_samples).whole, expected, 1e-10)


@pytest.mark.full
def test_the_z_loss_has_one_scale_in_every_layout():
    config = replace(LLAMA, moe_z_loss_coeff=0.1)
    expected = outcome(config, Layout(m=1), 1).whole
    for layout in SCALED_LAYOUTS:
        assert_equal(outcome(config, layout, 1).whole, expected, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_every_dispatcher_and_layout_drops_the_same_tokens_in_the_order_of_the_sample(policy: str):
    config = replace(GPT2, moe_expert_capacity_factor=0.75, moe_token_drop_policy=policy)
    expected = outcome(config, Layout(m=1), 1).choices
    assert len(expected) == GPT2.num_layers * BATCH * SEQ
    kept = [is_kept for pairs in expected.values() for _, is_kept in pairs]
    assert sum(kept) <= 0.9 * len(kept)
    if policy == "position":  # an expert that has dropped a token of a sample takes none of the later ones
        full = set()
        for layer, sample, position in sorted(expected):
            for expert, is_kept in expected[layer, sample, position]:
                assert not (is_kept and (layer, sample, expert) in full)
                if not is_kept:
                    full.add((layer, sample, expert))
    alltoall = replace(config, moe_token_dispatcher_type="alltoall")
    assert outcome(alltoall, Layout(tp=2, sp=True, cp=2, ep=2, m=2), 1).choices == expected
    assert outcome(config, Layout(tp=2, dp=2, ep=4, etp=1, m=2), 1).choices == expected


def test_the_expert_bias_moves_once_in_a_step_by_the_tokens_of_all_its_microbatches():
    config = config_of("gpt2", "bias")

    def work(mesh: Mesh, layout: Layout, frozen: str = "") -> dict[int, tuple[Tensor, Tensor]]:
        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT, frozen=frozen)
        tiny.step(0)
        routers = [module for module in tiny.model[0].module.modules() if isinstance(module, ParallelRouter)]
        return {router.layer_number: (router.tokens_of_last_step, router.expert_bias) for router in routers}

    layouts = [Layout(m=1), Layout(m=2), Layout(m=8), Layout(dp=2, ep=2, m=4)]
    first, *others = [rank for layout in layouts for rank in run_ranks(layout.sizes, partial(work, layout=layout))]
    for layer, (counts, bias) in first.items():
        assert counts.sum() == BATCH * SEQ * config.moe_router_topk
        mean = BATCH * SEQ * config.moe_router_topk / 8
        by_hand = [2e-4 * ((count < mean) - (count > mean)) for count in counts.tolist()]
        assert bias.tolist() == torch.tensor(by_hand, dtype=torch.float32).tolist() and bias.any()
        for other in others:
            assert torch.equal(other[layer][0], counts) and torch.equal(other[layer][1], bias)
    (frozen,) = run_ranks({}, partial(work, layout=Layout(m=1), frozen="router"))
    assert not any(bias.any() for _, bias in frozen.values()), "a frozen router chooses as before"
