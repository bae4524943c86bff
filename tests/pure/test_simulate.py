"""Schedules on paper: times, refusals of lists that cannot run, and what their drawings show."""

from schedules import FLAT, parse, refusal

from megatron.core.pipeline_parallel.schedule import Op, forward_only, gpipe, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.simulate import plot_text, show, simulate


def test_gpipe_pays_each_transfer_once_per_boundary_and_direction():
    for p, m in FLAT:
        end = simulate(gpipe(p, m), {Op.F: 3, Op.B: 5}, transfer=0.5).end
        assert max(end.values()) == (m + p - 1) * (3 + 5) + 2 * (p - 1) * 0.5, (p, m)


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


def test_costs_must_be_positive():
    assert refusal(simulate, gpipe(2, 1), {Op.F: 0, Op.B: -1}) == (
        "simulate: the cost of F (0), B (-1) must be positive; change `cost`"
    )


def test_show_points_at_one_action_of_one_rank():
    # fmt: off
    assert show(one_f_one_b(2, 3), rank=1, index=1, around=2).splitlines() == [
        "rank 0 at 1 |     F0.0    F0.1    B0.0    F0.2",
        "rank 1 at 1 |     F1.0 -> B1.0    F1.1    B1.1",
    ]
    # fmt: on
