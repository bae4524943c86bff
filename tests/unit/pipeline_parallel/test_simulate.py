"""Schedules on paper: times, memory, refusals of lists that cannot run, and what their drawings show."""

import json
from xml.etree import ElementTree

import pytest
from said import tells
from schedules import COVERING, FLAT, costs, parse, refusal

from megatron.core.pipeline_parallel.schedule.actions import Op
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from megatron.core.pipeline_parallel.schedule.plot import chrome_trace, plot_svg, plot_text
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES, default_chunks, missing_or_surplus_actions
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule, peak_bytes, show_around, simulate


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


INCOMPLETE = [
    ("F0.0 B0.0 F0.1 \n F1.0 B1.0 F1.1 B1.1", ["B0.1"]),
    ("F0.0 B0.0 F0.1 I0.1 \n F1.0 B1.0 F1.1 B1.1", ["W0.1"]),
    ("F0.0 B0.0 B0.0 F0.1 B0.1 \n F1.0 B1.0 F1.1 B1.1", ["B0.0"]),
    ("F0.0 B0.0 F0.1 B0.1 F0.2 \n F1.0 B1.0 F1.1 B1.1", ["F0.2"]),
    ("F0.0 B0.0 F0.1 B0.1 F1.1 \n F1.0 B1.0 B1.1", ["F1.1"]),
    ("F0.0 I0.0 W0.0 B0.0 F0.1 B0.1 \n F1.0 B1.0 F1.1 B1.1", ["B0.0"]),
    ("F0.0 F0.1 \n F1.0 F1.1", ["B0.0", "B0.1", "B1.0", "B1.1"]),
    ("F0.0 B0.0 REDUCE0 F0.1 REDUCE0.0 B0.1 \n F1.0 B1.0 F1.1 B1.1", ["REDUCE0", "REDUCE0.0"]),  # what lowering adds
    ("F0.0 B0.0 F0.1 B0.1", ["1 ranks"]),
]


@pytest.mark.parametrize(("lists", "named"), INCOMPLETE)
def test_a_schedule_that_is_not_one_whole_step_is_refused_by_what_it_lacks(monkeypatch, lists, named):
    schedule = parse(lists)
    problems = missing_or_surplus_actions(schedule, 2, 2)
    assert len(problems) == len(named) and all(name in problem for name, problem in zip(named, problems))
    monkeypatch.setitem(SCHEDULES, "mine", lambda p, m, v: schedule)
    text = refusal(make_schedule, "mine", 2, 2, 1)
    assert text.startswith("mine: ") and named[0] in text


def test_a_schedule_that_can_never_finish_is_refused_when_it_is_made(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "mine", lambda p, m, v: parse("F0.0 B0.0 \n B1.0 F1.0"))
    assert "B1.0 waits for F1.0" in refusal(make_schedule, "mine", 2, 1, 1)


def test_every_schedule_of_ours_is_a_whole_step():
    for name, make in SCHEDULES.items():
        for p, m, v in COVERING:
            if v == default_chunks(name) or name.endswith("interleaved"):
                assert make_schedule(name, p, m if m % p == 0 else p, v) == make(p, m if m % p == 0 else p, v)


def test_plot_draws_one_cell_per_unit_of_time():

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


def test_simulation_names_the_waiting_actions():
    lists = """
        F0.0 B0.0
        B1.0 F1.0
    """
    assert refusal(simulate, parse(lists)).splitlines() == [
        "schedule: deadlock, every unfinished rank waits",
        "  rank 0, position 1: B0.0 waits for B1.0 (rank 1, position 0)",
        "  rank 1, position 0: B1.0 waits for F1.0 (rank 1, position 1)",
        "rank 0 at 1 |      F0.0 -> B0.0",
        "rank 1 at 0 |           -> B1.0    F1.0",
    ]
    assert tells(refusal(simulate, parse("F0.0 \n F2.0")), "F2.0 F1.0")


def test_an_action_standing_twice_is_refused():
    assert refusal(simulate, parse("F0.0 F0.1 F0.0")).splitlines() == [
        "schedule: F0.0 is on rank 0 (position 0) and again on rank 0 (position 2); an action must occur once",
        "rank 0 at 2 |     F0.0    F0.1 -> F0.0",
    ]


def test_costs_must_be_positive():
    assert tells(refusal(simulate, gpipe(2, 1), {Op.F: 0, Op.B: -1}), "0 -1 cost")


def test_show_points_at_one_action_of_one_rank():

    assert show_around(one_f_one_b(2, 3), rank=1, index=1, around=2).splitlines() == [
        "rank 0 at 1 |     F0.0    F0.1    B0.0    F0.2",
        "rank 1 at 1 |     F1.0 -> B1.0    F1.1    B1.1",
    ]


