"""Parts of layers computed again, and inputs kept in parts: the same numbers, less memory, and the calls that this costs."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import (
    SEQ,
    TINY_GPT2,
    TINY_LLAMA,
    Layout,
    Outcome,
    assert_equal,
    build_chunks,
    forward_step,
    microbatches,
    run,
)

from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.recompute_without_rng_state import discard_and_recompute, recompute_in_backward

MODELS = {"gpt2": replace(TINY_GPT2, num_layers=2), "llama": replace(TINY_LLAMA, num_layers=2)}
MODULES = [["mlp"], ["layernorm"], ["core_attn", "mlp", "layernorm"]]
LAYOUTS = [Layout(), Layout(tp=2, m=2), Layout(tp=2, sp=True, m=2), Layout(pp=2, m=2, schedule="zb-h1")]


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout())


def with_modules(model: str, modules: list[str]) -> ModelConfig:
    return replace(MODELS[model], recompute_granularity="selective", recompute_modules=modules)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "modules", "layout"),
    [
        pytest.param(
            model,
            modules,
            replace(layout, recompute="selective"),
            id=f"{model}-{'-'.join(modules)}-{layout}",
            marks=marks,
        )
        for i, modules in enumerate(MODULES)
        for j, layout in enumerate(LAYOUTS)
        for model in [list(MODELS)[(i + j) % 2]]
        for marks in [[] if (i, j) == (2, 2) else [pytest.mark.full]]
    ],
)
def test_modules_computed_again_change_nothing(model: str, modules: list[str], layout: Layout):
    assert_equal(run(with_modules(model, modules), layout), one_process(model), 1e-10)


def test_a_norm_that_was_computed_again_goes_with_its_use():
    """And not with the graph, at the end of the whole backward."""
    memories, alive, y = [], [], torch.ones(8, requires_grad=True)
    for block in range(2):
        normed = y * 2
        memories.append(weakref.ref(normed.untyped_storage()))
        result = normed * normed
        discard_and_recompute(normed, partial(torch.mul, y.detach(), 2), until=result)
        if block == 0:
            result.register_hook(lambda _: alive.append(memories[1]() is not None))  # the second block is through
        y = result
        del normed, result
    y.sum().backward()
    assert alive == [False]


def without_dropout(config: ModelConfig) -> ModelConfig:
    return replace(config, hidden_dropout=0.0, attention_dropout=0.0)


def kept_bytes(mesh: Mesh, config: ModelConfig, layout: Layout) -> int:
    """What autograd keeps between a forward and its backward, parameters left out."""
    chunks, _, _ = build_chunks(mesh, config, layout)
    model, saved = chunks[0].module, {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        losses = forward_step(microbatches(BatchShape(2, 1), 0, mesh), chunks[0])
    assert losses
    return sum(memory.nbytes() for at, memory in saved.items() if at not in own)


@pytest.mark.parametrize("model", MODELS)
def test_each_module_spares_what_only_it_keeps(model: str):
    """With N bytes of an activation [s, b, h]: the output of a norm is N, twice a layer. An MLP keeps what its matrices and its
    activation read: its input, and with GELU 2 x 4 N, gated 3 f / h N. Computed again it keeps its input only."""
    (whole,) = run_ranks({}, lambda mesh: kept_bytes(mesh, without_dropout(MODELS[model]), Layout()))
    n, layers = SEQ * 2 * 16 * 8, 2
    width = {"gpt2": 4 + 4, "llama": 2 * 24 / 16 + 24 / 16}[model]
    for modules, spared in ((["layernorm"], 2 * n), (["mlp"], width * n), (["mlp", "layernorm"], (width + 2) * n)):
        config = without_dropout(with_modules(model, modules))
        (kept,) = run_ranks({}, lambda mesh, c=config: kept_bytes(mesh, c, Layout(recompute="selective")))
        assert whole - kept == spared * layers, modules


DIVIDED = [
    Layout(tp=2, m=2, recompute="uniform 1"),
    Layout(tp=2, pp=2, m=2, recompute="block 1", delayed=True),
    Layout(tp=4, dp=2, recompute="uniform 2"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(x, id=str(x), marks=[pytest.mark.full] * (i > 0)) for i, x in enumerate(DIVIDED)]
)
def test_inputs_kept_in_parts_change_nothing(layout: Layout):
    config = replace(
        MODELS["gpt2"], recompute_granularity="full", recompute_method="uniform", distribute_saved_activations=True
    )
    assert_equal(run(config, layout), one_process("gpt2"), 1e-10)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", Layout(tp=2, sp=True, m=2, recompute="uniform 1")),
        pytest.param("llama", Layout(tp=2, sp=True, pp=2, m=2, recompute="block 1"), marks=pytest.mark.full),
        pytest.param("experts", Layout(tp=2, sp=True, m=2, recompute="uniform 2"), marks=pytest.mark.full),
    ],
)
def test_inputs_that_are_shards_already_are_kept_as_they_are(model: str, layout: Layout):
    """The command line refuses it; a config of a script's own may say so."""
    config = replace(MODELS["llama"], num_experts=4, moe_ffn_hidden_size=12) if model == "experts" else MODELS[model]
    kept = replace(config, recompute_granularity="full", recompute_method="uniform", distribute_saved_activations=True)
    assert_equal(run(kept, layout), run(config, Layout()), 1e-10)


def test_inputs_in_parts_are_gathered_once_a_group_and_microbatch():
    """All-gathers of N / t over tp, and nothing else more, on two layers in groups of one and on two microbatches."""
    layout = Layout(tp=2, m=2, recompute="uniform 1")
    plain = replace(without_dropout(MODELS["gpt2"]), recompute_granularity="full", recompute_method="uniform")

    def calls(mesh: Mesh, divides: bool) -> Counter:
        chunks, _, _ = build_chunks(mesh, replace(plain, distribute_saved_activations=divides), layout)
        with mesh.ledger.record() as calls:
            data = microbatches(BatchShape(3, 2), 0, mesh)
            for _ in range(2):
                forward_step(data, chunks[0])[0].sum().backward()
        return Counter((call.op, call.axis, call.bytes) for call in calls)

    more, less = (run_ranks({"tp": 2}, lambda mesh, d=d: calls(mesh, d))[0] for d in (True, False))
    assert more - less == {("all_gather", "tp", SEQ * 3 * 16 * 8 // 2): 2 * 2} and not less - more


@pytest.mark.full
def test_the_whole_input_is_given_up():
    def work(mesh: Mesh) -> bool:
        start = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
        x = start * 2
        seen = weakref.ref(x)
        y = recompute_in_backward(lambda x: (x * x).exp(), SampleDropoutKeys(0), x, shard_over=mesh["tp"])
        del x
        gc.collect()
        is_gone = seen() is None
        y.sum().backward()
        assert torch.allclose(start.grad, 8 * torch.exp(torch.full((4, 2), 4.0, dtype=torch.float64)))
        return is_gone

    assert run_ranks({"tp": 2}, work) == [True, True]
