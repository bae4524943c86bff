"""The operations of a stage on one rank, with the bytes that each keeps for its backward, makes and needs. Pure.

What is said of a tensor is the first step that keeps it, for the memory is free when the last to use it in the backward is done.
Bytes of a layer of GPT-2 on one rank in bfloat16, in units of s b h, with f = 4 h and dropout behind each block:

    norm 2 | qkv 2 | attention 6 + 2 | proj - | dropout 1 | norm 2 | fc1 2 | gelu 8 | fc2 8 | dropout 1        34

the 34 of arXiv:2205.05198, equation 1. Its second term, 5 a s / h for the scores, is 0 with the fused kernel, which keeps none, and
7 a s / h with the plain one: our softmax is float32, 4 instead of 2 bytes.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.training.memory.sizes import LayerSizes
from megatron.training.memory.tape import Saved, Segment, Step, Tape

_INT, _BOOL, _FLOAT = 8, 1, 4  # bytes
_CORE, _MLP = ("attention", "softmax", "drop", "values", "together"), ("fc1", "gelu", "swiglu", "fc2")  # steps
_FEATURES_AT_ONCE, _TOKENS_AT_ONCE = 4096, 512  # of `tensor_parallel/linear.py`, whose factors are widened in blocks


def layer_segments(sizes: LayerSizes) -> Tape:
    """A layer that is kept, but for what is computed again."""
    steps, segments, kept = layer_steps(sizes), [], []
    for run in _runs_of(steps, together=(_CORE, _MLP if sizes.recomputes("mlp") else ())):
        saved = _saved_of(sizes, run)
        if saved is None:
            kept += run
            continue
        segments += [Segment(tuple(kept))] if kept else []
        segment = Segment(tuple(run), sum(size for size, _ in saved), inputs=saved)
        if run[0].name == _CORE[0]:  # which gives the last of them
            fused = sizes.s * sizes.b * _fused_width(sizes) * sizes.param_bytes, sizes.param_bytes
            segment = segment._replace(reads=saved[:-1], lent=(fused,) if _norms_look_in(sizes) else ())
        segments.append(segment)
        kept = []
    return (*segments, Segment(tuple(kept))) if kept else tuple(segments)


def _runs_of(steps: Sequence[Step], together: tuple[tuple[str, ...], ...]) -> list[list[Step]]:
    """Each step alone, but neighbours whose names stand in one of `together` as one run."""
    runs: list[list[Step]] = []
    for step in steps:
        if runs and any(step.name in names and runs[-1][-1].name in names for names in together):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _saved_of(sizes: LayerSizes, run: Sequence[Step]) -> tuple[Saved, ...] | None:
    """Of steps that are computed again, or whose input is, the memories that are kept nevertheless; None for others."""
    first, e = run[0].name, sizes.param_bytes
    normed = () if sizes.recomputes("layernorm") else ((sizes.stream * e, e),)
    if first == "attention" and sizes.recomputes("core_attn"):
        return (*_qkv(sizes), (run[-1].grad_out, e))  # what attention takes, and what it gives to proj
    if first == "fc1" and sizes.recomputes("mlp"):
        return normed
    return () if first in ("qkv", "fc1") and sizes.recomputes("layernorm") else None


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
    return (block[0], *(step._replace(waiting=step.waiting + normed) for step in block[1:]), refill)


def _row_linear(sizes: LayerSizes, step: Step) -> Step:
    """Without dropout behind it, what it is handed is the gradient of the stream itself."""
    return step._replace(grad_out=0) if sizes.hands_on_gradient else step


def embedding_steps(sizes: LayerSizes) -> tuple[Step, ...]:
    tokens, e = sizes.s * sizes.b, sizes.param_bytes
    stream = sizes.stream * sizes.residual_bytes
    apart = (_INT + _BOOL) * tokens if sizes.t > 1 else 0  # which words are mine
    whole = tokens * sizes.h
    rows = (
        sizes.words if sizes.accelerator else min(tokens, sizes.words)
    )  # of the table's gradient, made before it is added
    widened = whole * sizes.main_grad_bytes if sizes.param_bytes < sizes.main_grad_bytes else 0
    spread = whole * e * (2 if sizes.sequence_parallel else 1) if sizes.t > 1 else 0
    ids = _batch(sizes) if _keeps_batch(sizes) else 0
    return (
        Step("words", ids + apart, stream, 0, widened + spread + rows * sizes.h * sizes.main_grad_bytes),
        *_dropout(sizes),
    )


def shared_steps(sizes: LayerSizes, first: bool) -> tuple[Step, ...]:
    """What all layers of a microbatch share: rotary angles, while a layer may be computed again; and where documents do not see each
    other, their numbers, which lie in one tensor with the rest of the batch, and the plain kernel's mask."""
    full = sizes.recompute in ("uniform", "block")
    angles = sizes.s * (sizes.rotary_width // 2) * sizes.grad_bytes if full else 0
    batch = mask = 0
    if sizes.is_bert and (full or sizes.recomputes("core_attn") or not sizes.fused_attention):
        mask = sizes.b * sizes.s * _BOOL  # of padding; a fused kernel has one of its own
    elif sizes.by_document:
        batch = _batch(sizes) if (full or sizes.recomputes("core_attn")) and not (first and _keeps_batch(sizes)) else 0
        mask = 0 if sizes.fused_attention else sizes.b * sizes.s * sizes.s * _BOOL
    return (Step("shared", angles + batch + mask, 0, 0),)


def _batch(sizes: LayerSizes) -> int:
    """Tokens, labels, positions and documents, which are one tensor; so are a BERT's tokens, their kinds, labels and two masks."""
    fields = 5 if sizes.is_bert else 4 if sizes.by_document else 3
    return fields * sizes.s * sizes.b * _INT


def _keeps_batch(sizes: LayerSizes) -> bool:
    """Whether what the embedding keeps looks into it."""
    return sizes.t == 1 or (sizes.token_types if sizes.is_bert else sizes.positions) > 0


def head_steps(sizes: LayerSizes) -> tuple[Step, ...]:
    tokens, e = sizes.s * sizes.b, sizes.param_bytes
    scores = tokens * sizes.words * e
    at_once = min(tokens, max(1, sizes.cached_elements // max(1, sizes.real_words)))
    wide = at_once * sizes.real_words * sizes.grad_bytes
    of_mask = sizes.grad_bytes if sizes.is_bert else _FLOAT
    # Of a token: log-sum-exp, target, whose word it is, mask.
    kept = tokens * ((2 if sizes.z_loss else 1) * sizes.grad_bytes + _INT + _BOOL + of_mask)
    return (
        _norm(sizes),
        *(_before_words(sizes) if sizes.is_bert else ()),
        _linear(sizes, "scores", sizes.h, sizes.words, column=True),
        Step("loss", scores + kept, 0, scores, wide),
    )


def _before_words(sizes: LayerSizes) -> tuple[Step, ...]:
    """Of a BERT, behind the final norm: the order of sentences, told of one token a sample, and the dense layer of the words."""
    e = sizes.param_bytes
    part = replace(sizes, s=sizes.tokens // sizes.b, sequence_parallel=False, residual_bytes=e)  # which a rank works on
    dense, numel = _linear(part, "dense", sizes.h, sizes.h, column=True), sizes.stream * e
    head = (dense, _kept_step("gelu", ((numel, e),), numel, numel), _norm(part))
    if not sizes.binary_head:
        return head
    whole = sizes.s * sizes.b * sizes.h * e  # of which one position is looked at, and gets a gradient
    gathered = whole if sizes.sequence_parallel else 0
    return Step("order", gathered, 0, whole, gathered, waiting=numel, deferred=gathered), *head


def _norm(sizes: LayerSizes) -> Step:
    """Of the residual stream: its input is kept, and two numbers a row."""
    elements = sizes.stream
    e, r, g = sizes.param_bytes, sizes.residual_bytes, sizes.grad_bytes
    keeps, beside = elements * r + _norm_rows(sizes), 0
    row = _norm_rows(sizes) // 2, g if sizes.accelerator else r
    saves = ((elements * r, r), *[row] * (1 if sizes.rms else 2))
    if sizes.rms and not sizes.accelerator:  # which torch makes of single operations, on a copy where that is wider
        keeps += elements * (2 * g - (0 if sizes.recomputes("layernorm") and r != g else r))
        beside = (3 if e == r else 2) * elements * g  # one less beside the gradient widened
        saves = ((elements * g, g), (elements * g, g), (sizes.tokens * g, g))
    if e != r:  # weight, and bias, as wide as the stream
        saves += ((sizes.h * r, r),) * (1 if sizes.rms else 2)
        keeps += sizes.h * r * (1 if sizes.rms else 2)
        beside += elements * r
    one_by_one = sizes.rms and not sizes.accelerator
    return Step("norm", keeps, elements * e, elements * r, beside, saves=saves, at_once=2 if one_by_one else None)


def _residual(sizes: LayerSizes) -> int:
    """The stream that waits in a forward for the block's result, where the norm before has kept wider copies instead."""
    r = sizes.residual_bytes
    return sizes.stream * r if sizes.rms and not sizes.accelerator and r != sizes.grad_bytes else 0


def _norm_rows(sizes: LayerSizes) -> int:
    return 2 * sizes.tokens * (sizes.grad_bytes if sizes.accelerator else sizes.residual_bytes)


def _linear(sizes: LayerSizes, name: str, inputs: int, outputs: int, *, column: bool) -> Step:
    """x [tokens, inputs] -> [tokens, outputs], with the moves of tensor parallelism on the side of the whole width."""
    tokens, e, apart = sizes.s * sizes.b, sizes.param_bytes, sizes.sequence_parallel
    kept = (sizes.tokens if column else tokens) * inputs * e
    moved = tokens * inputs * e if column and apart else 0  # x or its gradient, whole
    widened = max(_weight_gradient_bytes(sizes, inputs, outputs), _widened_bytes(sizes, "backward", inputs, outputs))
    forward = _widened_bytes(sizes, "forward", inputs, outputs)
    grad_out, grad_in = tokens * outputs * e, (sizes.tokens if column else tokens) * inputs * e
    arriving = sizes.tokens * outputs * e if not column and apart else 0
    keeps = kept if column or name == "fc2" else 0  # attention keeps what proj takes
    return Step(
        name,
        keeps,
        grad_out,
        grad_in,
        2 * moved + arriving + widened,
        deferred=kept + grad_out,
        deferred_beside=moved + widened,
        saves=((keeps, e),) if keeps else (),
        reads=() if keeps else ((kept, e),),
        forward=forward and grad_out + forward,
    )


def _widened_bytes(sizes: LayerSizes, kind: str, inputs: int, outputs: int) -> int:
    """Room for a product in float32: on the side of the inputs whole, and a block of the outputs and of the weight."""
    if kind not in sizes.widened:
        return 0
    tokens, block = sizes.s * sizes.b, min(outputs, _FEATURES_AT_ONCE)
    return (tokens * (inputs + block) + inputs * block) * _FLOAT


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
    mask, stream = sizes.stream * _BOOL, sizes.stream * e
    # A product, and that with its bias, before there is a mask: what the forward of a recomputed group ends with.
    forward = stream * (1 + sizes.linear_bias)
    return (Step("dropout", mask, stream, stream, saves=((mask, _BOOL),), forward=forward),)


def _mlp(sizes: LayerSizes) -> tuple[Step, ...]:
    e = sizes.param_bytes
    inner = sizes.s * sizes.b * sizes.f * e
    if sizes.gated:  # gate and up are one tensor, whose gradient is put together at the end
        activation = Step("swiglu", 3 * inner, inner, 2 * inner, saves=((2 * inner, e), (inner, e)))
    else:
        activation = Step("gelu", inner, inner, inner, saves=((inner, e),))
    return activation, _linear(sizes, "fc2", sizes.f, sizes.h, column=False)


def _head_norms(sizes: LayerSizes) -> Step:
    """Of each query and key head."""
    e, g, tokens = sizes.param_bytes, sizes.grad_bytes, sizes.s * sizes.b
    rows = tokens * sizes.heads, tokens * sizes.kv_heads
    elements = sum(rows) * sizes.d
    saves = [(2 * row * (g if sizes.accelerator else e), g) for row in rows]
    beside, at_once = 0, None
    if sizes.rms and not sizes.accelerator:  # of single operations, as `_norm`
        saves += [(row * sizes.d * g, g) for row in rows] * (2 if e < g else 1)
        beside, at_once = 3 * elements * g, 2
    if _norms_look_in(sizes):
        saves.append((tokens * _fused_width(sizes) * e, e))
        saves += [(rows[0] * sizes.d * e, e)] if _copies_queries(sizes) else []
    keeps, numel = sum(size for size, _ in saves), elements * e
    return Step("head norms", keeps, numel, numel, beside, saves=tuple(saves), at_once=at_once)


def _norms_look_in(sizes: LayerSizes) -> bool:
    """Whether the norms of heads keep what the product has made, and not wider copies."""
    return sizes.qk_norm and (sizes.accelerator or not sizes.rms or sizes.param_bytes == sizes.grad_bytes)


def _copies_queries(sizes: LayerSizes) -> bool:
    """Whether the groups' queries are copied to lie side by side."""
    return sizes.kv_heads > 1 and sizes.heads > sizes.kv_heads


def _fused_width(sizes: LayerSizes) -> int:
    return (sizes.heads + 2 * sizes.kv_heads) * sizes.d


def _qkv(sizes: LayerSizes) -> tuple[Saved, ...]:
    """The memories that queries, keys and values lie in when attention takes them, but for what norms before it keep."""
    widths = [] if _norms_look_in(sizes) else [_fused_width(sizes)]
    if sizes.rotary_width > 0 or sizes.qk_norm:  # turned
        widths += [sizes.heads * sizes.d, sizes.kv_heads * sizes.d]
    elif _copies_queries(sizes):
        widths.append(sizes.heads * sizes.d)
    repeats = sizes.is_bert or not sizes.is_half  # for a kernel that takes masks, or float32
    if sizes.fused_attention and sizes.accelerator and repeats and sizes.heads > sizes.kv_heads:
        widths += [sizes.heads * sizes.d] * 2  # keys and values repeated for every query head
    e = sizes.param_bytes
    return tuple((sizes.s * sizes.b * width * e, e) for width in widths)


def _widened_qkv(sizes: LayerSizes) -> tuple[Saved, ...]:
    """Copies of queries, keys and values in float32."""
    widths = sizes.heads, sizes.kv_heads, sizes.kv_heads
    return tuple((sizes.s * sizes.b * width * sizes.d * _FLOAT, _FLOAT) for width in widths)


def _attention(sizes: LayerSizes) -> tuple[Step, ...]:
    """From the fused q/k/v to what proj takes."""
    tokens, e = sizes.s * sizes.b, sizes.param_bytes
    fused, out = tokens * _fused_width(sizes) * e, tokens * sizes.heads * sizes.d * e
    before = [_head_norms(sizes)] if sizes.qk_norm else []
    if sizes.rotary_width:
        rotary = 4 * sizes.s * sizes.rotary_width // 2 * e
        before.append(Step("rotary", rotary, fused, fused, saves=((rotary // 4, e),) * 4, at_once=1))
    if sizes.fused_attention:
        wide = "attention" in sizes.widened
        w = _FLOAT if wide else e
        parts = sizes.b if sizes.by_document else 1  # of which each is one operation's
        given = ((out // e * w // parts, w), (tokens * sizes.heads * _FLOAT // parts, _FLOAT)) * parts
        joined = ((out, e),) if sizes.by_document or wide else ()  # what proj takes is put together, or narrowed
        padding = ((tokens * w, w),) if sizes.is_bert else ()  # what is added to the scores of a key
        taken = _widened_qkv(sizes) if wide else _qkv(sizes)
        reads = ((fused, e),) if _norms_look_in(sizes) and not wide else ()  # values
        # Gradients of what is wide are as wide before they are rounded.
        beside = (out + fused) // e * w if wide else 0
        core = (
            _kept_step("attention", (*taken, *given, *joined, *padding), out, fused)._replace(
                reads=reads, at_once=len(taken) + 2 + sizes.is_bert, beside=beside
            ),
        )
    elif "attention" in sizes.widened:
        *inner, together = _plain_attention(replace(sizes, param_bytes=_FLOAT))
        narrow = sum(size for size, _ in _qkv(sizes))  # what was widened is there until attention is done
        inner = (step._replace(forward=step.forward and step.forward + narrow) for step in inner)
        core = (*inner, together._replace(keeps=out, grad_out=out, saves=((out, e),)))
    else:
        core = _plain_attention(sizes)
    return (
        Step("split", 0, fused, fused),
        *before,
        *core,
        _linear(sizes, "proj", sizes.heads * sizes.d, sizes.h, column=False),
    )


def _plain_attention(sizes: LayerSizes) -> tuple[Step, ...]:
    """softmax(Q K^T) V with its scores. Each of q, k, v is a copy, as large as what comes out."""
    tokens, e, g = sizes.s * sizes.b, sizes.param_bytes, sizes.grad_bytes
    fused, out = tokens * _fused_width(sizes) * e, tokens * sizes.heads * sizes.d * e
    scores = sizes.b * sizes.heads * sizes.s * sizes.s
    mask = 0 if sizes.by_document or sizes.is_bert else sizes.s * sizes.s * _BOOL
    # Scores, filled with -inf, and their softmax; or scores, softmax, what is dropped of it and that divided, and two masks.
    wide = scores * (4 * g + 2 * _BOOL if sizes.attention_dropout else 3 * g)
    forward = sum(size for size, _ in _qkv(sizes)) + out + mask + wide + _residual(sizes)
    # What the product with v takes, where that is not the softmax itself.
    takes = ((scores * e, e),) if sizes.attention_dropout or sizes.is_half else ()
    drop = _kept_step("drop", ((scores * _BOOL, _BOOL),), scores * g, scores * g, waiting=out)
    return (
        _kept_step("attention", ((out, e), (out, e)), scores * e, fused, waiting=out),
        _kept_step("softmax", ((mask, _BOOL), (scores * g, g)), scores * g, scores * g, waiting=out, forward=forward),
        *((drop,) if sizes.attention_dropout else ()),
        _kept_step("values", ((out, e), *takes), out, scores * e + out),
        _kept_step("together", ((out, e),), out, out),  # of all heads, for proj
    )


def _kept_step(name: str, saves: tuple[Saved, ...], grad_out: int, grad_in: int, **more: int) -> Step:
    """One that keeps just these memories."""
    return Step(name, sum(size for size, _ in saves), grad_out, grad_in, saves=saves, **more)
