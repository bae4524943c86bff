"""The experts of examples/toy_moe, on an unchanged megatron: any layout trains them as one process, and saves what any other loads."""

import ast
import importlib.util
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from covering import covering
from expert_layouts import DIMENSIONS, LAYOUTS, PLAIN, SEEDS, LayoutCase, Trained, outcome, worst_difference
from expert_models import BATCH, unmasked, zero
from local_ranks import run_ranks
from measured_memory import SMALL
from parity_cases import TOLERANCE
from same_code import ROOT
from script_run import trainer_of
from tiny_run import SEQ, TINY_GPT2, TINY_LLAMA, Layout, Subject, TinyTrainer, forward_step
from torch import Tensor, nn
from torch.nn import functional
from whole_run import TINY

import pretrain_gpt
from megatron.core.dist_checkpointing import load_whole_tensors
from megatron.core.distributed.sync_and_gather_params import full_state_dict
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL
from megatron.core.sharding.buffer_placement_and_sync import persistent_buffers
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.memory.forecast_memory_along_schedule import KINDS
from tools.estimating.measure import measure

HERE = ROOT / "examples" / "toy_moe"


def module_at(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"toy_moe_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOE = module_at("experts")
OWN = MOE.ToyMoEConfig(toy_expert_width=12, toy_balance_coefficient=0.3, toy_bias_update_rate=2e-4)
MODELS = {"gpt2": TINY_GPT2, "llama": TINY_LLAMA}


def make(config: Any, *, context: Any, own: Any = OWN, **parts: Any) -> nn.Module:
    context.aux_losses.declare("load balance")
    return MOE.ToyMoEModel(config, positions=SEQ, context=context, spec=MOE.spec_of(config, own), **parts)


EXPERTS = Subject(make, forward_step, unmasked, tokens=SEQ)


@cache
def one_process(model: str) -> Trained:
    return outcome(MODELS[model], Layout(m=2), subject=EXPERTS)


# zb-v is run with llama, whose embeddings are not tied
CASES = [
    pytest.param(
        layout,
        model := list(MODELS)[(i + (layout.schedule == "zb-v")) % 2],
        id=f"{layout}-zero{layout.data_parallel.stage}-{model}",
    )
    for i, layout in enumerate(LAYOUTS)
]
CHOICES = DIMENSIONS | {"recompute": ("none", "uniform 1", "selective", "all parts")}


@cache
def covering_cases() -> tuple[LayoutCase, ...]:
    """Cases in which every two choices that can stand together do."""
    return covering(LayoutCase, CHOICES, 2, seeds=[asdict(PLAIN) | seed for seed in SEEDS])


COVERING = [pytest.param(case.layout, case.model, id=str(case), marks=pytest.mark.sweep) for case in covering_cases()]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "model"), CASES + COVERING)
def test_every_layout_trains_as_one_process(layout: Layout, model: str):
    got = outcome(MODELS[model], layout, subject=EXPERTS)
    worst, where = worst_difference(got, one_process(model))
    assert worst <= TOLERANCE, where
    assert len(got.biases) == 4 and all(value.any() for value in got.biases.values())


# ---------------------------------------------------------------- one layer, by the formula


