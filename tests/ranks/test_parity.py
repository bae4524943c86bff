"""Any layout, same numbers: a run spread over ranks equals the run of one process, in float64, with ranks as threads.

The tolerance, 1e-10 of a tensor's largest value, leaves room for another order of summation over three steps (about 1e-15
each, amplified by Adam's division) and for nothing else. Tests marked `full` are the whole product; the others
cover every pair of choices.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_equal, run

TOLERANCE = 1e-10
MODELS = {
    "gpt2-tied": GPT2,
    "gpt2-untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "llama-tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "llama-untied": LLAMA,
}
MICROBATCHES = {1: (1, 2, 3), 2: (1, 2, 3), 4: (3, 4, 6)}  # by pipeline size: fewer, as many, more


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout())


def all_layouts() -> list[Layout]:
    return [
        Layout(tp=tp, sp=sp, pp=pp, dp=dp, m=m)
        for (tp, sp), pp, dp in product(((1, False), (2, False), (2, True), (4, False), (4, True)), (1, 2, 4), (1, 2))
        for m in MICROBATCHES[pp]
    ]


def pairs_of(layout: Layout, model: str) -> set[tuple]:
    """The pairs of choices that a case covers."""
    fewer_or_more = MICROBATCHES[layout.pp].index(layout.m)
    choices = list(enumerate((layout.tp, layout.sp, layout.pp, layout.dp, fewer_or_more, model)))
    return {(a, b) for i, a in enumerate(choices) for b in choices[i + 1 :]}


def covering_cases() -> list[tuple[Layout, str]]:
    """A small set of cases in which every pair of choices occurs; greedy, cheapest first."""
    cases = sorted(product(all_layouts(), MODELS), key=lambda case: case[0].tp * case[0].pp * case[0].dp)
    missing = set().union(*(pairs_of(*case) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(*case) & missing) / (2 + case[0].tp * case[0].pp * case[0].dp))
        chosen.append(best)
        missing -= pairs_of(*best)
    return chosen


@pytest.mark.parametrize(("layout", "model"), covering_cases(), ids=str)
def test_layout_equals_one_process(layout: Layout, model: str):
    assert_equal(run(MODELS[model], layout), one_process(model), TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", all_layouts(), ids=str)
def test_every_layout_equals_one_process(layout: Layout, model: str):
    assert_equal(run(MODELS[model], layout), one_process(model), TOLERANCE)


@pytest.mark.parametrize("model", ["gpt2-tied", "llama-untied"])
def test_no_wait_is_missing(model: str):
    """Groups that complete a call only at its wait, and poison its result until then, change nothing."""
    layout = Layout(tp=2, sp=True, pp=2, dp=2, m=3, delayed=True)
    assert_equal(run(MODELS[model], layout), one_process(model), TOLERANCE)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2), (4, 1)])
def test_outer_and_inner_data_parallel_ranks_are_one_axis(sizes: tuple[int, int]):
    from local_ranks import run_ranks

    outer, inner = sizes
    meshes = run_ranks({"dp_outer": outer, "dp_inner": inner, "tp": 2}, lambda mesh: mesh)
    assert [mesh["dp"].ranks for mesh in meshes[:2]] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert meshes[0]["dp_inner"].ranks == tuple(range(0, 2 * inner, 2))
    assert [mesh["dp_outer"].rank * inner + mesh["dp_inner"].rank for mesh in meshes] == [
        mesh["dp"].rank for mesh in meshes
    ]


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-dp"])
def test_rank_order_changes_no_number(order: str):
    from functools import partial

    from local_ranks import run_ranks
    from tiny_run import OptimizerConfig, put_together, train_rank

    layout = Layout(tp=2, pp=2, dp=2, m=2)
    work = partial(
        train_rank, config=GPT2, layout=layout, steps=1, global_batch=24, optimizer=OptimizerConfig(clip_grad=0.5)
    )
    ranks = run_ranks({"tp": 2, "pp": 2, "dp": 2}, work, order=order)
    whole = put_together([rank["grads"][0] for rank in ranks])
    for name, expected in one_process("gpt2-tied").grads[0].items():
        assert (whole[name] - expected).abs().max() <= TOLERANCE * expected.abs().max()
