"""Open a checkpoint of Megatron-LM as one of ours: its weights by our names, each as pieces of its files."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.convert.families.hf_family_fields_and_param_mappings import WORD_EMBEDDINGS
from megatron.convert.families.strided_views_of_hf_weights import shape_of
from megatron.convert.formats.find_megatron_folder import find_megatron
from megatron.convert.formats.locate_megatron_torch_dist_tensors import args_and_vocab_size_of_dist, read_dist
from megatron.convert.formats.locate_megatron_torch_tensors import MegatronModel, args_and_vocab_size, read_classic
from megatron.convert.formats.read_megatron_args import unknown_args_note
from megatron.convert.formats.safetensors_header import FETCH_AGAIN
from megatron.convert.missing_params_and_absent_heads import ABSENT_HEADS, binary_head_parameters
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint, StridedPiece, piece_of
from megatron.core.dist_checkpointing.manifest_format import CheckpointError, Manifest, TensorRecord
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.transformer.model_config import ModelConfig

_NOTE = "is a checkpoint of Megatron-LM: its weights are read, and not its optimizer's state"


def open_megatron(
    root: Path, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> StridedCheckpoint:
    """Open the model in a folder of Megatron-LM's checkpoints as one that any layout can load; reads no tensors.

    Every rank of `world` must call. The first rank reads the files' indices, and broadcasts them.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            folder = find_megatron(root, iteration)
            read = read_classic if folder.kind == "classic" else read_dist
            model = read(folder.path)
            manifest = manifest_of_megatron(model, folder.iteration, folder.path)
            note = f"{folder.path} {_NOTE}"
            unknown_args = unknown_args_note(model.args)
            if unknown_args:
                note += f"; {unknown_args}"
            text = manifest_as_text(folder.path, note, manifest)
    return checkpoint_from_text(text, world, device)


def manifest_as_text(path: Path, note: str, manifest: Manifest) -> str:
    """Return what the first rank has read as JSON, for `checkpoint_from_text`."""
    return json.dumps({"path": str(path), "note": note} | asdict(manifest))


def checkpoint_from_text(text: str | None, world: Axis, device: torch.device | str) -> StridedCheckpoint:
    """Broadcast the first rank's `manifest_as_text`, and return its checkpoint. Every rank of `world` must call."""
    raw = json.loads(collectives.broadcast_text(text, world, device))
    path = raw.pop("path")
    note = raw.pop("note")
    tensors = {name: _record(**record) for name, record in raw.pop("tensors").items()}
    return StridedCheckpoint(Path(path), Manifest(**raw, tensors=tensors), note)


def _record(dtype: str, shape: list[int], pieces: list[dict[str, Any]]) -> TensorRecord:
    typed_pieces = []
    for piece in pieces:
        box = tuple(map(tuple, piece.pop("box")))
        strides = tuple(piece.pop("strides"))
        typed_pieces.append(StridedPiece(**piece, box=box, strides=strides))
    return TensorRecord(dtype, tuple(shape), tuple(typed_pieces))


def manifest_of_megatron(model: MegatronModel, iteration: int, path: Path) -> Manifest:
    """Return the manifest of the model as a checkpoint of ours.

    Raises CheckpointError for parts that do not fit together.
    """
    records = {}
    problems = []
    for name, parts in model.parts.items():
        try:
            pieces = tuple(piece_of(*part) for part in parts)
            kind = "buffer" if name.endswith(".router.expert_bias") else "model"
            records[f"{kind}/{name}"] = TensorRecord(parts[0].tensor.dtype, shape_of([x.box for x in parts]), pieces)
        except ValueError as error:
            problems.append(f"{name!r:.90}: {error}")
    embedding = records.get(f"model/{WORD_EMBEDDINGS}")
    if embedding is None or len(embedding.shape) != 2:
        problems.append("has no word table")
    if problems:
        raise CheckpointError(path, problems, FETCH_AGAIN)
    vocab_size = embedding.shape[0]
    state = {
        "train": {"iteration": iteration, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": "BertModel" if model.is_bert else "GPTModel",
        "vocab_size": vocab_size,
        "config": _components(model.settings, model.args, vocab_size),
    }
    file_ends: dict[str, int] = {}
    for parts in model.parts.values():
        for part in parts:
            x = part.tensor
            file_ends[x.file] = max(file_ends.get(x.file, 0), x.start + x.nbytes)
    config = ModelConfig(**model.settings)
    if model.is_bert:
        has_binary_head = model.args.get("bert_binary_head", True) is not False
        state[ABSENT_HEADS] = [] if has_binary_head else binary_head_parameters(config)
    return Manifest(iteration, state, file_ends, records)


def settings_of_megatron(root: Path, iteration: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the settings that a checkpoint's args give to a run, by component."""
    folder = find_megatron(root, iteration)
    read_args = args_and_vocab_size if folder.kind == "classic" else args_and_vocab_size_of_dist
    settings, args, vocab_size = read_args(folder.path)
    return _components(settings, args, vocab_size)


def _components(settings: dict[str, Any], args: dict[str, Any], vocab_size: int) -> dict[str, dict[str, Any]]:
    """args: the run's, whose seq_length may not be valid."""
    length = args.get("seq_length")
    most = settings["max_position_embeddings"]
    is_valid = type(length) is int and 0 < length <= most
    return {
        "transformer": dict(settings),
        "tokenizer": {"model_vocab_size": vocab_size},
        "data": {"seq_length": length if is_valid else most},
        "optimizer": {},
        "checkpoint": {"save_optim": False},
    }
