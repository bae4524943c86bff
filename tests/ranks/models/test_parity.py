"""Any layout, same numbers: a run spread over ranks equals the run of one process, in float64, with ranks as threads.

And for just the traffic that the algebra says: recomputation, interleaving, parts of copies, split backwards, shared heads and
buckets included, each rank's calls are those of `traffic.py`.

The tolerance, 1e-10 of a tensor's largest value, leaves room for another order of summation over two steps (about 1e-15
each, amplified by Adam's division) and for nothing else. The fast set has every choice of layout_space, the full one some triples of them
too; with `sweep` there is every pair, and every triple that fits on 16 ranks; tests/campaigns/parity_sweep.py runs the product.
"""

from functools import cache
from itertools import combinations

import pytest
from layout_space import (
    COVERED_RANKS,
    DIMENSIONS,
    NOT_COVERED,
    Case,
    all_cases,
    cases_of_each_choice,
    combinations_of,
    count_cases,
    covering_cases,
    numbers_of,
)
from parity_cases import TOLERANCE, assert_as_one_process
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_equal, run

MODELS = {"gpt2-tied": GPT2, "llama-untied": LLAMA}
PAIRS, FAST = covering_cases(2), cases_of_each_choice()
TRIPLES = covering_cases(3)[len(PAIRS) :]


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.sweep) for case in PAIRS], ids=str
)
def test_every_pair_of_choices_equals_one_process(case: Case):
    assert_as_one_process(case)


@pytest.mark.full
@pytest.mark.parametrize("case", TRIPLES, ids=str)
def test_every_triple_of_choices_equals_one_process(case: Case):
    assert_as_one_process(case)


@pytest.mark.parametrize("strength", [2, 3])
def test_the_cases_cover_every_combination_that_can_be(strength: int):
    covered = {c for case in covering_cases(strength) for c in combinations(numbers_of(case.choices), strength)}
    assert covered == combinations_of(strength) if strength == 2 else covered > combinations_of(strength)
    assert len(covering_cases(strength)) < 250
    assert max(case.ranks for case in covering_cases(strength)) == COVERED_RANKS


@pytest.mark.full
def test_combinations_that_can_be_are_those_of_the_product():
    """Counted from the layouts' parts; here from cases on two ranks, two choices at a time."""
    cases = list(all_cases(max_ranks=2))
    assert len(cases) == count_cases(2)
    assert len({str(case) for case in cases}) == len(cases), "two cases have one name"
    cases = [case for case in cases if case.schedule not in NOT_COVERED]
    found = {c for case in cases[::7] for c in combinations(numbers_of(case.choices), 2)}
    assert found == combinations_of(2, 2)
    assert {name for name, _ in DIMENSIONS.items()} == set(Case.__dataclass_fields__)


@pytest.mark.full  # the pairs above have calls that complete late, too
@pytest.mark.parametrize("model", ["gpt2-tied", "llama-untied"])
def test_no_wait_is_missing(model: str):
    """Groups that complete a call only at its wait, and poison its result until then, change nothing."""
    layout = Layout(tp=2, sp=True, pp=2, dp=2, m=3, delayed=True)
    assert_equal(run(MODELS[model], layout), one_process(model), TOLERANCE)


@pytest.mark.full
def test_no_wait_is_missing_where_copies_travel_in_parts():
    layout = Layout(tp=2, pp=2, m=3, schedule="zb-h1", delayed=True)
    assert_equal(run(MODELS["gpt2-tied"], layout), one_process("gpt2-tied"), TOLERANCE)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2), (4, 1)])
def test_outer_and_inner_data_parallel_ranks_are_one_axis(sizes: tuple[int, int]):
    from local_ranks import run_ranks

    outer, inner = sizes
    meshes = run_ranks({"dp": outer * inner, "replicas": outer, "tp": 2}, lambda mesh: mesh)
    assert [mesh["dp"].ranks for mesh in meshes[:2]] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert meshes[0]["dp_inner"].ranks == tuple(range(0, 2 * inner, 2))
    assert [mesh["dp_outer"].rank * inner + mesh["dp_inner"].rank for mesh in meshes] == [
        mesh["dp"].rank for mesh in meshes
    ]


@pytest.mark.full
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
