"""One layer of experts in one process: against numbers of a float64 program of its own, and what its options do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import SEQ, TINY_LLAMA
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron.core import parallel_state
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.ops.aux_loss_collector import objective_of
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.in_memory_route_replay import RouteReplay
from megatron.core.transformer.moe.moe_layer import ParallelMoE
from megatron.core.transformer.recompute_without_rng_state import recompute_in_backward

E, H, F, S, SAMPLES, COEFFICIENT = 4, 16, 32, 8, 4, 0.05
LAYER = ModelConfig(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=4,
    ffn_hidden_size=F,
    swiglu=True,
    add_bias_linear=False,
    fp64=True,
    num_experts=E,
    moe_router_topk=2,
)
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = [0.0, 0.3, -0.2, 0.1]


def a_layer(config: ModelConfig) -> ParallelMoE:
    context = LayerContext.from_mesh(single_rank_mesh(), config.params_dtype, SampleDropoutKeys(3))
    context.aux_losses.num_layers = 1
    context.aux_losses.declare(*config.aux_loss_names)
    return ParallelMoE(config, 0, context)


def drawn() -> tuple[Tensor, ...]:
    """Router [E, h], gate and up of the experts [E, 2 f, h], their output [E, h, f], inputs and factors of outputs [s, b, h]."""
    g = torch.Generator().manual_seed(3)
    shapes = ((E, H), 0.5), ((E, 2 * F, H), 0.2), ((E, H, F), 0.2), ((S, SAMPLES, H), 1.0), ((S, SAMPLES, H), 1.0)
    return tuple(torch.randn(*shape, generator=g, dtype=torch.float64) * scale for shape, scale in shapes)


def norms(*, mbs: int = 1, main: bool = True, bias: bool = False, **options: Any) -> tuple[float, float, float]:
    """The norms of the gradients of router, experts and inputs, by microbatches of `mbs` samples."""
    layer = a_layer(replace(LAYER, **options))
    router, fc1, fc2, x, factors = drawn()
    x = x.requires_grad_()
    with torch.no_grad():
        layer.router.weight.copy_(router)
        layer.experts.linear_fc1.weight.copy_(fc1.view(E, 2, F, H))
        layer.experts.linear_fc2.weight.copy_(fc2)
        if bias:
            layer.router.expert_bias.copy_(torch.tensor(BIAS))
    losses = layer.context.aux_losses
    for first in range(0, SAMPLES, mbs):
        here = slice(first, first + mbs)
        layer.context.keys.samples = tuple(range(first, first + mbs))
        with losses.collecting() as collected:
            y = layer(x[:, here])
        objective = (y * factors[:, here]).sum() / (S * SAMPLES) if main else 0.0
        aux = objective_of(collected)
        if aux is not None:
            objective = objective + aux * mbs / SAMPLES
        objective.backward()
    experts = [p.grad.flatten() for p in layer.experts.parameters() if p.grad is not None]
    of_experts = torch.cat(experts).norm().item() if experts else 0.0
    return layer.router.weight.grad.norm().item(), of_experts, x.grad.norm().item()


def losses(kind: str) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": [kind], "moe_aux_loss_coeff": [COEFFICIENT]}


SAMPLE = losses("seq_aux_loss")
ALONE = {"main": False}
# (options, the norm of the router's gradient, that of the experts')
NUMBERS = [
    ({}, 0.414102741694, 2.045869759096),
    (SAMPLE, 0.413686798930, 2.045869759096),
    ({**SAMPLE, "moe_router_pre_softmax": True}, 0.361268587382, 1.833136376643),
    ({**SAMPLE, **SIGMOID}, 0.127763833680, 1.823571224601),
    (
        {**SAMPLE, **SIGMOID, "moe_router_pre_softmax": True},
        0.127763833680,
        1.823571224601,
    ),  # as DeepSeek-V3 is started
    ({**SAMPLE, **SIGMOID, "moe_router_topk_scaling_factor": 2.5}, 0.319564401310, 4.558928061502),
    (
        {
            **SAMPLE,
            **SIGMOID,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_enable_expert_bias": True,
            "bias": True,
        },
        0.544146865290,
        4.719528748149,
    ),
    ({"moe_expert_capacity_factor": 1.0}, 0.412096418686, 2.040356431969),
    ({"moe_expert_capacity_factor": 0.5}, 0.238770102199, 1.765873767103),
    ({**losses("aux_loss"), "mbs": 2}, 0.414059172873, None),
    ({**losses("aux_loss"), "mbs": 4}, 0.414138437328, None),
    ({**SAMPLE, **ALONE}, 0.002370923665, None),
    ({**losses("global_aux_loss"), **ALONE}, 0.001211182410, None),
    ({"moe_z_loss_coeff": 0.1, **ALONE}, 0.294169780479, None),
]


@pytest.mark.parametrize(("options", "router", "experts"), NUMBERS)
def test_gradients_are_those_of_a_program_of_its_own(options: dict, router: float, experts: float | None):
    """Issue 3768 of Megatron-LM names four scales of one loss: here each balancing loss has one, whatever the microbatches."""
    got = norms(**options)
    assert got[0] == pytest.approx(router, abs=2e-12)
    if experts is not None:
        assert got[1] == pytest.approx(experts, abs=2e-12)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss"])
def test_losses_of_samples_do_not_depend_on_the_microbatch_size(kind: str):
    assert norms(**losses(kind), mbs=1) == pytest.approx(norms(**losses(kind), mbs=4), rel=1e-12)


TINY = replace(TINY_LLAMA, num_experts=8, moe_ffn_hidden_size=12)


def of_tokens(config: ModelConfig, training: bool = True) -> tuple[ParallelMoE, Tensor]:
    layer = a_layer(config).train(training)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    x = torch.randn(SEQ, 2, 16, generator=generator, dtype=torch.float64)
    return layer, x.to(config.params_dtype).requires_grad_()


def run(layer: ParallelMoE, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


def test_both_dispatchers_compute_the_same():
    layer, x = of_tokens(TINY)
    expected = run(layer, x)
    for name in ("alltoall", "alltoall_seq"):
        layer.settings = replace(TINY, moe_token_dispatcher_type=name)
        for got, value in zip(run(layer, x), expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_half_precision_rounds_once_also_where_the_experts_of_a_token_are_on_different_ranks(dispatcher: str):
    """Each token's output, of one process and of two expert-parallel ranks with half of the samples each: equal, but for rare last bits."""
    config = replace(TINY, fp64=False, bf16=True, moe_router_topk=4, moe_token_dispatcher_type=dispatcher)
    layer, x = of_tokens(config)
    expected = layer(x).detach()

    def rank(mesh: Mesh) -> Tensor:
        context = LayerContext.from_mesh(mesh, config.params_dtype, SampleDropoutKeys(3))
        context.aux_losses.num_layers = 1
        of_rank = ParallelMoE(config, 0, context)
        ep = mesh["ep"]
        with torch.no_grad():
            for own, whole in zip(of_rank.parameters(), layer.parameters(), strict=True):
                part = whole.chunk(ep.size)[ep.rank] if own.shape != whole.shape else whole
                own.copy_(part)
            return of_rank(x[:, ep.rank : ep.rank + 1])

    got = torch.cat(run_ranks({"dp": 2, "ep": 2}, rank), 1)
    differ = (got != expected).double().mean().item()
    assert differ < 0.01, differ


