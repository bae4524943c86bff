"""What a microbatch keeps between its forward and its backward, and what the backward needs beside. Pure.

A stage is a tape of steps, in the order of the forward. A step keeps bytes until its backward has run, which takes the gradient of
its output, makes that of its input, and may need some room beside:

    forward    norm  qkv  attention  proj  norm  fc1  gelu  fc2         kept grows to the right
    backward    <------------------------------------------------       kept up to here + gradients on both sides + beside

What is said of a tensor is the first step that keeps it, for the memory is free when the last to use it in the backward is done.
Bytes of a layer of GPT-2 on one rank in bfloat16, in units of s b h, with f = 4 h and dropout behind each block:

    norm 2 | qkv 2 | attention 6 + 2 | proj - | dropout 1 | norm 2 | fc1 2 | gelu 8 | fc2 8 | dropout 1        34

the 34 of arXiv:2205.05198, equation 1. Its second term, 5 a s / h for the scores, is 0 with the fused kernel, which keeps none, and
7 a s / h with the plain one: our softmax is float32, 4 instead of 2 bytes.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import Action, Op
from megatron.training.memory.parameters import is_small, items_of_stage
from megatron.training.memory.sizes import LayerSizes, RunSizes

_INT, _BOOL, _FLOAT = 8, 1, 4  # bytes
_MLP = ("fc1", "gelu", "swiglu", "fc2")  # steps
_FEATURES_AT_ONCE, _TOKENS_AT_ONCE = 4096, 512  # of `tensor_parallel/linear.py`, whose factors are widened in blocks


class Step(NamedTuple):
    """One operation of a stage, in bytes."""

    name: str
    keeps: int
    grad_out: int
    grad_in: int
    beside: int = 0  # in the backward
    waiting: int = 0  # gradient of the residual stream that waits for the branch
    deferred: int = 0  # factors that stay if the weight gradient is put off
    deferred_beside: int = 0  # room for that weight gradient


class Segment(NamedTuple):
    """Steps that are kept, or of which only `kept_input` bytes are and the rest is computed again."""

    steps: tuple[Step, ...]
    kept_input: int | None = None
    part: int = 0  # of it, that stays beside the whole while the backward runs

    @property
    def keeps(self) -> int:
        return sum(step.keeps for step in self.steps) if self.kept_input is None else self.kept_input


Tape = tuple[Segment, ...]


class StageBytes(NamedTuple):
    """The activations of one microbatch in one stage."""

    kept: int  # from the forward to the backward
    backward: int  # at the peak of a backward, what was kept included
    input_backward: int  # likewise, where the weight gradients are put off
    kept_for_weights: int  # from then until these are computed
    weights: int  # room to compute them


def stage_bytes(run: RunSizes, stage: int) -> StageBytes:
    tape = tape_of_stage(run, stage)
    steps = [step for segment in tape for step in segment.steps]
    return StageBytes(
        kept=sum(segment.keeps for segment in tape),
        backward=_backward_peak(tape, defers=False),
        input_backward=_backward_peak(tape, defers=True),
        kept_for_weights=sum(step.deferred for step in steps) + _small_gradients(run, stage),
        weights=max((step.deferred_beside for step in steps), default=0),
    )


def _small_gradients(run: RunSizes, stage: int) -> int:
    """Those of norms and biases, which ZeRO stages 2 and 3 put off with the products where a schedule asks for it."""
    if run.zero_stage < 2:
        return 0
    return sum(item.numel for item in items_of_stage(run, stage) if is_small(item.name)) * run.layer.param_bytes


def peak_of_rank(actions: Iterable[Action], of_stage: dict[int, StageBytes]) -> int:
    """The most bytes of activations at once on a rank that runs these actions; those that do not compute are passed over."""
    live = peak = 0
    for op, stage, _ in actions:
        at = of_stage[stage]
        if op is Op.F:
            live += at.kept
            peak = max(peak, live)
        elif op is Op.B:
            peak = max(peak, live - at.kept + at.backward)
            live -= at.kept
        elif op is Op.I:
            peak = max(peak, live - at.kept + at.input_backward)
            live += at.kept_for_weights - at.kept
        elif op is Op.W:
            peak = max(peak, live + at.weights)
            live -= at.kept_for_weights
    return peak


def _backward_peak(tape: Tape, *, defers: bool) -> int:
    """The most bytes while the tape is run backwards."""
    before, peak, deferred = sum(segment.keeps for segment in tape), 0, 0
    for segment in reversed(tape):
        before -= segment.keeps
        kept = before + segment.part + sum(step.keeps for step in segment.steps)
        for step in reversed(segment.steps):
            beside = 0 if defers and step.deferred else step.beside
            peak = max(peak, kept + deferred + step.grad_out + step.grad_in + beside + step.waiting)
            deferred += step.deferred if defers else 0
            kept -= step.keeps
    return peak


# ---------------------------------------------------------------- the steps of a stage


def tape_of_stage(run: RunSizes, stage: int) -> Tape:
    """What one microbatch goes through on one rank of a stage."""
    sizes, first, last = run.layer, stage == 0, stage == len(run.layers) - 1
    layers = len(run.layers[stage])
    own = layer_steps(sizes)
    stream = sizes.stream * sizes.residual_bytes
    part = stream // sizes.t if sizes.saves_parts else 0
    saved = part or stream
    segments = [Segment(embedding_steps(sizes))] if first else []
    if sizes.recompute == "uniform":
        groups = [min(sizes.recompute_layers, layers - i) for i in range(0, layers, sizes.recompute_layers)]
        segments += [Segment(own * group, saved, part) for group in groups]
    elif sizes.recompute == "block":
        again = min(sizes.recompute_layers, layers)
        segments += [Segment(own, saved, part)] * again + [Segment(own)] * (layers - again)
    else:
        segments += [*layer_segments(sizes)] * layers
    if last:
        head = head_steps(sizes)
        if first and sizes.tied:  # a table that is looked up in too, whose gradient is not put off
            head = tuple(step._replace(deferred=0, deferred_beside=0) for step in head)
        return (*segments, Segment(head))
    return _with_received_gradient(sizes, tuple(segments)) if layers else tuple(segments)


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


def layer_segments(sizes: LayerSizes) -> Tape:
    """A layer that is kept, but for what is computed again."""
    steps, segments, kept = layer_steps(sizes), [], []
    for run in _runs_of(steps, together=_MLP if sizes.recomputes("mlp") else ()):
        saved = _saved_of(sizes, run)
        if saved is None:
            kept += run
            continue
        segments += [Segment(tuple(kept))] if kept else []
        segments.append(Segment(tuple(run), saved))
        kept = []
    return (*segments, Segment(tuple(kept))) if kept else tuple(segments)


def _runs_of(steps: Sequence[Step], together: tuple[str, ...]) -> list[list[Step]]:
    """Each step alone, but neighbours with names in `together` as one run."""
    runs: list[list[Step]] = []
    for step in steps:
        if runs and step.name in together and runs[-1][-1].name in together:
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _saved_of(sizes: LayerSizes, run: Sequence[Step]) -> int | None:
    """Of steps that are computed again, or whose input is, the bytes that are kept nevertheless; None for others."""
    first, normed = run[0].name, 0 if sizes.recomputes("layernorm") else sizes.stream * sizes.param_bytes
    if first == "attention" and sizes.recomputes("core_attn"):
        return _qkv_bytes(sizes) + run[0].grad_out  # what attention takes, and what it gives to proj
    if first == "fc1" and sizes.recomputes("mlp"):
        return normed
    return 0 if first in ("qkv", "fc1") and sizes.recomputes("layernorm") else None


def layer_steps(sizes: LayerSizes) -> tuple[Step, ...]:
    stream = sizes.stream * sizes.residual_bytes
    attention = (_linear(sizes, "qkv", sizes.h, _fused_width(sizes), column=True), *_attention(sizes))
    mlp = (_linear(sizes, "fc1", sizes.h, (2 if sizes.gated else 1) * sizes.f, column=True), *_mlp(sizes))
    return tuple(
        step._replace(waiting=step.waiting + stream)
        for block, again in ((attention, False), (mlp, sizes.recomputes("mlp")))
        for step in (
            _norm(sizes),
            *_after_norm(sizes, (*block[:-1], _row_linear(sizes, block[-1])), again),
            *_dropout(sizes),
        )
    )


def _after_norm(sizes: LayerSizes, block: tuple[Step, ...], again: bool) -> tuple[Step, ...]:
    """Where the norm's output is computed again, it is there from the start of the block's backward on. `again`: so is the block, as a
    whole, which then keeps it."""
    if not sizes.recomputes("layernorm"):
        return block
    normed, last = sizes.stream * sizes.param_bytes, block[-1]
    refill = Step("norm again", 0, last.grad_out, 0, normed + _norm_rows(sizes), waiting=normed)
    if again:
        return (*block, refill)
    return (block[0], *(step._replace(waiting=normed) for step in block[1:]), refill)


def _row_linear(sizes: LayerSizes, step: Step) -> Step:
    """Without dropout behind it, what it is handed is the gradient of the stream itself."""
    return step._replace(grad_out=0) if sizes.hands_on_gradient else step


def embedding_steps(sizes: LayerSizes) -> tuple[Step, ...]:
    tokens, e = sizes.s * sizes.b, sizes.param_bytes
    stream = sizes.stream * sizes.residual_bytes
    batch = (4 if sizes.by_document else 3) * tokens * _INT  # tokens, labels, positions and documents are one tensor
    apart = (_INT + _BOOL) * tokens if sizes.t > 1 else 0  # which words are mine
    whole = tokens * sizes.h
    rows = (
        sizes.words if sizes.accelerator else min(tokens, sizes.words)
    )  # of the table's gradient, made before it is added
    widened = whole * sizes.main_grad_bytes if sizes.param_bytes < sizes.main_grad_bytes else 0
    spread = whole * e * (2 if sizes.sequence_parallel else 1) if sizes.t > 1 else 0
    ids = batch if sizes.t == 1 or sizes.positions else 0
    return (
        Step("words", ids + apart, stream, 0, widened + spread + rows * sizes.h * sizes.main_grad_bytes),
        *_dropout(sizes),
    )


def head_steps(sizes: LayerSizes) -> tuple[Step, ...]:
    tokens, e = sizes.s * sizes.b, sizes.param_bytes
    scores = tokens * sizes.words * e
    at_once = min(tokens, max(1, sizes.cached_elements // sizes.words))
    wide = at_once * sizes.words * sizes.grad_bytes
    kept = tokens * (
        (2 if sizes.z_loss else 1) * sizes.grad_bytes + _INT + _BOOL + _FLOAT
    )  # of a token: log-sum-exp, target, mask
    return (
        _norm(sizes),
        _linear(sizes, "scores", sizes.h, sizes.words, column=True),
        Step("loss", scores + kept, 0, scores, wide),
    )


def _norm(sizes: LayerSizes) -> Step:
    """Of the residual stream: its input is kept, and two numbers a row."""
    elements = sizes.stream
    e, r, g = sizes.param_bytes, sizes.residual_bytes, sizes.grad_bytes
    keeps, beside = elements * r + _norm_rows(sizes), 0
    if sizes.rms and not sizes.accelerator:  # which torch makes of single operations, on a copy where that is wider
        keeps += elements * (2 * g - (0 if sizes.recomputes("layernorm") else r))
        beside = 3 * elements * g
    return Step("norm", keeps, elements * e, elements * r, beside + (elements * r if e != r else 0))


def _norm_rows(sizes: LayerSizes) -> int:
    return 2 * sizes.tokens * (sizes.grad_bytes if sizes.accelerator else sizes.residual_bytes)


def _linear(sizes: LayerSizes, name: str, inputs: int, outputs: int, *, column: bool) -> Step:
    """x [tokens, inputs] -> [tokens, outputs], with the moves of tensor parallelism on the side of the whole width."""
    tokens, e, apart = sizes.s * sizes.b, sizes.param_bytes, sizes.sequence_parallel
    kept = (sizes.tokens if column else tokens) * inputs * e
    moved = tokens * inputs * e if column and apart else 0  # x or its gradient, whole
    widened = _weight_gradient_bytes(sizes, inputs, outputs)
    grad_out, grad_in = tokens * outputs * e, (sizes.tokens if column else tokens) * inputs * e
    arriving = sizes.tokens * outputs * e if not column and apart else 0
    keeps = kept if column or name == "fc2" else 0  # attention keeps what proj takes
    return Step(
        name, keeps, grad_out, grad_in, 2 * moved + arriving + widened, deferred=kept + grad_out, deferred_beside=moved + widened
    )  # fmt: skip


def _weight_gradient_bytes(sizes: LayerSizes, inputs: int, outputs: int) -> int:
    """Room for a product that is wider than its factors: the product itself, or, on a CPU, factors that are widened."""
    if sizes.param_bytes == sizes.main_grad_bytes:
        return 0
    if sizes.accelerator:
        return inputs * outputs * sizes.main_grad_bytes
    tokens = sizes.s * sizes.b
    block = min(tokens, _TOKENS_AT_ONCE) * min(outputs, _FEATURES_AT_ONCE)
    return (tokens * inputs + block) * sizes.main_grad_bytes


def _dropout(sizes: LayerSizes) -> tuple[Step, ...]:
    if not sizes.hidden_dropout:
        return ()
    e = sizes.param_bytes
    return (Step("dropout", sizes.stream * _BOOL, sizes.stream * e, sizes.stream * e),)


def _mlp(sizes: LayerSizes) -> tuple[Step, ...]:
    inner = sizes.s * sizes.b * sizes.f * sizes.param_bytes
    # Gate and up are one tensor, whose gradient is put together at the end.
    gated, plain = Step("swiglu", 3 * inner, 2 * inner, 2 * inner), Step("gelu", inner, inner, inner)
    activation = gated if sizes.gated else plain
    return activation, _linear(sizes, "fc2", sizes.f, sizes.h, column=False)


def _head_norms(sizes: LayerSizes) -> Step:
    """Of each query and key head."""
    rows, e, g = sizes.s * sizes.b * (sizes.heads + sizes.kv_heads), sizes.param_bytes, sizes.grad_bytes
    elements = rows * sizes.d
    copied = sizes.s * sizes.b * sizes.heads * sizes.d * e if _copies_queries(sizes) else 0
    if sizes.rms and not sizes.accelerator:
        kept, beside = elements * (2 * g if e < g else g) + (copied if e == g else 0), 3 * elements * g
    else:
        kept, beside = copied, 0
    return Step("head norms", kept + rows * 2 * (g if sizes.accelerator else e), elements * e, elements * e, beside)


def _copies_queries(sizes: LayerSizes) -> bool:
    """Whether the groups' queries are copied to lie side by side."""
    return sizes.kv_heads > 1 and sizes.heads > sizes.kv_heads


