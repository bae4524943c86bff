"""The model's layers are split into pipeline stages."""

from collections.abc import Sequence
from itertools import accumulate

from megatron.core.parallel.parse_pipeline_layout_string import LAYOUT_FLAG, stages_of_layout
from megatron.core.parallel.stage_to_rank import StageMap, loop

_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    stages: StageMap | None = None,
    first: int | None = None,
    last: int | None = None,
    embedding_as_layer: bool = False,
    loss_as_layer: bool = False,
) -> list[range]:
    """Return the global layer numbers, from 0, of each stage: by default equally many in each.

    first, last: layers of the pipeline rank with the first or the last stage, over all its chunks; the other ranks
    share the rest. embedding_as_layer, loss_as_layer: count as a layer of the first or the last stage, which then has
    one layer less, possibly none. stages: the stage map; default one stage per rank.

        8 layers, 4 stages                                          0 1    2 3    4 5    6 7
        8 layers, 4 stages, first=1, last=1                         0      1 2 3  4 5 6  7
        6 layers, 4 stages, embedding_as_layer, loss_as_layer       0      1 2    3 4    5
        8 layers, 4 stages on 2 ranks, first=2                      0      1 2 3  4      5 6 7

    Megatron's `get_num_layers_to_build` gives the same numbers. Raises ValueError if the numbers do not divide.
    """
    stages = loop(num_stages) if stages is None else stages
    assert num_stages == len(stages.ranks), f"{num_stages} stages, and a map of {len(stages.ranks)}"
    if first is None and last is None:
        counts = _count_evenly(num_layers, num_stages, embedding_as_layer, loss_as_layer)
    elif embedding_as_layer or loss_as_layer:
        raise ValueError(
            f"pipeline: {_end_flags(first, last)} and {_accounting_flags(embedding_as_layer, loss_as_layer)} exclude "
            "each other; leave one of them out"
        )
    else:
        by_rank = _count_around_ends(num_layers, stages, first, last)
        counts = [by_rank[rank] for rank in stages.ranks]
    return _ranges(counts)


