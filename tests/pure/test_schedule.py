"""Pipeline schedules against closed forms, drawn tables and a transport whose sends block."""

import functools
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import indent

import pytest

from megatron.core import pipeline_parallel
from megatron.core.pipeline_parallel import schedule as schedule_module
from megatron.core.pipeline_parallel.lower import add_reduce, add_transfers, check_rendezvous, partner
from megatron.core.pipeline_parallel.schedule import Action, Op, forward_only, gpipe, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.simulate import bubble, peak_live, plot_text, show, simulate
from megatron.core.pipeline_parallel.stage import layers_of_stage, loop_placement, stages_of_rank

RANKS, MICROBATCHES, CHUNKS = range(1, 9), range(1, 17), range(1, 5)
FLAT = [(p, m) for p in RANKS for m in MICROBATCHES]
CHUNKED = [(p, m, v) for p, m in FLAT if m % p == 0 for v in CHUNKS]
COSTS = [{Op.F: f, Op.B: b} for f, b in ((1, 1), (1, 2), (3, 5), (2, 1))]


@functools.cache
def training_schedules():
    """Every (p, m, v, schedule) of the grid."""
    flat = [(p, m, 1, make(p, m)) for p, m in FLAT for make in (gpipe, one_f_one_b)]
    return flat + [(p, m, v, interleaved(p, m, v)) for p, m, v in CHUNKED]


def evaluation_schedules():
    return [(p, m, v, forward_only(p, m, v)) for p, m in FLAT for v in CHUNKS]


@functools.cache
def lowered_schedules():
    """The same with transfers and reductions; made once, since four tests read them."""
    return [
        (p, m, v, add_reduce(add_transfers(schedule, loop_placement(p)))) for p, m, v, schedule in training_schedules()
    ]


def parse(text):
    """One rank per line: "F0.0 SEND_F0.0" -> [[F0.0, SEND_F0.0]]."""
    rows = []
    for line in text.strip().splitlines():
        words = [re.fullmatch(r"([A-Z_]+)(\d+)(?:\.(\d+))?", word).groups() for word in line.split()]
        rows.append([Action(Op[op], int(stage), None if i is None else int(i)) for op, stage, i in words])
    return rows


def assert_lists(schedule, table):
    assert [" ".join(map(str, row)) for row in schedule] == [
        " ".join(line.split()) for line in table.strip().splitlines()
    ]


