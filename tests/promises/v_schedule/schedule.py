"""A V: going down the ranks and up again, a microbatch meets two stages on each."""

from megatron.core.pipeline_parallel import Action, Op, Schedule


def v_shaped(p: int, m: int, v: int) -> Schedule:
    """All forwards of a microbatch, down the ranks and up again, then its backwards the same way: nobody works beside another.

    p = 2:      rank 0  F0.0           F3.0 B3.0           B0.0 F0.1 ...
                rank 1       F1.0 F2.0           B2.0 B1.0      ...
    """
    if v != 2:
        raise ValueError(f"v: it has 2 chunks per rank, not {v}; give --num-virtual-stages-per-pipeline-rank 2")
    down = [(op, stage) for op, stages in ((Op.F, range(2 * p)), (Op.B, reversed(range(2 * p)))) for stage in stages]
    home = [*range(p), *reversed(range(p))]
    return [[Action(op, stage, i) for i in range(m) for op, stage in down if home[stage] == rank] for rank in range(p)]
