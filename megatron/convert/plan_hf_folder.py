"""Plan a model's Hugging Face folder, file by file, from the family's table of tensors read from ours to theirs.

    config.json                        written from our settings, for transformers 4 and 5
    model.safetensors, or files of at most a given size and model.safetensors.index.json
    tokenizer.json, generation_config.json, chat_template.jinja, ...     copied from the folder that the model came from

`stream_checkpoint_to_hf_folder.py` writes the model of a checkpoint by such a plan, `gather_ranks_to_hf_folder.py` that of a
running job.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.families.hf_family_fields_and_param_mappings import Family, ParamMapping
from megatron.convert.families.read_and_write_hf_config import config_of, kind_of
from megatron.convert.families.registry import FAMILIES
from megatron.convert.families.strided_views_of_hf_weights import OPERATIONS, HeadCounts, View
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, INDEX, WEIGHTS
from megatron.convert.formats.safetensors_header import header_of
from megatron.convert.hf_provenance_and_tokenizer_files import GENERATION, Provenance, copy_aux_files, write_aux_files
from megatron.convert.missing_params_and_absent_heads import check_complete, parameter_names
from megatron.convert.open_hf_safetensors_folder import head_counts_of, param_mappings
from megatron.convert.read_hf_token_to_id import read_bos_eos_ids
from megatron.convert.write_tokenizer_as_hf_files import files_of_tokenizer
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, CheckpointError, TensorRecord
from megatron.core.ops.attention.kernels import SOFTMAX
from megatron.core.sharding.boxes import slices
from megatron.core.storage.file_layer import backend_of, write_all, write_and_sync_content
from megatron.core.transformer.expected_parameter_shapes import parameter_shape
from megatron.core.transformer.model_config import ModelConfig

TOKENIZER = "tokenizer.json"
_PREFIX = "model/"  # of a parameter's name in a checkpoint


def to_hf_tensors(operation: str, heads: HeadCounts, ours: Tensor) -> Iterator[Tensor]:
    """Yield the Hugging Face tensors that the operation would make `ours` of, one after the other, in its dtype.

    ours: the full tensor, of any shape; `OPERATIONS[operation].shapes` has the shapes of the results.
    """
    rearrangement = OPERATIONS[operation]
    shapes = rearrangement.shapes(heads, tuple(ours.shape))
    full_views = [View.of(tensor_index, shape) for tensor_index, shape in enumerate(shapes)]
    places = list(rearrangement.places(heads, full_views))
    for tensor_index, shape in enumerate(shapes):
        places_here = [(box, view) for box, view in places if view.tensor_index == tensor_index]
        # A tensor that is one row-major box of ours is a slice of it: no copy.
        if len(places_here) == 1:
            ((box, view),) = places_here
            if view == full_views[tensor_index]:
                yield ours[slices(box)]
                continue
        hf_tensor = torch.empty(shape, dtype=ours.dtype, device=ours.device)
        for box, view in places_here:
            hf_tensor.as_strided(view.shape, view.strides, view.start).copy_(ours[slices(box)])
        yield hf_tensor


def bytes_of_tensor(x: Tensor) -> memoryview:
    """Return the bytes [nbytes] of a tensor x in host memory, of any shape and dtype, in row-major order.

    A contiguous tensor is not copied.
    """
    return x.reshape(-1).view(torch.uint8).numpy().data


@dataclass
class PlannedFile:
    """One file of weights to write."""

    mappings: list[ParamMapping]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # Hugging Face name -> (dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())


@dataclass(frozen=True)
class FolderPlan:
    """A folder to write. Its config.json has been read back and describes the same model."""

    kind: str  # its model_type
    config: dict[str, Any]
    files: dict[str, PlannedFile]  # by file name
    heads: HeadCounts
    records: dict[str, TensorRecord]  # our tensors, by their names in a checkpoint
    dtype: str | None  # of all tensors; None: unchanged
    origin: Provenance | None
    tokenizer: Mapping[str, Any] | None = None  # the settings of the run's
    tokenizer_sha256: str | None = None

    def name_of(self, mapping: ParamMapping) -> str:
        """Return the name that a mapping's parameter has in a checkpoint."""
        return _PREFIX + mapping.param

    def record_of(self, mapping: ParamMapping) -> TensorRecord:
        """Return the dtype and shape of a mapping's parameter."""
        return self.records[self.name_of(mapping)]

    def dtype_of(self, mapping: ParamMapping) -> torch.dtype:
        """Return the dtype in which a parameter is written."""
        return getattr(torch, self.dtype or self.record_of(mapping).dtype)

    def check_finite(self, mapping: ParamMapping, ours: Tensor) -> None:
        """Raise CheckpointError if a cast to a narrower dtype made infinity or NaN.

        ours: the tensor after the cast, in the shape of the parameter.
        """
        saved_dtype = self.record_of(mapping).dtype
        largest = torch.finfo(ours.dtype).max
        is_narrower = largest < torch.finfo(getattr(torch, saved_dtype)).max
        if not is_narrower or ours.numel() == 0:
            return
        if not all(map(math.isfinite, torch.aminmax(ours))):  # a NaN anywhere makes both NaN
            raise CheckpointError(
                mapping.param,
                f"as {self.dtype} it has infinite or undefined numbers: those of {saved_dtype} are above {largest:g}, the "
                f"largest of {self.dtype}, or were so before",
                f"give another dtype, or none to write {saved_dtype} (--save-hf-dtype of a run, --dtype of "
                "tools/checkpoint_convert.py)",
            )


