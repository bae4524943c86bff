"""Map the names that Megatron-LM has given its parameters to ours, and concatenate tensor-parallel shards. No torch.

language_model.transformer.layers.0.attention.dense.weight      2019 to 2021
language_model.encoder.layers.0.self_attention.dense.weight     2021 to 2026
decoder.layers.0.self_attention.linear_proj.weight              megatron-core

Experts have had four layouts, of which ours is one tensor [experts, 2, f, h] or [experts, h, f] for a layer:

mlp.experts.local_experts.3.linear_fc1.weight [2 f, h]          one by one
mlp.experts.linear_fc1.weight3 [2 f, h]                         one by one, of Transformer Engine's grouped linear
mlp.experts.weight1 [h, experts 2 f], weight2 [experts f, h]    the memory of [experts, h, 2 f] and [experts, f, h]
mlp.experts.experts.linear_fc1.weight [experts, 2 f, h]         torch_dist
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from megatron.convert.families.hf_family_fields_and_param_mappings import (
    LANGUAGE_MODEL,
    LAYER,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
)
from megatron.convert.families.strided_views_of_hf_weights import HeadCounts, View
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.core.sharding.boxes import Box, whole

# the copy of the word embeddings on the last stage of a tied model
TIED_COPY = "word_embeddings_for_head.weight"
_NO_PARAMETERS = re.compile(
    r"(.*\.)?_extra_state\d*(/.*)?|(.*\.)?rotary_(pos_)?emb\.inv_freq|.*\.attention\.(masked_)?bias|.*\.core_attention\..*scale.*"
    r"|.*\.router\.(local|global)_tokens_per_expert"
)
_LAYERS = re.compile(r"(?:transformer|encoder|decoder)\.layers\.(\d{1,6})\.(.+)")
_FINAL = re.compile(r"(?:transformer|encoder|decoder)\.final_(?:layernorm|norm)\.(weight|bias)")
_IN_LAYER = (
    (r"attention\.", "self_attention."),
    (r"self_attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"self_attention\.dense\.", "self_attention.linear_proj."),
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    (r"input_norm\.", "input_layernorm."),
    (r"post_attention_(layernorm|norm)\.", "pre_mlp_layernorm."),
)
_EXPERTS = f"{LAYER}mlp.experts."
_OF_EXPERTS = tuple(
    re.compile(rf"mlp\.experts\.{names}")
    for names in (
        r"(?:local_experts|experts)\.(?P<expert>\d{1,6})\.(?P<module>linear_fc[12])\.(?P<part>weight|bias)",
        r"(?P<module>linear_fc[12])\.(?P<part>weight|bias)(?P<expert>\d{1,6})",
        r"experts\.(?P<module>linear_fc[12])\.(?P<part>weight|bias)",
        r"weight(?P<grouped>[12])",
    )
)
_BERT = (
    (r"lm_head\.(layernorm|layer_norm|norm)\.", "lm_head.norm."),
    (r"lm_head\.bias", "word_bias.bias"),
    (r"output_layer\.bias", "word_bias.bias"),
)


class ParamPlace(NamedTuple):
    """A parameter of ours."""

    name: str  # with {i} for the layer
    layer: int | None = None  # as the checkpoint's model chunk counts it
    expert: int | None = None  # of a tensor of one expert, as its rank counts it
    is_grouped: bool = False  # weight1 or weight2


def map_param_name(megatron_name: str) -> ParamPlace | None:
    """Return our parameter for a tensor of Megatron-LM; None for a tensor that is no parameter.

    A name that is unknown stays as it is.
    """
    name = megatron_name.removeprefix("module.").removeprefix("language_model.")
    if _NO_PARAMETERS.fullmatch(name):
        return None
    if match := _LAYERS.fullmatch(name):
        for pattern in _OF_EXPERTS:
            if expert := pattern.fullmatch(match[2]):
                found = expert.groupdict()
                if "grouped" in found:
                    return ParamPlace(f"{_EXPERTS}linear_fc{found['grouped']}.weight", int(match[1]), is_grouped=True)
                number = found.get("expert")
                param = f"{_EXPERTS}{found['module']}.{found['part']}"
                return ParamPlace(param, int(match[1]), None if number is None else int(number))
        return ParamPlace(LAYER + _replaced(match[2], _IN_LAYER), int(match[1]))
    if match := _FINAL.fullmatch(name):
        return ParamPlace(f"{LANGUAGE_MODEL}decoder.final_layernorm.{match[1]}")
    if name.startswith("embedding.") or name == "output_layer.weight":
        return ParamPlace(LANGUAGE_MODEL + name)
    return ParamPlace(_replaced(name, _BERT))


def _replaced(name: str, table: Sequence[tuple[str, str]]) -> str:
    for pattern, ours in table:
        name = re.sub(f"^{pattern}", ours, name)
    return name


def has_bert_heads(names: Iterable[str]) -> bool:
    """Return whether our parameters of these names are those of a BERT, which may lack some of its heads."""
    return any(name.startswith(("lm_head.", "word_bias.", "binary_head.", "pooler.")) for name in names)


# ---------------------------------------------------------------- tensor-parallel shards


class TensorPart(NamedTuple):
    """A box of our tensor, and the view of one rank's tensor with the same elements."""

    box: Box
    view: View
    tensor: TensorInFile


