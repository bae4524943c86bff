"""The names that Megatron-LM has given its parameters, as ours, and how the parts of ranks are one tensor. No torch.

language_model.transformer.layers.0.attention.dense.weight      2019 to 2021
language_model.encoder.layers.0.self_attention.dense.weight     2021 to 2026
decoder.layers.0.self_attention.linear_proj.weight              megatron-core
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.convert.families.family import LAYER, OUTPUT, STAGE, WORD_TABLE
from megatron.convert.families.weight_layout import HeadCounts, View
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.core.sharding.boxes import Box, whole

# Copies of the word table on the last stage of a tied model, and what is nothing to learn.
TIED_COPY = "word_embeddings_for_head.weight"
_IGNORED = re.compile(
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


class OurPlace(NamedTuple):
    """A parameter of ours, with {i} for the layer; the layer as its own chunk counts it."""

    name: str
    layer: int | None = None


def our_place_of(theirs: str) -> OurPlace | None:
    """Where a tensor of theirs belongs; None for what is nothing to learn. A name that is unknown stays as it is."""
    name = theirs.removeprefix("module.").removeprefix("language_model.")
    if _IGNORED.fullmatch(name):
        return None
    if found := _LAYERS.fullmatch(name):
        return OurPlace(LAYER + _replaced(found[2], _IN_LAYER), int(found[1]))
    if found := _FINAL.fullmatch(name):
        return OurPlace(f"{STAGE}decoder.final_layernorm.{found[1]}")
    if name.startswith("embedding.") or name == "output_layer.weight":
        return OurPlace(STAGE + name)
    return OurPlace(_replaced(name, _BERT))


def _replaced(name: str, table: Sequence[tuple[str, str]]) -> str:
    for pattern, ours in table:
        name = re.sub(f"^{pattern}", ours, name)
    return name


def are_of_bert(names: Iterable[str]) -> bool:
    """Whether parameters, by names of ours, are those of a BERT: also of one that lacks some of its heads."""
    return any(name.startswith(("lm_head.", "word_bias.", "binary_head.", "pooler.")) for name in names)


# ---------------------------------------------------------------- parts of ranks


class PartOf(NamedTuple):
    """A box of ours, and the view of one rank's tensor that holds it."""

    box: Box
    view: View
    tensor: TensorInFile


PartsOfRanks = Iterator[PartOf]
Join = Callable[[Sequence[TensorInFile]], PartsOfRanks]


def _views(tensors: Sequence[TensorInFile]) -> list[View]:
    return [View.of(which, x.shape) for which, x in enumerate(tensors)]


def _stacked(views: Sequence[View], tensors: Sequence[TensorInFile], dim: int = 0) -> PartsOfRanks:
    """One after the other along a dimension."""
    at = 0
    for view in views:
        if len(view.shape) <= dim:
            raise ValueError(f"a tensor of shape {view.shape} has no dimension {dim} to be divided in")
        box = tuple((at, at + size) if d == dim else (0, size) for d, size in enumerate(view.shape))
        yield PartOf(box, view, tensors[view.which])
        at += view.shape[dim]


def rows(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
    return _stacked(_views(tensors), tensors)


def columns(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
    return _stacked(_views(tensors), tensors, dim=1)


def copies(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
    """The same on every rank; the first is taken."""
    x = tensors[0]
    yield PartOf(whole(x.shape), View.of(0, x.shape), x)


def gated(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
    """Each rank has its gates, then its ups."""
    halves = [view.parts((view.shape[0] // 2,) * 2) for view in _views(tensors)]
    return _stacked([half[part] for part in (0, 1) for half in halves], tensors)


def qkv_of_parts(heads: HeadCounts) -> Join:
    """Before version 1.0: each rank has all its queries, all its keys, all its values."""

    def join(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
        found = []
        for view in _views(tensors):
            parts = [part.parts((heads.width,) * _heads(view, heads)) for part in view.parts((view.shape[0] // 3,) * 3)]
            found += [x for head in zip(*parts) for x in head]
        return _stacked(found, tensors)

    return join


def qkv_of_features(heads: HeadCounts) -> Join:
    """Version 1.0: for each head, for each of its features, query, key and value."""

    def join(tensors: Sequence[TensorInFile]) -> PartsOfRanks:
        found = []
        for view in _views(tensors):
            row, others = view.strides[0], view.strides[1:]
            for head in view.parts((3 * heads.width,) * _heads(view, heads)):
                shape = (heads.width, *view.shape[1:])
                found += [View(view.which, shape, (3 * row, *others), head.start + part * row) for part in range(3)]
        return _stacked(found, tensors)

    return join


def _heads(view: View, heads: HeadCounts) -> int:
    if view.shape[0] % (3 * heads.width):
        raise ValueError(f"{view.shape[0]} rows are no heads of {heads.width} features")
    return view.shape[0] // (3 * heads.width)


_DIVIDED: dict[str, Join] = {
    **dict.fromkeys(
        (WORD_TABLE, f"{OUTPUT}.weight", "word_bias.bias", f"{LAYER}self_attention.core_attention.softmax_offset"), rows
    ),
    **{f"{LAYER}{name}.weight": columns for name in ("self_attention.linear_proj", "mlp.linear_fc2")},
}
_FC1 = (f"{LAYER}mlp.linear_fc1.weight", f"{LAYER}mlp.linear_fc1.bias")
_QKV = (f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}self_attention.linear_qkv.bias")
_WHOLE = re.compile(
    "|".join(
        (
            re.escape(f"{STAGE}embedding.") + r"(position|tokentype)_embeddings\.weight",
            re.escape(f"{STAGE}decoder.final_layernorm.") + "(weight|bias)",
            re.escape(LAYER) + r"(input|pre_mlp|post_self_attn|post_mlp)_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"self_attention\.[qk]_layernorm\.(weight|bias)",
            re.escape(LAYER) + r"(self_attention\.linear_proj|mlp\.linear_fc2)\.bias",
            r"lm_head\.(dense|norm)\.(weight|bias)|(binary_head|pooler\.dense)\.(weight|bias)",
        )
    )
)


def join_of(name: str, heads: HeadCounts, version: float, is_gated: bool) -> Join | None:
    """How a parameter's parts are one; None for a name that no model of ours has. name: with {i} for the layer."""
    if name in _QKV and version < 2:
        return (qkv_of_parts if version < 1 else qkv_of_features)(heads)
    if name in _QKV:
        return rows
    if name in _FC1:
        return gated if is_gated else rows
    return _DIVIDED.get(name) or (copies if _WHOLE.fullmatch(name) else None)


def is_known(name: str, heads: HeadCounts, is_gated: bool) -> bool:
    """Whether a model of ours has this parameter."""
    return join_of(name, heads, 3.0, is_gated) is not None
