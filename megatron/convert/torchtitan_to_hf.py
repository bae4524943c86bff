"""A checkpoint of torchtitan: a folder of torch.distributed.checkpoint, and the model's config.json. Reads no tensors.
No torch.

    .metadata, __0_0.distcp, ...     tok_embeddings.weight, layers.0.attention.wq.weight, ...; optimizer.*, which is not read
    config.json                      of the model in Hugging Face's form, put there by its user: the rest says nothing of
                                     what it
                                     computes

Tensors get the names of a Hugging Face folder, whose table then says where they belong. Each lies in chunks, one for
each rank
that held a part of it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from megatron.convert.families.family import Family
from megatron.convert.families.weight_layout import View
from megatron.convert.formats.find_megatron_folder import METADATA
from megatron.convert.formats.read_hf_folder import CONFIG, INDEX, WEIGHTS, are_equal
from megatron.convert.formats.read_torch_dcp import BoxInFile, read_dcp
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.strided_checkpoint import StridedPiece, piece_of
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import ITEM_BYTES, CheckpointError, TensorRecord
from megatron.core.sharding.boxes import size_of
from megatron.core.storage.file_layer import exists, is_file

# Whether queries and keys rotate in neighbouring pairs, where Hugging Face's form rotates halves; by model_type.
ROTATES_PAIRS = {"llama": True, "qwen3": False}
_NOT_WEIGHTS = re.compile(r"(optimizer|lr_scheduler|dataloader|train_state|ft_dataloader.*)(\..*|)|(.*\.)?freqs_cis")
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
_NAMES = (
    (r"tok_embeddings\.", "model.embed_tokens."),
    (r"norm\.", "model.norm."),
    (r"output\.", "lm_head."),  # until 2026
)
_IN_LAYER = (
    (r"attention\.(?:qkv_linear\.)?w([qkv])\.", r"self_attn.\1_proj."),
    (r"attention\.wo\.", "self_attn.o_proj."),
    (r"attention\.([qk])_norm\.", r"self_attn.\1_norm."),
    (r"feed_forward\.w1\.", "mlp.gate_proj."),
    (r"feed_forward\.w2\.", "mlp.down_proj."),
    (r"feed_forward\.w3\.", "mlp.up_proj."),
    (r"attention_norm\.", "input_layernorm."),
    (r"ffn_norm\.", "post_attention_layernorm."),
)


def is_titan_folder(root: Path) -> bool:
    """Whether a folder with a config.json has its weights in chunks of torch.distributed.checkpoint."""
    return is_file(root / METADATA) and not exists(root / WEIGHTS) and not exists(root / INDEX)


def in_their_form(name: str) -> str:
    """A parameter's name in a Hugging Face folder; a name that is unknown stays as it is."""
    name = name.removeprefix("model.")  # until 2025
    if (layer := _LAYER.fullmatch(name)) is None:
        return _replaced(name, _NAMES)
    return f"model.layers.{layer[1]}.{_replaced(layer[2], _IN_LAYER)}"


def _replaced(name: str, table: tuple[tuple[str, str], ...]) -> str:
    return next((re.sub(f"^{old}", new, name) for old, new in table if re.match(old, name)), name)


def chunks_of_titan(root: Path) -> dict[str, list[BoxInFile]]:
    """The chunks of each weight, by its name in a Hugging Face folder. Raises CheckpointError."""
    folder, found = read_dcp(root), {}
    for name in folder.tensors:
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        try:
            if found.setdefault(theirs := in_their_form(name), chunks := folder.chunks_of(name)) is not chunks:
                raise ValueError(f"another is {theirs} too")
        except ValueError as error:
            raise CheckpointError(root, f"{name!r:.90}: {error}", FETCH_AGAIN) from error
    return found


def as_whole(name: str, chunks: list[BoxInFile]) -> TensorInFile:
    """A tensor as if it lay row-major in a file of its name: what `divided` takes apart again."""
    shape = tuple(max(stop for _, stop in spans) for spans in zip(*(box for box, _ in chunks)))
    return TensorInFile(name, chunks[0].tensor.dtype, shape, 0)


def family_of_titan(family: Family, kind: str, rotary_percent: float) -> Family:
    """The family's table for weights of torchtitan. Raises ConfigError for a model_type that is not read."""
    if kind not in ROTATES_PAIRS or rotary_percent != 1:
        whole = "" if rotary_percent == 1 else " with heads that rotate in part"
        raise ConfigError(f"{CONFIG}: model_type is {kind}{whole}; read of torchtitan are {', '.join(ROTATES_PAIRS)}")
    turned = {"qkv": "qkv_pairs"} if ROTATES_PAIRS[kind] else {}
    return replace(
        family, rows=tuple(row._replace(operation=turned.get(row.operation, row.operation)) for row in family.rows)
    )


def divided(record: TensorRecord, chunks: Mapping[str, list[BoxInFile]]) -> TensorRecord:
    """A tensor of ours, made of whole tensors of theirs, as one made of their chunks."""
    pieces = (part for piece in record.pieces for part in _parts(piece, chunks[piece.file]))
    return replace(record, pieces=tuple(pieces))


def _parts(piece: StridedPiece, chunks: list[BoxInFile]) -> Iterator[StridedPiece]:
    """The rows of a piece that each chunk holds: from the row `first` on, each `step` rows of theirs, with all their
    columns."""
    width = prod(size_of(piece.box)[1:])
    first, step = piece.offset // ITEM_BYTES[piece.dtype] // width, piece.strides[0] // width
    rows = size_of(piece.box)[0]
    for (span, *columns), x in chunks:
        start, stop = (min(max(-(-(edge - first) // step), 0), rows) for edge in span)
        if start < stop:
            above = piece.box[0][0]
            box = (
                (above + start, above + stop),
                *((low + a, low + b) for (low, _), (a, b) in zip(piece.box[1:], columns)),
            )
            view = View.of(0, x.shape)
            begin = (first + start * step - span[0]) * view.strides[0]
            strides = (step * view.strides[0], *view.strides[1:])
            yield piece_of(box, View(0, size_of(box), strides, begin), x)


def check_tied_chunks(root: Path, chunks: Mapping[str, list[BoxInFile]], one: str, other: str) -> None:
    """Refuse a head that differs from the word table with which the model is tied. Raises CheckpointError."""
    if one not in chunks or other not in chunks:
        return
    pairs = list(zip(chunks[one], chunks[other]))
    same = len(chunks[one]) == len(chunks[other]) and all(a.box == b.box for a, b in pairs)
    if not same or not all(are_equal(root, a.tensor, b.tensor) for a, b in pairs):
        raise CheckpointError(
            root, f"{CONFIG} makes {one} and {other} one tensor, and one differs from the other", FETCH_AGAIN
        )
