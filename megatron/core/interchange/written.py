"""A checkpoint as a Hugging Face folder: the rows of a family read from right to left, one tensor at a time.

    config.json                        written from our settings, for transformers 4 and 5
    model.safetensors, or files of at most a given size and model.safetensors.index.json
    tokenizer.json, generation_config.json, chat_template.jinja, ...      as they are in the folder that they come from

The folder gets its name when it is complete. A rank has two tensors of ours in memory at most.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.boxes import slices, whole
from megatron.core.checkpoint.format import ITEM_BYTES
from megatron.core.checkpoint.load import Checkpoint
from megatron.core.checkpoint.local_tensor import LocalTensor
from megatron.core.config import ConfigError, build
from megatron.core.grid import ALONE, Axis
from megatron.core.interchange.carried import Origin, carry
from megatron.core.interchange.config_json import config_of, kind_of
from megatron.core.interchange.families import FAMILIES
from megatron.core.interchange.family import Row
from megatron.core.interchange.hf_folder import CONFIG, INDEX, WEIGHTS
from megatron.core.interchange.mapped import heads_of, rows_of
from megatron.core.interchange.operations import OPERATIONS, HeadCounts, View
from megatron.core.interchange.safetensors import header_of
from megatron.core.storage.files import at, exists, make_folders, remove_tree, write_all, write_synced
from megatron.core.transformer.model_config import ModelConfig

_PREFIX = "model/"


def their_tensors(operation: str, heads: HeadCounts, ours: Tensor) -> Iterator[Tensor]:
    """The tensors that the operation would make `ours` of, one after the other, in its dtype."""
    how = OPERATIONS[operation]
    shapes = how.shapes(heads, tuple(ours.shape))
    places = list(how.places(heads, [View.of(which, shape) for which, shape in enumerate(shapes)]))
    for which, shape in enumerate(shapes):
        mine = [(box, view) for box, view in places if view.which == which]
        ((box, view),) = mine if len(mine) == 1 else ((None, None),)
        if view == View.of(which, shape):  # it lies in ours as a whole
            yield ours[slices(box)]
            continue
        made = torch.empty(shape, dtype=ours.dtype, device=ours.device)
        for box, view in mine:
            made.as_strided(view.shape, view.strides, view.start).copy_(ours[slices(box)])
        yield made


@dataclass
class _File:
    """One file of weights to write."""

    rows: list[Row]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())


def write_hf_folder(
    checkpoint: Checkpoint,
    out: Path,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    most_bytes: int = 5 << 30,
    along: Path | None = None,
    note: Callable[[str], object] = lambda line: None,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> str:
    """Write the model of a checkpoint as the folder `out`, which must not exist; returns its model_type.

    Every rank of `world` must call, and writes its share of the files. kind: the model_type; default: that of the folder that
    the model came from, or the first family that can say what it computes. dtype: of all tensors; default: as they are.
    most_bytes: of one file. along: the folder with the tokenizer's files; default: where the model came from, and only files that
    are as they were then. note: told, on the first rank, of files that are not written. Raises ConfigError, CheckpointError.
    """
    state, partial = checkpoint.state, out.with_name(out.name + ".partial")
    with comm.together(world, device):
        model, words = _model_in(state, checkpoint.folder)
        origin = Origin.in_state(state, str(checkpoint.folder))
        kind = kind_of(model, words, kind or (origin.model_type if origin else None))
        files = _plan(checkpoint, kind, model, dtype, most_bytes)
        names = _names(len(files))
        if world.is_first:
            if exists(out):
                raise ConfigError(f"{out} is there already; a folder is written anew: choose another")
            if exists(partial):
                remove_tree(partial)
            make_folders(partial)
    with comm.together(world, device):
        for number, (name, file) in enumerate(zip(names, files)):
            if number % world.size == world.rank:
                _write_file(checkpoint, partial / name, file, heads_of(model))
    with comm.together(world, device):
        if world.is_first:
            carry(origin, along, partial, note)
            if len(files) > 1:
                _write_index(partial, dict(zip(names, files)))
            # Last, since a folder without it is none.
            _write_config(partial, config_of(kind, model, words, _dtype_of(files)) | _kept(origin))
            at(partial).sync_folder(partial)
            at(partial).rename(partial, out)
            at(out).sync_folder(out.parent)
    return kind


def _model_in(state: dict[str, Any], folder: Path) -> tuple[ModelConfig, int]:
    """(the model's settings, its words)."""
    saved = state.get("config", {}).get("transformer")
    known_models = {family.model for family in FAMILIES.values()}
    if saved is None or "vocab_size" not in state or state.get("model", "GPTModel") not in known_models:
        known = " or a ".join(sorted(known_models))
        raise ConfigError(
            f"{folder} holds a {state.get('model', 'model without a name')}; what is written is a {known}"
        )
    known = {f.name for f in fields(ModelConfig)}
    if unknown := sorted(saved.keys() - known):
        raise ConfigError(f"{folder} has model settings unknown here: {', '.join(unknown)}; use the code that wrote it")
    return build(ModelConfig, saved), state["vocab_size"]


def _plan(checkpoint: Checkpoint, kind: str, model: ModelConfig, dtype: str | None, most: int) -> list[_File]:
    """What each file holds. Tensors that are one of ours stay together."""
    records = {name: x for name, x in checkpoint.manifest.tensors.items() if name.startswith(_PREFIX)}
    rows = [row for row in rows_of(FAMILIES[kind], model) if _PREFIX + row.ours in records]
    if left := sorted(records.keys() - {_PREFIX + row.ours for row in rows}):
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ConfigError(f"a {kind} has no place for {', '.join(left[:3])}{more} of {checkpoint.folder}")
    files = [_File([], {})]
    for row in rows:
        record = records[_PREFIX + row.ours]
        shapes = OPERATIONS[row.operation].shapes(heads_of(model), record.shape)
        found = _File([row], {name: (dtype or record.dtype, shape) for name, shape in zip(row.theirs, shapes)})
        if files[-1].rows and files[-1].nbytes + found.nbytes > most:
            files.append(_File([], {}))
        files[-1].rows.extend(found.rows)
        files[-1].tensors.update(found.tensors)
    return files


def _names(count: int) -> list[str]:
    stem = WEIGHTS.removesuffix(".safetensors")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]


