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
    (
        (10, 4),
        {"embedding_as_layer": True},
        "pipeline: the number of layers (10 plus 1 for --account-for-embedding-in-pipeline-split) must be a multiple of the "
        "number of stages (4: ",
    ),
    (
        (0, 2),
        {"embedding_as_layer": True, "loss_as_layer": True},
        "pipeline: the number of layers (0 plus 2 for --account-for-embedding-in-pipeline-split and "
        "--account-for-loss-in-pipeline-split) must be ",
    ),
    (
        (8, 4),
        {"first": 1, "loss_as_layer": True},
        "pipeline: --decoder-first-pipeline-num-layers (1) says how many layers the end has, and so does "
        "--account-for-loss-in-pipeline-split; leave out one of the two",
    ),
    (
        (8, 4),
        {"first": 1},
        "pipeline: --decoder-first-pipeline-num-layers (1) leaves 7 of --num-layers (8) to 3 ranks with 1 chunks each; that "
        "must be a positive multiple of 3; change one",
    ),
    (
        (8, 4),
        {"first": 4, "last": 4},
        "pipeline: --decoder-first-pipeline-num-layers (4) and --decoder-last-pipeline-num-layers (4) leaves 0 of "
        "--num-layers (8) to 2 ranks with 1 chunks each; that must be a positive multiple of 2; change one",
    ),
    (
        (8, 2),
        {"first": 4, "last": 3},
        "pipeline: --decoder-first-pipeline-num-layers (4) and --decoder-last-pipeline-num-layers (3) must add up to "
        "--num-layers (8), since no other rank is left; change one",
    ),
    (
        (8, 3),
        {"first": 0, "last": 2},
        "pipeline: --decoder-first-pipeline-num-layers (0) must be a positive multiple of the chunks per rank (1); change it",
    ),
    (
        (8, 4),
        {"num_ranks": 2, "first": 3, "last": 5},
        "pipeline: --decoder-first-pipeline-num-layers (3) must be a positive multiple of the chunks per rank (2); change it\n"
        "pipeline: --decoder-last-pipeline-num-layers (5) must be a positive multiple of the chunks per rank (2); change it",
    ),
    (
        (8, 1),
        {"last": 8},
        "pipeline: --decoder-last-pipeline-num-layers (8) needs at least 2 pipeline ranks, not 1; leave it out",
    ),
]


@pytest.mark.parametrize("sizes, uneven, message", REFUSED)
def test_splits_that_do_not_come_out_even_are_refused(sizes, uneven, message):
    assert refusal(split_layers, *sizes, **uneven).startswith(message)