def test_both_kinds_of_products_compute_the_same(monkeypatch: pytest.MonkeyPatch):
    """In float32: torch has no grouped product of float64."""
    single = replace(TINY, fp64=False)
    expected = run(*of_tokens(single))
    rows: list[int] = []  # of each call; whether it runs is tried with 16
    grouped_mm = functional.grouped_mm
    monkeypatch.setattr(
        functional, "grouped_mm", lambda x, *more, **offs: rows.append(len(x)) or grouped_mm(x, *more, **offs)
    )
    got = run(*of_tokens(replace(single, moe_grouped_gemm=True)))
    assert rows.count(SEQ * 2 * TINY.moe_router_topk) == 4, "two linears, forward and backward"
    for value, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)


def test_megatrons_update_of_biases_counts_the_tokens_of_all_ranks_of_a_stage():
    """By the name of each release's group, too; a sum of 4, 4, 8, 0 has the mean 4."""
    own = [[4, 0, 4, 0], [0, 4, 0, 0], [0, 0, 4, 0], [0, 0, 0, 0]]

    def work(mesh):
        parallel_state.set_thread_mesh(mesh)
        counts = torch.tensor(own[mesh["tp"].rank + 2 * mesh["dp_cp"].rank])
        bias = torch.tensor(BIAS, dtype=torch.float64)
        updated = moe_utils.get_updated_expert_bias(counts, bias, 0.001)
        assert counts.tolist() == [4, 4, 8, 0]
        torch.testing.assert_close(updated, bias + torch.tensor([0, 0, -0.001, 0.001], dtype=torch.float64))
        counts = torch.tensor([1.0, 3.0])
        probs = torch.full((5, 2), 0.5)
        loss = moe_utils.switch_load_balancing_loss_func(
            probs, counts, 1, 1.0, parallel_state.get_tensor_model_parallel_group()
        )
        assert counts.tolist() == [2.0, 6.0] and abs(loss.item() - 2 * (2 + 6) * 2.5 / 10**2) < 1e-6

    run_ranks({"tp": 2, "dp": 2}, work)


