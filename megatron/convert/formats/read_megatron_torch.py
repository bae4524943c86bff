"""Classic checkpoints of Megatron-LM: the files of all ranks as one model. Reads no tensors. No torch.

A stage numbers its layers from 0 and may have several chunks of the model (`model0`, `model1`, ...): layers follow one
another
chunk by chunk, and within a chunk stage by stage.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.families.config_fields import ModelSettings
from megatron.convert.families.family import OUTPUT, WORD_TABLE
from megatron.convert.families.weight_layout import HeadCounts
from megatron.convert.formats.find_megatron_folder import rank_files
from megatron.convert.formats.megatron_param_mapping import (
    TIED_COPY,
    PartOf,
    are_of_bert,
    copies,
    join_of,
    our_place_of,
)
from megatron.convert.formats.pickle_as_data import PickleError
from megatron.convert.formats.read_hf_folder import are_equal
from megatron.convert.formats.read_megatron_args import plain_args, settings_of_args
from megatron.convert.formats.read_torch_file import TorchFile, read_torch_file
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import CheckpointError

_VERSIONS = (0, 1.0, 2.0, 3.0)
_MOST_TENSORS, _DEEPEST = 1_000_000, 20  # dots in a name
_CHUNK = re.compile(r"model(\d{0,4})")


@dataclass(frozen=True)
class MegatronModel:
    """A model in a checkpoint of Megatron-LM: what its run said of it, and where its tensors lie, by our names."""

    settings: ModelSettings
    args: Mapping[str, Any]
    parts: Mapping[str, list[PartOf]]
    is_bert: bool


def head_counts(settings: ModelSettings) -> HeadCounts:
    queries = settings["num_attention_heads"]
    groups = settings["num_query_groups"] if settings["group_query_attention"] else queries
    return HeadCounts(queries, groups, settings["kv_channels"])


RankChunks = list[dict[str, TensorInFile]]  # of one rank: name -> tensor


def read_classic(path: Path) -> MegatronModel:
    """The model in the folder of one iteration. Raises CheckpointError, ConfigError."""
    files = rank_files(path)
    ranks: dict[tuple[int, int], RankChunks] = {}
    args: dict[str, Any] = {}
    version = None
    for rank, name in sorted(files.items()):
        file = read_torch_file(path / name, name)
        try:
            ranks[rank], mine = _chunks_of(file), _version_of(file)
        except PickleError as error:
            raise CheckpointError(path / name, str(error), FETCH_AGAIN) from error
        if version is None:
            args, version = plain_args(file.values.get("args")), mine
        elif mine != version or len(ranks[rank]) != len(ranks[0, 0]):
            wrong = f"is of version {mine} with {len(ranks[rank])} chunks, the first rank's of {version} with {len(ranks[0, 0])}"
            raise CheckpointError(path / name, wrong, "fetch the folder again")
    source = f"{path / files[0, 0]}: args"
    if not args:
        raise ConfigError(
            f"{source} are not there, which say what the model computes; checkpoints before 2019-11 have none"
        )
    settings = settings_of_args(args, source)
    _check_sizes(path, files, args)
    return _joined(path, ranks, settings, args, version)


def args_of(path: Path) -> tuple[ModelSettings, dict[str, Any], int]:
    """(the settings of the model in the folder of one iteration, its args, the rows of its word table)."""
    files = rank_files(path)
    file = read_torch_file(path / files[0, 0], files[0, 0])
    try:
        tensors = _chunks_of(file)[0]
    except PickleError as error:
        raise CheckpointError(path / file.name, str(error), FETCH_AGAIN) from error
    args = plain_args(file.values.get("args"))
    settings = settings_of_args(args, f"{path / file.name}: args")
    table = next((x for theirs, x in tensors.items() if our_place_of(theirs).name == WORD_TABLE and x.shape), None)
    if table is None:
        raise CheckpointError(path / file.name, "has no word table", FETCH_AGAIN)
    return settings, args, table.shape[0] * (1 + max(rank for rank, _ in files))


def _check_sizes(path: Path, files: Mapping[tuple[int, int], str], args: Mapping[str, Any]) -> None:
    """Refuse a folder that lacks the last ranks: the others would be a smaller model."""
    tensor = "tensor_model_parallel_size" if "tensor_model_parallel_size" in args else "model_parallel_size"
    for axis, name, what in ((0, tensor, "tensor-parallel ranks"), (1, "pipeline_model_parallel_size", "stages")):
        there, said = 1 + max(key[axis] for key in files), args.get(name)
        if type(said) is int and said != there:
            raise CheckpointError(
                path,
                f"is of {said} {what}, as args say, and has {there}",
                "fetch the folder again, with the files of all ranks",
            )


# ---------------------------------------------------------------- one rank


def _chunks_of(file: TorchFile) -> RankChunks:
    if not isinstance(file.values, dict):
        raise PickleError("holds no dictionary")
    keys = {key: found[1] for key in file.values if isinstance(key, str) and (found := _CHUNK.fullmatch(key))}
    numbers = sorted(int(number) for number in keys.values() if number)
    if not keys or (numbers and ("model" in keys or numbers != [*range(len(numbers))])):
        raise PickleError(
            f"holds {', '.join(sorted(keys)) or 'no model'}; what is read is model, or model0, model1, ..."
        )
    ordered = sorted(keys, key=lambda key: int(keys[key] or 0))
    return [dict(_tensors_in(file, file.values[key])) for key in ordered]


def _tensors_in(file: TorchFile, value: Any) -> Iterator[tuple[str, TensorInFile]]:
    """The tensors of nested dictionaries, by the path of keys to each."""
    left: list[tuple[str, Any]] = [("", value)]
    for _ in range(_MOST_TENSORS):
        if not left:
            return
        name, one = left.pop()
        if isinstance(one, dict) and name.count(".") < _DEEPEST:
            left += [(f"{name}.{key:.200}".lstrip("."), x) for key, x in one.items() if isinstance(key, str)]
        elif our_place_of(name) is not None:
            if (tensor := file.tensor(one)) is None:
                raise PickleError(f"holds {name!r:.80}, which is no tensor")
            yield name, tensor
    raise PickleError(f"holds more than {_MOST_TENSORS} values in its model")


def _version_of(file: TorchFile) -> float:
    version = file.values.get("checkpoint_version", 0)
    if type(version) not in (int, float) or version not in _VERSIONS:
        shown = version if isinstance(version, int | float) else f"of type {type(version).__name__}"
        raise PickleError(f"has checkpoint_version {shown}; read are {', '.join(map(str, _VERSIONS))}")
    return float(version)


# ---------------------------------------------------------------- all ranks


def _joined(
    path: Path,
    ranks: Mapping[tuple[int, int], RankChunks],
    settings: ModelSettings,
    args: Mapping[str, Any],
    version: float,
) -> MegatronModel:
    """One model of the ranks' parts. Raises CheckpointError with all that does not fit."""
    by_name, problems = _by_name(ranks, settings["num_layers"])
    heads = head_counts(settings)
    is_gated = bool(settings.get("swiglu") or settings.get("gated"))
    tied = [] if settings["untie_embeddings_and_output_weights"] else [TIED_COPY, f"{OUTPUT}.weight"]
    parts: dict[str, list[PartOf]] = {}
    for (general, layer), tensors in by_name.items():
        name = general.replace("{i}", str(layer))
        try:
            if general in tied:
                table = by_name.get((WORD_TABLE, None), [])
                _check_equal(path, tensors, table, "it differs from the word table, with which it is tied")
                continue
            parts[name] = _parts_of(path, general, tensors, heads, version, is_gated)
        except (ValueError, IndexError) as error:
            problems.append(f"{name!r:.90}: {error}")
    if problems:
        raise CheckpointError(path, problems, "are these the files of one model? Nothing was read")
    return MegatronModel(settings, args, parts, is_bert=are_of_bert(parts))


