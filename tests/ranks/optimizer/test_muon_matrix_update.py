"""Muon against the decomposition, torch.optim.Muon, closed forms, and itself in other layouts."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from types import SimpleNamespace

import expert_models
import pytest
import torch
from covering import cover
from expert_models import zero
from layouts import Layout
from local_ranks import run_ranks
from muon_matrix import DIMENSIONS, MODELS, SHARDS, MuonCase, all_cases, covering_cases, main, outcomes
from parity_cases import TOLERANCE
from tiny_run import TINY_GPT2, TINY_LLAMA, Outcome, TinyTrainer, assert_equal, my_pieces, put_together, run
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed import DataParallelConfig
from megatron.core.optimizer import ParamGroup
from megatron.core.optimizer.adam_and_sgd import UpdateStep
from megatron.core.optimizer.gather_full_matrices_over_tp import MatrixOwners, ShardedMatrix
from megatron.core.optimizer.muon_config import NS_COEFFICIENTS, MuonConfig, ns_coefficients
from megatron.core.optimizer.muon_matrix_update import SMALLEST_NORM, muon_update, orthogonalized, scale_factor
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.accelerator import float32_products
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.placement import Placement
from megatron.core.transformer.model_config import ModelConfig

MUON = OptimizerConfig(optimizer="muon", clip_grad=0.5, weight_decay=0.1, muon_extra_scale_factor=0.2)
_LAYOUTS, _SHARDS = ("tp2", "pp2", "tp2sp-pp2-v2"), ("0 overlapped", "1", "1 hybrid")
SMALL = [case for case in all_cases() if case.layout in _LAYOUTS and case.shards in _SHARDS and case.model != "untied"]
SMALL = [case for case in SMALL if (case.layout, case.shards) != ("tp2sp-pp2-v2", "1 hybrid")]  # 16 ranks
TESTED = cover(SMALL, lambda case: frozenset(combinations(zip(DIMENSIONS, case.choices), 2)))


def number(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def update(weight: Tensor, gradients: list[Tensor], config: MuonConfig, **parts) -> tuple[Tensor, Tensor]:
    """(weight, momentum) after a step for each gradient, at rate 0.1 and decay 0.5."""
    weight, momentum = weight.clone(), torch.zeros_like(weight)
    whole = ShardedMatrix(Placement(tuple(weight.shape), None, **parts), tuple(weight.shape), ALONE)
    for count, gradient in enumerate(gradients):
        step = UpdateStep(0.1, 0.5, count)
        muon_update([weight], [gradient], {"momentum_buffer": [momentum]}, step, [whole], config=config)
    return weight, momentum


# ---------------------------------------------------------------- the direction

BANDS = {"simple": (0.68, 1.14), "quintic": (0.95, 1.05), "polar_express": (0.85, 1.13), "aol": (0.94, 1.06)}


@pytest.mark.parametrize("kind", NS_COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 72), (72, 24)], ids=str)
def test_a_direction_has_the_singular_vectors_of_the_matrix_and_values_near_one(kind: str, shape: tuple[int, int]):
    """The decomposition is LAPACK's. Bands: of five steps, of aol's four, for values above a hundredth of the norm."""
    matrix = number(0, *shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    config = MuonConfig(muon_coefficient_type=kind, muon_num_ns_steps=4 if kind == "aol" else 5)
    found = u.T @ orthogonalized(1e-6 * matrix, config) @ v.T  # the size of the matrix plays no part
    values = found.diagonal()
    assert (found - values.diag()).abs().max() < 1e-11 and s.min() > 0.01 * s.norm()
    lowest, highest = BANDS[kind]
    assert lowest < values.min() and values.max() < highest


def test_more_steps_of_polar_express_find_the_nearest_orthogonal_matrix():
    matrix = number(1, 16, 40)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalized(matrix, MuonConfig(muon_coefficient_type="polar_express", muon_num_ns_steps=12))
    torch.testing.assert_close(found, u @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_of_zeros_stays_one_and_one_of_rounding_has_hardly_a_direction(dtype: torch.dtype):
    """Rounding differs between layouts, which must have the same weights: it must not become an update of full size."""
    config = MuonConfig(muon_fp32_matmul_prec="highest")
    assert not orthogonalized(torch.zeros(3, 5, dtype=dtype), config).any()
    matrix = number(2, 8, 8, dtype=dtype)
    unit = matrix / matrix.norm()
    slope = math.prod(a for a, _, _ in ns_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps))
    for size in (1e-18, 1e-30):  # squares of the second underflow in float32
        found = orthogonalized(size * unit, config)
        torch.testing.assert_close(found, slope * size / SMALLEST_NORM * unit, rtol=1e-5, atol=0)


def test_scale_factors_are_those_of_the_papers():
    factors = {(mode, shape): scale_factor(shape, mode) for mode in BY_HAND for shape in ((32, 8), (8, 32))}
    assert factors == {(mode, shape): BY_HAND[mode][shape] for mode, shape in factors}
    # The size of an update: spectral's root mean square is 1 in every shape, unit_rms_norm's largest value sqrt(out / in).
    direction = orthogonalized(
        number(3, 32, 8), MuonConfig(muon_coefficient_type="polar_express", muon_num_ns_steps=12)
    )
    assert (direction * scale_factor((32, 8), "spectral")).square().mean().sqrt().item() == pytest.approx(1)


BY_HAND = {
    "spectral": {(32, 8): 32**0.5, (8, 32): 32**0.5},
    "unit_rms_norm": {(32, 8): 2.0, (8, 32): 0.5},
    "shape_scaling": {(32, 8): 2.0, (8, 32): 1.0},
}


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_products_have_the_precision_asked_for_also_where_the_process_has_set_another(precision: str):
    """A run in --bf16 lets float32 products round to bfloat16 on a CPU; high and highest are float32 there all the same."""
    matrix, config = number(4, 128, 256), MuonConfig(muon_fp32_matmul_prec=precision)
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        found = orthogonalized(matrix.float(), config)
        assert settings.fp32_precision == "bf16"
    finally:
        settings.fp32_precision = before
    wrong = (found.double() - orthogonalized(matrix, config)).norm() / matrix.shape[0] ** 0.5
    assert wrong < (0.03 if precision == "medium" else 1e-5)
    with float32_products(torch.device("meta"), tf32=True):
        assert settings.fp32_precision == before


# ---------------------------------------------------------------- the update


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_a_mean_of_gradients_whose_weights_fall(nesterov: bool):
    """m_t = (1 - mu) sum of mu^(t-i) g_i, and the last step's weight has moved by the direction of m, or of what Nesterov takes."""
    gradients, weight = [number(seed, 6, 10) for seed in range(3)], number(9, 6, 10)
    config = MuonConfig(muon_momentum=0.8, muon_nesterov=nesterov, muon_scale_mode="unit_rms_norm")
    before, _ = update(weight, gradients[:2], config)
    after, momentum = update(weight, gradients, config)
    torch.testing.assert_close(momentum, 0.2 * sum(0.8 ** (2 - i) * g for i, g in enumerate(gradients)))
    ahead = 0.8 * momentum + 0.2 * gradients[-1] if nesterov else momentum
    direction = orthogonalized(ahead, config) * 0.6**0.5
    torch.testing.assert_close(after, before - 0.1 * (direction + 0.5 * before), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)], ids=str)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("original", {"muon_scale_mode": "shape_scaling"}),
        ("match_rms_adamw", {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2}),
    ],
)
def test_an_update_is_that_of_torchs_muon(theirs, ours, shape, nesterov, monkeypatch: pytest.MonkeyPatch):
    """In float64: torch's rounding of the matrix to bfloat16 is switched off."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    weight, gradients = number(5, *shape), [number(seed, *shape) for seed in range(3)]
    config = MuonConfig(muon_coefficient_type="simple", muon_momentum=0.9, muon_nesterov=nesterov, **ours)
    parameter = torch.nn.Parameter(weight.clone())
    reference = torch.optim.Muon(
        [parameter], lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(update(weight, gradients, config)[0], parameter.data, rtol=1e-12, atol=1e-12)


def test_fused_matrices_are_orthogonalized_one_by_one():
    """q, k and v with all their heads, from groups of (2 query heads, k, v) of width 3; gate over up; and not asked for."""
    q, k, v = number(6, 12, 8), number(7, 6, 8), number(8, 6, 8)
    grouped = torch.cat([torch.cat((q[6 * i : 6 * i + 6], k[3 * i : 3 * i + 3], v[3 * i : 3 * i + 3])) for i in (0, 1)])
    config, rows = (
        MuonConfig(),
        [*range(6), *range(12, 18), *range(6, 9), *range(18, 21), *range(9, 12), *range(21, 24)],
    )
    assert torch.equal(grouped[rows], torch.cat((q, k, v)))

    def step(gradient: Tensor, config: MuonConfig = config, **parts) -> Tensor:
        return update(torch.zeros_like(gradient), [gradient], config, **parts)[0]

    torch.testing.assert_close(
        step(grouped, interleaved=(6, 3, 3))[rows], torch.cat([step(x) for x in (q, k, v)]), rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(
        step(torch.cat((q, k)), blocks=(12, 6)), torch.cat((step(q), step(k))), rtol=1e-12, atol=1e-13
    )
    together = MuonConfig(muon_split_qkv=False)
    torch.testing.assert_close(step(grouped, together, interleaved=(6, 3, 3)), step(grouped), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", BY_HAND)
def test_each_matrix_of_a_stack_is_updated_as_one_of_its_own(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Experts [E, 2, f, h] and [E, h, f], some without tokens, in products of a few and of one."""
    config = MuonConfig(muon_scale_mode=mode, muon_nesterov=True)
    for at_once in (2**24, 1, 200):
        monkeypatch.setattr("megatron.core.optimizer.muon_matrix_update._ELEMENTS_AT_ONCE", at_once)
        for shape in ((3, 2, 12, 8), (3, 8, 12)):
            weight, gradients = number(6, *shape), [number(seed, *shape) for seed in (7, 8)]
            for gradient in gradients:
                gradient[1] = 0
            found = update(weight, gradients, config)[0].flatten(0, -3)
            for i, matrix in enumerate(weight.flatten(0, -3)):
                own = [gradient.flatten(0, -3)[i] for gradient in gradients]
                torch.testing.assert_close(found[i], update(matrix, own, config)[0], rtol=1e-12, atol=1e-13)


