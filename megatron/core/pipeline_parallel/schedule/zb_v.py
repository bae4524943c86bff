"""ZB-V is a zero-bubble schedule whose stages are placed on the ranks in a V, with the memory of 1F1B."""

from collections import deque

from megatron.core.parallel.stage_to_rank import v_shape
from megatron.core.pipeline_parallel.schedule.actions import (
    Action,
    Op,
    Schedule,
    check_positive_sizes,
    count_stages,
    dependencies,
)


def zb_v(p: int, m: int, v: int = 2) -> Schedule:
    """ZB-V: two chunks per rank in a V, so that rank 0 has the first stage and the loss. Any m.

    Half the bubble of ZB-H1, with at most the memory of 1F1B (arXiv:2401.10241, section 6). With p = 3, m = 4 and F, I,
    W of equal time, lower case for the second chunk:

        rank 0 |F0F1F2F3  f0i0w0f1i1w1f2i2w2I0W0f3i3I1w3I2W1I3W2W3  |
        rank 1 |  F0F1F2f0F3f1i0w0f2i1w1I0W0f3i2I1w2i3I2W1I3w3W2W3  |
        rank 2 |    F0f0F1f1F2f2i0w0F3I0W0f3i1I1i2I2w1i3I3W1w2W2w3W3|
    """
    check_positive_sizes("zb-v", p, m, v, chunks=2)
    return _fill_with_weight_grads([_forwards_and_input_grads(rank, p, m) for rank in range(p)])


def _forwards_and_input_grads(rank: int, p: int, m: int) -> list[Action]:
    """Return the F and I of `rank` in order: made for any number of microbatches, then those from m on are dropped.

    I of microbatch 0 arrives after 2p forwards (of both chunks), which is the memory of 1F1B's rank 0, on every rank.
    From then on the rank repeats F I of its second chunk, and once the I of its first chunk arrive, F I F I over both.
    So each F has the memory of an I before it, and no rank waits for another longer than its own work takes, at any
    costs of F, I and W.
    """
    down, up = v_shape(p).of_rank(rank)  # the rank's stage on the way to the last rank, and on the way back
    ahead = 2 * (p - rank) - 1  # F of `down` before microbatch 0 comes back
    order = [(Op.F, down, i) for i in range(ahead)]
    for i in range(rank):
        order += [(Op.F, up, i), (Op.F, down, ahead + i)]
    for i in range(p - rank):
        order += [(Op.F, up, rank + i), (Op.I, up, i)]
    for i in range(m):
        order += [(Op.F, down, ahead + rank + i), (Op.I, down, i), (Op.F, up, p + i), (Op.I, up, p - rank + i)]
    return [Action(*action) for action in order if action[2] < m]


def _fill_with_weight_grads(schedule: Schedule) -> Schedule:
    """Return the lists of F and I with the W of each I.

    A W runs at once while the rank has forwards left, which need the memory; after its last forward only where the rank
    would wait, if F, I and W take one unit of time each.

    W run in the order of their I, so a stage's gradients are summed in the order of its microbatches, as by B.
    """
    num_stages = count_stages(schedule)
    queue = [deque(actions) for actions in schedule]  # by rank: the F and I that have not run
    forwards_left = [sum(action.op is Op.F for action in actions) for actions in schedule]
    weight_grads: list[deque[Action]] = [deque() for _ in schedule]  # by rank: the W whose I has run
    filled: Schedule = [[] for _ in schedule]
    done: set[Action] = set()

    def choose(rank: int) -> Action | None:
        is_ready = queue[rank] and done.issuperset(dependencies(queue[rank][0], num_stages))
        if weight_grads[rank] and (forwards_left[rank] or not is_ready):
            return weight_grads[rank].popleft()
        return queue[rank].popleft() if is_ready else None

    while any(queue) or any(weight_grads):
        # One unit of time: all ranks choose before any of the chosen actions counts as done.
        chosen = [choose(rank) for rank in range(len(schedule))]
        for rank, action in enumerate(chosen):
            if action is None:
                continue
            filled[rank].append(action)
            done.add(action)
            if action.op is Op.F:
                forwards_left[rank] -= 1
            if action.op is Op.I:
                weight_grads[rank].append(action.with_op(Op.W))
    return filled
