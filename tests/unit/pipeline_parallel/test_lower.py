"""Lowered schedules: what stands where, and that no order of the lists can deadlock or delay the compute."""

import itertools
from collections import Counter

import pytest
from said import tells
from schedules import (
    CHUNKS,
    COSTS,
    COVERING,
    RANKS,
    assert_lists,
    lower,
    lowered_schedules,
    parse,
    refusal,
    schedules_of,
    training_schedules,
)

from megatron.core.pipeline_parallel.schedule import lower as lower_module
from megatron.core.pipeline_parallel.schedule.actions import COMPUTE, Action, Op, stages_in
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from megatron.core.pipeline_parallel.schedule.lower import (
    DIRECTION_OF,
    add_reduce,
    add_transfers,
    check_rendezvous,
    partner,
)
from megatron.core.pipeline_parallel.schedule.simulate import locate, run_in_order, simulate

BEGINS = (Op.SEND_F, Op.POST_F, Op.SEND_B, Op.POST_B)
TRANSFER_OPS = (*BEGINS, Op.SENT_F, Op.RECV_F, Op.SENT_B, Op.RECV_B)

# ---- exact lists


def test_lowered_one_f_one_b_lists():
    assert_lists(
        lower(one_f_one_b(2, 2), 2),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 POST_B0.0 POST_B0.1 SENT_F0.0 RECV_B0.0 B0.0 RECV_B0.1 SENT_F0.1 B0.1 REDUCE0
        POST_F1.0 POST_F1.1 RECV_F1.0 F1.0 B1.0 SEND_B1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.1 REDUCE1 SENT_B1.0 SENT_B1.1
        """,
    )


def test_lowered_zb_h1_lists():
    assert_lists(
        lower(zb_h1(2, 2), 2),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 POST_B0.0 SENT_F0.0 RECV_B0.0 I0.0 POST_B0.1 W0.0 RECV_B0.1 SENT_F0.1 I0.1 W0.1 \
        REDUCE0
        POST_F1.0 POST_F1.1 RECV_F1.0 F1.0 I1.0 SEND_B1.0 RECV_F1.1 F1.1 I1.1 SEND_B1.1 SENT_B1.0 W1.0 W1.1 REDUCE1 \
        SENT_B1.1
        """,
    )


