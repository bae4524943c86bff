"""Pipeline schedules against exact lists, closed forms and the drawings in their documentation."""

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import indent

import pytest
from said import tells
from schedules import CHUNKED, COSTS, FLAT, assert_lists, parse, refusal, sizes_of, training_schedules

from megatron.core import pipeline_parallel
from megatron.core.parallel.stage_to_rank import loop, v_shape
from megatron.core.pipeline_parallel.schedule import actions as schedule_module
from megatron.core.pipeline_parallel.schedule.actions import Action, Op
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    split_and_defer_weight_grads,
    zb_h1,
    zb_interleaved,
)
from megatron.core.pipeline_parallel.schedule.plot import plot_text
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES, default_chunks
from megatron.core.pipeline_parallel.schedule.simulate import (
    bubble,
    bubble_in_theory,
    make_schedule,
    peak_live,
    peak_live_in_theory,
)
from megatron.core.pipeline_parallel.schedule.zb_v import zb_v

# ---- generators: exact lists


def test_actions_print_as_op_stage_microbatch():
    assert f"{Action(Op.F, 3, 1)} {Action(Op.SEND_B, 12, 40)} {Action(Op.REDUCE, 2)}" == "F3.1 SEND_B12.40 REDUCE2"


def test_gpipe_lists():
    assert_lists(
        gpipe(2, 3),
        """
        F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
        F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
        """,
    )


def test_one_f_one_b_lists():
    assert_lists(
        one_f_one_b(3, 4),
        """
        F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
        F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
        F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3
        """,
    )


def test_one_f_one_b_lists_with_fewer_microbatches_than_ranks():
    assert_lists(
        one_f_one_b(4, 2),
        """
        F0.0 F0.1 B0.0 B0.1
        F1.0 F1.1 B1.0 B1.1
        F2.0 F2.1 B2.0 B2.1
        F3.0 B3.0 F3.1 B3.1
        """,
    )


def test_one_rank_alternates_forward_and_backward():
    assert_lists(one_f_one_b(1, 3), "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2")


def test_interleaved_lists():
    assert_lists(
        interleaved(2, 4, 2),
        """
        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
        """,
    )


def test_interleaved_lists_on_one_rank():
    assert_lists(interleaved(1, 2, 2), "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1")


def test_zb_h1_lists():
    assert_lists(
        zb_h1(3, 4),
        """
        F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
        F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3
        F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3
        """,
    )


def test_deferring_works_with_chunks():
    assert_lists(
        split_and_defer_weight_grads(interleaved(1, 2, 2), delay=lambda rank: 2),
        "F0.0 F1.0 I1.0 F0.1 I0.0 F1.1 I1.1 W1.0 I0.1 W0.0 W1.1 W0.1",
    )


def test_forward_only_lists():
    assert_lists(
        forward_only(2, 3, 2),
        """
        F0.0 F0.1 F2.0 F2.1 F0.2 F2.2
        F1.0 F1.1 F3.0 F3.1 F1.2 F3.2
        """,
    )


# ---- generators: what holds for all of them


@pytest.mark.full
def test_every_compute_is_done_once_where_its_stage_lives():
    for p, m, v, schedule in training_schedules() + [(*sizes, forward_only(*sizes)) for sizes in CHUNKED]:
        ops = {action.op for actions in schedule for action in actions}
        assert ops in ({Op.F}, {Op.F, Op.B}, {Op.F, Op.I, Op.W})
        done = Counter((action, rank) for rank, actions in enumerate(schedule) for action in actions)
        ranks = (v_shape(p) if v == 2 and schedule == zb_v(p, m) else loop(p, v)).ranks
        expected = {(Action(op, s, i), ranks[s]): 1 for op in ops for s in range(p * v) for i in range(m)}
        assert done == expected, (p, m, v, schedule)


def test_deferring_keeps_the_order_of_all_but_the_weight_gradients():
    for p, m, v in CHUNKED:
        for unsplit in (interleaved(p, m, v), one_f_one_b(p, m)):
            for delay in (0, 1, m * v):
                split = split_and_defer_weight_grads(unsplit, delay=lambda rank, delay=delay: delay)
                assert [
                    [a._replace(op=Op.B) if a.op is Op.I else a for a in row if a.op is not Op.W] for row in split
                ] == unsplit


def test_weight_gradients_stay_in_the_order_of_their_input_gradients_and_lag_by_the_delay():
    for p, m in FLAT:
        for rank, actions in enumerate(zb_h1(p, m)):
            assert [a[1:] for a in actions if a.op is Op.W] == [a[1:] for a in actions if a.op is Op.I]
            behind = list(itertools.accumulate((a.op is Op.I) - (a.op is Op.W) for a in actions))
            assert max(behind) == min(rank + 1, m) and behind[-1] == 0


