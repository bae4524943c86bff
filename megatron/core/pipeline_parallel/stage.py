"""Which stages live on which pipeline rank, and which layers live in which stage.

A stage is a run of consecutive layers. With v stages (chunks) per rank, p ranks hold p * v stages, dealt out in a loop:

    p = 2, v = 2, 8 layers      rank 0: stage 0 (layers 0 1), stage 2 (layers 4 5)
                                rank 1: stage 1 (layers 2 3), stage 3 (layers 6 7)
"""

from collections.abc import Callable
from itertools import accumulate

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"

Placement = Callable[[int], int]  # stage -> pipeline rank


def loop_placement(num_ranks: int) -> Placement:
    """Stage s lives on rank s % num_ranks: chunk 0 of every rank, then chunk 1 of every rank, ..."""
    return lambda stage: stage % num_ranks


def stages_of_rank(placement: Placement, num_stages: int, rank: int) -> list[int]:
    """The stages of `rank` in the order of the model; entry k is the rank's chunk k."""
    return [stage for stage in range(num_stages) if placement(stage) == rank]


def layers_of_stage(num_layers: int, num_stages: int, stage: int, **uneven) -> range:
    """The global numbers, from 0, of the layers of `stage`. uneven: the keywords of `split_layers`."""
    assert 0 <= stage < num_stages, f"stage {stage} is outside 0..{num_stages - 1}"
    return split_layers(num_layers, num_stages, **uneven)[stage]


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    num_ranks: int | None = None,
    first: int | None = None,
    last: int | None = None,
    embedding_as_layer: bool = False,
    loss_as_layer: bool = False,
) -> list[range]:
    """The global numbers, from 0, of each stage's layers: as many in each, unless told otherwise.

    first, last: layers of the first and the last pipeline rank, over all its chunks; the other ranks share the rest.
    embedding_as_layer, loss_as_layer: count these as one more layer of the first and the last stage, which then has a
    layer less than the others, and may have none. num_ranks: pipeline ranks; None means one stage on each.

        8 layers, 4 stages                                          0 1    2 3    4 5    6 7
        8 layers, 4 stages, first=1, last=1                         0      1 2 3  4 5 6  7
        6 layers, 4 stages, embedding_as_layer, loss_as_layer       0      1 2    3 4    5
        8 layers, 4 stages on 2 ranks, first=2                      0      1 2 3  4      5 6 7

    The same as Megatron-LM's `get_num_layers_to_build`. Raises ValueError where a number does not come out even.
    """
    num_ranks = num_stages if num_ranks is None else num_ranks
    assert num_stages % num_ranks == 0, f"{num_stages} stages cannot be dealt out to {num_ranks} ranks"
    if first is None and last is None:
        counts = _count_evenly(num_layers, num_stages, embedding_as_layer, loss_as_layer)
    elif embedding_as_layer or loss_as_layer:
        raise ValueError(
            f"pipeline: {_given(first, last)} says how many layers the end has, and so does "
            f"{_given_accounting(embedding_as_layer, loss_as_layer)}; leave out one of the two"
        )
    else:
        by_rank = _count_around_ends(num_layers, num_ranks, num_stages // num_ranks, first, last)
        counts = [by_rank[stage % num_ranks] for stage in range(num_stages)]
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _count_evenly(num_layers: int, num_stages: int, embedding: bool, loss: bool) -> list[int]:
    """Layers by stage where the embedding and the loss may take the place of one."""
    slots = num_layers + embedding + loss
    if num_layers < 1 or slots < num_stages or slots % num_stages:
        extra = "" if slots == num_layers else f" plus {slots - num_layers} for {_given_accounting(embedding, loss)}"
        raise ValueError(
            f"pipeline: the number of layers ({num_layers}{extra}) must be a multiple of the number of stages "
            f"({num_stages}: pipeline ranks times chunks per rank); change --num-layers, --pipeline-model-parallel-size "
            "or --num-layers-per-virtual-pipeline-stage"
        )
    counts = [slots // num_stages] * num_stages
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _count_around_ends(num_layers: int, num_ranks: int, v: int, first: int | None, last: int | None) -> list[int]:
    """Layers in each of the v chunks of a rank, by rank, where the count of an end rank is given."""
    given = _given(first, last)
    if num_ranks < 2:
        raise ValueError(f"pipeline: {given} needs at least 2 pipeline ranks, not {num_ranks}; leave it out")
    problems = [
        f"{flag} ({count}) must be a positive multiple of the chunks per rank ({v}); change it"
        for flag, count in ((_FIRST, first), (_LAST, last))
        if count is not None and (count < 1 or count % v)
    ]
    rest, middle = num_layers - (first or 0) - (last or 0), num_ranks - (first is not None) - (last is not None)
    if middle == 0 and rest != 0:
        problems.append(f"{given} must add up to --num-layers ({num_layers}), since no other rank is left; change one")
    if middle and (rest < 1 or rest % (middle * v)):
        problems.append(
            f"{given} leaves {rest} of --num-layers ({num_layers}) to {middle} ranks with {v} chunks each; "
            f"that must be a positive multiple of {middle * v}; change one"
        )
    if problems:
        raise ValueError("\n".join(f"pipeline: {problem}" for problem in problems))
    counts = [rest // (middle * v) if middle else 0] * num_ranks
    if first is not None:
        counts[0] = first // v
    if last is not None:
        counts[-1] = last // v
    return counts


def _given(first: int | None, last: int | None) -> str:
    return " and ".join(f"{flag} ({n})" for flag, n in ((_FIRST, first), (_LAST, last)) if n is not None)


def _given_accounting(embedding: bool, loss: bool) -> str:
    flags = (("--account-for-embedding-in-pipeline-split", embedding), ("--account-for-loss-in-pipeline-split", loss))
    return " and ".join(flag for flag, is_set in flags if is_set)