TensorParts = Iterator[TensorPart]
Join = Callable[[Sequence[TensorInFile]], TensorParts]  # the ranks' shards, by rank -> the full tensor


def _views(tensors: Sequence[TensorInFile]) -> list[View]:
    return [View.of(rank, x.shape) for rank, x in enumerate(tensors)]


def _concatenated(views: Sequence[View], tensors: Sequence[TensorInFile], dim: int = 0) -> TensorParts:
    """Concatenate along a dimension."""
    first = 0
    for view in views:
        if len(view.shape) <= dim:
            raise ValueError(f"a tensor of shape {view.shape} has no dimension {dim} to shard")
        box = tuple((first, first + size) if d == dim else (0, size) for d, size in enumerate(view.shape))
        yield TensorPart(box, view, tensors[view.tensor_index])
        first += view.shape[dim]


def concat_rows(tensors: Sequence[TensorInFile]) -> TensorParts:
    """Join shards of a column-parallel weight or of a vocabulary: [rows / tp, ...] -> [rows, ...]."""
    return _concatenated(_views(tensors), tensors)


def concat_columns(tensors: Sequence[TensorInFile]) -> TensorParts:
    """Join shards of a row-parallel weight: [rows, columns / tp] -> [rows, columns]."""
    return _concatenated(_views(tensors), tensors, dim=1)


def take_first(tensors: Sequence[TensorInFile]) -> TensorParts:
    """Join copies: every rank has the same tensor, [..] -> [..]."""
    x = tensors[0]
    yield TensorPart(whole(x.shape), View.of(0, x.shape), x)