def split_two_stacks(encoder: int, decoder: int, stages: StageMap, split: int) -> list[range]:
    """Return the layer numbers, over the whole model, of each stage of an encoder and a decoder.

    The encoder has the first `split` stages by itself.

        4 and 6 layers on 4 stages, split 1     0 1 2 3    4 5    6 7    8 9

    Raises ValueError if a stack's layers do not divide into its stages, or a rank has several stages.
    """
    flag = f"--pipeline-model-parallel-split-rank ({split})"
    num_stages = stages.last + 1
    if stages.chunks > 1:
        raise ValueError(
            f"pipeline: {flag} needs one stage per rank, but this schedule has {stages.chunks}; leave it out: then "
            "all stages share all layers evenly"
        )
    if not 0 < split < num_stages:
        raise ValueError(
            f"pipeline: {flag} leaves no rank for the encoder or for the decoder; with "
            f"--pipeline-model-parallel-size {num_stages} give 1 to {num_stages - 1}, or leave it out"
        )
    problems = []
    for stack, layers, ranks in (("encoder", encoder, split), ("decoder", decoder, num_stages - split)):
        if layers % ranks:
            problems.append(
                f"pipeline: {flag} gives {layers} layers of the {stack} to {ranks} ranks; that must be a multiple of {ranks}; "
                "change one"
            )
    if problems:
        raise ValueError("\n".join(problems))
    counts = [encoder // split] * split + [decoder // (num_stages - split)] * (num_stages - split)
    return _ranges(counts)


def split_by_layout(layout: str | Sequence[Sequence[str]], num_layers: int, num_stages: int) -> list[range]:
    """Return the layer numbers, over the whole model, of each stage of a pipeline layout.

    The stages are those of the model's order: chunk 0 of every rank, then chunk 1 of every rank. A stage may be without
    layers; the embedding is in the first, and the loss in the last.

        Ett|ttt|L on 3 stages       0 1    2 3 4    -

    Raises ValueError if the layout is for other sizes, or has its parts in another order.
    """
    stages = stages_of_layout(layout)
    parts = "".join(stages)
    said = f"pipeline: {LAYOUT_FLAG} {layout}"
    problems = []
    if len(stages) != num_stages:
        problems.append(f"{said} has {len(stages)} stages, but the pipeline has {num_stages}; change one")
    if "m" in parts:
        problems.append(f"{said}: prediction of several tokens (m) is not built yet; leave it out")
    if parts.count("E") != 1 or not stages[0].startswith("E"):
        problems.append(f"{said} must have one E, the embedding, at the start of its first stage; move it there")
    if parts.count("L") != 1 or not stages[-1].endswith("L"):
        problems.append(f"{said} must have one L, the loss, at the end of its last stage; move it there")
    if parts.count("t") != num_layers:
        problems.append(f"{said} has {parts.count('t')} layers, but --num-layers is {num_layers}; change one")
    if problems:
        raise ValueError("\n".join(problems))
    return _ranges([stage.count("t") for stage in stages])


def _ranges(counts: list[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0: [2, 3] -> [0, 1], [2, 3, 4]."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _count_evenly(num_layers: int, num_stages: int, embedding: bool, loss: bool) -> list[int]:
    """Return the number of layers of each stage; the embedding and the loss may each count as a layer."""
    slots = num_layers + embedding + loss
    if num_layers < 1 or slots < num_stages or slots % num_stages:
        extra = ""
        if slots != num_layers:
            extra = f" plus {slots - num_layers} for {_accounting_flags(embedding, loss)}"
        raise ValueError(
            f"pipeline: the number of layers ({num_layers}{extra}) must be a multiple of the number of stages "
            f"({num_stages}: pipeline ranks times chunks per rank); change --num-layers, --pipeline-model-parallel-size "
            "or --num-layers-per-virtual-pipeline-stage"
        )
    counts = [slots // num_stages] * num_stages
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _count_around_ends(num_layers: int, stages: StageMap, first: int | None, last: int | None) -> list[int]:
    """Return the number of layers of each chunk, by rank, for given counts of the end ranks."""
    # check the counts of the end ranks
    flags = _end_flags(first, last)
    v = stages.chunks
    num_ranks = len(set(stages.ranks))
    if num_ranks < 2:
        raise ValueError(f"pipeline: {flags} needs at least 2 pipeline ranks, not {num_ranks}; leave it out")
    if None not in (first, last) and stages.rank_of_first == stages.rank_of_last:
        raise ValueError(
            f"pipeline: {flags} set the layers of one and the same rank, which has the first and the last stage; "
            "leave one of them out"
        )
    problems = []
    for flag, count in ((_FIRST, first), (_LAST, last)):
        if count is not None and (count < 1 or count % v):
            problems.append(f"{flag} ({count}) must be a positive multiple of the chunks per rank ({v}); change it")

    # share the rest among the ranks between
    rest = num_layers - (first or 0) - (last or 0)
    middle = num_ranks - (first is not None) - (last is not None)
    if middle == 0 and rest != 0:
        problems.append(f"{flags} must add up to --num-layers ({num_layers}): there is no other rank; change one")
    if middle and (rest < 1 or rest % (middle * v)):
        problems.append(
            f"{flags} leaves {rest} of --num-layers ({num_layers}) to {middle} ranks with {v} chunks each; "
            f"that must be a positive multiple of {middle * v}; change one"
        )
    if problems:
        raise ValueError("\n".join(f"pipeline: {problem}" for problem in problems))
    counts = [rest // (middle * v) if middle else 0] * num_ranks
    if first is not None:
        counts[stages.rank_of_first] = first // v
    if last is not None:
        counts[stages.rank_of_last] = last // v
    return counts


def _end_flags(first: int | None, last: int | None) -> str:
    """Return the given flags of the end ranks, with their values, for messages."""
    return " and ".join(f"{flag} ({n})" for flag, n in ((_FIRST, first), (_LAST, last)) if n is not None)


def _accounting_flags(embedding: bool, loss: bool) -> str:
    """Return the given flags that count the embedding or the loss as a layer, for messages."""
    flags = (("--account-for-embedding-in-pipeline-split", embedding), ("--account-for-loss-in-pipeline-split", loss))
    return " and ".join(flag for flag, is_set in flags if is_set)
