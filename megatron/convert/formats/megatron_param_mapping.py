"""Map the names that Megatron-LM has given its parameters to ours, and concatenate tensor-parallel shards. No torch.

language_model.transformer.layers.0.attention.dense.weight      2019 to 2021
language_model.encoder.layers.0.self_attention.dense.weight     2021 to 2026
decoder.layers.0.self_attention.linear_proj.weight              megatron-core
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.convert.families.hf_family_table import LANGUAGE_MODEL, LAYER, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.convert.families.weight_layout import HeadCounts, View
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.core.sharding.boxes import Box, whole

# the copy of the word embeddings on the last stage of a tied model
TIED_COPY = "word_embeddings_for_head.weight"
_NO_PARAMETERS = re.compile(
    r"(.*\.)?_extra_state\d*(/.*)?|(.*\.)?rotary_(pos_)?emb\.inv_freq|.*\.attention\.(masked_)?bias|.*\.core_attention\..*scale.*"
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
_BERT = (
    (r"lm_head\.(layernorm|layer_norm|norm)\.", "lm_head.norm."),
    (r"lm_head\.bias", "word_bias.bias"),
    (r"output_layer\.bias", "word_bias.bias"),
)


class ParamPlace(NamedTuple):
    """A parameter of ours."""

    name: str  # with {i} for the layer
    layer: int | None = None  # as the checkpoint's model chunk counts it


def map_param_name(megatron_name: str) -> ParamPlace | None:
    """Return our parameter for a tensor of Megatron-LM; None for a tensor that is no parameter.

    A name that is unknown stays as it is.
    """
    name = megatron_name.removeprefix("module.").removeprefix("language_model.")
    if _NO_PARAMETERS.fullmatch(name):
        return None
    if match := _LAYERS.fullmatch(name):
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
}
_FC1 = (f"{LAYER}mlp.linear_fc1.weight", f"{LAYER}mlp.linear_fc1.bias")
_QKV = (f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}self_attention.linear_qkv.bias")
_REPLICATED = re.compile(
    "|".join(
        (
            re.escape(f"{LANGUAGE_MODEL}embedding.") + r"(position|tokentype)_embeddings\.weight",
            re.escape(f"{LANGUAGE_MODEL}decoder.final_layernorm.") + "(weight|bias)",
            re.escape(LAYER) + r"(input|pre_mlp|post_self_attn|post_mlp)_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"self_attention\.[qk]_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"(self_attention\.linear_proj|mlp\.linear_fc2)\.bias",
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
    return find_join_rule(name, heads, 3.0, is_gated) is not None