def test_an_input_half_of_a_backward_is_what_the_stage_before_waits_for():
    start, end = simulate(zb_h1(2, 1), costs(1, 2, 4), transfer=0.5)
    assert [(str(action), start[action], end[action]) for action in sorted(start, key=start.get)] == [
        ("F0.0", 0, 1),
        ("F1.0", 1.5, 2.5),
        ("I1.0", 2.5, 4.5),
        ("W1.0", 4.5, 8.5),
        ("I0.0", 5, 7),
        ("W0.0", 7, 11),
    ]
    with pytest.raises(ValueError, match=r"(?s)I0\.0.*I1\.0"):
        simulate(parse("F0.0 I0.0 W0.0 \n F1.0 B1.0"))


# ---- memory


def test_peak_bytes_weigh_stages_and_what_weight_gradients_keep():
    # F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1, where stage 0 makes 3 bytes and stage 1 makes 1: 3 4 3 6 3 4 3 0
    assert peak_bytes(interleaved(1, 2, 2), [3, 1]) == [6]
    assert peak_bytes(zb_h1(3, 6), [10, 10, 10]) == [30, 30, 30]
    # If I frees half, rank 2 has a forward and two halves that wait for their W: 10 + 2 * 5.
    assert peak_bytes(zb_h1(3, 6), [10, 10, 10], kept_for_weights=0.5) == [30, 25, 20]
    assert peak_bytes(one_f_one_b(3, 6), [10, 10, 10], kept_for_weights=0.5) == [30, 20, 10]
    assert peak_bytes(zb_h1(3, 6), [1, 1, 1], kept_for_weights=1.5) == [3.5, 4, 4.5]


# ---- drawings


def test_plot_draws_both_halves_of_a_backward():

    assert plot_text(zb_h1(2, 3)).splitlines() == ["rank 0 |F0F1  I0W0F2I1W1I2W2|", "rank 1 |  F0I0F1I1W0F2I2W1W2|"]


@pytest.mark.parametrize("schedule", [zb_h1(4, 8), interleaved(2, 12, 3), forward_only(1, 1)])
def test_svg_has_a_box_for_every_action_and_a_number_in_it(schedule):
    svg = plot_svg(schedule, title="a < b & c")
    root = ElementTree.fromstring(svg)
    boxes = root.findall("{*}g")
    actions = {str(action) for actions in schedule for action in actions}
    assert {box.find("{*}title").text.split(":")[0] for box in boxes} == actions and len(boxes) == len(actions)
    assert {box.find("{*}text").text for box in boxes} == {action.split(".")[1] for action in actions}
    assert root.find("{*}text").text.startswith("a < b & c, bubble ")
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "it loads something from elsewhere"
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("width") != "100%":
            assert float(rect.get("x")) + float(rect.get("width")) <= width
            assert float(rect.get("y")) + float(rect.get("height")) <= height


@pytest.mark.parametrize("schedule", [zb_h1(1, 1), zb_h1(2, 2), interleaved(2, 2, 2)])
def test_the_legend_of_a_small_drawing_ends_inside_it_and_its_notes_apart(schedule):
    root = ElementTree.fromstring(plot_svg(schedule))
    notes = [text for text in root.findall("{*}text") if text.text.startswith(("F:", "B:", "I:", "W:", "lighter"))]
    ends = [float(text.get("x")) + 0.55 * 12 * len(text.text) for text in notes]  # a letter is half as wide as high
    starts = [float(text.get("x")) for text in notes]
    assert len(notes) == 3 and all(end < start for end, start in zip(ends, starts[1:]))
    assert ends[-1] < float(root.get("width"))


def test_chrome_trace_has_the_simulated_times_and_an_arrow_for_every_transfer():
    schedule, cost = zb_h1(2, 2), costs(1, 2, 1)
    trace = json.loads(json.dumps(chrome_trace(schedule, cost, 0.5, microseconds_per_unit=10)))
    start, end = simulate(schedule, cost, 0.5)
    done = {e["name"]: (e["tid"], e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert done == {
        str(action): (rank, 10 * start[action], 10 * end[action]) for rank, row in enumerate(schedule) for action in row
    }
    arrows = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    heads = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert sorted(arrows) == ["F0.0-F1.0", "F0.1-F1.1", "I1.0-I0.0", "I1.1-I0.1"] and arrows.keys() == heads.keys()
    assert all(heads[key]["ts"] - arrows[key]["ts"] >= 5 for key in arrows)
