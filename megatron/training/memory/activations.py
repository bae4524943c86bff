"""What a microbatch keeps between its forward and its backward, and what the backward needs beside. Pure.

A stage is a tape of steps (`steps.py`), in the order of the forward. A step keeps bytes until its backward has run, which takes the
gradient of its output, makes that of its input, and may need some room beside:

    forward    norm  qkv  attention  proj  norm  fc1  gelu  fc2         kept grows to the right
    backward    <------------------------------------------------       kept up to here + gradients on both sides + beside

Here the tape of a stage is put together, and run, forwards and backwards, by the actions of a schedule.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import Action, Op
from megatron.training.memory.elsewhere import Passing, block_of, leaving, placed, reads_ahead
from megatron.training.memory.parameters import is_small, items_of_stage
from megatron.training.memory.sizes import LayerSizes, RunSizes
from megatron.training.memory.steps import embedding_steps, head_steps, layer_segments, layer_steps, shared_steps
from megatron.training.memory.tape import Segment, Step, Tape


class StageBytes(NamedTuple):
    """The activations of one microbatch in one stage."""

    kept: int  # from the forward to the backward
    backward: int  # at the peak of a backward, what was kept included
    input_backward: int  # likewise, where the weight gradients are put off
    kept_for_weights: int  # from then until these are computed
    weights: int  # room to compute them
    forward: int = 0  # at the peak of a forward, where that is no backward's
    beside_forward: int = 0  # room at its end
    leaving: int = 0  # from a forward to the stage's next one, or to its own backward: what is on its way to a tier
    backward_of_last: int = 0  # of the microbatch of the stage's last forward: that is there when it begins
    input_backward_of_last: int = 0


def stage_bytes(run: RunSizes, stage: int) -> StageBytes:
    tape = tape_of_stage(run, stage)
    steps = [step for segment in tape for step in segment.steps]
    passing = partial(Passing, tape, ahead=reads_ahead(run), block=block_of(run))
    is_last = stage == len(run.layers) - 1
    beside = 2 + run.layer.hidden_dropout  # a product, that with its bias, and what dropout makes of it
    rounded = sum(passing(is_last=False).rounded(segment, step) for segment in tape for step in segment.steps)
    backward, of_last, by_input, by_input_of_last = (
        _backward_peak(tape, passing(is_last=just_made), defers=defers)
        for defers in (False, True)
        for just_made in (False, True)
    )
    return StageBytes(
        kept=sum(segment.keeps for segment in tape),
        backward=backward,
        input_backward=by_input,
        kept_for_weights=sum(step.deferred for step in steps) + rounded + _small_gradients(run, stage),
        weights=max((step.deferred_beside for step in steps), default=0),
        forward=_forward_peak(tape),
        beside_forward=0 if is_last else beside * run.layer.stream * run.layer.param_bytes,
        leaving=sum(leaving(tape).values()),
        backward_of_last=of_last,
        input_backward_of_last=by_input_of_last,
    )


def _small_gradients(run: RunSizes, stage: int) -> int:
    """Those of norms and biases, which ZeRO stages 2 and 3 put off with the products where a schedule asks for it."""
    if run.zero_stage < 2:
        return 0
    return sum(item.numel for item in items_of_stage(run, stage) if is_small(item.name)) * run.layer.param_bytes


def peak_of_rank(actions: Iterable[Action], of_stage: dict[int, StageBytes]) -> int:
    """The most bytes of activations at once on a rank that runs these actions; those that do not compute are passed over."""
    live = peak = 0
    last: dict[int, int | None] = {}  # by stage, the microbatch of the last forward, until its own backward
    for op, stage, microbatch in actions:
        at = of_stage[stage]
        is_last = microbatch is not None and last.get(stage) == microbatch
        if op in (Op.B, Op.I):
            live -= at.kept + (at.leaving if is_last else 0)
            last[stage] = None if is_last else last.get(stage)
        if op is Op.F:
            live -= at.leaving if last.get(stage) is not None else 0
            peak = max(peak, live + at.forward)
            live += at.kept + at.leaving
            last[stage] = microbatch
            peak = max(peak, live + at.beside_forward)
        elif op is Op.B:
            peak = max(peak, live + (at.backward_of_last if is_last else at.backward))
        elif op is Op.I:
            peak = max(peak, live + (at.input_backward_of_last if is_last else at.input_backward))
            live += at.kept_for_weights
        elif op is Op.W:
            peak = max(peak, live + at.weights)
            live -= at.kept_for_weights
    return peak


def _forward_peak(tape: Tape) -> int:
    """The most bytes while an operation runs that needs more in its forward than in its backward."""
    kept, peak, out = 0, 0, leaving(tape)
    for segment in tape:
        before = kept
        for step in segment.steps:
            peak = max(peak, before + step.forward)
            before += step.keeps if segment.kept_input is None else 0
        kept += segment.keeps + (segment.away.source if segment.away and segment.away.group in out else 0)
    return peak


def _backward_peak(tape: Tape, passing: Passing, *, defers: bool) -> int:
    """The most bytes while the tape is run backwards."""
    before, peak, deferred = sum(segment.keeps for segment in tape), 0, 0
    for segment in reversed(tape):
        before -= segment.keeps
        passing.enter(segment)
        kept = before + passing.held + segment.part + sum(passing.kept(segment, step) for step in segment.steps)
        if segment.kept_input is not None:  # a forward first, while the gradient waits
            peak = max(peak, kept + deferred + _again(segment.steps))
            peak = max(peak, before + passing.held + deferred + passing.gathered(segment) + _gradient(segment.steps))
        for step in reversed(segment.steps):
            beside = passing.read(segment, step) + (0 if defers and step.deferred else step.beside)
            peak = max(peak, kept + deferred + step.grad_out + step.grad_in + beside + step.waiting)
            deferred += step.deferred + passing.rounded(segment, step) if defers else 0
            kept -= passing.kept(segment, step)
    return peak


def _again(steps: Sequence[Step]) -> int:
    """The most bytes while steps are computed again, above what they keep."""
    more, left = 0, sum(step.keeps for step in steps)
    for step in steps:
        if step.forward:
            more = max(more, step.forward - left)
        left -= step.keeps
    return more + _gradient(steps)


def _gradient(steps: Sequence[Step]) -> int:
    """What waits for steps that are computed again."""
    return steps[-1].grad_out + steps[-1].waiting


# ---------------------------------------------------------------- the tape of a stage


def tape_of_stage(run: RunSizes, stage: int) -> Tape:
    """What one microbatch goes through on one rank of a stage."""
    sizes, first, last = run.layer, stage == 0, stage == len(run.layers) - 1
    layers = len(run.layers[stage])
    own = layer_steps(sizes)
    stream = sizes.stream * sizes.residual_bytes
    part = stream // sizes.t if sizes.saves_parts else 0
    saved = part or stream
    segments = [Segment(shared_steps(sizes, first))]
    segments += [Segment(embedding_steps(sizes))] if first else []
    saving = {"kept_input": saved, "part": part, "inputs": ((saved, sizes.residual_bytes),)}
    for layer, number, again in _groups(sizes, layers):
        group = (Segment(own * number, **saving),) if again else layer_segments(sizes)
        segments += placed(sizes, layer, group)
    if last:
        head = head_steps(sizes)
        if first and sizes.tied:  # a table that is looked up in too, whose gradient is not put off
            head = tuple(
                step._replace(deferred=0, deferred_beside=0) if step.name == "scores" else step for step in head
            )
        return (*segments, Segment(head))
    return _with_received_gradient(sizes, tuple(segments)) if layers else tuple(segments)


def _groups(sizes: LayerSizes, layers: int) -> Iterator[tuple[int, int, bool]]:
    """(the first layer's place in the stage, how many, whether they are computed again)"""
    size = sizes.recompute_layers if sizes.recompute == "uniform" else 1
    again = {"uniform": layers, "block": sizes.recompute_layers}.get(sizes.recompute, 0)
    for layer in range(0, layers, size):
        yield layer, min(size, layers - layer), layer < again


def _with_received_gradient(sizes: LayerSizes, tape: Tape) -> Tape:
    """The tape of a stage whose gradient came from the next one, and is counted where it was received: none of its own waits for the
    last branch."""
    stream, result, in_branch = sizes.stream * sizes.residual_bytes, [], True
    for segment in reversed(tape):
        steps = []
        for step in reversed(segment.steps):
            steps.insert(0, step._replace(waiting=step.waiting - stream) if in_branch else step)
            in_branch = in_branch and step.name != "norm"
        if not result and sizes.hands_on_gradient:
            steps[-1] = steps[-1]._replace(deferred=steps[-1].deferred - sizes.stream * sizes.param_bytes)
        result.insert(0, segment._replace(steps=tuple(steps)))
    return tuple(result)
