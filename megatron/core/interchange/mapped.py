"""A Hugging Face folder as a checkpoint of ours: its tensors by our names, each a list of byte ranges of the folder's files.

So each rank of any layout reads its boxes from the files as they lie, without a conversion and without a copy.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megatron.core import comm
from megatron.core.checkpoint import Checkpoint, open_checkpoint
from megatron.core.checkpoint.format import CheckpointError, Manifest, TensorRecord
from megatron.core.config import ConfigError
from megatron.core.grid import ALONE, Axis
from megatron.core.interchange.families import FAMILIES, HEAD, Family, Row
from megatron.core.interchange.fields import Given, ModelSettings
from megatron.core.interchange.hf_folder import CONFIG, HFFolder, are_equal, is_hf_folder, read_hf_folder, read_json
from megatron.core.interchange.operations import HeadCounts
from megatron.core.interchange.safetensors import FETCH_AGAIN, TensorInFile
from megatron.core.interchange.strided import StridedCheckpoint, record_of
from megatron.core.storage.files import is_file
from megatron.core.transformer.model_config import ModelConfig

_WORDS = "language_model.embedding.word_embeddings.weight"


# ---------------------------------------------------------------- config.json


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """The table of a config's model_type. Raises ConfigError for one that no table describes."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{source}: model_type {kind!r:.60} is not among those that are read: {known}")
    return FAMILIES[kind]


def settings_of(config: Mapping[str, Any], source: str) -> ModelSettings:
    """The settings of the model that a config.json describes, by names of `ModelConfig`, and `vocab_size`.

    Raises ConfigError for a key that its family's table does not understand, and for an option that is not built.
    """
    family, given = family_of(config, source), Given(config, source)
    settings = dict(family.settings)
    for field in family.fields:
        given.asked.update(field.theirs)
        settings |= field.read(given)
    if unknown := sorted(config.keys() - given.asked):
        which = ", ".join(f"{name} ({config[name]!r:.40})" for name in unknown)
        raise ConfigError(
            f"{source}: the table of {config['model_type']} does not know {which}; what a model computes is never guessed"
        )
    if unbuilt := sorted(settings.keys() - {f.name for f in fields(ModelConfig)} - {"vocab_size"}):
        raise ConfigError(f"{source}: this model needs {', '.join(unbuilt)}, which is not built")
    return settings


def settings_in(root: Path) -> ModelSettings:
    """`settings_of` the config.json of a folder."""
    return settings_of(read_json(root / CONFIG), str(root / CONFIG))


# ---------------------------------------------------------------- tensors


def rows_of(family: Family, config: ModelConfig) -> Iterator[Row]:
    """The rows of all layers, whether or not the model has the tensor."""
    for row in family.rows:
        for i in range(config.num_layers if "{i}" in row.ours else 1):
            yield Row(row.ours.format(i=i), row.operation, tuple(name.format(i=i) for name in row.theirs))


def heads_of(config: ModelConfig) -> HeadCounts:
    return HeadCounts(config.num_attention_heads, config.query_groups, config.head_width)


def records_of(
    family: Family, config: ModelConfig, tensors: Mapping[str, TensorInFile], root: Path
) -> dict[str, TensorRecord]:
    """The tensors of ours, by name. Raises CheckpointError for what is left over, half there, or of another shape."""
    rows = list(rows_of(family, config))
    tensors = _with_prefix(family, rows, tensors)
    records, used = {}, set()
    problems = []
    for ours, operation, theirs in rows:
        there = [name for name in theirs if name in tensors]
        used.update(there)
        if not there or (ours == HEAD.ours and not config.untie_embeddings_and_output_weights):
            continue
        if lacking := sorted({*theirs} - {*there}):
            problems.append(f"holds {there[0]!r} without {', '.join(map(repr, lacking))}")
            continue
        try:
            records[ours] = record_of(operation, heads_of(config), [tensors[name] for name in theirs])
        except ValueError as error:
            problems.append(f"holds {', '.join(map(repr, theirs))} of other shapes than {CONFIG} says ({error})")
    ignored = re.compile("|".join(family.ignored) or "(?!)")
    left = [name for name in tensors if name not in used and not ignored.fullmatch(name)]
    problems += [f"holds {name!r:.80}, for which the model has no place" for name in left]
    if problems:
        raise CheckpointError(root, problems, f"is it what {CONFIG} describes? Nothing was read")
    return records