def _fused_width(sizes: LayerSizes) -> int:
    return (sizes.heads + 2 * sizes.kv_heads) * sizes.d


def _qkv_bytes(sizes: LayerSizes) -> int:
    """The tensors that queries, keys and values lie in when attention takes them."""
    of_token, queries = _fused_width(sizes), sizes.heads * sizes.d
    turned = sizes.rotary_width > 0 or sizes.qk_norm
    if turned:
        of_token += queries + sizes.kv_heads * sizes.d
    elif _copies_queries(sizes):
        of_token += queries
    if sizes.fused_attention and sizes.accelerator and not sizes.is_half and sizes.heads > sizes.kv_heads:
        of_token += 2 * queries  # keys and values repeated for every query head
    return sizes.s * sizes.b * of_token * sizes.param_bytes


def _attention(sizes: LayerSizes) -> tuple[Step, ...]:
    """From the fused q/k/v to what proj takes."""
    tokens, e, g = sizes.s * sizes.b, sizes.param_bytes, sizes.grad_bytes
    fused, out = tokens * _fused_width(sizes) * e, tokens * sizes.heads * sizes.d * e
    scores = sizes.b * sizes.heads * sizes.s * sizes.s
    before = [_head_norms(sizes)] if sizes.qk_norm else []
    if sizes.rotary_width:
        rotary = 4 * sizes.s * sizes.rotary_width // 2 * e
        before.append(Step("rotary", rotary, fused, fused))
    if sizes.fused_attention:
        joined = out if sizes.by_document else 0  # what proj takes is put together from the documents
        core = Step("attention", _qkv_bytes(sizes) + out + joined + tokens * sizes.heads * _FLOAT, out, fused)
    else:
        masks = sizes.b if sizes.by_document else 1
        kept = 3 * out + masks * sizes.s * sizes.s * _BOOL + scores * g + out
        if sizes.attention_dropout:
            kept += scores * (_BOOL + e)
        elif sizes.is_half:
            kept += scores * e
        core = Step("attention", kept, out, fused, 2 * scores * g)
    return (
        Step("split", 0, fused, fused),
        *before,
        core,
        _linear(sizes, "proj", sizes.heads * sizes.d, sizes.h, column=False),
    )


def listed(tape: Sequence[Segment]) -> list[tuple[str, int]]:
    """What each step keeps, by name, for a table."""
    return [(step.name, step.keeps) for segment in tape for step in segment.steps]
