"""Read Megatron-core's torch_dist checkpoints: each full tensor by its name, in chunks. Reads no tensors. No torch.

    decoder.layers.self_attention.linear_qkv.weight [layers, rows, columns]      where all layers are alike
    decoder.layers.3.self_attention.linear_qkv.weight [rows, columns]            where they are not
    decoder.layers.mlp.experts.experts.linear_fc1.weight [layers, experts, rows, columns]
    optimizer.state.exp_avg.decoder.layers...                                    the optimizer's, which is not read

The run's arguments are in common.pt, or in an object of the folder, common_state.
"""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megatron.convert.families.config_fields import ModelSettings
from megatron.convert.families.hf_family_fields_and_param_mappings import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.convert.families.strided_views_of_hf_weights import View
from megatron.convert.formats.find_megatron_folder import COMMON
from megatron.convert.formats.hf_config_and_safetensors_headers import are_equal, path_inside
from megatron.convert.formats.locate_megatron_torch_tensors import MegatronModel, head_counts, router_bias_of
from megatron.convert.formats.megatron_param_names_and_shard_joins import (
    TensorPart,
    has_bert_heads,
    is_known,
    is_of_experts,
    map_param_name,
    split_stacked_experts,
)
from megatron.convert.formats.read_megatron_args import plain_args_from_pickle, settings_of_args
from megatron.convert.formats.read_torch_dcp_metadata import BoxInFile, DcpFolder, read_dcp
from megatron.convert.formats.safetensors_header import FETCH_AGAIN
from megatron.convert.formats.torch_save_tensor_offsets import read_torch_file
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.sharding.boxes import Box, size_of
from megatron.core.storage.file_layer import is_file

_COMMON_STATE = "common_state/shard_0_1"  # since 2026
_NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\..*|(rng_state|rerun_state_machine|opt_param_scheduler)\b.*")
_STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)")
_GATE_OR_UP = re.compile(
    r"(.*mlp\.(?:(?:shared_experts|experts\.experts(?:\.\d{1,6})?)\.)?linear_fc1\.(?:weight|bias))_([wv])"
)  # gate (w) and up (v) as separate tensors

# our name with {i} for the layer; the layer; the expert, of a tensor of one expert
_Key = tuple[str, int | None, int | None]
PartsByParam = dict[_Key, list[TensorPart]]


def read_dist(path: Path) -> MegatronModel:
    """Read the model in the folder of one iteration. Raises CheckpointError, ConfigError."""
    folder = read_dcp(path)
    settings, args = _settings_and_args(folder)
    parts_by_param, problems = _parts_by_param(folder)
    parts = _checked_parts(path, parts_by_param, settings, problems)
    if problems:
        raise CheckpointError(path, problems, "is it one model's checkpoint? Nothing was read")
    return MegatronModel(settings, args, parts, is_bert=has_bert_heads(parts))


def args_and_vocab_size_of_dist(path: Path) -> tuple[ModelSettings, dict[str, Any], int]:
    """Return (the model's settings, the run's args, the padded vocabulary size) of an iteration's folder."""
    folder = read_dcp(path)
    for megatron_name, x in folder.tensors.items():
        place = None if _NOT_WEIGHTS.fullmatch(megatron_name) else map_param_name(megatron_name)
        if place is not None and place.name == WORD_EMBEDDINGS and x.shape:
            settings, args = _settings_and_args(folder)
            return settings, args, x.shape[0]
    raise CheckpointError(path, "has no word table", FETCH_AGAIN)


def _settings_and_args(folder: DcpFolder) -> tuple[ModelSettings, dict[str, Any]]:
    """Return (the model's settings, the run's arguments)."""
    if is_file(folder.path / COMMON):
        path_inside(folder.path, COMMON)
        file = read_torch_file(folder.path / COMMON, COMMON)
        values = file.values
    elif _COMMON_STATE in folder.objects:
        file = folder.file(folder.objects[_COMMON_STATE])
        values = file.values[0] if isinstance(file.values, list) and file.values else None
    else:
        raise ConfigError(f"{folder.path} has neither {COMMON} nor common_state, which contain the model's settings")
    args = plain_args_from_pickle(values.get("args")) if isinstance(values, dict) else {}
    source = f"{folder.path / file.name}: args"
    if not args:
        raise ConfigError(f"{source} are missing; they contain the model's settings")
    return settings_of_args(args, source) | router_bias_of(folder.tensors), args


# ---------------------------------------------------------------- tensors