OF_EXPERTS = {".weight": None, ".bias": "adam"}


def test_our_models_say_which_matrices_are_fused():
    (tiny,) = run_ranks({}, lambda mesh: TinyTrainer(mesh, TINY_LLAMA, Layout()))
    placements = {
        name.rpartition("layers.0.")[2]: (p.placement.interleaved, p.placement.blocks)
        for name, p in tiny.model[0].module.named_parameters()
    }
    d = TINY_LLAMA.hidden_size // TINY_LLAMA.num_attention_heads
    assert placements["self_attention.linear_qkv.weight"] == ((2 * d, d, d), ())
    assert placements["mlp.linear_fc1.weight"] == ((), (24, 24))
    assert placements["mlp.linear_fc2.weight"] == ((), ())


# ---------------------------------------------------------------- in every layout


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=pytest.mark.full) for case in TESTED[1:]])
def test_a_layout_gives_the_numbers_of_one_process(case: MuonCase):
    assert_equal(*outcomes(case), TOLERANCE)


@pytest.mark.full
def test_all_axes_give_the_numbers_of_one_process():
    assert_equal(*outcomes(MuonCase("tp2sp-pp2-v2", "1 overlapped", "one group", "nesterov")), TOLERANCE)


EXPERTS = replace(expert_models.LLAMA, num_layers=2, moe_shared_expert_intermediate_size=8)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sp=True, pp=2, etp=2, data_parallel=DataParallelConfig(zero_stage=0), m=2),
        Layout(tp=2, dp=2, ep=2, etp=2, data_parallel=zero(1)),
        Layout(dp=4, ep=2, data_parallel=zero(1, num_distributed_optimizer_instances=2)),
        Layout(dp=2, data_parallel=zero(0), delayed=True),
    ],
    ids=str,
)
def test_experts_in_a_layout_have_the_weights_of_one_process(layout: Layout):
    assert_equal(run(EXPERTS, layout, steps=2, optimizer=MUON), experts_of_one_process(), TOLERANCE)