def by_formula(layer: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Every expert on every token, and the sum of the chosen ones."""
    chances = (x @ layer.router.t()).softmax(-1)  # [s, b, experts]
    weights = chances * torch.zeros_like(chances).scatter(-1, ids, 1.0)
    weights = weights / weights.sum(-1, keepdim=True)
    results = torch.einsum("ehf,sbef->sbeh", layer.fc2, functional.gelu(torch.einsum("efh,sbh->sbef", layer.fc1, x)))
    return torch.einsum("sbe,sbeh->sbh", weights, results)


def a_layer(own: Any = OWN) -> Any:
    """One layer of one process, whose parameters are large enough to choose clearly."""
    layer = MOE.ToyMoE(TINY_GPT2, 0, LayerContext.from_mesh(single_rank_mesh(), torch.float64), own)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return layer


def test_a_layer_computes_the_formula():
    layer = a_layer()
    x = torch.randn(SEQ, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    ids = (x @ layer.router.t()).topk(2).indices
    wanted = torch.autograd.grad(by_formula(layer, x, ids).square().sum(), [x, *layer.parameters()])
    y = layer(x)
    torch.testing.assert_close(y, by_formula(layer, x, ids), rtol=1e-12, atol=1e-14)
    for got, expected in zip(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert torch.equal(layer.tokens_per_expert, counts)
    layer.end_of_step()
    torch.testing.assert_close(layer.expert_bias, 2e-4 * (counts.double().mean() - counts).sign().float())


def test_the_buffers_that_restart_are_those_that_a_step_ends_as_it_began_them():
    """A folder of another project, which has none of them, lacks nothing."""
    layer = a_layer()
    initial = {buffer.name: buffer.tensor.clone() for buffer in persistent_buffers(layer)}
    layer(torch.randn(SEQ, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    layer.end_of_step()
    for buffer in persistent_buffers(layer):
        assert buffer.declared.restarts == torch.equal(buffer.tensor, initial[buffer.name]), buffer.name


def test_equal_scores_choose_the_first_experts_and_an_expert_without_rows_has_a_gradient_of_zero():
    layer = a_layer()
    with torch.no_grad():
        layer.router.zero_()
    layer(torch.ones(SEQ, 1, 16, dtype=torch.float64)).sum().backward()
    assert layer.tokens_per_expert.tolist() == [SEQ, SEQ] + [0] * 6
    assert layer.fc1.grad[:2].any() and not layer.fc1.grad[2:].any() and not layer.fc2.grad[2:].any()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_without_rows_trains_with_the_others(stage: int):
    """All tokens choose two experts of the first rank. The second sends its rows there, and in the backward their gradients; the
    first sends as many results and gradients back. The second rank's experts have gradients of zero."""
    layout = Layout(dp=2, ep=2, m=2, data_parallel=zero(stage))

    def work(mesh: Mesh) -> float:
        tiny = TinyTrainer(mesh, TINY_GPT2, layout, global_batch=BATCH, subject=EXPERTS)
        for name, value in tiny.model[0].module.named_buffers():
            if name.endswith("expert_bias"):
                value[:2] = 1e6
        with mesh.ledger.record() as calls:
            norm = tiny.step(0).grad_norm
        rows = 2 * SEQ * (BATCH // 2) * TINY_GPT2.num_layers  # of a rank in a step
        sent = sum(call.bytes for call in calls if call.op == "all_to_all_v")
        assert sent == 2 * rows * TINY_GPT2.hidden_size * 8
        (experts,) = (buffer for buffer in tiny.buffers if buffer.plan.key[0] == EXPERT_DATA_PARALLEL)
        assert all(bool(tensor.any()) == mesh["ep"].is_first for tensor in experts.sums.tensors)
        return norm

    norms = run_ranks(layout.sizes, work)
    assert norms[0] == norms[1] > 0


def test_rows_travel_as_the_closed_form_says():
    """Of T tokens on a rank, with forced balance, R = 2 T rows: each goes to the ranks that have a part of its expert, and its results
    come back; the backward sends the gradients the same way. Numbers of rows travel once."""
    own, layout = replace(OWN, toy_force_balance=True), Layout(tp=2, dp=2, ep=2, m=1, data_parallel=zero(1))

    def work(mesh: Mesh) -> list:
        subject = replace(EXPERTS, make=partial(make, own=own))
        tiny = TinyTrainer(mesh, TINY_GPT2, layout, global_batch=BATCH, subject=subject)
        with mesh.ledger.record() as calls:
            tiny.step(0)
        return [(call.op, call.bytes) for call in calls if call.axis == "ep_etp"]

    layers, ep, etp, h = TINY_GPT2.num_layers, 2, 2, TINY_GPT2.hidden_size
    rows = 2 * (SEQ // 2) * (BATCH // 2)  # of a rank
    for calls in run_ranks(layout.sizes, work):
        sent = Counter(op for op, _ in calls)
        assert sent == {"all_to_all": layers, "all_to_all_v": 4 * layers}
        for op, size in calls:
            assert size == (8 * 8 * etp if op == "all_to_all" else (rows * etp - rows // ep) * h * 8)


# ---------------------------------------------------------------- runs of the script


FLAGS = (
    " --fp64 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --global-batch-size 4 --toy-expert-width 8 --toy-bias-update-rate 2e-4 "
    "--override-opt_param-scheduler --lr-decay-iters 18 "
)
EP2 = " --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 3 --overlap-param-gather --overlap-grad-reduce"


def script() -> SimpleNamespace:
    sys.path.insert(0, str(HERE))
    own = module_at("pretrain")
    parts = {"model_provider": own.model_provider, "extra_args_provider": own.add_own_flags, "rules": own.RULES}
    return SimpleNamespace(**vars(pretrain_gpt) | parts)


def run_script(sizes: dict[str, int], flags: str) -> list[dict[str, Tensor]]:
    """Each rank's parameters and buffers at the end of a run."""
    own = script()

    def rank(mesh: Mesh) -> dict[str, Tensor]:
        with trainer_of(own, mesh, " ".join(TINY) + FLAGS + flags, predicts=False) as trainer:
            trainer._train()
            return {n: p.clone() for chunk in trainer.model for n, p in full_state_dict(chunk.module).items()}

    return run_ranks(sizes, rank)


@pytest.mark.sweep
def test_a_run_resumes_to_the_bit_and_loads_with_other_expert_ranks(tmp_path):
    sizes = {"tp": 2, "dp": 2, "ep": 2}
    checks = "--log-params-norm --log-num-zeros-in-grad --check-weight-hash-across-dp-replicas-interval 1 --check-state-hash-interval 1"
    whole = run_script(sizes, f"{EP2} {checks} --train-iters 3 --save {tmp_path / 'whole'}")
    run_script(sizes, f"{EP2} --train-iters 2 --save {tmp_path / 'half'}")
    again = run_script(sizes, f"{EP2} --train-iters 3 --load {tmp_path / 'half'} --save {tmp_path / 'again'}")
    for before, after in zip(whole, again, strict=True):
        assert before.keys() == after.keys() and any(name.endswith("expert_bias") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for name, value in whole[0].items() if name.endswith("expert_bias"))

    # one process has the bits, and trains on as EP 2 does; so does EP 4
    (alone,) = run_script({}, f" --train-iters 2 --load {tmp_path / 'half'}")
    for name, value in load_whole_tensors(tmp_path / "half").items():
        kind, _, rest = name.partition("/")
        if kind in ("model", "buffer"):
            assert torch.equal(alone[rest][: len(value)], value), name  # the vocabulary has padding
    assert alone["language_model.decoder.layers.0.mlp.fc1"].shape == (8, 8, 8)
    expected = load_whole_tensors(tmp_path / "whole")
    for ep in (1, 4):
        flags = (
            f" --expert-model-parallel-size {ep} --train-iters 3 --load {tmp_path / 'half'} --save {tmp_path / str(ep)}"
        )
        run_script({"dp": ep, "ep": ep}, flags)
        got = load_whole_tensors(tmp_path / str(ep))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            worst = (got[name] - value).abs().max()
            assert worst <= 1e-9 * value.abs().max(), f"{name} differs by {worst} with {ep} expert-parallel ranks"


def test_a_model_without_experts_has_no_expert_ranks():
    """A script that does not say so is refused when its model is built."""

    def rank(mesh: Mesh) -> None:
        flags = " ".join(TINY) + FLAGS.partition("--toy")[0] + "--train-iters 1 --expert-model-parallel-size 2"
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False):
            pass

    with pytest.raises(
        RuntimeError, match=r"--expert-model-parallel-size is 2, but no parameter of the model is sharded"
    ):
        run_ranks({"dp": 2, "ep": 2}, rank)


MEMORY = [
    "--world-size 2 --rank 1 --expert-model-parallel-size 2",
    pytest.param(
        "--world-size 8 --rank 5 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--zero-stage 3",
        marks=pytest.mark.sweep,
    ),
    pytest.param(
        "--world-size 4 --rank 3 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 "
        "--sequence-parallel --zero-stage 2",
        marks=pytest.mark.sweep,
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("flags", MEMORY)
def test_memory_is_predicted_where_experts_have_equal_numbers_of_rows(flags: str):
    """From shapes alone, where nobody can read how many rows come; measured with values."""
    got = measure(f"{SMALL} {flags} --toy-force-balance --toy-expert-width 96 --model {HERE / 'pretrain.py'}".split())
    predicted = got.predicted.bytes
    for kind, size in got.bytes.items():
        assert predicted[kind] == pytest.approx(size, rel=0.0 if kind in KINDS[:3] else 0.05, abs=1024), kind
    assert sum(predicted.values()) >= 0.99 * got.total  # the peaks of the kinds need not meet


# ---------------------------------------------------------------- a script's own code alone


def test_the_example_changes_no_module_of_megatron():
    """It assigns to its own objects, and to nothing that it has imported."""
    for path in HERE.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = node.value
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                assert not (isinstance(owner, ast.Name) and owner.id in imported), ast.unparse(node)
            assert not (isinstance(node, ast.Name) and node.id in ("setattr", "delattr")), path
