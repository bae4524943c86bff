"""Stages: where they live and which layers are in them."""

import pytest
from said import tells
from schedules import refusal

from megatron.core.pipeline_parallel.stage import layers_of_stage, loop_placement, split_layers, stages_of_rank


def test_loop_placement_deals_stages_round():
    assert [loop_placement(3)(stage) for stage in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [stages_of_rank(loop_placement(2), 6, rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_layers_are_split_evenly_and_in_order():
    assert [list(layers_of_stage(8, 4, stage)) for stage in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(layers_of_stage(3, 1, 0)) == [0, 1, 2]


@pytest.mark.parametrize("num_layers, num_stages", [(10, 4), (0, 4)])
def test_uneven_layers_are_refused(num_layers, num_stages):
    assert tells(
        refusal(layers_of_stage, num_layers, num_stages, 0),
        f"{num_layers} {num_stages} --num-layers --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage",
    )


def test_a_stage_beyond_the_last_is_our_error():
    with pytest.raises(AssertionError, match=r"(?s)4.*0\.\.3"):
        layers_of_stage(8, 4, 4)


SPLITS = [  # num_layers, num_stages, keywords, layers in each stage
    (8, 4, {}, [2, 2, 2, 2]),
    (8, 4, {"first": 1, "last": 1}, [1, 3, 3, 1]),
    (8, 4, {"first": 2}, [2, 2, 2, 2]),
    (7, 3, {"last": 1}, [3, 3, 1]),
    (5, 2, {"first": 2, "last": 3}, [2, 3]),
    (6, 4, {"embedding_as_layer": True, "loss_as_layer": True}, [1, 2, 2, 1]),
    (7, 4, {"embedding_as_layer": True}, [1, 2, 2, 2]),
    (7, 4, {"loss_as_layer": True}, [2, 2, 2, 1]),
    (2, 4, {"embedding_as_layer": True, "loss_as_layer": True}, [0, 1, 1, 0]),  # the ends have no layer
    (5, 1, {"embedding_as_layer": True, "loss_as_layer": True}, [5]),
    # Two chunks: the counts of the first and the last rank are split over its chunks, an end's place is one stage's.
    (8, 4, {"num_ranks": 2, "first": 2}, [1, 3, 1, 3]),
    (16, 8, {"num_ranks": 4, "first": 2, "last": 2}, [1, 3, 3, 1, 1, 3, 3, 1]),
    (14, 8, {"num_ranks": 4, "embedding_as_layer": True, "loss_as_layer": True}, [1, 2, 2, 2, 2, 2, 2, 1]),
]


@pytest.mark.parametrize("num_layers, num_stages, uneven, counts", SPLITS)
def test_layers_are_split_as_told(num_layers, num_stages, uneven, counts):
    split = split_layers(num_layers, num_stages, **uneven)
    assert [len(layers) for layers in split] == counts
    assert [layer for layers in split for layer in layers] == list(range(num_layers))
    assert split == [layers_of_stage(num_layers, num_stages, stage, **uneven) for stage in range(num_stages)]


def test_splits_in_the_documentation_are_current():

    for sizes, uneven in [
        ((8, 4), {}),
        ((8, 4), {"first": 1, "last": 1}),
        ((8, 4), {"num_ranks": 2, "first": 2}),
        ((6, 4), {"embedding_as_layer": True, "loss_as_layer": True}),
    ]:
        drawn = "".join(" ".join(map(str, layers)).ljust(7) for layers in split_layers(*sizes, **uneven))
        assert f" {drawn.rstrip()}\n" in split_layers.__doc__


REFUSED = [
    ((10, 4), {"embedding_as_layer": True}, "10 1 --account-for-embedding-in-pipeline-split 4"),
    (
        (0, 2),
        {"embedding_as_layer": True, "loss_as_layer": True},
        "0 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    (
        (8, 4),
        {"first": 1, "loss_as_layer": True},
        "--decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split",
    ),
    ((8, 4), {"first": 1}, "--decoder-first-pipeline-num-layers 1 7 --num-layers 8 3"),
    (
        (8, 4),
        {"first": 4, "last": 4},
        "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 0 --num-layers 8 2 1",
    ),
    (
        (8, 2),
        {"first": 4, "last": 3},
        "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 3 --num-layers 8",
    ),
    ((8, 3), {"first": 0, "last": 2}, "--decoder-first-pipeline-num-layers 0 1"),
    (
        (8, 4),
        {"num_ranks": 2, "first": 3, "last": 5},
        "--decoder-first-pipeline-num-layers 3 2 --decoder-last-pipeline-num-layers 5",
    ),
    ((8, 1), {"last": 8}, "--decoder-last-pipeline-num-layers 8 2 1"),
]


@pytest.mark.parametrize("sizes, uneven, message", REFUSED)
def test_splits_that_do_not_come_out_even_are_refused(sizes, uneven, message):
    assert tells(refusal(split_layers, *sizes, **uneven), message)