@cache
def experts_of_one_process() -> Outcome:
    return run(EXPERTS, Layout(), steps=2, optimizer=MUON)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "matrices", "sharded", "other"),
    [
        (TINY_LLAMA, 4 * 4, Layout(tp=2, dp=2, data_parallel=zero(1)), Layout(pp=2)),
        (EXPERTS, 2 * 7, Layout(tp=2, dp=2, ep=2, etp=2, data_parallel=zero(1)), Layout(dp=2, ep=2)),
    ],
    ids=["dense", "experts"],
)
def test_states_are_torchs_and_a_run_goes_on_bit_for_bit_and_in_another_layout(
    config: ModelConfig, matrices: int, sharded: Layout, other: Layout, tmp_path
):
    def train(mesh: Mesh, layout: Layout, first: int, steps: int) -> list:
        tiny = TinyTrainer(mesh, config, layout, optimizer=MUON)
        kinds = {kind: set(tensors) for kind, tensors in tiny.adam.tensors().items()}
        assert len(kinds["momentum_buffer"]) == matrices // layout.pp
        assert kinds["exp_avg"] == kinds["exp_avg_sq"] and not kinds["exp_avg"] & kinds["momentum_buffer"]
        if first:
            tiny.load(tmp_path)
        for step in range(first, first + steps):
            tiny.step(step)
        if steps == 2:
            tiny.save(tmp_path, 2)
        tiny.finish_param_gather()
        return [piece for chunk in tiny.model for piece in my_pieces(chunk.module, mesh, lambda p: p)]

    whole = put_together(run_ranks(sharded.sizes, partial(train, layout=sharded, first=0, steps=3)))
    run_ranks(sharded.sizes, partial(train, layout=sharded, first=0, steps=2))
    again = put_together(run_ranks(sharded.sizes, partial(train, layout=sharded, first=2, steps=1)))
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    elsewhere = put_together(run_ranks(other.sizes, partial(train, layout=other, first=2, steps=1)))
    for name, value in whole.items():
        torch.testing.assert_close(elsewhere[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_gathers_each_matrix_on_its_owner_alone_which_at_stage_0_sends_the_result_once(stage: int):
    """Bytes of all matrices, over both data-parallel ranks. The update of stage 1 sends no more than parameters."""
    layout = Layout(tp=2, dp=2, data_parallel=DataParallelConfig(zero_stage=stage))

    def made(optimizer: OptimizerConfig) -> list[Counter]:
        ranks = run(TINY_LLAMA, layout, steps=2, optimizer=optimizer).calls
        matrices = (("all_gather", "tp"), ("broadcast", "dp"))
        return [Counter({call: n for call, n in calls.items() if call[:2] in matrices}) for _, calls in ranks]

    h, ffn, layers, kv = 16, 24, 4, 2 * 2 * 4
    local = Counter([(h + kv) * h // 2, h * h // 2, 2 * ffn * h // 2, h * ffn // 2])  # elements of a rank's matrices
    expected = Counter({("all_gather", "tp", 8 * n): layers * count for n, count in local.items()})
    sent = Counter({("broadcast", "dp", 8 * n): layers * count for n, count in local.items()})
    by_rank = [mine - others for mine, others in zip(made(MUON), made(OptimizerConfig()))]
    for mine in by_rank if stage == 0 else ():
        assert mine & sent == sent, "every rank takes part in each broadcast"
        mine -= sent
    assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3], "ranks of a tensor-parallel group own the same"
    assert by_rank[0] + by_rank[2] == expected and min(map(len, by_rank)) > 0


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_owners_send_the_bits_that_every_rank_would_find_and_in_bfloat16_if_all_ranks_have_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
):
    """In float32, over three data-parallel ranks, whose calls complete at their waits, with and without units for bfloat16."""
    config = MuonConfig(muon_fp32_matmul_prec=precision, muon_nesterov=True)
    shapes, step = [(12, 8), (8, 24), (24, 8), (8, 8)], UpdateStep(0.1, 0.5, 0)
    fused = {0: {"interleaved": (2, 2, 2)}, 2: {"blocks": (12, 12)}}
    units = SimpleNamespace(present=True)
    monkeypatch.setattr("megatron.core.optimizer.muon_matrix_update.multiplies_bfloat16", lambda device: units.present)

    def train(mesh: Mesh, shared: bool) -> tuple[list[Tensor], list]:
        weights = [number(i, *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]
        gradients = [number(9 + i, *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]
        states = {"momentum_buffer": [torch.zeros_like(weight) for weight in weights]}
        owners = MatrixOwners(mesh["dp"]) if shared else MatrixOwners()
        wholes = [
            ShardedMatrix(Placement(shape, None, **fused.get(i, {})), shape, ALONE, owners=owners)
            for i, shape in enumerate(shapes)
        ]
        with mesh.ledger.record() as calls:
            muon_update(weights, gradients, states, step, wholes, config=config)
        return weights, [call.bytes for call in calls if call.op == "broadcast"]

    for units.present in (True, False):
        together, alone = (
            run_ranks({"dp": 3}, partial(train, shared=shared), delayed=shared) for shared in (True, False)
        )
        for (weights, sent), (expected, _) in zip(together, alone):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected))
            width = 2 if precision == "medium" and units.present else 4
            assert sorted(sent) == sorted(width * rows * columns for rows, columns in shapes)


def test_ranks_that_differ_in_their_units_send_float32():
    answers = run_ranks({"dp": 3}, lambda mesh: MatrixOwners(mesh["dp"]).all_agree(mesh["dp"].rank != 2, "cpu"))
    assert answers == [False] * 3


# ---------------------------------------------------------------- who is updated by what, and what is refused


def test_tables_norms_biases_and_the_output_layer_are_left_to_the_other_optimizer():
    group_of = MUON.grouping(lambda name, placement: ParamGroup())
    shapes = {
        "embedding.word_embeddings.weight": (64, 16),
        "embedding.position_embeddings.weight": (8, 16),
        "embedding.tokentype_embeddings.weight": (2, 16),
        "output_layer.weight": (64, 16),
        "decoder.layers.0.mlp.linear_fc1.bias": (64,),
        "decoder.final_layernorm.weight": (16,),
        "decoder.layers.0.mlp.experts": (4, 16, 16),
        "decoder.layers.0.mlp.linear_fc1.weight": (64, 16),
        "pooler.dense.weight": (16, 16),
    }
    optimizers = {name: group_of(name, Placement(shape, None)).optimizer for name, shape in shapes.items()}
    assert [name for name, optimizer in optimizers.items() if optimizer is None] == [*shapes][-2:]
    assert set(optimizers.values()) == {None, "adam"}
    of_experts = {"decoder.layers.0.mlp.experts.linear_fc1" + end: optimizer for end, optimizer in OF_EXPERTS.items()}
    for name, optimizer in of_experts.items():
        stack = Placement((4, 2, 16, 16) if name.endswith("weight") else (4, 2, 16), None, shard={"ep": 0, "etp": 2})
        assert group_of(name, stack).optimizer == optimizer
    chosen = replace(MUON, muon_scalar_optimizer="sgd").grouping(lambda name, placement: ParamGroup(optimizer="adam"))
    assert chosen("decoder.layers.0.mlp.linear_fc1.weight", Placement((64, 16), None)).optimizer == "adam"


def test_a_vector_that_a_fork_gives_to_muon_is_refused():
    given = lambda name, placement: ParamGroup(optimizer="muon" if name.endswith("bias") else None)  # noqa: E731
    with pytest.raises(
        RuntimeError,
        match=r"muon updates only matrices, but .*bias has the shape \(\d+,\); group_of must give it another",
    ):
        run_ranks({}, lambda mesh: TinyTrainer(mesh, TINY_GPT2, Layout(), group_of=given))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"--muon-num-ns-steps is 5, but --muon-coefficient-type aol has coefficients for only 4 steps; "
        ".*polar_express",
    ):
        MuonConfig(muon_coefficient_type="aol")
    with pytest.raises(ConfigError, match="--muon-scalar-optimizer muon updates only matrices; use adam or sgd"):
        OptimizerConfig(optimizer="muon", muon_scalar_optimizer="muon")
    with pytest.raises(ConfigError, match=r"dist_muon.* --optimizer muon --use-distributed-optimizer"):
        OptimizerConfig(optimizer="dist_muon")
    assert MuonConfig(muon_coefficient_type="simple", muon_num_ns_steps=9)


def test_the_command_goes_on_and_reports(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    path, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    monkeypatch.setattr("muon_matrix.outcomes", lambda case: (None, None))
    monkeypatch.setattr("muon_matrix.worst_of", lambda *_: (1e-14, "losses of step 0"))
    assert main([str(path)]) == 0 and main([str(path), "--report", str(page)]) == 0
    assert f"**{len(all_cases())} of {len(all_cases())} cases have been run; 0 differ.**" in page.read_text()
    assert len({str(case) for case in all_cases()}) == len(all_cases()) == 6 * len(SHARDS) * len(MODELS) * 4
    assert len(covering_cases()) < 60
