"""The whole product of TP x SP x PP x DP x microbatches x tied weights x style equals one process, case by case.

The covering sets of `test_parity.py` reach further, into every dimension; this leaves nothing out of the basic ones.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_equal, run

MODELS = {
    "gpt2-tied": GPT2,
    "gpt2-untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "llama-tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "llama-untied": LLAMA,
}
MICROBATCHES = {1: (1, 2, 3), 2: (1, 2, 3), 4: (3, 4, 6)}  # by pipeline size: fewer, as many, more
LAYOUTS = [
    Layout(tp=tp, sp=sp, pp=pp, dp=dp, m=m)
    for (tp, sp), pp, dp in product(((1, False), (2, False), (2, True), (4, False), (4, True)), (1, 2, 4), (1, 2))
    for m in MICROBATCHES[pp]
]


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout())


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_one_process(layout: Layout, model: str):
    assert_equal(run(MODELS[model], layout), one_process(model), 1e-10)