def test_a_large_capacity_drops_nothing_and_a_small_one_returns_zeros_for_dropped_tokens():
    layer, x = of_tokens(TINY)
    expected = run(layer, x)
    layer.router.settings = replace(TINY, moe_expert_capacity_factor=4.0)  # E / K
    assert all(torch.equal(a, b) for a, b in zip(run(layer, x), expected, strict=True))
    layer.router.settings = replace(TINY, moe_expert_capacity_factor=0.25)
    routing = layer.router(x, layer.rows_of(x)[1])
    dropped = ~routing.kept.any(-1)  # [s, b]
    assert (~routing.kept).double().mean() >= 0.1 and dropped.any()
    assert not layer(x)[dropped].any() and not routing.weights[~routing.kept].any()


def test_routes_that_are_replayed_give_equal_bits():
    layer, x = of_tokens(replace(TINY, moe_enable_routing_replay=True))
    replay = RouteReplay([layer])
    with replay.recording():
        expected = run(layer, x)
    assert {sample for _, sample in replay.routes} == {0, 1}
    with replay.replaying():
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x), expected, strict=True))
        with torch.no_grad():
            layer.router.weight.neg_()  # other scores, and the same choices
        assert torch.equal(layer.router(x, layer.rows_of(x)[1]).ids[:, 0], replay.routes[1, 0])
        layer.context.keys.samples = (7, 8)
        with pytest.raises(ValueError, match="no choices of sample 7"):
            layer(x)
    with pytest.raises(ValueError, match="--moe-enable-routing-replay"):
        RouteReplay([of_tokens(TINY)[0]])


def test_a_recomputation_keeps_the_choices_and_counts_no_token_twice():
    layer, x = of_tokens(
        replace(TINY, moe_expert_capacity_factor=1.0, moe_input_jitter_eps=0.1, **losses("global_aux_loss"))
    )
    expected = run(layer, x)
    layer.router.end_of_step()
    choose = layer.router.choose
    calls = []
    layer.router.choose = lambda *inputs: (calls.append(1), choose(*inputs))[1]
    y = recompute_in_backward(layer, layer.context.keys, x, modules=[layer])
    got = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(calls) == 1
    assert layer.router.tokens_per_expert.sum() <= 2 * SEQ * 2
    assert layer.router.counts_so_far[1] == 2


def test_a_recomputed_layer_may_have_parts_that_are_recomputed_too():
    shared = replace(TINY, moe_shared_expert_intermediate_size=8)
    layer, x = of_tokens(shared)
    expected = run(layer, x)
    modules = ["moe", "moe_act", "shared_experts"]
    layer, x = of_tokens(replace(shared, recompute_granularity="selective", recompute_modules=modules))
    y = recompute_in_backward(layer, layer.context.keys, x, modules=[layer])
    got = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_divides_a_microbatch_evenly_in_training_alone(k: int):
    config = replace(TINY, moe_router_load_balancing_type=["sinkhorn"], moe_router_topk=k)
    layer, x = of_tokens(replace(config, moe_enable_routing_replay=True))
    with torch.no_grad():
        layer.router.weight[0] += 10 * x.mean((0, 1))  # an expert that many tokens like
    rows = layer.rows_of(x)[1]
    logits = layer.router.gating(x)
    replay = RouteReplay([layer])
    with replay.recording():
        expected = run(layer, x)
    loads = layer.router.tokens_per_expert.clone()
    with replay.replaying():
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x), expected, strict=True))
    y = recompute_in_backward(layer, layer.context.keys, x, modules=[layer])
    got = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    layer.eval()
    plain = layer.router(x, rows)
    assert torch.equal(plain.ids, logits.topk(k).indices.sort(-1).values)
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    torch.testing.assert_close(plain.weights, scores.gather(-1, plain.ids), rtol=1e-12, atol=0)
    assert loads.max() < plain.ids.flatten().bincount().max()