def _parts_by_param(folder: DcpFolder) -> tuple[PartsByParam, list[str]]:
    """Return (the parts of each parameter, the problems)."""
    parts_by_param: PartsByParam = {}
    problems: list[str] = []
    halves: dict[_Key, dict[str, list[TensorPart]]] = {}  # {"w": gate, "v": up}
    for megatron_name in folder.tensors:
        if _NOT_WEIGHTS.fullmatch(megatron_name) or map_param_name(megatron_name) is None:
            continue
        half = _GATE_OR_UP.fullmatch(megatron_name)
        try:
            for place, parts in _parts_of_tensor(half[1] if half else megatron_name, folder.chunks_of(megatron_name)):
                if half:
                    halves.setdefault(place, {})[half[2]] = parts
                elif place in parts_by_param:
                    raise ValueError("it is in the checkpoint twice, under two names")
                else:
                    parts_by_param[place] = parts
        except (ValueError, IndexError) as error:
            problems.append(f"{megatron_name!r:.90}: {error}")

    # linear_fc1 of a gated MLP: the gate's rows, then those of up
    for place, by_half in halves.items():
        if by_half.keys() != {"w", "v"} or place in parts_by_param:
            problems.append(f"{place[0]!r:.90} lacks its gates or its ups, or has them twice")
            continue
        rows_dim = 1 if is_of_experts(place[0]) and place[2] is None else 0  # [experts, rows, columns], or [rows, ..]
        gate_rows = max(part.box[rows_dim][1] for part in by_half["w"])
        up = [part._replace(box=_moved_down(part.box, rows_dim, gate_rows)) for part in by_half["v"]]
        parts_by_param[place] = [*by_half["w"], *up]
    return parts_by_param, problems


def _moved_down(box: Box, dim: int, rows: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + rows, stop + rows), *box[dim + 1 :])


def _parts_of_tensor(megatron_name: str, chunks: list[BoxInFile]) -> Iterator[tuple[_Key, list[TensorPart]]]:
    """Yield ((our name, layer, expert), parts) for a tensor of one parameter.

    Of a tensor that stacks all layers, yield a pair for each layer.
    """
    stacked = _STACKED.fullmatch(megatron_name)
    if stacked is None:
        place = map_param_name(megatron_name)
        yield (place.name, place.layer, place.expert), [TensorPart(box, View.of(0, x.shape), x) for box, x in chunks]
        return
    place = map_param_name(f"{stacked[1]}.0.{stacked[2]}")
    layers: dict[int, list[TensorPart]] = {}
    for box, x in chunks:  # [layers of the chunk, ...]
        layer_span, *layer_box = box
        shape = size_of(box)[1:]
        for i in range(*layer_span):
            view = View.of(0, shape)._replace(start=(i - layer_span[0]) * prod(shape))
            layers.setdefault(i, []).append(TensorPart(tuple(layer_box), view, x))
    for i, parts in layers.items():
        yield (place.name, i, place.expert), parts


def _checked_parts(
    path: Path, parts_by_param: PartsByParam, settings: ModelSettings, problems: list[str]
) -> Mapping[str, list[TensorPart]]:
    """Return the parts by our full names. Adds to `problems` what does not fit the settings."""
    heads = head_counts(settings)
    is_gated = bool(settings.get("swiglu") or settings.get("gated"))
    is_tied = not settings["untie_embeddings_and_output_weights"]
    by_name: dict[str, list[TensorPart]] = {}
    for (name_with_i, layer, expert), parts in parts_by_param.items():
        name = name_with_i.replace("{i}", str(layer))
        if not is_known(name_with_i, heads, is_gated):
            problems.append(f"{name!r:.90}: the models here have no tensor of this name")
        elif is_of_experts(name_with_i):
            try:
                by_name.setdefault(name, []).extend(split_stacked_experts(name, parts, expert, is_gated))
            except (ValueError, IndexError) as error:
                problems.append(f"{name!r:.90}: {error}")
        elif is_tied and name_with_i == f"{OUTPUT_LAYER}.weight":
            embedding = parts_by_param.get((WORD_EMBEDDINGS, None, None), [])
            same_boxes = [x.box for x in parts] == [x.box for x in embedding]
            if not same_boxes or not all(are_equal(path, x.tensor, y.tensor) for x, y in zip(parts, embedding)):
                problems.append(f"{name!r}: it differs from the word table, with which it is tied")
        else:
            by_name[name] = parts
    layers = {layer for _, layer, _ in parts_by_param if layer is not None}
    if layers != {*range(settings["num_layers"])}:
        problems.append(f"it has {len(layers)} layers, and args say {settings['num_layers']}")
    return by_name
