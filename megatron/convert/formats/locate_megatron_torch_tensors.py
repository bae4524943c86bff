"""Read classic checkpoints of Megatron-LM: join the files of all ranks to one model. Reads no tensors. No torch.

A stage numbers its layers from 0 and may have several chunks of the model (`model0`, `model1`, ...): the layers are in
order of chunks, and within a chunk in order of stages.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.families.config_fields import ModelSettings
from megatron.convert.families.hf_family_fields_and_param_mappings import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.convert.families.strided_views_of_hf_weights import HeadCounts
from megatron.convert.formats.find_megatron_folder import (
    MegatronRank,
    check_all_ranks,
    expert_tensor_size,
    rank_files,
    with_expert_ranks,
)
from megatron.convert.formats.hf_config_and_safetensors_headers import are_equal
from megatron.convert.formats.megatron_param_names_and_shard_joins import (
    TIED_COPY,
    ExpertShard,
    TensorPart,
    find_join_rule,
    has_bert_heads,
    is_of_experts,
    join_experts,
    map_param_name,
    take_first,
)
from megatron.convert.formats.pickle_as_data import PickleError
from megatron.convert.formats.read_megatron_args import plain_args_from_pickle, settings_of_args
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.formats.torch_save_tensor_offsets import TorchFile, read_torch_file
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import CheckpointError

_VERSIONS = (0, 1.0, 2.0, 3.0)  # of checkpoint_version
_MOST_TENSORS = 1_000_000
_DEEPEST = 20  # dots in a name
_CHUNK = re.compile(r"model(\d{0,4})")
_FIRST = MegatronRank(0, 0)


@dataclass(frozen=True)
class MegatronModel:
    """A model in a checkpoint of Megatron-LM: its settings, and the positions of its tensors."""

    settings: ModelSettings
    args: Mapping[str, Any]  # of the run
    parts: Mapping[str, list[TensorPart]]  # by our names
    is_bert: bool


def head_counts(settings: ModelSettings) -> HeadCounts:
    """Return the sizes of a model's attention heads."""
    queries = settings["num_attention_heads"]
    groups = settings["num_query_groups"] if settings["group_query_attention"] else queries
    return HeadCounts(queries, groups, settings["kv_channels"])


RankChunks = list[dict[str, TensorInFile]]  # the model chunks of one rank: name -> tensor


def read_classic(path: Path) -> MegatronModel:
    """Read the model in the folder of one iteration. Raises CheckpointError, ConfigError."""
    files = _rank_files(path)
    ranks: dict[MegatronRank, RankChunks] = {}
    args: dict[str, Any] = {}
    version = None
    for rank, name in sorted(files.items()):
        file = read_torch_file(path / name, name)
        try:
            ranks[rank] = _chunks_of(file)
            rank_version = _version_of(file)
        except PickleError as error:
            raise CheckpointError(path / name, str(error), FETCH_AGAIN) from error
        chunks = len(ranks[rank])
        if version is None:
            args = plain_args_from_pickle(file.values.get("args"))
            version = rank_version
        elif rank_version != version or chunks != len(ranks[_FIRST]):
            wrong = (
                f"is of version {rank_version} with {chunks} chunks, the first rank's of {version} "
                f"with {len(ranks[_FIRST])}"
            )
            raise CheckpointError(path / name, wrong, "fetch the folder again")
    source = f"{path / files[_FIRST]}: args"
    if not args:
        raise ConfigError(
            f"{source} are missing; they contain the model's settings, which checkpoints from before 2019-11 do not "
            "have"
        )
    settings = settings_of_args(args, source)
    settings |= router_bias_of(name for chunk in ranks[_FIRST] for name in chunk)
    _check_sizes(path, files, args)
    return _joined(path, ranks, settings, args, version)


def _rank_files(path: Path) -> dict[MegatronRank, str]:
    """Return the file of each rank, relative to the folder of an iteration."""
    files = rank_files(path)
    if len(files) == 1:
        return files
    name = files[_FIRST]
    args = plain_args_from_pickle(_values_of(read_torch_file(path / name, name)).get("args"))
    files = with_expert_ranks(files, args)
    check_all_ranks(path, files, args)
    return files


def _values_of(file: TorchFile) -> dict[str, Any]:
    return file.values if isinstance(file.values, dict) else {}


def router_bias_of(names: Iterable[str]) -> ModelSettings:
    """Return the setting of a bias of the router, which no argument tells. names: Megatron's, of parameters."""
    return {"moe_router_bias": True} if any(name.endswith("mlp.router.bias") for name in names) else {}