def _with_prefix(family: Family, rows: list[Row], tensors: Mapping[str, TensorInFile]) -> dict[str, TensorInFile]:
    """The tensors by the names of the table, also of a file that leaves the family's prefix out."""
    known = {name for row in rows for name in row.theirs}
    return {
        name if name in known else family.prefix + name.removeprefix(family.prefix): x for name, x in tensors.items()
    }


def check_tied(folder: HFFolder, family: Family, config: ModelConfig, root: Path) -> None:
    """Refuse a head that differs from the word table with which the model is tied."""
    (head,), (table,) = (next(row.theirs for row in family.rows if row.ours == ours) for ours in (HEAD.ours, _WORDS))
    mine = _with_prefix(family, list(family.rows), folder.tensors)
    if config.untie_embeddings_and_output_weights or head not in mine or table not in mine:
        return
    if not are_equal(root, mine[head], mine[table]):
        raise CheckpointError(
            root, f"{CONFIG} ties the output layer to the word table, and {head} differs from {table}", FETCH_AGAIN
        )


# ---------------------------------------------------------------- the checkpoint


def manifest_of(folder: HFFolder, root: Path) -> Manifest:
    """The folder as a checkpoint of iteration 0: weights, and the settings of their model."""
    settings = settings_of(folder.config, str(root / CONFIG))
    words = settings.pop("vocab_size")
    config = ModelConfig(**settings)
    records = records_of(family_of(folder.config, CONFIG), config, folder.tensors, root)
    ends: dict[str, int] = {}
    for x in folder.tensors.values():
        ends[x.file] = max(ends.get(x.file, 0), x.start + x.nbytes)
    state = {
        "train": {"iteration": 0, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": "GPTModel",
        "vocab_size": words,
        "config": {
            "transformer": settings,
            "data": {"seq_length": config.max_position_embeddings},
            "tokenizer": _tokenizer_in(root),
            "optimizer": {},
            "checkpoint": {"save_optim": False},
        },
    }
    return Manifest(0, state, ends, {f"model/{name}": record for name, record in records.items()})


def _tokenizer_in(root: Path) -> dict[str, Any]:
    path = root / "tokenizer.json"
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)} if is_file(path) else {}


def is_foreign(root: Path | str) -> bool:
    """Whether a folder holds a model of another project that is read as it lies."""
    return is_hf_folder(Path(root))


def open_any(
    root: Path | str, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> Checkpoint:
    """`open_checkpoint`, also of a folder of another project. Every rank of `world` must call."""
    with comm.together(world, device):
        foreign = json.dumps(is_foreign(root)) if world.is_first else None
    if not json.loads(comm.broadcast_text(foreign, world, device)):
        return open_checkpoint(root, iteration, world, device)
    if iteration is not None:
        raise ConfigError(f"{root} is no folder of iterations: leave iteration {iteration} out")
    return open_foreign(root, world, device)


def open_foreign(root: Path | str, world: Axis = ALONE, device: torch.device | str = "cpu") -> StridedCheckpoint:
    """The model in a folder of another project, as a checkpoint that any layout reads; reads no tensors.

    Every rank of `world` must call. The first rank reads config and headers for all.
    """
    root, text = Path(root), None
    with comm.together(world, device):
        if world.is_first:
            folder = read_hf_folder(root)
            settings = settings_of(folder.config, str(root / CONFIG))
            settings.pop("vocab_size")
            check_tied(folder, family_of(folder.config, CONFIG), ModelConfig(**settings), root)
            text = json.dumps(asdict(folder))
    raw = json.loads(comm.broadcast_text(text, world, device))
    tensors = {
        name: TensorInFile(file, dtype, tuple(shape), start)
        for name, (file, dtype, shape, start) in raw["tensors"].items()
    }
    with comm.together(world, device):
        manifest = manifest_of(HFFolder(raw["config"], tensors, tuple(raw["notes"])), root)
    return StridedCheckpoint(root, manifest, "; ".join(raw["notes"]))
