"""Megatron-core's checkpoints in torch_dist: each tensor whole, by its name, in chunks of a folder. Reads no tensors. No
torch.

    decoder.layers.self_attention.linear_qkv.weight [layers, rows, columns]      where all layers are alike
    decoder.layers.3.self_attention.linear_qkv.weight [rows, columns]            where they are not
    optimizer.state.exp_avg.decoder.layers...                                    the optimizer's, which is not read

The run's arguments are in common.pt, or in an object of the folder, common_state.
"""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megatron.convert.families.config_fields import ModelSettings
from megatron.convert.families.family import OUTPUT, WORD_TABLE
from megatron.convert.families.weight_layout import View
from megatron.convert.formats.find_megatron_folder import COMMON
from megatron.convert.formats.megatron_param_mapping import PartOf, are_of_bert, is_known, our_place_of
from megatron.convert.formats.read_hf_folder import are_equal, path_inside
from megatron.convert.formats.read_megatron_args import plain_args, settings_of_args
from megatron.convert.formats.read_megatron_torch import MegatronModel, head_counts
from megatron.convert.formats.read_torch_dcp import BoxInFile, DcpFolder, read_dcp
from megatron.convert.formats.read_torch_file import read_torch_file
from megatron.convert.formats.safetensors_header import FETCH_AGAIN
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.sharding.boxes import Box, size_of
from megatron.core.storage.file_layer import is_file

_COMMON_STATE = "common_state/shard_0_1"  # since 2026
_NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\..*|(rng_state|rerun_state_machine|opt_param_scheduler)\b.*")
_STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)")
_HALF = re.compile(r"(.*mlp\.linear_fc1\.(?:weight|bias))_([wv])")  # gates and ups as tensors of their own

# (our name, with {i} for the layer; the layer) -> where it lies
PlacedParts = dict[tuple[str, int | None], list[PartOf]]


def read_dist(path: Path) -> MegatronModel:
    """The model in the folder of one iteration. Raises CheckpointError, ConfigError."""
    folder = read_dcp(path)
    settings, args = _said(folder)
    parts, problems = _parts_of(folder)
    found = _joined(path, parts, settings, problems)
    if problems:
        raise CheckpointError(path, problems, "is it one model's checkpoint? Nothing was read")
    return MegatronModel(settings, args, found, is_bert=are_of_bert(found))


def args_of_dist(path: Path) -> tuple[ModelSettings, dict[str, Any], int]:
    """(the settings of the model in the folder of one iteration, its args, the rows of its word table)."""
    folder = read_dcp(path)
    places = ((our_place_of(theirs), x) for theirs, x in folder.tensors.items() if not _NOT_WEIGHTS.fullmatch(theirs))
    table = next((x for place, x in places if place and place.name == WORD_TABLE and x.shape), None)
    if table is None:
        raise CheckpointError(path, "has no word table", FETCH_AGAIN)
    return *_said(folder), table.shape[0]


def _said(folder: DcpFolder) -> tuple[ModelSettings, dict[str, Any]]:
    """The settings of the model, and the run's arguments."""
    if is_file(folder.path / COMMON):
        path_inside(folder.path, COMMON)
        file = read_torch_file(folder.path / COMMON, COMMON)
        values = file.values
    elif _COMMON_STATE in folder.objects:
        file = folder.file(folder.objects[_COMMON_STATE])
        values = file.values[0] if isinstance(file.values, list) and file.values else None
    else:
        raise ConfigError(f"{folder.path} has neither {COMMON} nor common_state, which say what the model computes")
    args = plain_args(values.get("args")) if isinstance(values, dict) else {}
    source = f"{folder.path / file.name}: args"
    if not args:
        raise ConfigError(f"{source} are not there, which say what the model computes")
    return settings_of_args(args, source), args


# ---------------------------------------------------------------- tensors


def _parts_of(folder: DcpFolder) -> tuple[PlacedParts, list[str]]:
    """The tensors of the model by our names; what cannot be read."""
    found: PlacedParts = {}
    problems: list[str] = []
    halves: dict[tuple[str, int | None], dict[str, list[PartOf]]] = {}
    for theirs in folder.tensors:
        if _NOT_WEIGHTS.fullmatch(theirs) or our_place_of(theirs) is None:
            continue
        half = _HALF.fullmatch(theirs)
        try:
            for place, parts in _places_of(half[1] if half else theirs, folder.chunks_of(theirs)):
                if half:
                    halves.setdefault(place, {})[half[2]] = parts
                elif found.setdefault(place, parts) is not parts:
                    raise ValueError("it is there under two names")
        except (ValueError, IndexError) as error:
            problems.append(f"{theirs!r:.90}: {error}")
    for place, both in halves.items():
        if both.keys() != {"w", "v"} or place in found:
            problems.append(f"{place[0]!r:.90} lacks its gates or its ups, or has them twice")
            continue
        rows = max(part.box[0][1] for part in both["w"])
        lower = [part._replace(box=_moved(part, rows)) for part in both["v"]]
        found[place] = [*both["w"], *lower]
    return found, problems


def _moved(part: PartOf, rows: int) -> Box:
    start, stop = part.box[0]
    return ((start + rows, stop + rows), *part.box[1:])


def _places_of(theirs: str, chunks: list[BoxInFile]) -> Iterator[tuple[tuple[str, int | None], list[PartOf]]]:
    """Where a tensor belongs, and its parts; that of all layers belongs to each."""
    if (stacked := _STACKED.fullmatch(theirs)) is None:
        name, layer = our_place_of(theirs)
        yield (name, layer), [PartOf(box, View.of(0, x.shape), x) for box, x in chunks]
        return
    name = our_place_of(f"{stacked[1]}.0.{stacked[2]}").name
    layers: dict[int, list[PartOf]] = {}
    for box, x in chunks:
        shape = size_of(box)[1:]
        for i in range(*box[0]):
            view = View.of(0, shape)._replace(start=(i - box[0][0]) * prod(shape))
            layers.setdefault(i, []).append(PartOf(box[1:], view, x))
    for i, parts in layers.items():
        yield (name, i), parts


def _joined(path: Path, parts: PlacedParts, settings: ModelSettings, problems: list[str]) -> Mapping[str, list[PartOf]]:
    """The tensors by their full names. Adds to `problems` what does not fit the settings."""
    heads, is_gated = head_counts(settings), bool(settings.get("swiglu") or settings.get("gated"))
    is_tied, found = not settings["untie_embeddings_and_output_weights"], {}
    for (general, layer), mine in parts.items():
        name = general.replace("{i}", str(layer))
        if not is_known(general, heads, is_gated):
            problems.append(f"{name!r:.90}: a model here has no such tensor")
        elif is_tied and general == f"{OUTPUT}.weight":
            table = parts.get((WORD_TABLE, None), [])
            equal = [x.box for x in mine] == [x.box for x in table]
            if not equal or not all(are_equal(path, x.tensor, y.tensor) for x, y in zip(mine, table)):
                problems.append(f"{name!r}: it differs from the word table, with which it is tied")
        else:
            found[name] = mine
    layers = {layer for _, layer in parts if layer is not None}
    if layers != {*range(settings["num_layers"])}:
        problems.append(f"it has {len(layers)} layers, and args say {settings['num_layers']}")
    return found