def refusal(function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


# ---- stages


def test_loop_placement_deals_stages_round():
    assert [loop_placement(3)(stage) for stage in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [stages_of_rank(loop_placement(2), 6, rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_layers_are_split_evenly_and_in_order():
    assert [list(layers_of_stage(8, 4, stage)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(layers_of_stage(3, 1, 0)) == [0, 1, 2]


@pytest.mark.parametrize("num_layers, num_stages", [(10, 4), (0, 4)])
def test_uneven_layers_are_refused(num_layers, num_stages):
    assert refusal(layers_of_stage, num_layers, num_stages, 0) == (
        f"pipeline: the number of layers ({num_layers}) must be a multiple of the number of stages ({num_stages}: "
        "pipeline ranks times chunks per rank); change --num-layers, --pipeline-model-parallel-size or "
        "--num-layers-per-virtual-pipeline-stage"
    )


def test_a_stage_beyond_the_last_is_our_error():
    with pytest.raises(AssertionError, match=r"stage 4 is outside 0\.\.3"):
        layers_of_stage(8, 4, 4)


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


def test_forward_only_lists():
    assert_lists(
        forward_only(2, 3, 2),
        """
        F0.0 F0.1 F2.0 F2.1 F0.2 F2.2
        F1.0 F1.1 F3.0 F3.1 F1.2 F3.2
        """,
    )


# ---- generators: what holds for all of them


def test_every_forward_and_backward_is_done_once_where_its_stage_lives():
    for p, m, v, schedule in training_schedules():
        done = Counter((action, rank) for rank, actions in enumerate(schedule) for action in actions)
        assert done == {(Action(op, s, i), s % p): 1 for op in (Op.F, Op.B) for s in range(p * v) for i in range(m)}, (
            p,
            m,
            v,
            schedule,
        )
    for p, m, v, schedule in evaluation_schedules():
        done = Counter((action, rank) for rank, actions in enumerate(schedule) for action in actions)
        assert done == {(Action(Op.F, s, i), s % p): 1 for s in range(p * v) for i in range(m)}, (p, m, v, schedule)


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


# ---- closed forms of arXiv:2104.04473, section 2.2


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_gpipe_and_one_f_one_b_bubble_matches_theory(cost):
    for p, m in FLAT:
        assert bubble(gpipe(p, m), cost) == pytest.approx((p - 1) / m), (p, m)
        assert bubble(one_f_one_b(p, m), cost) == pytest.approx((p - 1) / m), (p, m)


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_interleaved_bubble_matches_theory(cost):
    for p, m, v in CHUNKED:
        assert bubble(interleaved(p, m, v), cost) == pytest.approx((p - 1) / (v * m)), (p, m, v)


def test_forward_only_bubble_matches_theory():
    for p, m in FLAT:
        assert bubble(forward_only(p, m)) == pytest.approx((p - 1) / m), (p, m)
    for p, m, v in CHUNKED:
        assert bubble(forward_only(p, m, v)) == pytest.approx((p - 1) / (v * m)), (p, m, v)


def test_gpipe_pays_each_transfer_once_per_boundary_and_direction():
    for p, m in FLAT:
        end = simulate(gpipe(p, m), {Op.F: 3, Op.B: 5}, transfer=0.5).end
        assert max(end.values()) == (m + p - 1) * (3 + 5) + 2 * (p - 1) * 0.5, (p, m)


def test_peak_live_activations_match_theory():
    for p, m in FLAT:
        assert peak_live(gpipe(p, m)) == [m] * p, (p, m)
        assert peak_live(one_f_one_b(p, m)) == [min(p - r, m) for r in range(p)], (p, m)
    for p, m, v in CHUNKED:
        expected = [min(2 * (p - r - 1) + (v - 1) * p + 1, v * m) for r in range(p)]
        assert peak_live(interleaved(p, m, v)) == expected, (p, m, v)


# fmt: off
IN_NUMBERS = [
    (gpipe(4, 8),           3 / 8,  [8, 8, 8, 8]),
    (one_f_one_b(4, 8),     3 / 8,  [4, 3, 2, 1]),
    (one_f_one_b(4, 2),     3 / 2,  [2, 2, 2, 1]),
    (interleaved(4, 8, 2),  3 / 16, [11, 9, 7, 5]),  # halves of a rank's layers
    (interleaved(4, 4, 2),  3 / 8,  [8, 8, 7, 5]),
    (one_f_one_b(1, 5),     0,      [1]),
]
# fmt: on


@pytest.mark.parametrize("schedule, bubble_over_ideal, live", IN_NUMBERS)
def test_bubble_and_memory_in_numbers(schedule, bubble_over_ideal, live):
    assert bubble(schedule) == pytest.approx(bubble_over_ideal)
    assert peak_live(schedule) == live


# ---- the time line


def test_simulated_times():
    start, end = simulate(one_f_one_b(2, 1), {Op.F: 1, Op.B: 2}, transfer=0.25)
    assert [(str(action), start[action], end[action]) for action in sorted(start, key=start.get)] == [
        ("F0.0", 0, 1),
        ("F1.0", 1.25, 2.25),
        ("B1.0", 2.25, 4.25),
        ("B0.0", 4.5, 6.5),
    ]


def test_plot_draws_one_cell_per_unit_of_time():
    # fmt: off
    assert plot_text(one_f_one_b(2, 3)).splitlines() == [
        "rank 0 |F0F1    B0--F2B1--  B2--|",
        "rank 1 |  F0B0--F1B1--F2B2--    |",
    ]
    assert plot_text(interleaved(2, 2, 2)).splitlines() == [
        "rank 0 |F0F1f0f1    b0--  b1--B0--B1--|",
        "rank 1 |  F0F1f0b0--f1b1--B0--B1--    |",
    ]
    assert plot_text(forward_only(2, 11), {Op.F: 0.3}).splitlines() == [
        "rank 0 |F0-F1-F2-F3-F4-F5-F6-F7-F8-F9-F10   |",
        "rank 1 |   F0-F1-F2-F3-F4-F5-F6-F7-F8-F9-F10|",
    ]
    # fmt: on


def test_plot_in_the_documentation_is_current():
    assert indent(plot_text(one_f_one_b(3, 4)), "    ") in schedule_module.__doc__


# ---- lowering


def test_lowered_one_f_one_b_lists():
    assert_lists(
        add_reduce(add_transfers(one_f_one_b(2, 2), loop_placement(2))),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0
        RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1 REDUCE1
        """,
    )


def test_lowered_interleaved_lists():
    assert_lists(
        add_reduce(add_transfers(interleaved(2, 2, 2), loop_placement(2))),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_F2.0 F2.0 RECV_F2.1 SEND_F2.0 F2.1 SEND_F2.1 \
        RECV_B2.0 B2.0 SEND_B2.0 RECV_B2.1 B2.1 SEND_B2.1 REDUCE2 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0
        RECV_F1.0 F1.0 RECV_F1.1 SEND_F1.0 F1.1 SEND_F1.1 RECV_F3.0 F3.0 \
        RECV_F3.1 B3.0 SEND_B3.0 F3.1 B3.1 RECV_B1.0 SEND_B3.1 REDUCE3 B1.0 RECV_B1.1 SEND_B1.0 B1.1 SEND_B1.1 REDUCE1
        """,
    )


def test_lowered_forward_only_lists():
    assert_lists(
        add_reduce(add_transfers(forward_only(2, 2), loop_placement(2))),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1
        RECV_F1.0 F1.0 RECV_F1.1 F1.1
        """,
    )


def test_stages_on_the_same_rank_need_no_transfer():
    assert_lists(
        add_reduce(add_transfers(interleaved(1, 2, 2), loop_placement(1))),
        "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 REDUCE1 B0.1 REDUCE0",
    )


def test_lowered_schedules_run_with_blocking_sends():
    for p, _, _, lowered in lowered_schedules():
        check_rendezvous(lowered, loop_placement(p))
    for p, _, _, schedule in evaluation_schedules():
        check_rendezvous(add_transfers(schedule, loop_placement(p)), loop_placement(p))


@pytest.mark.parametrize("cost", [{Op.F: 1, Op.B: 1}, {Op.F: 0.1, Op.B: 0.3}, {Op.F: 5, Op.B: 1}], ids=str)
def test_lowered_schedules_run_with_blocking_sends_whatever_the_cost(cost):
    for p, m, v in [(2, 2, 2), (2, 8, 3), (4, 8, 2), (8, 8, 1), (3, 9, 4)]:
        for schedule in (gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, v), forward_only(p, m, v)):
            check_rendezvous(add_reduce(add_transfers(schedule, loop_placement(p), cost)), loop_placement(p))


def test_lowering_keeps_the_compute_and_counts_transfers_per_boundary_and_direction():
    for (p, m, v, schedule), (*_, lowered) in zip(training_schedules(), lowered_schedules(), strict=True):
        assert [[action for action in actions if action.op in (Op.F, Op.B)] for actions in lowered] == schedule
        boundaries = p * v - 1 if p > 1 else 0
        counts = Counter(action.op for actions in lowered for action in actions)
        assert [counts[op] for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)] == [m * boundaries] * 4, (p, m, v)


def test_no_compute_stands_between_a_producer_and_its_send():
    for *_, lowered in lowered_schedules():
        for actions in lowered:
            last_compute = None
            for action in actions:
                if action.op in (Op.F, Op.B):
                    last_compute = action
                if action.op in (Op.SEND_F, Op.SEND_B):
                    assert last_compute[1:] == action[1:]


def test_a_stage_is_reduced_once_after_its_last_backward():
    for p, m, v, lowered in lowered_schedules():
        for actions in lowered:
            last_of_stage = {action.stage: action.op for action in actions}
            assert set(last_of_stage.values()) == {Op.REDUCE}, (p, m, v)
            assert sum(action.op is Op.REDUCE for action in actions) == v, (p, m, v)


def test_partners_point_at_each_other():
    pairs = [("SEND_F3.1", "RECV_F4.1"), ("SEND_B4.1", "RECV_B3.1")]
    for one, other in pairs:
        [[one]], [[other]] = parse(one), parse(other)
        assert partner(one) == other and partner(other) == one


# ---- refusals


def test_rendezvous_refuses_sends_that_wait_for_each_other():
    # Each list is right by itself: sends after producers, receives before consumers. There is no global order.
    lists = """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1
        RECV_F1.0 F1.0 B1.0 SEND_B1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.1
    """
    assert refusal(check_rendezvous, parse(lists), loop_placement(2)).splitlines() == [
        "schedule: it can never finish, every unfinished rank waits",
        "  rank 0, position 3: SEND_F0.1 waits for RECV_F1.1 (rank 1, position 4)",
        "  rank 1, position 3: SEND_B1.0 waits for RECV_B0.0 (rank 0, position 4)",
        "rank 0 at 3 |    F0.0         SEND_F0.0    F0.1 -> SEND_F0.1    RECV_B0.0    B0.0    RECV_B0.1",
        "rank 1 at 3 |    RECV_F1.0    F1.0         B1.0 -> SEND_B1.0    RECV_F1.1    F1.1    B1.1",
    ]


# fmt: off
BROKEN = [
    # a consumer before its receive
    ("F0.0 SEND_F0.0 RECV_B0.0 B0.0 \n F1.0 RECV_F1.0 B1.0 SEND_B1.0",
     "rank 1, position 0: F1.0 waits for RECV_F1.0 (rank 1, position 1)"),
    # a send before its producer
    ("SEND_F0.0 F0.0 RECV_B0.0 B0.0 \n RECV_F1.0 F1.0 B1.0 SEND_B1.0",
     "rank 0, position 0: SEND_F0.0 waits for F0.0 (rank 0, position 1)"),
    # a receive that nobody sends
    ("F0.0 RECV_B0.0 B0.0 \n F1.0 B1.0",
     "rank 0, position 1: RECV_B0.0 waits for SEND_B1.0 (in no list)"),
    # a reduction before the last backward of its stage
    ("F0.0 B0.0 REDUCE0 F0.1 B0.1",
     "rank 0, position 2: REDUCE0 waits for B0.1 (rank 0, position 4)"),
]
# fmt: on


@pytest.mark.parametrize("broken, message", BROKEN)
def test_rendezvous_refuses_what_stands_before_its_needs(broken, message):
    lists = parse(broken)
    assert message in refusal(check_rendezvous, lists, loop_placement(len(lists)))


# What needs what on one rank, by op, for the same stage and microbatch.
NEEDS = [(Op.F, Op.RECV_F), (Op.SEND_F, Op.F), (Op.B, Op.F), (Op.B, Op.RECV_B), (Op.SEND_B, Op.B)]


def test_rendezvous_refuses_every_action_moved_before_what_it_needs():
    p, m = 3, 4
    lowered = add_reduce(add_transfers(one_f_one_b(p, m), loop_placement(p)))
    num_refused = 0
    for rank, microbatch, (op, needed_op) in itertools.product(range(p), range(m), NEEDS):
        action, need = Action(op, rank, microbatch), Action(needed_op, rank, microbatch)
        if action in lowered[rank] and need in lowered[rank]:
            moved = [[other for other in row if other != action] for row in lowered]
            moved[rank].insert(moved[rank].index(need), action)
            assert f"{action} waits for {need}" in refusal(check_rendezvous, moved, loop_placement(p))
            num_refused += 1
    assert num_refused == m * (p + 4 * (p - 1))  # F before B in every stage, four transfers on every boundary


def test_simulation_names_the_waiting_actions():
    lists = """
        F0.0 B0.0
        B1.0 F1.0
    """
    assert refusal(simulate, parse(lists)).splitlines() == [
        "schedule: it can never finish, every unfinished rank waits",
        "  rank 0, position 1: B0.0 waits for B1.0 (rank 1, position 0)",
        "  rank 1, position 0: B1.0 waits for F1.0 (rank 1, position 1)",
        "rank 0 at 1 |      F0.0 -> B0.0",
        "rank 1 at 0 |           -> B1.0    F1.0",
    ]
    assert "F2.0 waits for F1.0 (in no list)" in refusal(simulate, parse("F0.0 \n F2.0"))


def test_an_action_standing_twice_is_refused():
    assert refusal(simulate, parse("F0.0 F0.1 F0.0")).splitlines() == [
        "schedule: F0.0 is on rank 0 (position 0) and again on rank 0 (position 2); every action must be there once",
        "rank 0 at 2 |     F0.0    F0.1 -> F0.0",
    ]


def test_a_schedule_of_another_placement_is_refused():
    assert refusal(add_transfers, gpipe(2, 1), lambda stage: 1 - stage) == (
        "schedule: F0.0 is in the list of rank 0, but the placement puts stage 0 on rank 1; "
        "pass the placement the schedule was made for\n"
        "rank 0 at 0 |    -> F0.0    B0.0\n"
        "rank 1 at 0 |       F1.0    B1.0"
    )


def test_a_lowered_schedule_cannot_be_simulated():
    lowered = add_reduce(add_transfers(gpipe(2, 1), loop_placement(2)))
    assert refusal(simulate, lowered) == (
        "simulate: there is no cost for RECV_B, RECV_F, REDUCE, SEND_B, SEND_F, only for F, B; "
        "pass the schedule as it was before add_transfers and add_reduce"
    )
    with pytest.raises(AssertionError, match=r"SEND_F0\.0 is no compute action"):
        schedule_module.dependencies(Action(Op.SEND_F, 0, 0), num_stages=2)


def test_costs_must_be_positive():
    assert refusal(simulate, gpipe(2, 1), {Op.F: 0, Op.B: -1}) == (
        "simulate: the cost of F (0), B (-1) must be positive; change `cost`"
    )


def test_interleaved_refuses_a_rest_of_microbatches():
    assert refusal(interleaved, 4, 6, 2) == (
        "interleaved: num_microbatches (6) must be a multiple of the pipeline size (4); "
        "use 1f1b or change --global-batch-size"
    )


def test_sizes_below_one_are_refused_together():
    assert refusal(interleaved, 0, 0, 0) == (
        "interleaved: the pipeline size (0) must be at least 1; change --pipeline-model-parallel-size\n"
        "interleaved: num_microbatches (0) must be at least 1; raise --global-batch-size\n"
        "interleaved: chunks per rank (0) must be at least 1; lower --num-layers-per-virtual-pipeline-stage to at most "
        "num_layers / pipeline size"
    )
    assert refusal(gpipe, 0, 1).startswith("gpipe: the pipeline size (0)")
    assert refusal(one_f_one_b, 1, 0).startswith("1f1b: num_microbatches (0)")
    assert refusal(forward_only, 1, 0).startswith("forward_only: num_microbatches (0)")


def test_show_points_at_one_action_of_one_rank():
    # fmt: off
    assert show(one_f_one_b(2, 3), rank=1, index=1, around=2).splitlines() == [
        "rank 0 at 1 |     F0.0    F0.1    B0.0    F0.2",
        "rank 1 at 1 |     F1.0 -> B1.0    F1.1    B1.1",
    ]
    # fmt: on


# ---- the package


def test_every_public_name_is_found_and_others_are_refused():
    assert pipeline_parallel.gpipe is gpipe
    for name, submodule in pipeline_parallel._SUBMODULE_OF.items():
        if submodule in ("stage", "schedule", "lower", "simulate"):  # the others load torch
            assert getattr(pipeline_parallel, name) is not None
            assert name in dir(pipeline_parallel)
    with pytest.raises(AttributeError, match="no attribute 'zigzag'"):
        pipeline_parallel.zigzag  # noqa: B018


def test_the_pure_files_load_without_torch():
    """A process of its own, because other tests of this one load torch."""
    code = (
        "import sys; from megatron.core.pipeline_parallel import add_reduce, bubble, interleaved, loop_placement; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
