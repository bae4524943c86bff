"""A model as a Hugging Face folder: what is in it, file by file, by the rows of a family read from right to left.

    config.json                        written from our settings, for transformers 4 and 5
    model.safetensors, or files of at most a given size and model.safetensors.index.json
    tokenizer.json, generation_config.json, chat_template.jinja, ...      as they are in the folder that they come from

`export_checkpoint.py` writes the model of a checkpoint so, `export_distributed.py` that of a running job.
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

from megatron.convert.check_missing_keys import check_complete, names_of
from megatron.convert.families.config_json import config_of, kind_of
from megatron.convert.families.family import Family, Row
from megatron.convert.families.registry import FAMILIES
from megatron.convert.families.weight_layout import OPERATIONS, HeadCounts, View
from megatron.convert.formats.read_hf_folder import CONFIG, INDEX, WEIGHTS
from megatron.convert.formats.safetensors_header import header_of
from megatron.convert.hf_origin import GENERATION, Provenance, carry
from megatron.convert.hf_reader import heads_of, rows_of
from megatron.convert.hf_tokenizer_vocab import end_ids_in
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.base.registry import FUNCTIONS
from megatron.core.dist_checkpointing.format import ITEM_BYTES, CheckpointError, TensorRecord
from megatron.core.ops.attention.kernels import SOFTMAX
from megatron.core.sharding.boxes import slices
from megatron.core.storage.file_layer import backend_of, write_all, write_synced
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


def bytes_of_tensor(x: Tensor) -> memoryview:
    """Its elements in row-major order, without a copy if they lie so. x: in host memory."""
    return x.reshape(-1).view(torch.uint8).numpy().data


@dataclass
class PlannedFile:
    """One file of weights to write."""

    rows: list[Row]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())


@dataclass(frozen=True)
class FolderPlan:
    """A folder to write, whose config.json has been read again and says what the model computes."""

    kind: str  # its model_type
    config: dict[str, Any]
    files: dict[str, PlannedFile]  # by name
    heads: HeadCounts
    records: dict[str, TensorRecord]  # of ours, by the name in a checkpoint
    dtype: str | None  # of all tensors; None: as they are
    origin: Provenance | None

    def name_of(self, row: Row) -> str:
        """The name in a checkpoint of the tensor of ours that a row is about."""
        return _PREFIX + row.ours

    def record_of(self, row: Row) -> TensorRecord:
        return self.records[self.name_of(row)]

    def dtype_of(self, row: Row) -> torch.dtype:
        """The dtype in which it is written."""
        return getattr(torch, self.dtype or self.record_of(row).dtype)

    def check_held(self, row: Row, ours: Tensor) -> None:
        """Raises CheckpointError if a narrower dtype made infinity or NaN of a number. ours: the tensor as it is written."""
        before, most = self.record_of(row).dtype, torch.finfo(ours.dtype).max
        if most >= torch.finfo(getattr(torch, before)).max or ours.numel() == 0:
            return
        if not all(map(math.isfinite, torch.aminmax(ours))):  # NaN is the least and the greatest
            raise CheckpointError(
                row.ours,
                f"as {self.dtype} it has infinite or undefined numbers: those of {before} are above {most:g}, the largest of "
                f"{self.dtype}, or were so before",
                f"give another dtype, or none to write {before} (--save-hf-dtype of a run, --dtype of "
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
    """What a folder of the model holds, file by file.

    state: of a checkpoint. tensors: dtypes and shapes, by the names of a checkpoint. source: of both, in errors. The rest as
    `write_hf_folder` is given. Raises ConfigError for a model that the family cannot say, and for tensors without a
    place, and
    CheckpointError for a model that lacks tensors.
    """
    state = _with_our_attention(state, source)
    model, words = _model_in(state, source)
    origin = Provenance.in_state(state, source)
    kind = kind_of(state.get("model", "GPTModel"), model, words, kind or (origin.model_type if origin else None))
    records = {name: x for name, x in tensors.items() if name.startswith(_PREFIX)}
    check_complete(state, records, source, allow=allow_missing, note=note)
    files = _files(records, source, kind, model, dtype, most_bytes)
    config = config_of(kind, model, words, _dtype_of(files)) | _kept(origin)
    config["architectures"] = [_architecture(FAMILIES[kind], model, records)]
    return FolderPlan(kind, config, dict(zip(_names(len(files)), files)), heads_of(model), records, dtype, origin)


def finish_folder(plan: FolderPlan, partial: Path, along: Path | None, note: Callable[[str], object]) -> None:
    """Write all but the weights into a folder that has them; as `write_hf_folder` is given. For one rank."""
    carried = carry(plan.origin, along, partial, note)
    config = plan.config | ({} if along is None else _ends_by(along, plan, note))
    if plan.origin is not None and GENERATION not in carried:
        config |= _ends_of_generation(plan.origin, config)
    if len(plan.files) > 1:
        _write_index(partial, plan.files)
    write_synced(partial / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")  # without it a folder is none
    backend_of(partial).sync_folder(partial)


def _architecture(family: Family, model: ModelConfig, records: Collection[str]) -> str:
    """The family's, or the one without the heads that are not there as a whole."""
    names = names_of(family.model, model) or []
    lacking = [name for name in names if _PREFIX + name not in records]
    heads = [head for head in family.heads if (mine := head.of(names)) and {*mine} <= {*lacking}]
    return family.architecture_without(heads)


