"""Stages: where they live and which layers are in them."""

import pytest
from schedules import refusal

from megatron.core.pipeline_parallel.stage import layers_of_stage, loop_placement, stages_of_rank


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