def test_drawings_in_the_documentation_are_current():
    split = {Op.F: 1, Op.I: 1, Op.W: 1}
    assert indent(plot_text(one_f_one_b(3, 4)), " " * 4) in schedule_module.__doc__
    for make in (zb_h1, zb_v):
        assert indent(plot_text(make(3, 4), split), " " * 8) in make.__doc__


def test_interleaved_with_one_stage_per_rank_has_the_order_of_one_f_one_b_on_the_last_rank():
    for p, m in FLAT:
        if m % p == 0:
            assert interleaved(p, m, 1)[-1] == one_f_one_b(p, m)[-1]


def test_forward_only_is_training_without_its_backwards():
    for p, m, v in CHUNKED:
        only = [[action for action in actions if action.op is Op.F] for actions in interleaved(p, m, v)]
        assert forward_only(p, m, v) == only
    for p, m in FLAT:
        assert forward_only(p, m) == [[action for action in actions if action.op is Op.F] for actions in gpipe(p, m)]


# ---- closed forms of arXiv:2104.04473, section 2.2, and arXiv:2401.10241


@pytest.mark.full
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_gpipe_and_one_f_one_b_bubble_matches_theory(cost):
    for p, m in FLAT:
        assert bubble(gpipe(p, m), cost) == pytest.approx((p - 1) / m), (p, m)
        assert bubble(one_f_one_b(p, m), cost) == pytest.approx((p - 1) / m), (p, m)


@pytest.mark.full
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_zb_h1_bubble_matches_theory(cost):
    """(p - 1)(tF + tI - tW), as in table 1 of arXiv:2401.10241, where m >= p and W is the cheapest; exact for the rest."""
    f, i, w = (cost[op] for op in (Op.F, Op.I, Op.W))
    for p, m in FLAT:
        idle = bubble(zb_h1(p, m), cost) * m * (f + i + w)
        assert idle == pytest.approx((p - 1) * (f + i) - (min(p, m) - 1) * min(f, i, w)), (p, m)
        if m >= p and w <= min(f, i):
            assert idle == pytest.approx((p - 1) * (f + i - w)), (p, m)


@pytest.mark.full
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_bubble_and_memory_by_name_match_their_closed_forms(cost):
    for name, make in SCHEDULES.items():
        for p, m, v in sizes_of(name):
            schedule, theory = make(p, m, v), bubble_in_theory(name, p, m, v, cost)
            if theory is not None:
                assert bubble(schedule, cost) == pytest.approx(theory, abs=1e-12), (name, p, m, v)
            else:
                assert name == "zb-v" and (m < p or len({cost[op] for op in (Op.F, Op.I, Op.W)}) > 1)
            assert peak_live(schedule) == peak_live_in_theory(name, p, m, v), (name, p, m, v)
    assert bubble_in_theory("1f1b", 4, 8, transfer=0.5) is None


@pytest.mark.full
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_zb_h1_is_never_slower_than_one_f_one_b(cost):
    for p, m in FLAT:
        assert bubble(zb_h1(p, m), cost) <= bubble(one_f_one_b(p, m), cost) + 1e-12


@pytest.mark.full
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_interleaved_bubble_matches_theory(cost):
    for p, m, v in CHUNKED:
        assert bubble(interleaved(p, m, v), cost) == pytest.approx((p - 1) / (v * m)), (p, m, v)


def test_forward_only_bubble_matches_theory():
    for p, m in FLAT:
        assert bubble(forward_only(p, m)) == pytest.approx((p - 1) / m), (p, m)
    for p, m, v in CHUNKED:
        assert bubble(forward_only(p, m, v)) == pytest.approx((p - 1) / (v * m)), (p, m, v)


def test_peak_live_activations_match_theory():
    for p, m in FLAT:
        assert peak_live(gpipe(p, m)) == [m] * p, (p, m)
        assert peak_live(one_f_one_b(p, m)) == [min(p - r, m) for r in range(p)], (p, m)
        assert peak_live(zb_h1(p, m)) == [min(p, m)] * p, (p, m)
        assert max(peak_live(zb_h1(p, m))) == max(peak_live(one_f_one_b(p, m)))
    for p, m, v in CHUNKED:
        expected = [min(2 * (p - r - 1) + (v - 1) * p + 1, v * m) for r in range(p)]
        assert peak_live(interleaved(p, m, v)) == expected, (p, m, v)


