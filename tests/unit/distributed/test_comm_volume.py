"""What each ZeRO stage sends, against the table of the ZeRO paper and its hybrids: in elements of a model of P, and in words."""

import re
from dataclasses import replace

import pytest
from said import tells

from megatron.core.distributed.zero_stage_comm_volume import BufferSizes, comm_volume_by_stage_line, step_comm_volume

P = 3 * 2**20
ONE = BufferSizes(P, shared_numel=0, param_bytes=1, sum_bytes=1, sent_bytes=1)  # bytes are elements
# stage, group, groups, microbatches, divided -> elements that a rank sends, as multiples of P
TABLE = [
    (0, 4, 1, 5, False, 2 * 3 / 4),
    (1, 4, 1, 5, False, 2 * 3 / 4),
    (2, 4, 1, 5, False, (5 + 1) * 3 / 4),
    (3, 4, 1, 5, False, 3 * 5 * 3 / 4),
    (0, 4, 2, 5, False, 2 * 7 / 8),  # all eight ranks
    (1, 4, 2, 5, False, 2 * 3 / 4 + 2 * 1 / 2 / 4),
    (3, 4, 2, 5, False, 3 * 5 * 3 / 4 + 2 * 1 / 2 / 4),
    (3, 4, 2, 5, True, 3 * 5 * 3 / 4 + (1 + 1) * 1 / 2 / 4),
    (3, 1, 1, 5, False, 0),
]


@pytest.mark.parametrize(("stage", "inner", "outer", "m", "divides", "expected"), TABLE)
def test_a_rank_sends_what_the_papers_say(stage, inner, outer, m, divides, expected):
    sent = step_comm_volume(ONE, stage, inner=inner, outer=outer, microbatches=m, divides_outer=divides)
    assert sum(sent.values()) == pytest.approx(expected * P, rel=1e-12)


def test_bytes_follow_the_types():
    """bfloat16 parameters, float32 gradients that travel in bfloat16, a table of a tenth that is fetched once more."""
    flat = BufferSizes(1000, shared_numel=100, param_bytes=2, sum_bytes=4, sent_bytes=2)
    assert step_comm_volume(flat, 3, inner=2, outer=2, microbatches=3) == {
        ("reduce_scatter", "shard"): 3 * 1000 * 2 / 2,
        ("all_gather", "shard"): 3 * (2000 + 100) * 2 / 2,
        ("all_reduce", "replica"): 500 * 4,
    }


def test_frozen_elements_are_gathered_in_stage_3_alone():
    frozen = BufferSizes(1000, shared_numel=100, param_bytes=2, sum_bytes=0, sent_bytes=0, is_frozen=True)
    sent = [step_comm_volume(frozen, stage, inner=2, outer=2, microbatches=3) for stage in range(4)]
    assert sent == [{}, {}, {}, {("all_gather", "shard"): 3 * (2000 + 100) * 2 / 2}]


def test_experts_are_summed_over_their_own_ranks():
    """Of 8 ranks, 2 have copies of each expert: a half of its elements is sent in a sum, not seven eighths."""
    experts = replace(ONE, ranks=(2, 1))
    line = comm_volume_by_stage_line([ONE, experts], 1, inner=8, outer=1, microbatches=1, divides_outer=False)
    assert f"1: {2 * 3 * 7 / 8 + 2 * 3 * 1 / 2:.1f} MiB (chosen)" in line


def test_the_line_marks_the_chosen_stage():
    sizes = {"inner": 2, "microbatches": 2}
    line = comm_volume_by_stage_line([ONE, ONE], 1, outer=1, divides_outer=False, **sizes)
    stages = re.findall(r"(\d): ([\d.]+) MiB( \(chosen\))?", line)
    assert stages == [("0", "6.0", ""), ("1", "6.0", " (chosen)"), ("2", "9.0", ""), ("3", "18.0", "")]
    line = comm_volume_by_stage_line([ONE], 3, outer=2, divides_outer=True, **sizes)
    assert "2 groups of 2 ranks" in line and tells(line, "--outer-dp-sharding-strategy 10.5 MiB")
