"""Context parallelism in half precision, and with compiled regions: as near to one process as these can be."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_equal, run

from megatron.core.context_parallel.block_attention import LazySum
from megatron.core.ops.compile import compiled_region
from megatron.core.transformer.model_config import ModelConfig

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
HALVES = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # name of the flag: rounding, relative
ONE = Layout()
WITHOUT_DROPOUT = replace(LLAMA, num_layers=2, fp64=False)


@cache
def one_step(model: ModelConfig, layout: Layout = ONE) -> Outcome:
    return run(model, layout, steps=1, global_batch=4)


def distance(got: Outcome, expected: Outcome) -> float:
    """Of the gradients of all parameters, as a share of their norm."""
    ((mine,), (theirs,)) = got.grads, expected.grads
    parts = [((mine[name] - x).double().norm(), x.double().norm()) for name, x in theirs.items()]
    off, whole = (torch.stack(norms).norm().item() for norms in zip(*parts))
    return off / whole


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_as_near_to_float32_as_that_of_one_process(half: str, kind: str, ranks: int):
    """Ranks sum blocks in another order and round other numbers: up to half again as far. Loss: a rounding of its value."""
    model, exact = replace(WITHOUT_DROPOUT, **{half: True}), one_step(WITHOUT_DROPOUT)
    alone, shared = one_step(model), one_step(model, Layout(cp=ranks, cp_types=(kind,), cp_heads=2))
    assert 0 < distance(shared, exact) < 1.5 * distance(alone, exact)
    assert shared.losses == pytest.approx(exact.losses, rel=HALVES[half])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["p2p", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
@pytest.mark.parametrize(
    "model", [pytest.param(GPT2, marks=pytest.mark.full, id="gpt2"), pytest.param(LLAMA, id="llama")]
)
def test_compiled_regions_give_one_eager_process_in_float64(
    model: ModelConfig, kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """Dropout, learned positions and biases, or grouped heads and rotary positions, traced as for a compiler."""
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")
    model, layout = replace(model, num_layers=2), Layout(cp=ranks, cp_types=(kind,), cp_heads=2)
    assert_equal(one_step(replace(model, compile="regions"), layout), one_step(model), 1e-10)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_blocks_are_summed_in_float32_and_rounded_once(half: torch.dtype, blocks: int):
    """A ring's blocks of two ranks and of more: all of my rows first, then the last half of them."""
    draw = torch.Generator().manual_seed(blocks)
    rows = [slice(0, 8), *[slice(4, 8)] * (blocks - 1)]
    tensors = [torch.randn(2, 3, part.stop - part.start, 5, generator=draw).to(half) for part in rows]
    total, expected = LazySum(torch.empty(2, 3, 8, 5, dtype=half)), torch.zeros(2, 3, 8, 5)
    for part, x in zip(rows, tensors):
        expected[:, :, part] += x.float()
        total.add(part, x.clone())
    (got,) = total.rounded(half)
    assert torch.equal(got.transpose(1, 2), expected.to(half))
