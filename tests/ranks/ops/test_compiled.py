"""--compile regions, layers: what is compiled computes what eager code does, under any layout, and is compiled once.

Cases of many layouts trace the formulas with a backend that needs no C++; one test compiles them as a run does.
"""

from dataclasses import replace

import pytest
import torch
from layout_space import Case, covering_cases
from parity_cases import assert_as_one_process
from tiny_run import TINY_GPT2, TINY_LLAMA, Layout, assert_equal, run
from torch import Tensor

from megatron.core.ops.activations import OTHER_ACTIVATIONS, gated_region
from megatron.core.ops.attention.kernels import unfused_attention
from megatron.core.ops.attention.query_tiled_causal_compiled import tiled_causal_attention
from megatron.core.ops.compile import compiled_region
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.ops.compile.compiled_region import compile_cost, compiles
from megatron.core.ops.dropout_masks import column_words, numbered_keys, pairs_of_words
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy

CASES = [case for case in covering_cases(2) if case.corner != "5 words"][::13]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas are traced as for a compiler, and run eagerly."""
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(name: str, dtype: torch.dtype) -> list:
    x = values(6, 2, 16, dtype=dtype)
    weight, bias = values(16, dtype=dtype, seed=1), values(16, dtype=dtype, seed=2)
    place = pairs_of_words([7])[0]
    lines = numbered_keys(pairs_of_words([3, 4]), 0, 6).transpose(0, 1)
    return {
        "LayerNorm": [x, weight, bias, 1e-5],
        "RMSNorm": [x, weight, None, 1e-5],
        "gelu-tanh": [x, bias],
        "gated_silu": [x, bias],
        "residual": [x, values(6, 2, 16, dtype=dtype, seed=3), lines, column_words(16, place), 0.3, dtype],
        "heads": [
            values(6, 2, 2, 5, 8, dtype=dtype),
            values(80, dtype=dtype, seed=5),
            values(6, 1, 3, dtype=dtype),
            values(6, 1, 3, dtype=dtype, seed=4),
            3,
        ],
    }[_SAME_INPUTS.get(name, name)]


_SAME_INPUTS = {"heads_interleaved": "heads", "LayerNorm1p": "LayerNorm", "RMSNorm1p": "RMSNorm"}
_SAME_INPUTS |= dict.fromkeys(OTHER_ACTIVATIONS, "gelu-tanh")


def both_directions(function, inputs: list) -> list[Tensor]:
    """The results, then the gradients of the floating inputs."""
    given = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    made = function(*given)
    made = made if isinstance(made, tuple) else (made,)
    grads = [values(*x.shape, dtype=x.dtype, seed=9 + i) for i, x in enumerate(made)]
    needed = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    found = torch.autograd.grad(made, needed, grads, allow_unused=True)
    return [x.detach() for x in (*made, *found) if x is not None]


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.full
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_is_its_eager_form(name: str, traced: None):
    """To rounding in float64; in bfloat16 no further from it than the eager form and one rounding of the largest value."""
    region = REGIONS[name]
    exact = both_directions(region.eager, inputs_of(name, torch.float64))
    compiled = both_directions(region.compiled, inputs_of(name, torch.float64))[: len(exact)]
    assert max(map(error, compiled, exact)) < 1e-12
    half = inputs_of(name, torch.bfloat16)
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in half]
    exact = both_directions(region.eager, [torch.float64 if x is torch.bfloat16 else x for x in wide])
    eager, compiled = (both_directions(f, half) for f in (region.eager, region.compiled))
    for near, got, truth in zip(eager, compiled, exact):
        assert error(got, truth) <= error(near, truth) + 2**-8


@pytest.mark.full
@pytest.mark.parametrize("left_out", [(1,), (2, 3), (1, 2, 3)], ids=["no bias", "no rotation", "neither"])
def test_heads_may_lack_a_bias_or_a_rotation(left_out: tuple[int, ...], traced: None):
    inputs = [None if i in left_out else x for i, x in enumerate(inputs_of("heads", torch.float64))]
    exact, compiled = (both_directions(f, inputs) for f in (REGIONS["heads"].eager, REGIONS["heads"].compiled))
    assert len(compiled) == 4 + (1 not in left_out) and max(map(error, compiled, exact)) < 1e-12


@pytest.mark.full
def test_bounded_and_shifted_gates_are_their_eager_form(traced: None):
    region, inputs = gated_region("quick-gelu", 0.7, 1.0), inputs_of("gelu-tanh", torch.float64)
    exact, compiled = both_directions(region.eager, inputs), both_directions(region.compiled, inputs)
    assert max(map(error, compiled, exact)) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_in_tiles_is_the_plain_one(dropout: float, traced: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.core.ops.attention.query_tiled_causal_compiled._QUERIES", 4)
    monkeypatch.setattr("megatron.core.ops.attention.query_tiled_causal_compiled._ELEMENTS", 40)
    keys = SampleDropoutKeys(5)
    keys.samples = (11, 4)
    masks = AttentionDropout(dropout, keys, 1, 0)
    heads = [values(2, n, 10, 6, seed=n) for n in (4, 2, 2)]
    plain, tiled = (
        both_directions(lambda q, k, v, f=f: f(q, k, v, None, masks), heads)
        for f in (unfused_attention, tiled_causal_attention)
    )
    assert max(map(error, tiled, plain)) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.01)])
def test_rows_of_the_cross_entropy(smoothing: float, z_loss: float, traced: None):
    target = torch.tensor([[0, 5], [-1, 36], [3, 3]])
    options = {"label_smoothing": smoothing, "z_loss": z_loss}

    def loss(**how: bool):
        return lambda x: sharded_cross_entropy(x * 1, target, ALONE, 37, **options, **how)

    eager, *others = (
        both_directions(loss(**how), [values(3, 2, 40)])
        for how in ({}, {"compiled": True}, {"compiled": True, "overwrite": True}, {"overwrite": True})
    )
    assert all(max(map(error, other, eager)) < 1e-12 for other in others)


@pytest.mark.full
def test_a_kept_graph_of_overwritten_scores_has_another_backward(traced: None):
    scores = values(3, 1, 8).requires_grad_()
    loss = sharded_cross_entropy(scores * 1, torch.zeros(3, 1).long(), ALONE, compiled=True, overwrite=True).sum()
    first, second, last = (torch.autograd.grad(loss, scores, retain_graph=kept)[0] for kept in (True, True, False))
    assert torch.equal(first, second) and torch.equal(first, last)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_with_regions_equal_one_eager_process(case: Case, traced: None):
    assert_as_one_process(case, "regions")


@pytest.mark.full
@pytest.mark.parametrize("choice", ["regions", "layers"])
def test_layers_and_microbatches_share_what_is_compiled(choice: str, traced: None):
    """The first step compiles; more layers, steps and microbatches compile nothing."""
    config = replace(TINY_GPT2, compile=choice, num_layers=1)
    run(config, Layout(), steps=1)
    before = compile_cost().programs
    run(replace(config, num_layers=3), Layout(m=1), steps=2)
    assert compile_cost().programs == before


@pytest.mark.full
def test_a_compiled_run_is_the_eager_one():
    """tests/campaigns/parity_sweep.py --compile regions has the other models, and all layouts."""
    if not compiles(CompileConfig("regions"), "cpu"):
        pytest.skip("no C++ compiler")
    assert_equal(
        run(replace(TINY_LLAMA, compile="regions"), Layout(), steps=1), run(TINY_LLAMA, Layout(), steps=1), 1e-12
    )
