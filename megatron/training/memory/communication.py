"""What a rank holds for the sake of the other ranks: transfers between stages, sums under way, units of ZeRO. Pure.

A rank's lowered list of actions is walked, and what is there is counted at each:

    POST .. RECV    room for what arrives: an input, then an activation; a gradient stays until its backward has ended
    SEND .. SENT    an output, or the gradient of an input
    F, B, I, W      parameters and gradients that are whole for a while (ZeRO stages 2 and 3)
    REDUCE          sums under way, which lie beside the gradients (stage 1, or rounded to bfloat16) or in their place (stage 0)
    after the step  each rank's updated part, as the others fetch it
"""

from collections.abc import Sequence

from megatron.core.distributed.plan import BufferPlan
from megatron.core.pipeline_parallel.schedule import Action, Op
from megatron.training.memory.parameters import owned_numel, plans_of_stage
from megatron.training.memory.passing import PassingBytes, SumBytes, sum_of_bucket
from megatron.training.memory.sizes import RunSizes


def peak_of_rank(run: RunSizes, rank: int, actions: Sequence[Action]) -> int:
    """The most bytes at once on a pipeline rank that runs these lowered actions."""
    plans = {stage: plans_of_stage(run, stage) for stage in run.stages_of(rank)}
    passing = {stage: PassingBytes(run, stage) for stage in plans} if run.zero_stage > 1 else {}
    whole = run.layer.stream * run.layer.residual_bytes
    scatters = run.scatter and run.layer.t > 1 and run.layer.stream % run.layer.t == 0
    part = whole // run.layer.t if scatters else whole
    ends = (Op.B, Op.W if run.layer.hands_on_gradient else Op.I)  # of the gradient that a stage begins with
    moving = summing = 0
    gathers = {stage: _gathered(run, plans[stage]) for stage in plans}  # until the stage's next forward, with overlap
    stays = sum(one.held for one in passing.values())
    peak = stays + max(*(partial_bytes(run, stage) for stage in plans), *gathers.values())
    gathers = gathers if run.overlap_gather else {}
    splits = any(action.op is Op.I for action in actions)
    sums = {stage: _sums(run, plans[stage]) for stage in plans}
    for op, stage, _ in actions:
        before = moving + summing + sum(one.held for one in passing.values()) + sum(gathers.values())
        if op in (Op.POST_F, Op.POST_B):
            moving += part
        elif op in (Op.RECV_F, Op.RECV_B):
            peak = max(peak, before + (whole if scatters else 0))
            moving += (0 if op is Op.RECV_F else whole) - part
        elif op in (Op.SEND_F, Op.SEND_B):
            moving += whole
        elif op in (Op.SENT_F, Op.SENT_B):
            moving -= whole
        elif op is Op.REDUCE:
            summing += sum(one.under_way for one in sums[stage])
            # Sums begin in the last backward, which holds the gradient it began with, to the end of what is put off.
            holds = run.layer.hands_on_gradient if splits else stage == 0
            first = whole if run.overlap_reduce and holds and stage < len(run.layers) - 1 else 0
            peak = max(peak, moving + first + summing)
        elif passing:
            others = before - passing[stage].held
            peak = max(peak, others + passing[stage].act(op))
        if op in ends and stage < len(run.layers) - 1:
            moving -= whole
        peak = max(peak, before, moving + summing + sum(one.held for one in passing.values()) + sum(gathers.values()))
        if op is Op.F:
            gathers.pop(stage, None)
    return max(peak, _at_end([one for stage in sums for one in sums[stage]]))


def _sums(run: RunSizes, plans: Sequence[BufferPlan]) -> list[SumBytes]:
    """What the sum of each bucket of a stage takes beside the gradients, where it begins in the last backward and ends with the step."""
    if run.fixed_order or run.zero_stage > 1:  # counted with the gradients, or as they come
        return []
    return [sum_of_bucket(run, bucket.stop - bucket.start) for plan in plans for bucket in plan.buckets]


def _at_end(sums: Sequence[SumBytes]) -> int:
    """The most bytes while a step ends one sum after the other, each of which is gone before the next. No transfer is left then."""
    left, peak = sum(one.under_way for one in sums), 0
    for one in sums:
        left -= one.under_way
        peak = max(peak, left + one.at_its_end)
    return peak


def _gathered(run: RunSizes, plans: Sequence[BufferPlan]) -> int:
    """Copies of what this rank has updated, while the others fetch it. In stage 3 each forward fetches for itself."""
    if run.zero_stage not in (1, 2) or run.shards == 1:
        return 0
    return sum(map(owned_numel, plans)) * run.layer.param_bytes


def partial_bytes(run: RunSizes, stage: int) -> int:
    """Gradients of which each tensor-parallel rank has a part, laid end to end to be summed in one message."""
    sizes, layers = run.layer, len(run.layers[stage])
    if sizes.t == 1:
        return 0
    numel = 0
    norm = 1 if sizes.rms else 2
    if sizes.sequence_parallel:
        numel += layers * (2 * norm + 2 * sizes.linear_bias) * sizes.h
        numel += norm * sizes.h if stage == len(run.layers) - 1 else 0
        numel += (sizes.positions + sizes.token_types) * sizes.h if stage == 0 else 0
        if sizes.is_bert and stage == len(run.layers) - 1:
            numel += (sizes.h + 1 + norm) * sizes.h  # what stands before the output layer
    numel += layers * 2 * norm * sizes.d if sizes.qk_norm else 0
    shared = layers * 2 * sizes.d * (sizes.h + sizes.qkv_bias) if sizes.ranks_per_kv_head > 1 else 0
    return max(numel, shared) * sizes.grad_bytes // (run.shards if run.zero_stage > 0 else 1)
