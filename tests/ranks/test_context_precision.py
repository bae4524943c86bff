"""Context parallelism in half precision, and with compiled regions: as near to one process as these can be."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_equal, run

from megatron.core import compiler
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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_as_near_to_float32_as_that_of_one_process(half: str, kind: str, ranks: int):
    """Ranks sum blocks in another order and round other numbers: up to half again as far. Loss: a rounding of its value."""
    model, exact = replace(WITHOUT_DROPOUT, **{half: True}), one_step(WITHOUT_DROPOUT)
    alone, shared = one_step(model), one_step(model, Layout(cp=ranks, cp_types=(kind,), cp_heads=2))
    assert 0 < distance(shared, exact) < 1.5 * distance(alone, exact)
    assert shared.losses == pytest.approx(exact.losses, rel=HALVES[half])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["p2p", *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
@pytest.mark.parametrize(
    "model", [pytest.param(GPT2, marks=pytest.mark.full, id="gpt2"), pytest.param(LLAMA, id="llama")]
)
def test_compiled_regions_give_one_eager_process_in_float64(
    model: ModelConfig, kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """Dropout, learned positions and biases, or grouped heads and rotary positions, traced as for a compiler."""
    monkeypatch.setattr(compiler, "BACKEND", "eager")
    model, layout = replace(model, num_layers=2), Layout(cp=ranks, cp_types=(kind,), cp_heads=2)
    assert_equal(one_step(replace(model, compile="regions"), layout), one_step(model), 1e-10)
