"""A checkpoint of Megatron-LM as one of ours: its weights by our names, each a list of pieces of its files."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.convert.check_missing_keys import ABSENT_HEADS, without_order_of_sentences
from megatron.convert.families.family import WORD_TABLE
from megatron.convert.families.weight_layout import shape_of
from megatron.convert.formats.find_megatron_folder import find_megatron
from megatron.convert.formats.read_megatron_args import unclear
from megatron.convert.formats.read_megatron_torch import MegatronModel, args_of, read_classic
from megatron.convert.formats.read_megatron_torch_dist import args_of_dist, read_dist
from megatron.convert.formats.safetensors_header import FETCH_AGAIN
from megatron.convert.strided_checkpoint import StridedCheckpoint, StridedPiece, piece_of
from megatron.core.dist_checkpointing.format import CheckpointError, Manifest, TensorRecord
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.transformer.model_config import ModelConfig

_NOTE = "is a checkpoint of Megatron-LM: its weights are read, and not its optimizer's state"


def open_megatron(
    root: Path, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> StridedCheckpoint:
    """The model in a folder of Megatron-LM's checkpoints, as a checkpoint that any layout reads; reads no tensors.

    Every rank of `world` must call. The first rank reads the files' indices for all.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            folder = find_megatron(root, iteration)
            read = {"classic": read_classic, "torch_dist": read_dist}[folder.kind]
            model = read(folder.path)
            manifest = manifest_of_megatron(model, folder.iteration, folder.path)
            doubt = unclear(model.args)
            note = f"{folder.path} {_NOTE}" + (f"; {doubt}" if doubt else "")
            text = manifest_as_text(folder.path, note, manifest)
    return opened_by_first(text, world, device)


def manifest_as_text(path: Path, note: str, manifest: Manifest) -> str:
    """What the first rank has read, for `opened_by_first`."""
    return json.dumps({"path": str(path), "note": note} | asdict(manifest))


def opened_by_first(text: str | None, world: Axis, device: torch.device | str) -> StridedCheckpoint:
    """The checkpoint of the first rank's `manifest_as_text`, on every rank. Every rank of `world` must call."""
    raw = json.loads(collectives.broadcast_text(text, world, device))
    path, note = raw.pop("path"), raw.pop("note")
    tensors = {name: _record(**record) for name, record in raw.pop("tensors").items()}
    return StridedCheckpoint(Path(path), Manifest(**raw, tensors=tensors), note)


def _record(dtype: str, shape: list[int], pieces: list[dict[str, Any]]) -> TensorRecord:
    found = []
    for piece in pieces:
        box, strides = tuple(map(tuple, piece.pop("box"))), tuple(piece.pop("strides"))
        found.append(StridedPiece(**piece, box=box, strides=strides))
    return TensorRecord(dtype, tuple(shape), tuple(found))


def manifest_of_megatron(model: MegatronModel, iteration: int, path: Path) -> Manifest:
    """The model as a checkpoint of ours. Raises CheckpointError for parts that do not fit together."""
    records, problems = {}, []
    for name, parts in model.parts.items():
        try:
            pieces = tuple(piece_of(*part) for part in parts)
            records[f"model/{name}"] = TensorRecord(parts[0].tensor.dtype, shape_of([x.box for x in parts]), pieces)
        except ValueError as error:
            problems.append(f"{name!r:.90}: {error}")
    if (table := records.get(f"model/{WORD_TABLE}")) is None or len(table.shape) != 2:
        problems.append("has no word table")
    if problems:
        raise CheckpointError(path, problems, FETCH_AGAIN)
    state = {
        "train": {"iteration": iteration, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": "BertModel" if model.is_bert else "GPTModel",
        "vocab_size": table.shape[0],
        "config": _components(model.settings, model.args, table.shape[0]),
    }
    ends: dict[str, int] = {}
    for x in (part.tensor for parts in model.parts.values() for part in parts):
        ends[x.file] = max(ends.get(x.file, 0), x.start + x.nbytes)
    config = ModelConfig(**model.settings)
    if model.is_bert:
        has_order = model.args.get("bert_binary_head", True) is not False
        state[ABSENT_HEADS] = [] if has_order else without_order_of_sentences(config)
    return Manifest(iteration, state, ends, records)


def settings_of_megatron(root: Path, iteration: int | None = None) -> dict[str, dict[str, Any]]:
    """The settings that a checkpoint's args give to a run, by component."""
    folder = find_megatron(root, iteration)
    return _components(*{"classic": args_of, "torch_dist": args_of_dist}[folder.kind](folder.path))


def _components(settings: dict[str, Any], args: dict[str, Any], words: int) -> dict[str, dict[str, Any]]:
    length = args.get("seq_length")
    usable = type(length) is int and 0 < length <= settings["max_position_embeddings"]
    return {
        "transformer": dict(settings),
        "tokenizer": {"model_vocab_size": words},
        "data": {"seq_length": length if usable else settings["max_position_embeddings"]},
        "optimizer": {},
        "checkpoint": {"save_optim": False},
    }
