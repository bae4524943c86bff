"""What each rank sends in a training step, worked out by hand from model and layout: the oracle of the ledger tests.

It shares no code with the product. With N the bytes of an activation [s, b, h] of one microbatch, over t tensor-parallel ranks:

    per microbatch          tensor parallel                  with sequence parallelism
    embedding               1 AR(N)                          1 RS(N), backward 1 AG(N/t)
    layer, forward          2 AR(N)                          2 AG(N/t) + 2 RS(N)
    layer, backward         2 AR(N)                          2 AG(N/t) + 2 RS(N), and 2 AG(N/t) of inputs kept divided
    layer, computed again   2 AR(N)                          2 AG(N/t) + 2 RS(N)
    output layer            backward 1 AR(N)                 1 AG(N/t), backward 1 RS(N) + 1 AG(N/t)
    cross entropy           3 AR of one number a token       the same

Full recomputation: the second forward of a group of layers ends once it has every tensor that the backward asks for. The last of
these is the input of the last layer's second MLP matrix; its sum over the ranks comes after it and is left out: one AR (RS) less
per group. Dropout behind it needs its mask, so that with dropout nothing is left out.

A boundary between stages on different ranks: a send and a receive each way per microbatch, of N, or of N/t where the ranks hold
parts (sequence parallelism) or send parts of equal copies; those put their parts together by 1 AG(N/t) per receive.

Per step and stage: 1 AR over dp of each buffer, or of each bucket; 1 AR over tp of the gradients of which each rank has a part,
1 AR over kv of shared key and value heads. A tied table on two stages: 1 AR between them. Scalars: the norm over mp, the tokens
and the loss over pp, and on the last stage these two and the two of the report over dp.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

ALIGNMENT = 8  # elements


@dataclass(frozen=True)
class Setting:
    """What traffic depends on. `model` and `layout` are read, never called: a ModelConfig and a tiny_run.Layout."""

    model: Any
    layout: Any
    sequence: int
    words: int
    global_batch: int
    element: int = 8  # bytes

    @property
    def last_stage(self) -> int:
        return self.layout.pp * self.layout.v - 1

    @property
    def microbatch(self) -> int:
        return self.global_batch // self.layout.dp // self.layout.m

    @property
    def activation(self) -> int:
        """Bytes of [s, b, h]."""
        return self.sequence * self.microbatch * self.model.hidden_size * self.element

    @property
    def tied(self) -> bool:
        return not self.model.untie_embeddings_and_output_weights

    @property
    def ends_together(self) -> bool:
        """Whether the first and the last stage are on one rank, which has a tied table once."""
        return self.layout.pp == 1 or self.folded

    @property
    def folded(self) -> bool:
        """Whether the stages go up the ranks and back, so that two in the middle, and the two ends, are on one rank."""
        return self.layout.schedule == "zb-v"

    def stages(self, pp_rank: int) -> list[int]:
        if self.folded:
            return [pp_rank, self.last_stage - pp_rank]
        return list(range(pp_rank, self.last_stage + 1, self.layout.pp))

    def layers(self, stage: int) -> int:
        assert self.model.num_layers % (self.last_stage + 1) == 0
        return self.model.num_layers // (self.last_stage + 1)


def calls_of_step(setting: Setting, pp_rank: int) -> Counter:
    """(op, axis, bytes) -> how often a rank of this pipeline stage calls it in one training step."""
    layout, calls = setting.layout, Counter()
    for stage in setting.stages(pp_rank):
        per_microbatch = _tensor_parallel(setting, stage) + _boundaries(setting, stage)
        calls += Counter({call: count * layout.m for call, count in per_microbatch.items()})
        calls += _gradients(setting, stage)
    last = setting.last_stage in setting.stages(pp_rank)
    calls += _once("mp", layout.tp * layout.pp, setting.element) + _once("pp", layout.pp, 2 * 8)
    return calls + (_once("dp", layout.dp, 4 * 8) if last else Counter())


def _once(axis: str, size: int, nbytes: int) -> Counter:
    return Counter({("all_reduce", axis, nbytes): 1}) if size > 1 and nbytes else Counter()


# ---------------------------------------------------------------- per microbatch


def _tensor_parallel(setting: Setting, stage: int) -> Counter:
    layout, whole, layers = setting.layout, setting.activation, setting.layers(stage)
    if layout.tp == 1:
        return Counter()
    groups, again = _recomputed(setting, layers)
    left_out = groups if setting.model.hidden_dropout == 0 else 0
    first, last = stage == 0, stage == setting.last_stage
    calls = Counter()
    if (
        last
    ):  # the cross entropy: the largest score, the target's score, and a sum, beside which label smoothing has another
        tokens = setting.sequence * setting.microbatch * setting.element
        calls[("all_reduce", "tp", tokens)] += 2
        calls[("all_reduce", "tp", tokens * (1 + (setting.model.label_smoothing > 0)))] += 1
    if not layout.sp:
        sums = 4 * layers + 2 * again - left_out + first + last
        return calls + Counter({("all_reduce", "tp", whole): sums})
    gathers = 6 * layers + 2 * again + first + 2 * last
    scatters = 4 * layers + 2 * again - left_out + first + last
    return calls + Counter(
        {("all_gather", "tp", whole // layout.tp): gathers, ("reduce_scatter", "tp", whole): scatters}
    )


def _recomputed(setting: Setting, layers: int) -> tuple[int, int]:
    """(groups, layers) of a stage that the backward computes again."""
    if setting.layout.recompute in ("none", "selective"):  # attention's core does not communicate
        return 0, 0
    method, number = setting.layout.recompute.split()
    if method == "uniform":
        return -(-layers // int(number)), layers
    return (min(int(number), layers),) * 2


def _boundaries(setting: Setting, stage: int) -> Counter:
    layout = setting.layout
    if layout.pp == 1:
        return Counter()
    in_parts = layout.tp > 1 and layout.scatter and not layout.sp
    size = setting.activation // (layout.tp if in_parts or layout.sp else 1)
    turn = layout.pp - 1 if setting.folded else None  # the next stage is on the same rank
    before, after = stage > 0 and stage - 1 != turn, stage < setting.last_stage and stage != turn
    return Counter(
        {
            ("recv", "pp_forward", size): before,
            ("send", "pp_backward", size): before,
            ("send", "pp_forward", size): after,
            ("recv", "pp_backward", size): after,
        }
    ) + Counter({("all_gather", "tp", size): (before + after) * in_parts})


# ---------------------------------------------------------------- per step


def _gradients(setting: Setting, stage: int) -> Counter:
    layout, calls = setting.layout, Counter()
    ends = stage in (0, setting.last_stage)
    table = _rounded(_table(setting)) if setting.tied and not setting.ends_together and ends else 0
    config = layout.data_parallel
    buckets = _buckets(_parameters(setting, stage), config.ddp_bucket_size if config.overlap_grad_reduce else None)
    for elements in [*buckets, table]:
        calls += _once("dp", layout.dp, elements * setting.element)
    calls += _once("embd", layout.pp, table * setting.element)
    calls += _once("tp", layout.tp, _seen_in_part(setting, stage) * setting.element)
    sharing = max(1, layout.tp // setting.model.query_groups)
    return calls + _once("kv", sharing, _shared_heads(setting) * setting.layers(stage) * setting.element)


def _buckets(sizes: list[int], limit: int | None) -> list[int]:
    """Elements in each message: from the last parameter on, as many as fill a bucket."""
    buckets, filled = [], 0
    for size in reversed(sizes):
        filled += _rounded(size)
        if limit is not None and filled >= limit:
            buckets, filled = [*buckets, filled], 0
    return buckets + [filled] * (filled > 0)


def _rounded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _table(setting: Setting) -> int:
    """Elements of a rank's part of the padded word table."""
    share = setting.model.make_vocab_size_divisible_by
    return -(-setting.words // (share * setting.layout.tp)) * share * setting.model.hidden_size


def _parameters(setting: Setting, stage: int) -> list[int]:
    """Elements of a rank's parameters in the order of the forward, but for a table that two stages share."""
    model, h = setting.model, setting.model.hidden_size
    first, last, alone = stage == 0, stage == setting.last_stage, setting.ends_together
    sizes = [_table(setting)] * (first and (alone or not setting.tied))
    sizes += [setting.sequence * h] * (first and model.position_embedding_type == "learned_absolute")
    sizes += _norm(model, h) * (first and model.norm_placement == "post")
    sizes += _layer(setting) * setting.layers(stage)
    sizes += _norm(model, h) * (last and model.norm_placement != "post") + [_table(setting)] * (
        last and not setting.tied
    )
    return sizes + [_table(setting) // h] * (last and model.add_output_bias)


def _norm(model: Any, width: int) -> list[int]:
    return [width] * (2 if model.normalization == "LayerNorm" and model.norm_bias else 1)


def _norms(model: Any, *names: str) -> list[int]:
    return [size for name in names if name in model.layer_norms for size in _norm(model, model.hidden_size)]


def _layer(setting: Setting) -> list[int]:
    model, t, h = setting.model, setting.layout.tp, setting.model.hidden_size
    heads, d = model.num_attention_heads // t, model.head_width
    qkv = (heads + 2 * max(1, model.query_groups // t)) * d
    inner = model.ffn_size // t
    fc1 = 2 * inner if model.is_gated else inner
    return [
        *_norms(model, "input_layernorm"),
        qkv * h,
        *[qkv] * model.has_qkv_bias,
        *(_norm(model, d) * 2 if model.qk_layernorm else []),
        heads * d * h,
        *[h] * model.has_proj_bias,
        *_norms(model, "post_self_attn_layernorm", "pre_mlp_layernorm"),
        fc1 * h,
        *[fc1] * model.has_mlp_bias,
        inner * h,
        *[h] * model.has_mlp_bias,
        *_norms(model, "post_mlp_layernorm"),
    ]


def _seen_in_part(setting: Setting, stage: int) -> int:
    """Elements whose gradient each tensor-parallel rank has a part of: of its heads, and of its part of the sequence."""
    model, h, layers = setting.model, setting.model.hidden_size, setting.layers(stage)
    count = 2 * sum(_norm(model, model.head_width)) * layers if model.qk_layernorm else 0
    if setting.layout.sp:
        count += (
            len(model.layer_norms) * sum(_norm(model, h)) + h * (model.has_proj_bias + model.has_mlp_bias)
        ) * layers
        count += sum(_norm(model, h)) * (stage == (0 if model.norm_placement == "post" else setting.last_stage))
        count += setting.sequence * h * (stage == 0 and model.position_embedding_type == "learned_absolute")
    return count


def _shared_heads(setting: Setting) -> int:
    """Elements of a layer's key and value rows that several ranks hold."""
    model = setting.model
    return 2 * model.head_width * (model.hidden_size + model.has_qkv_bias)
