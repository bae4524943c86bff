"""What lies in the buffers of a pipeline stage, from sizes alone. Pure.

The parameters are listed as a `GPTModel` or a `BertModel` makes them, and laid out by the plan that `DistributedDataParallel` uses, gaps included:
what is predicted is what will be allocated, to the byte.
"""

from dataclasses import replace

from megatron.core.distributed.plan import BufferPlan, Cut, Item, lay_out
from megatron.core.tiers.plan import cut_by_fraction
from megatron.training.memory.sizes import LayerSizes, RunSizes
from megatron.training.memory.tier_bytes import Element, bytes_by_tier

WORDS, OUTPUT = "embedding.word_embeddings", "output_layer"  # units
WORD_BIAS, HEAD, ORDER = "word_bias", ("lm_head.dense", "lm_head.norm"), ("pooler.dense", "binary_head")  # of a BERT


def plans_of_stage(run: RunSizes, stage: int) -> list[BufferPlan]:
    """The buffers of a stage on one rank."""
    shards = (run.shards if run.zero_stage > 0 else 1) * (run.replicas if run.divides_outer else 1)
    cut = Cut(run.bucket_numel, shards, by_unit=run.zero_stage == 3)
    return lay_out(items_of_stage(run, stage), cut_of=lambda key: cut)


def items_of_stage(run: RunSizes, stage: int) -> list[Item]:
    """The parameters of a stage on one rank, in the order of `named_parameters`; a table that two stages share has its own key."""
    sizes, first, last = run.layer, stage == 0, stage == len(run.layers) - 1
    table = {"weight": sizes.words * sizes.h}
    units: list[tuple[str, dict[str, int]]] = []
    if first or (last and sizes.tied):
        units.append((WORDS, table))
    if first and sizes.positions:
        units.append(("embedding.position_embeddings", {"weight": sizes.positions * sizes.h}))
    if first and sizes.token_types:
        units.append(("embedding.tokentype_embeddings", {"weight": sizes.token_types * sizes.h}))
    units += [(f"decoder.layers.{layer}", layer_parameters(sizes)) for layer in run.layers[stage]]
    if last:
        units.append(("decoder.final_layernorm", _norm(sizes, sizes.h)))
    if last and not sizes.tied:
        units.append((OUTPUT, table))
    if last and sizes.is_bert:
        units += bert_head(sizes)
    shared = sizes.tied and run.p > 1  # by the first and the last stage
    return [
        Item(f"{unit}.{name}", numel, "tied" if unit == WORDS and shared else "own", unit)
        for unit, numels in units
        for name, numel in numels.items()
    ]


def bert_head(sizes: LayerSizes) -> list[tuple[str, dict[str, int]]]:
    """The units behind a BERT's layers, beside its output layer; their linear layers are whole on every rank."""
    h = sizes.h
    head, bias = (_linear(h, h, True), _norm(sizes, h)), (WORD_BIAS, {"bias": sizes.words})
    units, order = [*zip(HEAD, head), bias], [*zip(ORDER, (_linear(h, h, True), _linear(h, 2, True)))]
    return units + (order if sizes.binary_head else [])


def layer_parameters(sizes: LayerSizes) -> dict[str, int]:
    """Elements of each parameter of a layer on one rank."""
    h, width = sizes.h, sizes.heads * sizes.d
    fused, inner = (sizes.heads + 2 * sizes.kv_heads) * sizes.d, (2 if sizes.gated else 1) * sizes.f
    head_norm = _norm(sizes, sizes.d) if sizes.qk_norm else {}
    parts = {
        "input_layernorm": _norm(sizes, h),
        "self_attention.linear_qkv": _linear(h, fused, sizes.qkv_bias),
        "self_attention.q_layernorm": head_norm,
        "self_attention.k_layernorm": head_norm,
        "self_attention.linear_proj": _linear(width, h, sizes.linear_bias),
        "pre_mlp_layernorm": _norm(sizes, h),
        "mlp.linear_fc1": _linear(h, inner, sizes.linear_bias),
        "mlp.linear_fc2": _linear(sizes.f, h, sizes.linear_bias),
    }
    return {f"{part}.{name}": numel for part, numels in parts.items() for name, numel in numels.items()}


_MATRICES = (OUTPUT, HEAD[0], *ORDER)


def _linear(inputs: int, outputs: int, bias: bool) -> dict[str, int]:
    return {"weight": inputs * outputs} | ({"bias": outputs} if bias else {})


def _norm(sizes: LayerSizes, width: int) -> dict[str, int]:
    return {"weight": width} if sizes.rms else {"weight": width, "bias": width}


def is_small(name: str) -> bool:
    """Whether a parameter is that of a norm, or a bias: neither a table nor the matrix of a linear layer."""
    is_matrix = name.endswith(".weight") and (".linear_" in name or name.startswith(_MATRICES))
    return not (name.startswith("embedding.") or is_matrix)


def state_of(run: RunSizes, plan: BufferPlan) -> dict[str, dict[str, int]]:
    """Bytes by tier and kind that last of a buffer on one rank. The share that is offloaded is rounded up to whole parameters, of
    which each part of a bucket has others."""
    owned, starts = plan.owned(run.part % plan.shards), [slot.start for slot in plan.slots]
    away, _ = cut_by_fraction(owned, starts, run.offload_fraction)
    return bytes_by_tier(
        plan.numel,
        Element.of(
            run.layer.param_bytes, run.moments, gradient=run.layer.main_grad_bytes, splits_masters=run.splits_masters
        ),
        stage=run.zero_stage,
        shards=run.shards if run.zero_stage > 0 else 1,
        outer=run.replicas if run.divides_outer else 1,
        tier=run.tier,
        fraction=sum(stop - start for start, stop in away) / owned_numel(plan),
        offload_params=run.offload_params,
    )


def owned_numel(plan: BufferPlan) -> int:
    """Elements of a buffer that one rank owns: updates."""
    return plan.numel // plan.shards


def parameter_count(run: RunSizes) -> int:
    """Parameters of the whole model, padding of the vocabulary included."""
    alone = replace(run, layer=run.layer.undivided, layers=(range(sum(map(len, run.layers))),), p=1)
    return sum(item.numel for item in items_of_stage(alone, 0))


def held_count(run: RunSizes) -> int:
    """Parameters on one rank of every pipeline stage, without gaps."""
    return sum(item.numel for stage in range(len(run.layers)) for item in items_of_stage(run, stage))