def _dtype_of(files: list[_File]) -> str:
    """The dtype of most elements."""
    sizes: dict[str, int] = {}
    for dtype, shape in (entry for file in files for entry in file.tensors.values()):
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _write_file(checkpoint: Checkpoint, path: Path, plan: _File, heads: HeadCounts) -> None:
    with at(path).open(path, "xb") as file:
        write_all(file, header_of(plan.tensors), path)
        for row in plan.rows:
            dtype, name = plan.tensors[row.theirs[0]][0], _PREFIX + row.ours
            ours = torch.empty(checkpoint.manifest.tensors[name].shape, dtype=getattr(torch, dtype))
            box = whole(tuple(ours.shape))
            whole_tensor = LocalTensor(ours, tuple(ours.shape), [(box, box)], False)
            checkpoint.read_into({name: whole_tensor}, convert=True, in_place=True)
            for theirs in their_tensors(row.operation, heads, ours):
                write_all(file, theirs.reshape(-1).view(torch.uint8).numpy().data, path)
        at(path).sync(file)


def _kept(origin: Origin | None) -> dict[str, Any]:
    """Keys that the folder had. Unknown ids of a text's ends and padding are null, or the class's own would be taken."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | dict(origin.kept if origin else {})


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    write_synced(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_index(folder: Path, files: dict[str, _File]) -> None:
    sizes = {"total_size": sum(file.nbytes for file in files.values())}
    index = {"metadata": sizes, "weight_map": {name: file for file, plan in files.items() for name in plan.tensors}}
    write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")
