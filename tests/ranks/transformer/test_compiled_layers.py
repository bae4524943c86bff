"""--compile layers beside eager runs: what goes through the programs of a whole layer, and what is left in parts and says why.

Programs are called as they are written here; test_compiled.py traces them, and tests/campaigns/parity_sweep.py --compile layers compiles
them in layouts.
"""

from dataclasses import replace

import pytest
import torch
from compiled_cases import GATED, GELU, RUNS as OF_REGIONS, as_written, zero
from local_ranks import run_ranks
from measured_memory import SMALL, check
from tiny_bert import BERT
from tiny_run import GPT, Layout, Subject, assert_equal, build_chunks, run
from torch import nn

from megatron.core.ops.compile.compiled_region import whole_layer_fallback_lines
from megatron.core.ops.cpu_half_precision_matmul import MatmulModes
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.compile_before_and_after_attention import WholeLayerPrograms
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from tools.estimating.measure import measure

pytestmark = pytest.mark.usefixtures(as_written.__name__)
GELU, GATED = replace(GELU, compile="layers"), replace(GATED, compile="layers")


def layer_of(config: ModelConfig = GELU, **of_tensors) -> ParallelTransformerLayer:
    torch.manual_seed(0)
    tp = TensorParallel(Axis("tp", (0,), 0), dtype=torch.float64, **of_tensors)
    return ParallelTransformerLayer(config, 0, LayerContext(tp, SampleDropoutKeys(1)))