def test_lowered_interleaved_lists():
    assert_lists(
        lower(interleaved(2, 2, 2), 2),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 POST_F2.0 POST_F2.1 SENT_F0.0 RECV_F2.0 F2.0 SEND_F2.0 RECV_F2.1 SENT_F0.1 \
        F2.1 SEND_F2.1 POST_B2.0 SENT_F2.0 RECV_B2.0 B2.0 SEND_B2.0 POST_B2.1 RECV_B2.1 SENT_F2.1 B2.1 SEND_B2.1 \
        REDUCE2 POST_B0.0 POST_B0.1 SENT_B2.0 RECV_B0.0 B0.0 RECV_B0.1 B0.1 REDUCE0 SENT_B2.1
        POST_F1.0 POST_F1.1 RECV_F1.0 F1.0 SEND_F1.0 RECV_F1.1 F1.1 SEND_F1.1 POST_F3.0 POST_F3.1 SENT_F1.0 \
        RECV_F3.0 F3.0 B3.0 SEND_B3.0 POST_B1.0 RECV_F3.1 F3.1 B3.1 SEND_B3.1 REDUCE3 POST_B1.1 RECV_B1.0 SENT_B3.0 \
        B1.0 SEND_B1.0 RECV_B1.1 SENT_B3.1 SENT_F1.1 B1.1 SEND_B1.1 REDUCE1 SENT_B1.0 SENT_B1.1
        """,
    )


def test_lowered_forward_only_lists():
    assert_lists(
        add_transfers(forward_only(2, 2)),
        """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 SENT_F0.0 SENT_F0.1
        POST_F1.0 POST_F1.1 RECV_F1.0 F1.0 RECV_F1.1 F1.1
        """,
    )


def test_stages_on_the_same_rank_need_no_transfer():
    assert_lists(lower(interleaved(1, 2, 2), 1), "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 REDUCE1 B0.1 REDUCE0")


def test_lists_in_the_documentation_are_current():
    made = [*add_transfers(one_f_one_b(2, 1)), *lower(one_f_one_b(2, 1), 2)]
    for actions in made:
        assert f" {' '.join(map(str, actions))}\n" in lower_module.__doc__


# ---- what holds for all of them


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_no_schedule_deadlocks_whatever_the_cost(cost):
    for p, m, v in COVERING:
        for schedule in schedules_of(p, m, v):
            check_rendezvous(add_reduce(add_transfers(schedule, cost)))


@pytest.mark.full
@pytest.mark.parametrize("p", RANKS)
def test_no_schedule_deadlocks_over_the_whole_product(p):
    """Every size, under three cost models; lists that two of them make alike are walked once. Past 2 p microbatches a list repeats
    its steady state, so there the models take turns."""
    for m, v in itertools.product(range(1, 33), CHUNKS):
        for schedule in schedules_of(p, m, v):
            walked = []
            for cost in COSTS[:3] if m <= 2 * p else [COSTS[m % 3]]:
                lowered = add_reduce(add_transfers(schedule, cost))
                if lowered not in walked:
                    check_rendezvous(lowered)
                    walked.append(lowered)


def timed_run(lowered, cost):
    """When the last action ends if a transfer takes no time, but waits for its turn and for both its ends."""
    home, clock = locate(lowered), [0.0] * len(lowered)
    began, ready = {}, {}  # a SEND or POST: its moment; a transfer's SEND: when it is done
    queues = {key: [] for key in itertools.product(("forward", "backward"), range(len(lowered)))}

    def settle():
        heads = {(direction, queue[0]) for (direction, _), queue in queues.items() if queue}
        for direction, action in heads:
            if (direction, partner(action)) in heads and action.op in (Op.SEND_F, Op.SEND_B):
                ends = [(direction, home[end][0]) for end in (action, partner(action))]
                earlier = [ready.get((end, "last"), 0.0) for end in ends]
                moment = max(began[action], began[partner(action)], *earlier)
                for end in ends:
                    ready[queues[end].pop(0)] = ready[end, "last"] = moment
                return True
        return False

    def attempt(rank, heads):
        action = lowered[rank][heads[rank]]
        if action.op in COMPUTE:
            clock[rank] += cost[action.op]
        elif action.op in BEGINS:
            began[action] = clock[rank]
            queues[DIRECTION_OF[action.op], rank].append(action)
            while settle():
                pass
        elif action.op in TRANSFER_OPS:
            begun = action._replace(op=Op[action.op.name.replace("SENT", "SEND").replace("RECV", "POST")])
            if begun not in ready:
                return [begun]
            clock[rank] = max(clock[rank], ready[begun])
        return []

    run_in_order(lowered, attempt)
    return max(clock)


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_beginning_and_waiting_in_order_delays_no_compute(cost):
    for p, m, v in COVERING:
        for schedule in schedules_of(p, m, v):
            lowered = add_transfers(schedule, cost)
            on_paper = max(simulate(schedule, cost).end.values())
            assert timed_run(lowered, cost) == pytest.approx(on_paper), (p, m, v, schedule)


@pytest.mark.full
def test_lowering_keeps_the_compute_and_begins_and_ends_each_transfer_once():
    for (p, m, v, schedule), (*_, lowered) in zip(training_schedules(), lowered_schedules(), strict=True):
        assert [[action for action in actions if action.op in COMPUTE] for actions in lowered] == schedule
        ranks = stages_in(schedule).ranks
        boundaries = sum(here != there for here, there in itertools.pairwise(ranks))
        counts = Counter(action.op for actions in lowered for action in actions)
        assert [counts[op] for op in TRANSFER_OPS] == [m * boundaries] * 8, (p, m, v)
        for action in locate(lowered):  # which raises if one stands twice
            assert action.op not in TRANSFER_OPS or partner(partner(action)) == action


def test_a_rank_begins_transfers_in_one_global_order_of_their_direction():
    for p, m, v in COVERING:
        for schedule in schedules_of(p, m, v):
            lowered, edges = add_transfers(schedule), {}
            for direction, actions in itertools.product(("forward", "backward"), lowered):
                begun = [a for a in actions if a.op in BEGINS and DIRECTION_OF[a.op] == direction]
                sends = [a if a.op in (Op.SEND_F, Op.SEND_B) else partner(a) for a in begun]
                for earlier, later in itertools.pairwise(sends):
                    edges.setdefault(later, set()).add(earlier)
            assert_no_circle(edges)


def assert_no_circle(edges):
    """edges: what stands directly before each."""
    left = {node: set(before) for node, before in edges.items()}
    while left:
        free = {node for node, before in left.items() if not before & left.keys()}
        assert free, f"these are before each other: {list(left)}"
        left = {node: before for node, before in left.items() if node not in free}


@pytest.mark.full
def test_a_send_is_begun_before_the_next_compute_and_a_receive_is_waited_for_right_before_its_consumer():
    begin_of_compute = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}
    recv_of_compute = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
    for *_, lowered in lowered_schedules():
        for actions in lowered:
            gaps = split_at_compute(actions)
            for (before, compute), (after, _) in itertools.pairwise(gaps):
                sends = [a for a in after if a.op in (Op.SEND_F, Op.SEND_B)]
                recvs = [a for a in before if a.op in (Op.RECV_F, Op.RECV_B)]
                assert all(a == compute._replace(op=begin_of_compute[compute.op]) for a in sends)
                assert all(a == compute._replace(op=recv_of_compute[compute.op]) for a in recvs)


def split_at_compute(actions):
    """[(what stands before it, the compute), ..., (what stands at the end, None)]"""
    gaps, gap = [], []
    for action in actions:
        if action.op in COMPUTE:
            gaps.append((gap, action))
            gap = []
        else:
            gap.append(action)
    return [*gaps, (gap, None)]


@pytest.mark.full
def test_between_two_computes_nothing_waits_before_all_is_begun():
    for *_, lowered in lowered_schedules():
        for gap, _ in itertools.chain.from_iterable(map(split_at_compute, lowered)):
            begins = [action.op in BEGINS or action.op is Op.REDUCE for action in gap]
            assert begins == sorted(begins, reverse=True), gap


@pytest.mark.full
def test_a_rank_holds_at_most_two_leaving_results_a_direction():
    for *_, lowered in lowered_schedules():
        for actions, (begin, end) in itertools.product(lowered, ((Op.SEND_F, Op.SENT_F), (Op.SEND_B, Op.SENT_B))):
            held = itertools.accumulate((action.op is begin) - (action.op is end) for action in actions)
            assert max(held) <= 2


@pytest.mark.full
@pytest.mark.parametrize(
    "cost", [*COSTS, {Op.F: 1, Op.B: 8, Op.I: 4, Op.W: 4}, {Op.F: 8, Op.B: 2, Op.I: 1, Op.W: 1}], ids=str
)
def test_at_most_two_receives_a_direction_are_posted_ahead_of_their_data(cost):
    """A receive that is posted when its producer has ended holds no more memory than data that arrives unasked would."""
    for p, m, v in COVERING:
        for schedule in schedules_of(p, m, v):
            end = simulate(schedule, cost).end
            for actions in add_transfers(schedule, cost):
                now, ahead = 0.0, {"forward": [], "backward": []}
                for action in actions:
                    if action.op in COMPUTE:
                        now = end[action]
                    if action.op in (Op.POST_F, Op.POST_B):
                        made_by = (Op.F,) if action.op is Op.POST_F else (Op.B, Op.I)
                        producers = [partner(action)._replace(op=op) for op in made_by]
                        moments = ahead[DIRECTION_OF[action.op]]
                        moments += [end[producer] for producer in producers if producer in end]
                        assert sum(moment > now for moment in moments) <= 2, (p, m, v, action, actions)


def test_an_output_has_left_before_its_backward_frees_it():
    for *_, lowered in lowered_schedules():
        for actions in lowered:
            position = {action: index for index, action in enumerate(actions)}
            for action, index in position.items():
                if action.op in (Op.B, Op.I):
                    assert position.get(action._replace(op=Op.SENT_F), -1) < index


def test_a_stage_is_reduced_once_after_its_last_gradient_and_its_sends():
    for p, m, v, lowered in lowered_schedules():
        for actions in lowered:
            last_of_stage = {action.stage: action.op for action in actions if action.op is not Op.SENT_B}
            assert set(last_of_stage.values()) == {Op.REDUCE}, (p, m, v)
            assert sum(action.op is Op.REDUCE for action in actions) == v, (p, m, v)


def test_partners_point_at_each_other():
    pairs = [
        ("SEND_F3.1", "POST_F4.1"),
        ("SENT_F3.1", "RECV_F4.1"),
        ("SEND_B4.1", "POST_B3.1"),
        ("SENT_B4.1", "RECV_B3.1"),
    ]
    for one, other in pairs:
        [[one]], [[other]] = parse(one), parse(other)
        assert partner(one) == other and partner(other) == one


# ---- refusals


def test_receives_posted_in_another_order_than_the_sends_are_refused():
    lists = """
        F0.0 SEND_F0.0 F0.1 SEND_F0.1 SENT_F0.0 SENT_F0.1
        POST_F1.1 POST_F1.0 RECV_F1.0 F1.0 RECV_F1.1 F1.1
    """
    assert refusal(check_rendezvous, parse(lists)).splitlines() == [
        "schedule: deadlock, every unfinished rank waits",
        "  rank 0, position 4: SENT_F0.0 waits for POST_F1.1 (rank 1, position 0)",
        "  rank 1, position 2: RECV_F1.0 waits for POST_F1.1 (rank 1, position 0)",
        "rank 0 at 4 |    SEND_F0.0    F0.1         SEND_F0.1 -> SENT_F0.0    SENT_F0.1",
        "rank 1 at 2 |                 POST_F1.1    POST_F1.0 -> RECV_F1.0    F1.0         RECV_F1.1    F1.1",
    ]


def test_a_circle_through_the_queues_of_three_ranks_is_refused():
    # Every pair of ranks agrees on its own transfers, but rank 0 waits with F3.0 behind F0.1, rank 1 with F0.1 behind
    # F1.0, and rank 2 with F1.0 behind F2.0, which goes to rank 0.
    lists = add_transfers(forward_only(3, 3, 2))
    check_rendezvous(lists)
    moved = move(lists, parse("POST_F1.1")[0][0], before=parse("SEND_F1.0")[0][0])
    moved = move(moved, parse("POST_F3.0")[0][0], before=parse("SEND_F0.1")[0][0])
    assert "waits for" in refusal(check_rendezvous, moved)


def move(schedule, action, before):
    rank, _ = locate(schedule)[action]
    moved = [[other for other in row if other != action] for row in schedule]
    moved[rank].insert(moved[rank].index(before), action)
    return moved


BROKEN = [
    # a consumer before its receive
    ("F0.0 SEND_F0.0 SENT_F0.0 \n POST_F1.0 F1.0 RECV_F1.0", "1 F1.0 RECV_F1.0 2"),
    # a send before its producer
    ("SEND_F0.0 F0.0 SENT_F0.0 \n POST_F1.0 RECV_F1.0 F1.0", "0 SEND_F0.0 F0.0 1"),
    # a gradient sent before the half of the backward that computes it
    (
        "F0.0 SEND_F0.0 SENT_F0.0 POST_B0.0 RECV_B0.0 I0.0 W0.0 \n POST_F1.0 RECV_F1.0 F1.0 SEND_B1.0 I1.0 W1.0 SENT_B1.0",
        "1 3 SEND_B1.0 I1.0 4",
    ),
    # weight gradients before the half that they are left out of
    ("F0.0 W0.0 I0.0", "0 1 W0.0 I0.0 2"),
    # a wait for what was not begun
    ("F0.0 SEND_F0.0 SENT_F0.0 \n RECV_F1.0 POST_F1.0 F1.0", "1 0 RECV_F1.0 POST_F1.0"),
    # a receive that nobody sends
    ("F0.0 \n POST_F1.0 RECV_F1.0 F1.0", "1 RECV_F1.0 SEND_F0.0"),
    # a send that nobody receives, waited for or not
    ("F0.0 SEND_F0.0 SENT_F0.0 \n F1.0", "0 2 SENT_F0.0 POST_F1.0"),
    ("F0.0 SEND_F0.0 B0.0", "SEND_F0.0 POST_F1.0 SENT_F0.0"),
    # a send that is never waited for, so that its memory is never free
    ("F0.0 SEND_F0.0 \n POST_F1.0 RECV_F1.0 F1.0", "SEND_F0.0 SENT_F0.0"),
    # a reduction before the last backward of its stage, or before its last weight gradient
    ("F0.0 B0.0 REDUCE0 F0.1 B0.1", "0 2 REDUCE0 B0.1 4"),
    ("F0.0 I0.0 REDUCE0 W0.0", "0 2 REDUCE0 W0.0 3"),
]


@pytest.mark.parametrize("broken, message", BROKEN)
def test_rendezvous_refuses_what_stands_before_its_needs(broken, message):
    lists = parse(broken)
    assert tells(refusal(check_rendezvous, lists), message)


# What needs what on one rank, by op, for the same stage and microbatch.
NEEDS = [
    *((Op.POST_F, Op.RECV_F), (Op.RECV_F, Op.F), (Op.F, Op.SEND_F), (Op.SEND_F, Op.SENT_F)),
    *((Op.POST_B, Op.RECV_B), (Op.RECV_B, Op.B), (Op.F, Op.B), (Op.B, Op.SEND_B), (Op.SEND_B, Op.SENT_B)),
    *((Op.RECV_B, Op.I), (Op.F, Op.I), (Op.I, Op.SEND_B), (Op.I, Op.W)),
]


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_rendezvous_refuses_every_action_moved_before_what_it_needs(make):
    p, m = 3, 4
    lowered = lower(make(p, m), p)
    num_refused = 0
    for rank, microbatch, (needed_op, op) in itertools.product(range(p), range(m), NEEDS):
        action, need = Action(op, rank, microbatch), Action(needed_op, rank, microbatch)
        if action in lowered[rank] and need in lowered[rank]:
            moved = move(lowered, action, before=need)
            assert f"{action} waits for {need}" in refusal(check_rendezvous, moved)
            num_refused += 1
    needs_on_each_boundary, needs_in_each_stage = 8, 1 if make is one_f_one_b else 2  # F before B, or before I before W
    assert num_refused == m * (needs_on_each_boundary * (p - 1) + needs_in_each_stage * p)


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1, gpipe])
def test_rendezvous_refuses_two_transfers_of_a_direction_begun_in_the_other_order(make):
    """Swapping two sends next to each other, with their computes, leaves each list right by itself."""
    p, m = 3, 4
    lowered = lower(make(p, m), p)
    for rank, direction in itertools.product(range(p), ("forward", "backward")):
        posts = [a for a in lowered[rank] if a.op in (Op.POST_F, Op.POST_B) and DIRECTION_OF[a.op] == direction]
        for earlier, later in itertools.pairwise(posts):
            assert "waits for" in refusal(check_rendezvous, move(lowered, later, before=earlier))


@pytest.mark.parametrize("op", TRANSFER_OPS)
def test_rendezvous_refuses_a_missing_transfer_action(op):
    lowered = lower(one_f_one_b(3, 4), 3)
    for action in locate(lowered):
        if action.op is op:
            without = [[other for other in row if other != action] for row in lowered]
            assert str(action) in refusal(check_rendezvous, without)


def test_a_schedule_whose_stage_is_not_on_one_rank_is_refused():
    for lists, wrong in (
        ("F0.0 B1.0 \n F1.0 B0.0", "stage 0 is on ranks [0, 1]"),
        ("F0.0 B0.0 \n F2.0", "stage 1 is on ranks []"),
    ):
        for function in (add_transfers, check_rendezvous):
            assert wrong in refusal(function, parse(lists))


def test_a_lowered_schedule_cannot_be_simulated_as_compute():
    assert tells(
        refusal(simulate, lower(gpipe(2, 1), 2)),
        "POST_B POST_F RECV_B RECV_F REDUCE SEND_B SEND_F SENT_B SENT_F add_transfers add_reduce",
    )