def _with_our_attention(state: dict[str, Any], source: str) -> dict[str, Any]:
    """The state of a model whose attention is a softmax, as in all families; a script's kernel of this function is one
    of ours.
    Raises ConfigError for another function, which no config.json can say."""
    settings, function = state.get("config", {}), state.get(FUNCTIONS, {}).get("attention_backend")
    if function is None:
        return state
    if function != SOFTMAX:
        raise ConfigError(
            f"{source} has attention that computes {function!r}, and what reads the folder would compute {SOFTMAX!r}; keep the "
            "model as a checkpoint (--save). A kernel that computes the same says so: Kernel(..., computes=SOFTMAX)"
        )
    if "transformer" not in settings:
        return state
    transformer = settings["transformer"] | {"attention_backend": "auto"}
    return state | {"config": settings | {"transformer": transformer}}


def _model_in(state: dict[str, Any], source: str) -> tuple[ModelConfig, int]:
    """(the model's settings, its words)."""
    saved = state.get("config", {}).get("transformer")
    known_models = {family.model for family in FAMILIES.values()}
    if saved is None or "vocab_size" not in state or state.get("model", "GPTModel") not in known_models:
        known = " or a ".join(sorted(known_models))
        raise ConfigError(
            f"{source} holds a {state.get('model', 'model without a name')}; what is written is a {known}"
        )
    known = {f.name for f in fields(ModelConfig)}
    if unknown := sorted(saved.keys() - known):
        raise ConfigError(f"{source} has model settings unknown here: {', '.join(unknown)}; use the code that wrote it")
    model, data = build(ModelConfig, saved), state["config"].get("data", {})
    if model.max_position_embeddings is None and model.position_embedding_type != "relative":
        lengths = data.get("seq_length"), data.get("decoder_seq_length")  # a run without the flag has as many positions
        model = replace(model, max_position_embeddings=max((x for x in lengths if x is not None), default=None))
    return model, state["vocab_size"]


def _files(
    records: Mapping[str, TensorRecord], source: str, kind: str, model: ModelConfig, dtype: str | None, most: int
) -> list[PlannedFile]:
    """What each file holds. Tensors that are one of ours stay together."""
    rows = [row for row in rows_of(FAMILIES[kind], model) if _PREFIX + row.ours in records]
    if left := sorted(records.keys() - {_PREFIX + row.ours for row in rows}):
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ConfigError(f"a {kind} has no place for {', '.join(left[:3])}{more} of {source}")
    files = [PlannedFile([], {})]
    for row in rows:
        record = records[_PREFIX + row.ours]
        shapes = OPERATIONS[row.operation].shapes(heads_of(model), record.shape)
        found = PlannedFile([row], {name: (dtype or record.dtype, shape) for name, shape in zip(row.theirs, shapes)})
        if files[-1].rows and files[-1].nbytes + found.nbytes > most:
            files.append(PlannedFile([], {}))
        files[-1].rows.extend(found.rows)
        files[-1].tensors.update(found.tensors)
    return files


def _names(count: int) -> list[str]:
    stem = WEIGHTS.removesuffix(".safetensors")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [WEIGHTS]


def _dtype_of(files: list[PlannedFile]) -> str:
    """The dtype of most elements."""
    sizes: dict[str, int] = {}
    for dtype, shape in (entry for file in files for entry in file.tensors.values()):
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def write_rows(path: Path, plan: FolderPlan, planned: PlannedFile, rows: Iterable[tuple[Row, Tensor]]) -> None:
    """Write a file of weights. rows: with the whole tensor of ours for each, in host memory, in the order of the plan.

    Raises CheckpointError for numbers that the dtype cannot hold.
    """
    with backend_of(path).open(path, "xb") as file:
        write_all(file, header_of(planned.tensors), path)
        for row, ours in rows:
            plan.check_held(row, ours)
            for theirs in their_tensors(row.operation, plan.heads, ours):
                write_all(file, bytes_of_tensor(theirs), path)
        backend_of(path).sync(file)


def _kept(origin: Provenance | None) -> dict[str, Any]:
    """Keys that the folder had. Unknown ids of a text's ends and padding are null, or the class's own would be taken."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | dict(origin.kept if origin else {})


def _ends_by(along: Path, plan: FolderPlan, note: Callable[[str], object]) -> dict[str, int]:
    """The ids that begin and end a text by the chosen tokenizer, where the model did not begin with its own.

    Without an eos_token_id, generate() of transformers writes on after the end of a text. Ids without a row in the word table are
    left out.
    """
    kept = plan.origin.kept if plan.origin else {}
    if "eos_token_id" in kept:
        return {}
    try:
        found = end_ids_in(along)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        note(f"config.json names no bos_token_id and eos_token_id by the files of --tokenizer: {error}")
        return {}
    return {name: i for name, i in found.items() if i < plan.config["vocab_size"]}


def _ends_of_generation(origin: Provenance, config: dict[str, Any]) -> dict[str, Any]:
    """The ids that ended the folder's texts by a file that is not carried, for config.json to say."""
    try:
        ends = origin.end_ids()
    except CheckpointError:  # nobody could read them
        return {}
    if not ends or ends in (config["eos_token_id"], [config["eos_token_id"]]):
        return {}
    return {"eos_token_id": ends[0] if len(ends) == 1 else ends}


def _write_index(folder: Path, files: dict[str, PlannedFile]) -> None:
    sizes = {"total_size": sum(file.nbytes for file in files.values())}
    index = {"metadata": sizes, "weight_map": {name: file for file, plan in files.items() for name in plan.tensors}}
    write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")
