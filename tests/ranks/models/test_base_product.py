"""The whole product of TP x SP x PP x DP x microbatches equals one process, one of four models a layout, in turn.

The covering sets of `test_parity.py` reach further, into every dimension, and meet each size of an axis with each model; this leaves no
layout of the basic axes out, over the two steps after which moments and weights are a run's.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from tiny_run import TINY_GPT2, TINY_LLAMA, Layout, Outcome, assert_equal, run

from megatron.core.transformer.model_config import ModelConfig

LLAMA = replace(TINY_LLAMA, num_query_groups=4)  # a key head for each of four tensor-parallel ranks
MODELS = {
    "gpt2-tied": TINY_GPT2,
    "gpt2-untied": replace(TINY_GPT2, untie_embeddings_and_output_weights=True),
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
def one_process(model: ModelConfig, global_batch: int) -> Outcome:
    return run(model, Layout(), steps=2, global_batch=global_batch)


CASES = [(layout, list(MODELS)[i % len(MODELS)]) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.full
@pytest.mark.parametrize("layout, model", CASES, ids=str)
def test_every_layout_equals_one_process(layout: Layout, model: str):
    global_batch = 12 if 12 % (layout.dp * layout.m) == 0 else 24
    config = replace(
        MODELS[model], num_layers=max(2, layout.pp)
    )  # more layers in a stage are the covering sets' to show
    got = run(config, layout, steps=2, global_batch=global_batch)
    assert_equal(got, one_process(config, global_batch), 1e-10)
