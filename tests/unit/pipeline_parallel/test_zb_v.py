"""ZB-V and the interleaved schedule with deferred weight gradients against ZB-H1, 1F1B and what is possible at all."""

import itertools

import pytest
from said import tells
from schedules import COSTS, MICROBATCHES, assert_lists, costs, refusal

from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.schedule.actions import Op, stages_in
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import one_f_one_b, zb_h1, zb_interleaved
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers, check_rendezvous
from megatron.core.pipeline_parallel.schedule.simulate import bubble, peak_live
from megatron.core.pipeline_parallel.schedule.zb_v import zb_v

EQUAL = costs(1, 1, 1)
GATE = [(p, m) for p in range(2, 9) for m in range(p, 4 * p + 1)]
THINNED = [(2, 2), (2, 5), (3, 7), (4, 4), (4, 9), (5, 20), (8, 8), (8, 9)]
sizes = pytest.mark.parametrize("sizes", [THINNED, pytest.param(GATE, marks=pytest.mark.full)], ids=["some", "all"])


def test_zb_v_lists():
    assert_lists(
        zb_v(2, 3),
        """
        F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 I0.1 W3.2 I0.2 W0.1 W0.2
        F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 I1.1 I2.2 I1.2 W2.1 W1.1 W2.2 W1.2
        """,
    )


@sizes
def test_zb_v_has_less_than_the_bubble_of_zb_h1_and_at_most_the_memory_of_1f1b(sizes):
    """No schedule of this stage map is shorter: the last rank waits p - 1 forwards of a chunk, and is never idle again."""
    for p, m in sizes:
        schedule = zb_v(p, m)
        if m not in MICROBATCHES:  # test_lower.py has those
            check_rendezvous(add_reduce(add_transfers(schedule)))
        assert pytest.approx((p - 1) / (6 * m)) == bubble(schedule, EQUAL) < bubble(zb_h1(p, m), EQUAL), (p, m)
        assert max(peak_live(schedule)) <= 2 * max(peak_live(one_f_one_b(p, m))), (p, m)


@pytest.mark.full
@pytest.mark.parametrize("cost", [*COSTS, costs(1, 1.2, 0.9), costs(1, 0.8, 0.8)], ids=str)
def test_more_microbatches_lengthen_no_wait(cost):
    """Each rank's work, and not a chain of transfers, sets the pace, whatever F, I and W cost: the idle time stays."""
    for p in (2, 4, 5):
        once, often = (bubble(zb_v(p, m), cost) * m for m in (3 * p, 9 * p))
        assert often <= once * (1 + 1e-9), p
        assert bubble(zb_v(p, 3 * p), cost) <= bubble(one_f_one_b(p, 3 * p), cost), p


def test_zb_v_lies_in_a_v_for_every_number_of_microbatches():
    for p, m in itertools.product((1, 2, 3, 5), (1, 2, 7)):
        assert stages_in(zb_v(p, m)) == StageMap((*range(p), *range(p)[::-1]))
        orders = [[a[1:] for a in row if a.op is op] for row in zb_v(p, m) for op in (Op.I, Op.W)]
        assert orders[::2] == orders[1::2], "gradients are summed in the order of the microbatches"


def test_zb_interleaved_divides_the_bubble_of_zb_h1_by_the_chunks():
    for p, m, v in itertools.product((2, 4), (4, 8), (2, 3)):
        assert bubble(zb_interleaved(p, m, v)) == pytest.approx(bubble(zb_h1(p, m)) / v)


@pytest.mark.parametrize("v", [1, 3])
def test_other_numbers_of_chunks_are_refused(v):
    assert tells(
        refusal(zb_v, 2, 4, v),
        f"zb-v 2 chunks {v} --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank",
    )