IN_NUMBERS = [
    (gpipe(4, 8), 3 / 8, [8, 8, 8, 8]),
    (one_f_one_b(4, 8), 3 / 8, [4, 3, 2, 1]),
    (one_f_one_b(4, 2), 3 / 2, [2, 2, 2, 1]),
    (interleaved(4, 8, 2), 3 / 16, [11, 9, 7, 5]),  # halves of a rank's layers
    (interleaved(4, 4, 2), 3 / 8, [8, 8, 7, 5]),
    (one_f_one_b(1, 5), 0, [1]),
    (zb_h1(4, 8), 1 / 8, [4, 4, 4, 4]),  # a third of the bubble of 1F1B, the memory of its rank 0
    (zb_h1(4, 2), 5 / 6, [2, 2, 2, 2]),
    (zb_h1(1, 5), 0, [1]),
]


@pytest.mark.parametrize("schedule, bubble_over_ideal, live", IN_NUMBERS)
def test_bubble_and_memory_in_numbers(schedule, bubble_over_ideal, live):
    assert bubble(schedule) == pytest.approx(bubble_over_ideal)
    assert peak_live(schedule) == live


# ---- refusals


def test_interleaved_refuses_a_rest_of_microbatches():
    assert tells(refusal(interleaved, 4, 6, 2), "num_microbatches 6 4 1f1b --global-batch-size")
    assert tells(refusal(zb_interleaved, 4, 6, 2), "zb-interleaved: num_microbatches 6 4 zb-v --global-batch-size")


def test_schedules_are_made_by_name_with_one_calling_convention():
    assert list(SCHEDULES) == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-interleaved", "zb-v"]
    made = {name: make(4, 8, default_chunks(name)) for name, make in SCHEDULES.items()}
    expected = [gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 1), zb_h1(4, 8), zb_interleaved(4, 8, 1), zb_v(4, 8)]
    assert list(made.values()) == expected
    assert SCHEDULES["interleaved"](4, 8, 2) == interleaved(4, 8, 2)
    assert default_chunks("zb-v") == 2 and default_chunks("no schedule") == default_chunks(None) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_schedules_of_one_chunk_refuse_more(name):
    assert tells(refusal(SCHEDULES[name], 4, 8, 2), f"{name} 2 --num-layers-per-virtual-pipeline-stage")
    assert tells(refusal(SCHEDULES[name], 4, 8, 0), f"{name} 0 1")


def test_only_compute_has_dependencies():
    with pytest.raises(AssertionError, match=r"SEND_F0\.0"):
        schedule_module.dependencies(Action(Op.SEND_F, 0, 0), num_stages=2)


def test_sizes_below_one_are_refused_together():
    assert tells(
        refusal(interleaved, 0, 0, 0),
        "0 1 --pipeline-model-parallel-size num_microbatches --global-batch-size --num-layers-per-virtual-pipeline-stage num_layers",
    )
    assert tells(refusal(gpipe, 0, 1), "gpipe 0 --pipeline-model-parallel-size")
    assert refusal(one_f_one_b, 1, 0).startswith("1f1b: num_microbatches (0)")
    assert refusal(forward_only, 1, 0).startswith("forward_only: num_microbatches (0)")


# ---- what is refused


def one_stage_moves(p: int, m: int, v: int):
    return one_f_one_b(p, m)[:: 1 if m == 2 * p else -1]


def one_action_moves(p: int, m: int, v: int):
    first, second = one_f_one_b(p, m)
    return [[*first, second.pop()], second]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (one_action_moves, "rank 0 has B1.7 stage is on rank 1"),
        (lambda p, m, v: parse("F0.0 F1.0 F2.0 \n F3.0"), "rank 0 has stages [0, 1], 1 of 2 rank 1 []"),
        (lambda p, m, v: [], "0 ranks 2"),
        (lambda p, m, v: None, "NoneType a list of Actions"),
        (lambda p, m, v: [[1], [2]], "rank 0 1 int a list of Actions"),
        (one_stage_moves, "[1, 0] with 8 microbatches, on [0, 1] with 4"),
    ],
)
def test_a_schedule_that_places_no_stages_is_refused_by_name(monkeypatch, make, said):
    monkeypatch.setitem(SCHEDULES, "mine", make)
    with pytest.raises(ValueError, match=r"^mine: ") as error:
        make_schedule("mine", 2, 8)
    assert tells(error.value, f"{said} SCHEDULES['mine']")


# ---- the package


def test_every_public_name_is_found_and_others_are_refused():
    assert pipeline_parallel.gpipe is gpipe
    for name in dir(pipeline_parallel):
        assert getattr(pipeline_parallel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'zigzag'"):
        pipeline_parallel.zigzag  # noqa: B018


def test_the_pure_files_load_without_torch():
    """A process of its own, because other tests of this one load torch."""
    code = (
        "import sys; from megatron.core.pipeline_parallel import add_reduce, bubble, interleaved, loop; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)