def concat_gate_up_shards(tensors: Sequence[TensorInFile]) -> TensorParts:
    """Join shards of a gated MLP: [2 f / tp, ..] -> [2 f, ..].

    Each rank has rows of the gate, then rows of up; ours has all of the gate first.
    """
    halves = [view.parts((view.shape[0] // 2,) * 2) for view in _views(tensors)]  # by rank: [gate, up]
    gates = [gate for gate, _ in halves]
    ups = [up for _, up in halves]
    return _concatenated([*gates, *ups], tensors)


def concat_qkv_version_0(heads: HeadCounts) -> Join:
    """Return the join of linear_qkv before checkpoint version 1.0: [3 n d / tp, ..] -> [3 n d, ..].

    Each rank has all its queries, all its keys, all its values.
    """

    def join(tensors: Sequence[TensorInFile]) -> TensorParts:
        flatten_batch_and_heads = []
        for view in _views(tensors):
            q, k, v = view.parts((view.shape[0] // 3,) * 3)
            local_heads = _local_heads(view, heads)
            parts = [x.parts((heads.width,) * local_heads) for x in (q, k, v)]
            for head in zip(*parts):
                flatten_batch_and_heads += head
        return _concatenated(flatten_batch_and_heads, tensors)

    return join


def concat_qkv_version_1(heads: HeadCounts) -> Join:
    """Return the join of linear_qkv of checkpoint version 1.0: [3 n d / tp, ..] -> [3 n d, ..].

    A shard has, for each head and each feature, query, key and value.
    """

    def join(tensors: Sequence[TensorInFile]) -> TensorParts:
        flatten_batch_and_heads = []
        for view in _views(tensors):
            row_stride, *other_strides = view.strides
            for head in view.parts((3 * heads.width,) * _local_heads(view, heads)):
                shape = (heads.width, *view.shape[1:])
                strides = (3 * row_stride, *other_strides)  # every third row
                for part in range(3):  # q, k, v
                    flatten_batch_and_heads.append(
                        View(view.tensor_index, shape, strides, head.start + part * row_stride)
                    )
        return _concatenated(flatten_batch_and_heads, tensors)

    return join


def _local_heads(view: View, heads: HeadCounts) -> int:
    """Return the number of heads in one rank's linear_qkv, [3 x heads x width, ...]."""
    if view.shape[0] % (3 * heads.width):
        raise ValueError(f"{view.shape[0]} rows cannot be divided into heads of {heads.width} features")
    return view.shape[0] // (3 * heads.width)


_SHARDED: dict[str, Join] = {
    WORD_EMBEDDINGS: concat_rows,
    f"{OUTPUT_LAYER}.weight": concat_rows,
    "word_bias.bias": concat_rows,
    f"{LAYER}self_attention.core_attention.softmax_offset": concat_rows,
    f"{LAYER}self_attention.linear_proj.weight": concat_columns,
    f"{LAYER}mlp.linear_fc2.weight": concat_columns,
    f"{LAYER}mlp.shared_experts.linear_fc2.weight": concat_columns,
}
_FC1 = tuple(f"{LAYER}mlp.{owner}linear_fc1.{part}" for owner in ("", "shared_experts.") for part in ("weight", "bias"))
_QKV = (f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}self_attention.linear_qkv.bias")
_REPLICATED = re.compile(
    "|".join(
        (
            re.escape(f"{LANGUAGE_MODEL}embedding.") + r"(position|tokentype)_embeddings\.weight",
            re.escape(f"{LANGUAGE_MODEL}decoder.final_layernorm.") + "(weight|bias)",
            re.escape(LAYER) + r"(input|pre_mlp|post_self_attn|post_mlp)_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"self_attention\.[qk]_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"(self_attention\.linear_proj|mlp\.(shared_experts\.)?linear_fc2)\.bias",
            re.escape(LAYER) + r"mlp\.(router\.(weight|bias|expert_bias)|shared_experts\.gate_weight)",
            r"lm_head\.(dense|norm)\.(weight|bias)|(binary_head|pooler\.dense)\.(weight|bias)",
        )
    )
)


def find_join_rule(name: str, heads: HeadCounts, version: float, is_gated: bool) -> Join | None:
    """Return how a parameter's shards are joined; None for a name that no model of ours has.

    name: with {i} for the layer. version: checkpoint_version.
    """
    if name in _QKV:
        if version < 1:
            return concat_qkv_version_0(heads)
        if version < 2:
            return concat_qkv_version_1(heads)
        return concat_rows
    if name in _FC1:
        return concat_gate_up_shards if is_gated else concat_rows
    if name in _SHARDED:
        return _SHARDED[name]
    return take_first if _REPLICATED.fullmatch(name) else None


def is_known(name: str, heads: HeadCounts, is_gated: bool) -> bool:
    """Return whether a model of ours has this parameter. name: with {i} for the layer."""
    return is_of_experts(name) or find_join_rule(name, heads, 3.0, is_gated) is not None


# ---------------------------------------------------------------- experts


def is_of_experts(name: str) -> bool:
    """Return whether a parameter of ours has a row for each expert. name: with {i} for the layer."""
    return name in {
        f"{_EXPERTS}{module}.{part}" for module in ("linear_fc1", "linear_fc2") for part in ("weight", "bias")
    }


class ExpertShard(NamedTuple):
    """A tensor of one or several experts on one rank."""

    place: ParamPlace
    tensor: TensorInFile
    tensor_rank: int
    expert_rank: int


def join_experts(
    name: str, shards: Sequence[ExpertShard], num_experts: int, ranks: tuple[int, int], is_gated: bool
) -> list[TensorPart]:
    """Join the shards of a layer's experts to our tensor. Raises ValueError if they are not all there or do not fit.

    name: ours. ranks: how many tensor-parallel and expert-parallel ranks there are. The tensor-parallel ranks shard an
    expert as they shard an MLP.
    """
    tp, ep = ranks
    here = num_experts // ep  # experts of a rank
    if here * ep != num_experts:
        raise ValueError(f"{ep} expert-parallel ranks cannot hold {num_experts} experts")
    by_rank: dict[tuple[int, int], list[ExpertShard]] = {}
    for shard in shards:
        by_rank.setdefault((shard.expert_rank, shard.tensor_rank), []).append(shard)
    if len(by_rank) != tp * ep:
        raise ValueError(f"{len(by_rank)} of {tp * ep} ranks have it")
    if len({shard.tensor.dtype for shard in shards}) > 1:
        raise ValueError("its dtype differs between ranks")

    parts = []
    for (expert_rank, tensor_rank), found in sorted(by_rank.items()):
        numbers = sorted(-1 if shard.place.expert is None else shard.place.expert for shard in found)
        is_grouped = len(found) == 1 and found[0].place.is_grouped
        if not is_grouped and numbers != [*range(here)]:
            raise ValueError(f"a rank has experts {numbers[:20]}, not 0 to {here - 1}")
        if name.endswith("linear_fc2.bias") and tensor_rank:
            continue  # a copy
        for shard in found:
            if is_grouped:
                view = _view_of_grouped(name, shard.tensor.shape, here, is_gated)
                first = expert_rank * here
            else:
                view = _view_of_expert(name, shard.tensor.shape, is_gated)
                first = expert_rank * here + (shard.place.expert or 0)
            box = [(0, size) for size in view.shape]
            box[0] = (first, first + view.shape[0])
            if not name.endswith("linear_fc2.bias"):
                width = view.shape[2]  # of the part of an expert that this rank has
                box[2] = (tensor_rank * width, (tensor_rank + 1) * width)
            parts.append(TensorPart(tuple(box), view, shard.tensor))
    return parts


def _view_of_expert(name: str, shape: tuple[int, ...], is_gated: bool) -> View:
    """Return the tensor of one expert in the dimensions of ours: [1, 2, f, h], [1, h, f], [1, 2, f] or [1, h]."""
    dims = 2 if name.endswith("weight") else 1
    if len(shape) != dims:
        raise ValueError(f"an expert's tensor has shape {shape}, not {dims} dimensions")
    view = View.of(0, shape)
    if "linear_fc2" in name:
        return view._replace(shape=(1, *shape), strides=(prod(shape), *view.strides))
    parts = 2 if is_gated else 1
    f = shape[0] // parts
    if f * parts != shape[0]:
        raise ValueError(f"{shape[0]} rows are not gates and ups")
    return view._replace(shape=(1, parts, f, *shape[1:]), strides=(prod(shape), f * view.strides[0], *view.strides))


def _view_of_grouped(name: str, shape: tuple[int, ...], experts: int, is_gated: bool) -> View:
    """Return a grouped tensor, which has the matrices of a rank's experts transposed, in the dimensions of ours."""
    if len(shape) != 2:
        raise ValueError(f"a grouped tensor has shape {shape}, not 2 dimensions")
    if "linear_fc2" in name:
        f = shape[0] // experts
        h = shape[1]
        view = View(0, (experts, h, f), (f * h, 1, h))
    else:
        parts = 2 if is_gated else 1
        h = shape[0]
        f = shape[1] // (experts * parts)
        view = View(0, (experts, parts, f, h), (h * parts * f, f, 1, parts * f))
    if prod(view.shape) != prod(shape):
        raise ValueError(f"a grouped tensor of shape {shape} is not that of {experts} experts")
    return view


def split_stacked_experts(
    name: str, parts: Sequence[TensorPart], expert: int | None, is_gated: bool
) -> Iterator[TensorPart]:
    """Yield parts of [experts, 2 f, h], as torch_dist has them, in the dimensions of ours; of one expert: [2 f, h].

    name: ours.
    """
    if expert is not None:
        parts = [
            TensorPart(
                ((expert, expert + 1), *part.box),
                part.view._replace(shape=(1, *part.view.shape), strides=(prod(part.view.shape), *part.view.strides)),
                part.tensor,
            )
            for part in parts
        ]
    if "linear_fc2" in name:
        yield from parts
        return
    groups = 2 if is_gated else 1
    rows = max(part.box[1][1] for part in parts)
    f = rows // groups
    if f * groups != rows:
        raise ValueError(f"{rows} rows are not gates and ups")
    for part in parts:
        experts, (start, stop), *others = part.box
        for group in range(groups):
            first, last = max(start, group * f), min(stop, (group + 1) * f)
            if first >= last:
                continue
            per_expert, per_row, *strides = part.view.strides
            shape = (part.view.shape[0], 1, last - first, *part.view.shape[2:])
            view = part.view._replace(
                shape=shape,
                strides=(per_expert, per_row * (last - first), per_row, *strides),
                start=part.view.start + (first - start) * per_row,
            )
            span = (first - group * f, last - group * f)
            yield TensorPart((experts, (group, group + 1), span, *others), view, part.tensor)