def plan_folder(
    state: dict[str, Any],
    tensors: Mapping[str, TensorRecord],
    source: str,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    most_bytes: int = 5 << 30,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> FolderPlan:
    """Plan the folder of a model: its config.json, and the tensors of each file.

    state: a checkpoint's state. tensors: dtypes and shapes, by the names of a checkpoint. source: names both in errors.
    The other arguments are those of `write_hf_folder`. Raises ConfigError for a model that the family cannot describe
    and for tensors that it has no name for, CheckpointError for a model that lacks tensors.
    """
    state = _with_our_attention(state, source)
    model, vocab_size = model_in_state(state, source)
    origin = Provenance.in_state(state, source)
    if not kind and origin is not None:
        kind = origin.model_type
    kind = kind_of(state.get("model", "GPTModel"), model, vocab_size, kind or None)
    if model.has_experts and model.moe_router_force_load_balancing:
        raise ConfigError(
            f"{source} has --moe-router-force-load-balancing, which takes experts in turn; a {kind} takes them by the "
            "router's scores, and would compute something else. Train without the flag, and write that"
        )
    records = {name: record for name, record in tensors.items() if name.startswith(_PREFIX)}
    check_complete(state, records, source, allow=allow_missing, note=note)
    _check_shapes(records, source, model, vocab_size)
    files = _files(records, source, kind, model, dtype, most_bytes)

    # Ids of special tokens that are unknown are written as null: else the class's own defaults would be taken.
    special_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    carried_keys = origin.kept if origin else {}
    config = config_of(kind, model, vocab_size, _dtype_of(files)) | special_ids | dict(carried_keys)
    config["architectures"] = [_architecture(FAMILIES[kind], model, records)]
    named_files = dict(zip(_file_names(len(files)), files))
    return FolderPlan(
        kind,
        config,
        named_files,
        head_counts_of(model),
        records,
        dtype,
        origin,
        tokenizer=state["config"].get("tokenizer"),
        tokenizer_sha256=state.get("tokenizer_sha256"),
    )


def write_config_and_aux_files(
    plan: FolderPlan, partial: Path, tokenizer_folder: Path | None, note: Callable[[str], object]
) -> None:
    """Write all but the weights into a folder that has them; arguments as `write_hf_folder`'s. One rank calls."""
    config = plan.config
    has_files_of_origin = plan.origin is not None and plan.origin.files != {}
    if tokenizer_folder is not None or has_files_of_origin:
        copied = copy_aux_files(plan.origin, tokenizer_folder, partial, note)
    else:
        copied = write_aux_files(files_of_tokenizer(plan.tokenizer, plan.tokenizer_sha256, note), partial)
        if TOKENIZER in copied:
            tokenizer_folder = partial
    if tokenizer_folder is not None:
        config = config | _end_ids_of_tokenizer(tokenizer_folder, plan, note)
    if plan.origin is not None and GENERATION not in copied:
        config = config | _end_ids_of_generation(plan.origin, config)
    if len(plan.files) > 1:
        sizes = {"total_size": sum(file.nbytes for file in plan.files.values())}
        weight_map = {name: file for file, planned in plan.files.items() for name in planned.tensors}
        index = {"metadata": sizes, "weight_map": weight_map}
        write_and_sync_content(partial / INDEX, json.dumps(index, indent=2) + "\n")
    # config.json is last: a folder without it is not taken for a model.
    write_and_sync_content(partial / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    backend_of(partial).sync_folder(partial)


def _architecture(family: Family, model: ModelConfig, records: Collection[str]) -> str:
    """Return the family's architecture, or the one without the heads of which no parameter is there."""
    names = parameter_names(family.model, model) or []
    missing = {name for name in names if _PREFIX + name not in records}
    absent_heads = []
    for head in family.heads:
        head_params = head.of(names)
        if head_params and {*head_params} <= missing:
            absent_heads.append(head)
    return family.architecture_lacking(absent_heads)


def _with_our_attention(state: dict[str, Any], source: str) -> dict[str, Any]:
    """Replace a script's own attention kernel by one of ours, in the state of a model whose attention is a softmax.

    All families have softmax attention. Raises ConfigError for a kernel that computes anything else, since no
    config.json can describe it.
    """
    settings = state.get("config", {})
    function = state.get(FUNCTIONS, {}).get("attention_backend")
    if function is None:
        return state
    if function != SOFTMAX:
        raise ConfigError(
            f"{source} has attention that computes {function!r}, but programs that read the Hugging Face folder would "
            f"compute {SOFTMAX!r}; keep the model as a checkpoint (--save). If the kernel does compute this softmax, "
            "declare it: Kernel(..., computes=SOFTMAX)"
        )
    if "transformer" not in settings:
        return state
    transformer = settings["transformer"] | {"attention_backend": "auto"}
    return state | {"config": settings | {"transformer": transformer}}


def model_in_state(state: dict[str, Any], source: str) -> tuple[ModelConfig, int]:
    """Return (the model's settings, with the number of its positions; its vocabulary size) of a checkpoint's state.

    Raises ConfigError for a model that no family is of, and for settings that are not known.
    """
    saved = state.get("config", {}).get("transformer")
    known_models = {family.model for family in FAMILIES.values()}
    if saved is None or "vocab_size" not in state or state.get("model", "GPTModel") not in known_models:
        known = " or a ".join(sorted(known_models))
        raise ConfigError(
            f"{source} contains a {state.get('model', 'model without a name')}; only these can be written: {known}"
        )
    unknown = sorted(saved.keys() - {f.name for f in fields(ModelConfig)})
    if unknown:
        raise ConfigError(
            f"{source} has unknown model settings: {', '.join(unknown)}; use the version of the code that wrote it"
        )
    model = build(ModelConfig, saved)
    data = state["config"].get("data", {})
    if model.max_position_embeddings is None and model.position_embedding_type != "relative":
        # A run without the flag has as many positions as its longest sequence.
        lengths = [data.get("seq_length"), data.get("decoder_seq_length")]
        longest = max((length for length in lengths if length is not None), default=None)
        model = replace(model, max_position_embeddings=longest)
    return model, state["vocab_size"]


def _check_shapes(records: Mapping[str, TensorRecord], source: str, model: ModelConfig, vocab_size: int) -> None:
    """Refuse tensors that are not of the model that config.json will describe. Raises CheckpointError."""
    problems = []
    for name, record in records.items():
        param = name.removeprefix(_PREFIX)
        expected = parameter_shape(model, param, vocab_size, model.max_position_embeddings)
        if expected is not None and record.shape != expected:
            problems.append(f"holds {param} of shape {record.shape}, and its settings say {expected}")
    if problems:
        raise CheckpointError(source, problems, "is it the model that its settings describe? Nothing was written")


def _files(
    records: Mapping[str, TensorRecord], source: str, kind: str, model: ModelConfig, dtype: str | None, most: int
) -> list[PlannedFile]:
    """Distribute the tensors over files of at most `most` bytes. Tensors of one parameter stay in one file."""
    mappings = [mapping for mapping in param_mappings(FAMILIES[kind], model) if _PREFIX + mapping.param in records]
    unmapped = sorted(records.keys() - {_PREFIX + mapping.param for mapping in mappings})
    if unmapped:
        more = f" and {len(unmapped) - 3} more" if len(unmapped) > 3 else ""
        raise ConfigError(f"a {kind} has no parameters for {', '.join(unmapped[:3])}{more} of {source}")
    files = [PlannedFile([], {})]
    for mapping in mappings:
        record = records[_PREFIX + mapping.param]
        shapes = OPERATIONS[mapping.operation].shapes(head_counts_of(model), record.shape)
        tensors = {name: (dtype or record.dtype, shape) for name, shape in zip(mapping.hf_params, shapes)}
        nbytes = PlannedFile([mapping], tensors).nbytes
        if files[-1].mappings and files[-1].nbytes + nbytes > most:
            files.append(PlannedFile([], {}))
        files[-1].mappings.append(mapping)
        files[-1].tensors.update(tensors)
    return files


def _file_names(count: int) -> list[str]:
    if count <= 1:
        return [WEIGHTS]
    stem = WEIGHTS.removesuffix(".safetensors")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _dtype_of(files: list[PlannedFile]) -> str:
    """Return the dtype that most elements have."""
    sizes: dict[str, int] = {}
    for file in files:
        for dtype, shape in file.tensors.values():
            sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def write_weights_file(
    path: Path, plan: FolderPlan, planned: PlannedFile, params: Iterable[tuple[ParamMapping, Tensor]]
) -> None:
    """Write a file of weights. Raises CheckpointError for numbers that the dtype cannot hold, OSError.

    params: (mapping, our full tensor in host memory, [shape of `plan.record_of(mapping)`]), in the order of the plan.
    """
    with backend_of(path).open(path, "xb") as file:
        write_all(file, header_of(planned.tensors), path)
        for mapping, ours in params:
            plan.check_finite(mapping, ours)
            for hf_tensor in to_hf_tensors(mapping.operation, plan.heads, ours):
                write_all(file, bytes_of_tensor(hf_tensor), path)
        backend_of(path).sync(file)


def _end_ids_of_tokenizer(tokenizer_folder: Path, plan: FolderPlan, note: Callable[[str], object]) -> dict[str, int]:
    """Return bos_token_id and eos_token_id by the chosen tokenizer, unless the model has them from its folder.

    Without an eos_token_id, generate() of transformers does not stop at the end of a text. Ids outside the vocabulary
    of the model are left out.
    """
    if plan.origin is not None and "eos_token_id" in plan.origin.kept:
        return {}
    try:
        end_ids = read_bos_eos_ids(tokenizer_folder)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        note(f"config.json names no bos_token_id and eos_token_id by the files of --tokenizer: {error}")
        return {}
    return {name: i for name, i in end_ids.items() if i < plan.config["vocab_size"]}


def _end_ids_of_generation(origin: Provenance, config: dict[str, Any]) -> dict[str, Any]:
    """Return the ids that end a text by a generation_config.json that is not copied, for config.json."""
    try:
        end_ids = origin.end_ids()
    except CheckpointError:  # the file is unreadable, as it was in training
        return {}
    if not end_ids or end_ids in (config["eos_token_id"], [config["eos_token_id"]]):
        return {}
    return {"eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids}