def args_and_vocab_size(path: Path) -> tuple[ModelSettings, dict[str, Any], int]:
    """Return (the model's settings, the run's args, the padded vocabulary size) of an iteration's folder."""
    files = _rank_files(path)
    file = read_torch_file(path / files[_FIRST], files[_FIRST])
    try:
        tensors = _chunks_of(file)[0]
    except PickleError as error:
        raise CheckpointError(path / file.name, str(error), FETCH_AGAIN) from error
    args = plain_args_from_pickle(file.values.get("args"))
    settings = settings_of_args(args, f"{path / file.name}: args") | router_bias_of(tensors)
    for name, x in tensors.items():
        if map_param_name(name).name == WORD_EMBEDDINGS and x.shape:
            tp = 1 + max(rank.tensor for rank in files)
            return settings, args, x.shape[0] * tp
    raise CheckpointError(path / file.name, "has no word table", FETCH_AGAIN)


def _check_sizes(path: Path, files: Mapping[MegatronRank, str], args: Mapping[str, Any]) -> None:
    """Refuse a folder that lacks the last ranks: the others would be a smaller model."""
    tp_arg = "tensor_model_parallel_size" if "tensor_model_parallel_size" in args else "model_parallel_size"
    for axis, arg, what in (
        (0, tp_arg, "tensor-parallel ranks"),
        (1, "pipeline_model_parallel_size", "stages"),
        (2, "expert_model_parallel_size", "expert-parallel ranks"),
    ):
        size = 1 + max(key[axis] for key in files)
        expected = args.get(arg)
        if type(expected) is int and expected != size:
            raise CheckpointError(
                path,
                f"is of {expected} {what}, as args say, and has {size}",
                "fetch the folder again, with the files of all ranks",
            )
    expert_tp = args.get("expert_tensor_parallel_size")
    tp = 1 + max(rank.tensor for rank in files)
    if args.get("num_experts") and type(expert_tp) is int and expert_tp != expert_tensor_size(files, args):
        raise CheckpointError(
            path,
            f"has experts over {expert_tp} expert-tensor-parallel ranks, and {tp} tensor-parallel ranks",
            "save it as torch_dist with Megatron-LM (--ckpt-convert-format torch_dist), and give that folder",
        )


# ---------------------------------------------------------------- one rank


def _chunks_of(file: TorchFile) -> RankChunks:
    """Return the tensors of each model chunk in a rank's file."""
    if not isinstance(file.values, dict):
        raise PickleError("holds no dictionary")
    numbers: dict[str, str] = {}  # key -> its number; "" for `model`
    for key in file.values:
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match:
            numbers[key] = match[1]
    numbered = sorted(int(number) for number in numbers.values() if number)
    are_in_order = not numbered or ("model" not in numbers and numbered == [*range(len(numbered))])
    if not numbers or not are_in_order:
        raise PickleError(
            f"contains {', '.join(sorted(numbers)) or 'no model'}; it must contain model, or model0, model1, ..."
        )
    ordered = sorted(numbers, key=lambda key: int(numbers[key] or 0))
    return [dict(_tensors_in(file, file.values[key])) for key in ordered]


def _tensors_in(file: TorchFile, state_dict: Any) -> Iterator[tuple[str, TensorInFile]]:
    """Yield (the path of keys joined by dots, tensor) for the parameters in nested dictionaries, without recursion."""
    pending: list[tuple[str, Any]] = [("", state_dict)]
    for _ in range(_MOST_TENSORS):
        if not pending:
            return
        name, value = pending.pop()
        if isinstance(value, dict) and name.count(".") < _DEEPEST:
            for key, x in value.items():
                if isinstance(key, str):
                    pending.append((f"{name}.{key:.200}".lstrip("."), x))
        elif map_param_name(name) is not None:
            tensor = file.tensor(value)
            if tensor is None:
                raise PickleError(f"contains {name!r:.80}, which is not a tensor")
            yield name, tensor
    raise PickleError(f"contains more than {_MOST_TENSORS} values in its model")


def _version_of(file: TorchFile) -> float:
    version = file.values.get("checkpoint_version", 0)
    if type(version) not in (int, float) or version not in _VERSIONS:
        shown = version if isinstance(version, int | float) else f"of type {type(version).__name__}"
        raise PickleError(f"has checkpoint_version {shown}; only {', '.join(map(str, _VERSIONS))} can be read")
    return float(version)


# ---------------------------------------------------------------- all ranks


