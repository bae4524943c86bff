"""Mixtures of experts in any layout train as one process: losses, norms, every gradient and weight, and the experts' biases."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import pytest
import torch
from covering import Combined, covering
from expert_models import BATCH, GPT2, LLAMA, ROUTERS, SUBJECT, unmasked, zero
from local_ranks import run_ranks
from tiny_run import SEQ, Layout, Outcome, Subject, TinyTrainer, assert_equal, pieces_of_chunks, put_together
from torch import Tensor

from megatron.core.ops.shard_sequence import positions_of
from megatron.core.optimizer.optimizer_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.router import ParallelRouter


class Found(dict):
    """What one rank knows: of `Outcome`, with the biases of its layers, and its calls of the last step."""


def train(mesh: Mesh, config: ModelConfig, layout: Layout, steps: int, subject: Subject = SUBJECT) -> Found:
    optimizer = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, optimizer=optimizer, subject=subject)
    found = Found(losses=[], norms=[], grads=[])
    for number in range(steps):
        with mesh.ledger.record() as calls:
            result = tiny.step(number)
        found["losses"].append(sum(result.losses.values()))
        found["norms"].append(result.grad_norm)
        found["grads"].append(pieces_of_chunks(tiny.chunks, mesh, lambda p: p.main_grad, {"sums": tiny.buffers}))
    tiny.finish_param_gather()
    sharded = [buffer for buffer in tiny.buffers if buffer.stage == 3]
    found["weights"] = pieces_of_chunks(tiny.chunks, mesh, lambda p: p.data, {"owned_params": sharded})
    named = [pair for chunk in tiny.model for pair in chunk.module.named_buffers()]
    found["biases"] = {name: value for name, value in named if name.endswith("expert_bias")}
    assert all(not value.any() for name, value in named if name.endswith("tokens_per_expert"))
    found["calls"] = Counter((call.op, call.axis) for call in calls)
    found["is_last"] = mesh.has_last_stage
    return found


def outcome(
    config: ModelConfig, layout: Layout, steps: int = 2, subject: Subject = SUBJECT
) -> tuple[Outcome, dict[str, Tensor], list[Found]]:
    ranks = run_ranks(
        layout.sizes,
        partial(train, config=layout.applied_to(config), layout=layout, steps=steps, subject=subject),
        delayed=layout.delayed,
        ranks_per_kv_head=config.ranks_per_kv_head(layout.tp),
        stages=layout.stages if layout.pp > 1 else None,
    )
    biases: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for name, value in rank["biases"].items():
            assert torch.equal(biases.setdefault(name, value), value), f"{name} differs between ranks"
    whole = Outcome(
        losses=[rank for rank in ranks if rank["is_last"]][-1]["losses"],
        norms=ranks[0]["norms"],
        grads=[put_together([rank["grads"][step] for rank in ranks]) for step in range(steps)],
        weights=put_together([rank["weights"] for rank in ranks]),
    )
    return whole, biases, ranks


MODELS = {"gpt2": GPT2, "llama": LLAMA}


def config_of(model: str, router: str) -> ModelConfig:
    return replace(MODELS[model], **ROUTERS[router])


@cache
def one_process(model: str, router: str) -> tuple[Outcome, dict[str, Tensor]]:
    return outcome(config_of(model, router), Layout(m=2))[:2]


LAYOUTS = [
    Layout(dp=2, tp=2, pp=2, ep=2, m=2, data_parallel=zero(3)),
    Layout(dp=4, ep=4, m=1, data_parallel=zero(1), delayed=True),
    Layout(tp=2, sp=True, ep=2, etp=1, m=2, recompute="uniform 1"),
    Layout(tp=2, m=2),
    Layout(cp=2, dp=2, ep=4, m=2, data_parallel=zero(2)),
    Layout(pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(3, overlap_param_gather=True)),
    Layout(pp=2, v=2, tp=2, sp=True, dp=2, ep=2, m=2, schedule="interleaved", data_parallel=zero(1)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(3), recompute="all parts", delayed=True),
    Layout(tp=2, dp=2, ep=4, etp=1, m=2, data_parallel=zero(2), schedule="1f1b"),
    Layout(dp=2, etp=2, m=2, data_parallel=zero(0)),
    Layout(cp=2, tp=2, sp=True, ep=2, m=2, recompute="uniform 2", data_parallel=zero(0)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(1, num_distributed_optimizer_instances=2)),
    Layout(pp=2, v=2, dp=2, ep=2, m=2, schedule="zb-v", data_parallel=zero(2), recompute="selective"),
    Layout(tp=2, pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(2), delayed=True),
]
# zb-v is run with llama, whose embeddings are not tied
CASES = [
    (layout, list(MODELS)[(i + (layout.schedule == "zb-v")) % 2], list(ROUTERS)[i % len(ROUTERS)])
    for i, layout in enumerate(LAYOUTS)
]


PIPELINES = {
    "alone": {},
    "1f1b": {"pp": 2},
    "vpp": {"pp": 2, "v": 2, "schedule": "interleaved"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "v": 2, "schedule": "zb-v"},
}
DIMENSIONS = {
    "tp": (1, 2),
    "sp": (False, True),
    "pipeline": tuple(PIPELINES),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (None, 1, 2),
    "stage": (0, 1, 2, 3),
    "groups": (1, 2),
    "recompute": ("none", "uniform 1", "selective", "all parts", "experts"),
    "delayed": (False, True),
    "model": tuple(MODELS),
    "router": tuple(ROUTERS),
}


@dataclass(frozen=True)
class Case(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    tp: int
    sp: bool
    pipeline: str
    cp: int
    dp: int
    ep: int
    etp: int | None
    stage: int
    groups: int  # of ranks that have all shards
    recompute: str
    delayed: bool
    model: str
    router: str

    @property
    def layout(self) -> Layout:
        config = zero(self.stage, num_distributed_optimizer_instances=self.groups)
        same = {name: getattr(self, name) for name in ("tp", "sp", "cp", "dp", "ep", "etp", "delayed")}
        recompute = "none" if self.recompute == "experts" else self.recompute
        return Layout(**same, **PIPELINES[self.pipeline], m=2, recompute=recompute, data_parallel=config)

    @property
    def config(self) -> ModelConfig:
        return replace(config_of(self.model, self.router), moe_layer_recompute=self.recompute == "experts")

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * PIPELINES[self.pipeline].get("pp", 1)

    @property
    def can_be(self) -> bool:
        of_experts = self.ep * (self.etp or self.tp) * self.groups
        return (
            self.ranks <= 16
            and self.tp * self.cp * self.dp % of_experts == 0
            and not (self.sp and self.tp == 1)
            and not (self.groups > 1 and (self.stage == 0 or self.dp == 1))
            and not (self.pipeline == "zb-v" and self.model == "gpt2")
        )


@cache
def covering_cases() -> tuple[Case, ...]:
    """Cases in which every two choices that can stand together do."""
    plain = Case(1, False, "alone", 1, 1, 1, None, 1, 1, "none", False, "llama", "softmax")
    seeds = [replace(plain, tp=tp, sp=tp > 1, dp=dp, cp=cp) for tp in (1, 2) for dp in (1, 2, 4) for cp in (1, 2)]
    return covering(Case, DIMENSIONS, 2, seeds=[asdict(seed) for seed in seeds])


@pytest.mark.sweep
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{i}") for i, case in enumerate(covering_cases())])
def test_every_pair_of_choices_trains_as_one_process(case: Case):
    """python -m pytest tests/ranks/transformer/test_moe_layouts.py -m sweep"""
    got, biases, _ = outcome(case.config, case.layout)
    expected, biases_of_one = one_process(case.model, case.router)
    assert_equal(got, expected, 1e-10)
    assert biases.keys() == biases_of_one.keys()
    assert all(torch.equal(biases[name], value) for name, value in biases_of_one.items())


@pytest.mark.parametrize(
    ("layout", "model", "router"),
    [pytest.param(*case, id=f"{case[0]}-zero{case[0].data_parallel.stage}-{case[1]}-{case[2]}") for case in CASES],
)
def test_every_layout_trains_as_one_process(layout: Layout, model: str, router: str):
    got, biases, _ = outcome(config_of(model, router), layout)
    expected, biases_of_one = one_process(model, router)
    assert_equal(got, expected, 1e-10)
    assert biases.keys() == biases_of_one.keys()
    for name, value in biases_of_one.items():
        assert torch.equal(biases[name], value), name
    assert router != "bias" or any(value.any() for value in biases.values())


# of microbatches of 4 samples, which Sinkhorn's iteration balances
SINKHORN = [
    Layout(cp=2, tp=2, sp=True, ep=2, etp=1, m=2, recompute="uniform 2", data_parallel=zero(0)),
    Layout(tp=2, dp=2, ep=4, etp=1, m=1, data_parallel=zero(2)),
]


@pytest.mark.full
def test_sinkhorn_balances_a_microbatch_alike_in_every_layout():
    """Megatron balances the tokens of each rank, so that tensor- and context-parallel ranks change the choice there."""
    options = {"moe_router_load_balancing_type": ["sinkhorn"], "moe_z_loss_coeff": 0.01, "moe_input_jitter_eps": 0.1}
    config = replace(LLAMA, num_layers=2, **options)
    expected = outcome(config, Layout(m=2))[0]
    without = outcome(replace(config, moe_router_load_balancing_type=["none"]), Layout(m=2), 1)[0]
    assert abs(expected.losses[0] - without.losses[0]) > 1e-6
    for layout in SINKHORN:
        assert_equal(outcome(config, layout)[0], expected, 1e-10)


# ---------------------------------------------------------------- what Megatron's layouts change, by name

BALANCED = {"moe_aux_loss_coeff": [0.3]}
SCALED_LAYOUTS = [Layout(dp=4, ep=2, m=2), Layout(tp=2, sp=True, cp=2, ep=2, etp=1, m=4)]


@pytest.mark.full
def test_balancing_losses_have_one_scale_in_every_layout():
    """Pull request 3768 of Megatron-LM names four scales that one coefficient has there: by the type of the loss, by the size of a
    microbatch, by tensor- and context-parallel ranks, and by data-parallel ranks. If all samples are equal, all types have one value."""
    equal_samples = replace(SUBJECT, sample=lambda number, texts=None: unmasked(0, texts))
    expected = outcome(replace(LLAMA, **BALANCED), Layout(m=1), 1, equal_samples)[0]
    without = outcome(LLAMA, Layout(m=1), 1, equal_samples)[0]
    assert abs(expected.norms[0] - without.norms[0]) > 1e-3 * without.norms[0]
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        config = replace(LLAMA, **BALANCED, moe_router_load_balancing_type=[kind])
        for layout in SCALED_LAYOUTS:
            assert_equal(outcome(config, layout, 1, equal_samples)[0], expected, 1e-10)


@pytest.mark.full
def test_the_z_loss_has_one_scale_in_every_layout():
    config = replace(LLAMA, moe_z_loss_coeff=0.1)
    expected = outcome(config, Layout(m=1), 1)[0]
    for layout in SCALED_LAYOUTS:
        assert_equal(outcome(config, layout, 1)[0], expected, 1e-10)


Choices = dict[tuple[int, int, int], list[tuple[int, bool]]]


def choices_of(config: ModelConfig, layout: Layout) -> Choices:
    """(layer, sample, position) -> the experts of the token, and whether each keeps it."""

    def work(mesh: Mesh) -> Choices:
        tiny = TinyTrainer(mesh, layout.applied_to(config), layout, global_batch=BATCH, subject=SUBJECT)
        found: Choices = {}

        def note(router, inputs, routing) -> None:
            positions = positions_of(inputs[1], routing.ids.shape[0], routing.ids.device).tolist()
            for i, position in enumerate(positions):
                for row, sample in enumerate(router.context.keys.samples):
                    pairs = zip(routing.ids[i, row].tolist(), routing.kept[i, row].tolist(), strict=True)
                    found[router.layer_number, sample, position] = list(pairs)

        for module in tiny.model[0].module.modules():
            if isinstance(module, ParallelRouter):
                module.register_forward_hook(note)
        tiny.step(0)
        return found

    ranks = run_ranks(layout.sizes, work, ranks_per_kv_head=config.ranks_per_kv_head(layout.tp))
    return {key: value for rank in ranks for key, value in rank.items()}


@pytest.mark.full
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_every_dispatcher_and_layout_drops_the_same_tokens_in_the_order_of_the_sample(policy: str):
    config = replace(GPT2, moe_expert_capacity_factor=0.75, moe_token_drop_policy=policy)
    expected = choices_of(config, Layout(m=1))
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
    assert choices_of(alltoall, Layout(tp=2, sp=True, cp=2, ep=2, m=2)) == expected
    assert choices_of(config, Layout(tp=2, dp=2, ep=4, etp=1, m=2)) == expected


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