def test_sinkhorn_chooses_by_all_samples_of_the_microbatch():
    """What the choice depends on: a sample alone is divided evenly by itself, with others together."""
    layer, x = of_tokens(replace(TINY, moe_router_load_balancing_type=["sinkhorn"]))
    rows = layer.rows_of(x)[1]
    together = layer.router(x, rows).ids
    turned = layer.router(x.flip(1), rows).ids
    assert torch.equal(turned.flip(1), together), "the order of the samples decides nothing"
    alone = torch.cat([layer.router(sample, rows).ids for sample in x.split(1, dim=1)], dim=1)
    assert alone.shape == together.shape and not torch.equal(alone, together)


def test_forced_balance_gives_each_expert_as_many_tokens_and_jitter_is_off_in_evaluation():
    config = replace(TINY, moe_router_force_load_balancing=True, moe_input_jitter_eps=0.5)
    layer, x = of_tokens(config)
    first = layer(x)
    assert layer.router.tokens_per_expert.tolist() == [SEQ * 2 * 2 // 8] * 8
    assert torch.equal(layer(x), first)  # draws are those of the samples
    layer.eval()
    assert not torch.equal(layer(x), first)


@pytest.mark.parametrize("length", [5, 6])
def test_jitter_without_gradients_is_that_of_one_process(length: int):
    """Ranks of tp that do not divide the rows route all of them, by equal draws."""
    config = replace(TINY, moe_input_jitter_eps=0.5, moe_ffn_hidden_size=12)
    x = torch.randn(length, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def work(mesh: Mesh) -> Tensor:
        layer = ParallelMoE(config, 0, LayerContext.from_mesh(mesh, torch.float64, SampleDropoutKeys(3)))
        initialize_parameters(layer, 1, mesh)
        with torch.no_grad():
            return layer(x)

    (expected,) = run_ranks({}, work)
    for got in run_ranks({"tp": 2}, work):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_an_expert_without_rows_has_gradients_of_zero():
    layer, _ = of_tokens(replace(TINY, moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True))
    with torch.no_grad():
        layer.router.weight.zero_()  # the first two experts have all tokens
    layer(torch.ones(SEQ, 1, 16, dtype=torch.float64)).sum().backward()
    for weight in (layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight):
        assert weight.grad[:2].any() and not weight.grad[2:].any()
    layer.router.end_of_step()
    assert layer.router.tokens_of_last_step.tolist() == [SEQ, SEQ] + [0] * 6
    assert layer.router.idle_steps.tolist() == [0, 0] + [1] * 6


def test_frozen_experts_save_no_rows_and_the_gradient_of_the_input_is_the_same():
    layer, x = of_tokens(TINY)

    def saved_and_gradient() -> tuple[int, Tensor]:
        """The elements that are saved for the backward, and the gradient of x."""
        saved: dict[int, Tensor] = {}

        def keep(kept: Tensor) -> Tensor:
            saved[kept.data_ptr()] = kept
            return kept

        with saved_tensors_hooks(keep, lambda kept: kept):
            y = layer(x)
        return sum(kept.numel() for kept in saved.values()), torch.autograd.grad(y.square().sum(), x)[0]

    trained, expected = saved_and_gradient()
    layer.experts.requires_grad_(False)
    frozen, got = saved_and_gradient()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    rows = SEQ * 2 * TINY.moe_router_topk
    assert trained - frozen == rows * (TINY.hidden_size + TINY.moe_ffn_hidden_size), "the inputs of both products"
