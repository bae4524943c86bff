"""Which stages live on which pipeline rank, and which layers live in which stage.

A stage is a run of consecutive layers. With v stages (chunks) per rank, p ranks hold p * v stages, dealt out in a loop:

    p = 2, v = 2, 8 layers      rank 0: stage 0 (layers 0 1), stage 2 (layers 4 5)
                                rank 1: stage 1 (layers 2 3), stage 3 (layers 6 7)
"""

from collections.abc import Callable

Placement = Callable[[int], int]  # stage -> pipeline rank


def loop_placement(num_ranks: int) -> Placement:
    """Stage s lives on rank s % num_ranks: chunk 0 of every rank, then chunk 1 of every rank, ..."""
    return lambda stage: stage % num_ranks


def stages_of_rank(placement: Placement, num_stages: int, rank: int) -> list[int]:
    """The stages of `rank` in the order of the model; entry k is the rank's chunk k."""
    return [stage for stage in range(num_stages) if placement(stage) == rank]


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """The global numbers, from 0, of the layers of `stage`; every stage has the same number of layers."""
    assert 0 <= stage < num_stages, f"stage {stage} is outside 0..{num_stages - 1}"
    if num_layers < num_stages or num_layers % num_stages:
        raise ValueError(
            f"pipeline: the number of layers ({num_layers}) must be a multiple of the number of stages ({num_stages}: "
            "pipeline ranks times chunks per rank); change --num-layers, --pipeline-model-parallel-size or "
            "--num-layers-per-virtual-pipeline-stage"
        )
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)