def _by_name(
    ranks: Mapping[tuple[int, int], RankChunks], layers: int
) -> tuple[dict[tuple[str, int | None], list[TensorInFile]], list[str]]:
    """((our name, with {i} for the layer; its layer in the whole model) -> the tensor of each tensor-parallel rank;
    problems)."""
    tp, pp = (1 + max(key[axis] for key in ranks) for axis in (0, 1))
    found: dict[tuple[str, int | None], list[TensorInFile]] = {}
    problems, begin = [], 0
    for chunk in range(len(ranks[0, 0])):
        for stage in range(pp):
            count = 0
            for rank in range(tp):
                for theirs, tensor in ranks[rank, stage][chunk].items():
                    name, layer = our_place_of(theirs)
                    count = max(count, 0 if layer is None else layer + 1)
                    tensors = found.setdefault((name, None if layer is None else begin + layer), [])
                    tensors.append(tensor)
            begin += count
    if begin != layers:
        problems.append(f"its stages have {begin} layers, and args say {layers}")
    for (name, layer), tensors in found.items():
        if len(tensors) != tp:
            problems.append(f"{name.replace('{i}', str(layer))!r:.90} is there {len(tensors)} times, for {tp} ranks")
    return found, problems


def _parts_of(
    path: Path, name: str, tensors: list[TensorInFile], heads: HeadCounts, version: float, is_gated: bool
) -> list[PartOf]:
    if (join := join_of(name, heads, version, is_gated)) is None:
        raise ValueError("a model here has no such tensor")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("its ranks have it in several dtypes")
    if join is copies:
        _check_equal(
            path, tensors[1:], tensors[:1] * (len(tensors) - 1), "its ranks differ in it, which each has whole"
        )
    return list(join(tensors))


def _check_equal(path: Path, some: list[TensorInFile], others: list[TensorInFile], problem: str) -> None:
    if len(some) != len(others) or not all(are_equal(path, one, other) for one, other in zip(some, others)):
        raise ValueError(problem)
