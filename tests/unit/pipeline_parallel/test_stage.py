"""Stages: where they live and which layers are in them."""

import pytest
from said import tells
from schedules import refusal

from megatron.core.parallel.stage_to_rank import StageMap, loop
from megatron.core.pipeline_parallel.layer_split import split_layers

MAPS = [  # ranks of the stages, stages of rank 0 and of the last rank, ranks of the first and the last stage, pairs that talk
    (loop(1), (0,), (0,), (0, 0), []),
    (loop(2, 3), (0, 2, 4), (1, 3, 5), (0, 1), [(0, 1)]),
    (loop(3, 2), (0, 3), (2, 5), (0, 2), [(0, 1), (0, 2), (1, 2)]),
    (StageMap((0, 1, 2, 2, 1, 0)), (0, 5), (2, 3), (0, 0), [(0, 1), (1, 2)]),
]


@pytest.mark.parametrize("stages, of_first_rank, of_last_rank, ends, pairs", MAPS)
def test_a_map_says_where_each_stage_runs(stages, of_first_rank, of_last_rank, ends, pairs):
    assert (stages.of_rank(0), stages.of_rank(max(stages.ranks))) == (of_first_rank, of_last_rank)
    assert (stages.rank_of_first, stages.rank_of_last) == ends and stages.neighbours == pairs
    assert [stages.chunk_of(stage) for stage in of_last_rank] == [*range(stages.chunks)]


def test_layers_are_split_evenly_and_in_order():
    assert [list(layers) for layers in split_layers(8, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(split_layers(3, 1)[0]) == [0, 1, 2]


@pytest.mark.parametrize("num_layers, num_stages", [(10, 4), (0, 4)])
def test_uneven_layers_are_refused(num_layers, num_stages):
    assert tells(
        refusal(split_layers, num_layers, num_stages),
        f"{num_layers} {num_stages} --num-layers --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage",
    )


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
    (8, 4, {"stages": loop(2, 2), "first": 2}, [1, 3, 1, 3]),
    (16, 8, {"stages": loop(4, 2), "first": 2, "last": 2}, [1, 3, 3, 1, 1, 3, 3, 1]),
    (14, 8, {"stages": loop(4, 2), "embedding_as_layer": True, "loss_as_layer": True}, [1, 2, 2, 2, 2, 2, 2, 1]),
]


@pytest.mark.parametrize("num_layers, num_stages, uneven, counts", SPLITS)
def test_layers_are_split_as_told(num_layers, num_stages, uneven, counts):
    split = split_layers(num_layers, num_stages, **uneven)
    assert [len(layers) for layers in split] == counts
    assert [layer for layers in split for layer in layers] == list(range(num_layers))


def test_splits_in_the_documentation_are_current():

    for sizes, uneven in [
        ((8, 4), {}),
        ((8, 4), {"first": 1, "last": 1}),
        ((8, 4), {"stages": loop(2, 2), "first": 2}),
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
        {"stages": loop(2, 2), "first": 3, "last": 5},
        "--decoder-first-pipeline-num-layers 3 2 --decoder-last-pipeline-num-layers 5",
    ),
    ((8, 1), {"last": 8}, "--decoder-last-pipeline-num-layers 8 2 1"),
]


@pytest.mark.parametrize("sizes, uneven, message", REFUSED)
def test_splits_that_do_not_come_out_even_are_refused(sizes, uneven, message):
    assert tells(refusal(split_layers, *sizes, **uneven), message)
