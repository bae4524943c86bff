"""A pipeline schedule of your own: a function of integers, which the trainer runs and tools/plot_schedule.py draws."""

from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule


def rounds(p: int, m: int, v: int) -> Schedule:
    """GPipe in rounds of p microbatches: all forwards of a round, then all its backwards. At most p activations are alive.

    p = 2, m = 4, backward twice as long as forward:

        rank 0 |F0F1      B0--B1--F2F3      B2--B3--|
        rank 1 |  F0F1B0--B1--      F2F3B2--B3--    |
    """
    if v > 1:
        raise ValueError(
            f"rounds: it has one chunk per rank, not {v}; leave out --num-layers-per-virtual-pipeline-stage"
        )
    starts = range(0, m, p)
    return [
        [
            Action(op, stage, microbatch)
            for start in starts
            for op in (Op.F, Op.B)
            for microbatch in range(start, min(start + p, m))
        ]
        for stage in range(p)
    ]