def _joined(
    path: Path,
    ranks: Mapping[MegatronRank, RankChunks],
    settings: ModelSettings,
    args: Mapping[str, Any],
    version: float,
) -> MegatronModel:
    """Join the ranks' shards to one model. Raises CheckpointError with all that does not fit."""
    expert_tp = expert_tensor_size(ranks, args)
    shards, expert_shards, problems = _shards_by_name(ranks, settings["num_layers"], expert_tp)
    heads = head_counts(settings)
    is_gated = bool(settings.get("swiglu") or settings.get("gated"))
    is_tied = not settings["untie_embeddings_and_output_weights"]
    tied_copies = [TIED_COPY, f"{OUTPUT_LAYER}.weight"] if is_tied else []
    parts: dict[str, list[TensorPart]] = {}
    for (name_with_i, layer), tensors in shards.items():
        name = name_with_i.replace("{i}", str(layer))
        try:
            if name_with_i in tied_copies:
                embedding = shards.get((WORD_EMBEDDINGS, None), [])
                _check_equal(path, tensors, embedding, "it differs from the word table, with which it is tied")
                continue
            parts[name] = _join_shards(path, name_with_i, tensors, heads, version, is_gated)
        except (ValueError, IndexError) as error:
            problems.append(f"{name!r:.90}: {error}")
    sizes = (expert_tp, 1 + max(rank.expert for rank in ranks))
    for (name_with_i, layer), found in expert_shards.items():
        name = name_with_i.replace("{i}", str(layer))
        try:
            parts[name] = join_experts(name_with_i, found, settings.get("num_experts") or 0, sizes, is_gated)
        except ValueError as error:
            problems.append(f"{name!r:.90}: {error}")
    if problems:
        raise CheckpointError(path, problems, "are these the files of one model? Nothing was read")
    return MegatronModel(settings, args, parts, is_bert=has_bert_heads(parts))


# (our name with {i} for the layer, the layer's number in the full model)
_Key = tuple[str, int | None]


def _shards_by_name(
    ranks: Mapping[MegatronRank, RankChunks], num_layers: int, expert_tp: int
) -> tuple[dict[_Key, list[TensorInFile]], dict[_Key, list[ExpertShard]], list[str]]:
    """Return the shards of each parameter, by tensor-parallel rank, the shards of experts, and the problems.

    expert_tp: how many ranks share each expert.
    """
    tp, pp, _ = (1 + max(key[axis] for key in ranks) for axis in range(3))
    # of several ranks with copies the first
    of_tensor_rank: dict[tuple[int, int], MegatronRank] = {}
    of_experts: dict[tuple[int, int, int], MegatronRank] = {}
    for rank in sorted(ranks, key=lambda rank: (rank.stage, rank.expert, rank.tensor)):
        of_tensor_rank.setdefault((rank.tensor, rank.stage), rank)
        of_experts.setdefault((rank.tensor % expert_tp, rank.stage, rank.expert), rank)
    shards: dict[_Key, list[TensorInFile]] = {}
    expert_shards: dict[_Key, list[ExpertShard]] = {}
    problems = []
    first_layer = 0
    for chunk in range(len(ranks[_FIRST])):
        for stage in range(pp):
            layers_here = 0
            for rank in sorted(rank for rank in ranks if rank.stage == stage):
                part = (rank.tensor % expert_tp, stage, rank.expert)
                for megatron_name, tensor in ranks[rank][chunk].items():
                    place = map_param_name(megatron_name)
                    layer = place.layer
                    if layer is not None:
                        layers_here = max(layers_here, layer + 1)
                        layer += first_layer
                    if is_of_experts(place.name):
                        if of_experts[part] == rank:
                            shard = ExpertShard(place, tensor, part[0], rank.expert)
                            expert_shards.setdefault((place.name, layer), []).append(shard)
                    elif of_tensor_rank[rank.tensor, stage] == rank:
                        shards.setdefault((place.name, layer), []).append(tensor)
            first_layer += layers_here
    if first_layer != num_layers:
        problems.append(f"its stages have {first_layer} layers, and args say {num_layers}")
    for (name, layer), tensors in shards.items():
        if len(tensors) != tp:
            problems.append(f"{name.replace('{i}', str(layer))!r:.90} is there {len(tensors)} times, for {tp} ranks")
    return shards, expert_shards, problems


def _join_shards(
    path: Path, name: str, tensors: list[TensorInFile], heads: HeadCounts, version: float, is_gated: bool
) -> list[TensorPart]:
    """name: with {i} for the layer. tensors: by tensor-parallel rank."""
    join = find_join_rule(name, heads, version, is_gated)
    if join is None:
        raise ValueError("the models here have no tensor of this name")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("its dtype differs between ranks")
    if join is take_first:
        first, *others = tensors
        _check_equal(path, others, [first] * len(others), "its ranks differ in it, which each has whole")
    return list(join(tensors))


def _check_equal(path: Path, tensors: list[TensorInFile], expected: list[TensorInFile], problem: str) -> None:
    """Raise ValueError unless the tensors have the same bytes in pairs."""
    if len(tensors) != len(expected) or not all(are_equal(path, x, y) for x, y in zip(tensors, expected)):
        raise ValueError(problem)
