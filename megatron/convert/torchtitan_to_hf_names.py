"""Give a checkpoint of torchtitan the names of a Hugging Face folder. Reads no tensors. No torch.

    .metadata, __0_0.distcp, ...    torch.distributed.checkpoint: tok_embeddings.weight, layers.0.attention.wq.weight,
                                    ...; optimizer.*, which is not read
    config.json                     of the model in Hugging Face's form, put there by its user: the other files do not
                                    describe what the model computes

With these names, the family's table maps the tensors to ours. Each tensor is in chunks, one for each rank that
held a part of it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.strided_views_of_hf_weights import View
from megatron.convert.formats.find_megatron_folder import METADATA
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, INDEX, WEIGHTS, are_equal
from megatron.convert.formats.read_torch_dcp_metadata import BoxInFile, read_dcp
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.strided_reads_of_foreign_files import StridedPiece, piece_of
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, CheckpointError, TensorRecord
from megatron.core.sharding.boxes import size_of
from megatron.core.storage.file_layer import exists, is_file

# By model_type: whether neighbouring features of queries and keys rotate as a pair. In Hugging Face's form the two halves of a
# head do.
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


def has_dcp_weights(root: Path) -> bool:
    """Return whether a folder with a config.json has its weights in chunks of torch.distributed.checkpoint."""
    return is_file(root / METADATA) and not exists(root / WEIGHTS) and not exists(root / INDEX)


def hf_name_of(name: str) -> str:
    """Return a parameter's name in a Hugging Face folder; a name that is unknown stays as it is."""
    name = name.removeprefix("model.")  # until 2025
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _replaced(name, _NAMES)
    return f"model.layers.{layer[1]}.{_replaced(layer[2], _IN_LAYER)}"


def _replaced(name: str, table: tuple[tuple[str, str], ...]) -> str:
    """Replace the beginning of a name by the first row of the table that matches it."""
    for old, new in table:
        if re.match(old, name):
            return re.sub(f"^{old}", new, name)
    return name


def chunks_by_hf_name(root: Path) -> dict[str, list[BoxInFile]]:
    """Return the chunks of each weight, by its name in a Hugging Face folder. Raises CheckpointError."""
    folder = read_dcp(root)
    chunks_by_name: dict[str, list[BoxInFile]] = {}
    for name in folder.tensors:
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        hf_name = hf_name_of(name)
        try:
            chunks = folder.chunks_of(name)
            if hf_name in chunks_by_name:
                raise ValueError(f"another is {hf_name} too")
        except ValueError as error:
            raise CheckpointError(root, f"{name!r:.90}: {error}", FETCH_AGAIN) from error
        chunks_by_name[hf_name] = chunks
    return chunks_by_name


def placeholder_tensor_of(name: str, chunks: list[BoxInFile]) -> TensorInFile:
    """Return a tensor as if it were row-major in a file of its name; `split_into_chunks` replaces this file again."""
    shape = tuple(max(stop for _, stop in spans) for spans in zip(*(box for box, _ in chunks)))
    return TensorInFile(name, chunks[0].tensor.dtype, shape, 0)


def family_of_titan(family: Family, kind: str, rotary_percent: float) -> Family:
    """Return the family's table for weights of torchtitan.

    Raises ConfigError for a model_type that is not supported.
    """
    if kind not in ROTATES_PAIRS or rotary_percent != 1:
        partly = "" if rotary_percent == 1 else " with heads that rotate in part"
        raise ConfigError(
            f"{CONFIG}: model_type is {kind}{partly}; of torchtitan's models only {', '.join(ROTATES_PAIRS)} can "
            "be read"
        )
    if not ROTATES_PAIRS[kind]:
        return family
    mappings = []
    for mapping in family.mappings:
        is_qkv = mapping.operation == "qkv"
        mappings.append(mapping._replace(operation="qkv_pairs") if is_qkv else mapping)
    return replace(family, mappings=tuple(mappings))


def split_into_chunks(record: TensorRecord, chunks: Mapping[str, list[BoxInFile]]) -> TensorRecord:
    """Return a tensor of ours that is made of full tensors (`placeholder_tensor_of`) as one made of their chunks."""
    pieces: list[StridedPiece] = []
    for piece in record.pieces:
        pieces += _pieces_in_chunks(piece, chunks[piece.file])
    return replace(record, pieces=tuple(pieces))


def _pieces_in_chunks(piece: StridedPiece, chunks: list[BoxInFile]) -> Iterator[StridedPiece]:
    """Yield the part of a piece that each chunk holds.

    The piece takes, of the full tensor, row `first` and each `step`th row after it, with all their columns.
    """
    columns_of_piece = piece.box[1:]
    width = prod(size_of(piece.box)[1:])
    first = piece.offset // ITEM_BYTES[piece.dtype] // width
    step = piece.strides[0] // width
    rows = size_of(piece.box)[0]
    first_row_of_box = piece.box[0][0]
    for (row_span, *column_spans), x in chunks:
        # the piece's rows that are in the chunk: the first one at or after the chunk's first row, ...
        start, stop = (min(max(-(-(edge - first) // step), 0), rows) for edge in row_span)
        if start >= stop:
            continue
        columns = [(low + a, low + b) for (low, _), (a, b) in zip(columns_of_piece, column_spans)]
        box = ((first_row_of_box + start, first_row_of_box + stop), *columns)
        # the same rows in the chunk, which is row-major itself
        chunk_view = View.of(0, x.shape)
        row_stride = chunk_view.strides[0]
        first_element = (first + start * step - row_span[0]) * row_stride
        strides = (step * row_stride, *chunk_view.strides[1:])
        yield piece_of(box, View(0, size_of(box), strides, first_element), x)


def check_tied_chunks(root: Path, chunks: Mapping[str, list[BoxInFile]], output: str, embedding: str) -> None:
    """Refuse an output layer that differs from the word embeddings that the model ties it to.

    Raises CheckpointError.
    """
    if output not in chunks or embedding not in chunks:
        return
    pairs = list(zip(chunks[output], chunks[embedding]))
    same_boxes = len(chunks[output]) == len(chunks[embedding]) and all(a.box == b.box for a, b in pairs)
    if not same_boxes or not all(are_equal(root, a.tensor, b.tensor) for a, b in pairs):
        raise CheckpointError(
            root, f"{CONFIG} makes {output} and {embedding} one tensor, and one differs from the other", FETCH_AGAIN
        )