def gradients(layer: nn.Module, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Of a sum over the layer's result, which stands first. dtype: of the residual stream; its values are bfloat16's."""
    x = torch.randn(6, 2, 16, dtype=torch.float32, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    out = layer(x.requires_grad_())
    found = torch.autograd.grad(out.double().square().sum(), [x, *layer.parameters()])
    return [out.detach(), *found]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward of a layer took its programs."""
    found, asked = [], WholeLayerPrograms.can_run
    monkeypatch.setattr(
        WholeLayerPrograms, "can_run", lambda self, cache: found.append(asked(self, cache)) or found[-1]
    )
    return found


RUNS: dict[str, tuple[ModelConfig, Layout, Subject]] = {
    "ZeRO 1": (GELU, Layout(dp=2, m=2, data_parallel=zero(1), delayed=True), GPT),
    "ZeRO 2, core attention recomputed": (GELU, Layout(dp=2, recompute="selective", data_parallel=zero(2)), GPT),
    "ZeRO 3, all recomputed": (GATED, Layout(dp=2, m=2, recompute="uniform 1", data_parallel=zero(3)), GPT),
    **{
        name: OF_REGIONS[name]
        for name in ("activations in host memory", "zb-v, windows", "zb-v, ZeRO 2, grouped queries")
    },
    "BERT": (GELU, Layout(m=2), BERT),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_run_through_whole_layers_is_the_eager_run(name: str, taken: list[bool]):
    model, layout, subject = RUNS[name]
    eager = run(replace(model, compile="off"), layout, steps=2, global_batch=8, subject=subject)
    got = run(replace(model, compile="layers"), layout, steps=2, global_batch=8, subject=subject)
    assert_equal(got, eager, 1e-12)
    assert taken and all(taken)


@pytest.mark.parametrize("config", [GELU, GATED], ids=["gelu", "gated"])
def test_a_layer_is_its_eager_form(config: ModelConfig, taken: list[bool]):
    """To rounding in float64; in bfloat16 no further from it than the eager layer and one rounding of the largest value."""
    eager = replace(config, compile="off")
    assert max(map(error, gradients(layer_of(config)), gradients(layer_of(eager)))) < 1e-12
    truth = gradients(layer_of(eager).bfloat16().double())
    for stream in (torch.bfloat16, torch.float32):  # the latter with --fp32-residual-connection
        near, got = (gradients(layer_of(one).bfloat16(), stream) for one in (eager, config))
        assert [x.dtype for x in got] == [x.dtype for x in near]
        assert all(error(mine, true) <= error(other, true) + 2**-8 for other, mine, true in zip(near, got, truth))
    assert taken == [True] * 3


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


# ---------------------------------------------------------------- what stands in the way


class OwnMLP(ParallelMLP):
    """A script's."""


def test_a_layer_in_parts_says_why():
    recomputes = replace(GELU, recompute_granularity="selective", recompute_modules=["mlp", "layernorm"])
    own = layer_of()
    own.mlp = OwnMLP(
        GELU, 0, LayerContext(TensorParallel(Axis("tp", (0,), 0), dtype=torch.float64), SampleDropoutKeys(1))
    )
    own.compiled_layer = WholeLayerPrograms(own, GELU, TensorParallel(Axis("tp", (0,), 0)))
    found = {
        "nothing": layer_of(),
        "--recompute-modules mlp layernorm recomputes what lies inside a program": layer_of(recomputes),
        "this CPU widens products in float64, block by block": layer_of(matmul_modes=MatmulModes.all("widened")),
        "OwnMLP is the script's own, in the place of ParallelMLP": own,
    }
    for why, layer in found.items():
        said = f"--compile layers: 1 of 1 layers run as with regions, since {why}"
        assert whole_layer_fallback_lines([layer]) == ([] if why == "nothing" else [said])
    assert whole_layer_fallback_lines([layer_of(replace(GELU, compile="regions"))]) == []


def test_tensor_parallel_layers_stay_in_parts():
    def lines(mesh: Mesh) -> list[str]:
        chunks, _, _ = build_chunks(mesh, GELU, Layout(tp=2, sp=True))
        return whole_layer_fallback_lines(chunks.values())

    why = "the collectives of 2 tensor-parallel ranks lie inside a layer"
    assert run_ranks({"tp": 2}, lines) == [[f"--compile layers: 2 of 2 layers run as with regions, since {why}"]] * 2


def test_hooks_and_replaced_parts_are_called(taken: list[bool]):
    """A program calls no part; so a layer of which a script watches or replaces one, also later, runs in parts."""
    layer, seen = layer_of(), []
    first = gradients(layer)
    handle = layer.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    watched = gradients(layer)
    handle.remove()
    layer.mlp.linear_fc2.forward = lambda y, own=layer.mlp.linear_fc2.forward: own(y * 0)
    replaced = gradients(layer)
    other = layer_of()
    other.mlp.activation = lambda x, bias: (x + bias).relu()
    replaced_later = gradients(other)
    assert taken == [True, False, False, False] and seen == ["mlp"]
    assert max(map(error, watched, first)) < 1e-12
    assert min(error(found[0], first[0]) for found in (replaced, replaced_later)) > 1e-4


def test_each_dropout_has_its_probability(taken: list[bool]):
    layers = [layer_of(replace(GELU, compile=how)) for how in ("off", "layers")]
    for layer in layers:
        layer.attention_dropout.probability = 0.5
        layer.mlp_dropout.probability = 0.0
    assert max(map(error, *map(gradients, layers))) < 1e-12 and taken == [True]


@pytest.mark.full
def test_a_run_says_what_is_left_in_parts(said):
    selective = "--recompute-granularity selective --recompute-modules mlp"
    lines = said(f"--compile layers --train-iters 1 {selective}").splitlines()
    why = "--recompute-modules mlp recomputes what lies inside a program"
    told = [line.strip() for line in lines if line.strip().startswith("--compile layers: ") and "regions" in line]
    assert len(told) == 1 and told[0].endswith(f"layers run as with regions, since {why}")


# ---------------------------------------------------------------- memory


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", ["", "--world-size 4 --rank 1 --bf16 --zero-stage 3 --swiglu --normalization RMSNorm"]
)
def test_memory_with_layers_is_predicted_and_less(flags: str):
    """What a program saves is declared. With regions as little is kept: their products make the same inputs again."""
    got, parts, eager = (measure(f"{SMALL} {flags} --compile {how}".split()) for how in ("layers", "regions", "off"))
    check(got.predicted, got.bytes, got.total, got.in_file)
    assert got.bytes["activations"] <= parts.bytes["activations"] < 0.8 * eager.bytes["activations"]
