"""A Hugging Face folder as a checkpoint of ours: its tensors by our names, each a list of byte ranges of the folder's files.

So each rank of any layout reads its boxes from the files as they lie, without a conversion and without a copy.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron.convert.check_missing_keys import ABSENT_HEADS, absent_heads_of
from megatron.convert.families.config_fields import Given, dtype_in
from megatron.convert.families.config_json import family_of, settings_of
from megatron.convert.families.family import OUTPUT, Family, Row
from megatron.convert.families.weight_layout import HeadCounts
from megatron.convert.formats.read_hf_folder import CONFIG, HFFolder, are_equal, read_hf_folder, read_json
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.hf_origin import Provenance
from megatron.convert.hf_tokenizer_config import TOKENIZER_CONFIG
from megatron.convert.strided_checkpoint import StridedCheckpoint, record_of
from megatron.core.dist_checkpointing.format import CheckpointError, Manifest, TensorRecord
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.storage.file_layer import is_file
from megatron.core.transformer.model_config import ModelConfig

# ---------------------------------------------------------------- tensors


def rows_of(family: Family, config: ModelConfig) -> Iterator[Row]:
    """The rows of all layers, whether or not the model has the tensor."""
    for row in family.rows:
        if row.gated not in (None, config.is_gated):
            continue
        layers = config.num_layers if "{i}" in row.ours else config.decoder_layers if "{j}" in row.ours else 1
        for i in range(layers):
            yield Row(row.ours.format(i=i, j=i), row.operation, tuple(name.format(i=i, j=i) for name in row.theirs))


def heads_of(config: ModelConfig) -> HeadCounts:
    return HeadCounts(config.num_attention_heads, config.query_groups, config.head_width)


def records_of(
    family: Family, config: ModelConfig, tensors: Mapping[str, TensorInFile], root: Path
) -> dict[str, TensorRecord]:
    """The tensors of ours, by name. Raises CheckpointError for what is left over, half there, or of another shape."""
    rows = list(rows_of(family, config))
    tensors = _by_todays_names(family, rows, tensors)
    records, used = {}, set()
    problems = []
    for ours, operation, theirs, _ in rows:
        there = [name for name in theirs if name in tensors]
        used.update(there)
        if not there or (ours == f"{OUTPUT}.weight" and not config.untie_embeddings_and_output_weights):
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


def _by_todays_names(family: Family, rows: list[Row], tensors: Mapping[str, TensorInFile]) -> dict[str, TensorInFile]:
    """The tensors by the names of the table, also of an old file: its names end otherwise, or lack the family's prefix."""
    known = {name for row in rows for name in row.theirs}
    ignored = re.compile("|".join(family.ignored) or "(?!)")

    def today(name: str) -> str:
        if name in known:
            return name
        for old, new in family.old_endings:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        whole = family.prefix + name.removeprefix(family.prefix)
        return whole if whole in known or ignored.fullmatch(whole) else name

    return {today(name): x for name, x in tensors.items()}


def check_tied(folder: HFFolder, family: Family, config: ModelConfig, root: Path) -> None:
    """Refuse a head that differs from the word table with which the model is tied, and a copy that differs from its
    tensor."""
    tensors, pairs = _by_todays_names(family, list(family.rows), folder.tensors), list(family.copies)
    if not config.untie_embeddings_and_output_weights:
        pairs.append(family.head_and_table())
    for one, other in pairs:
        if one in tensors and other in tensors and not are_equal(root, tensors[one], tensors[other]):
            raise CheckpointError(
                root, f"{CONFIG} makes {one} and {other} one tensor, and one differs from the other", FETCH_AGAIN
            )


# ---------------------------------------------------------------- the checkpoint


def config_in(root: Path) -> dict[str, Any]:
    """The config.json of a folder; reads the weights' headers where they say more."""
    config = read_json(root / CONFIG)
    return config if family_of(config, str(root / CONFIG)).untied(config) is None else _read(root).config


def _read(root: Path) -> HFFolder:
    folder = read_hf_folder(root)
    family = family_of(folder.config, str(root / CONFIG))
    if (untied := family.untied(folder.config)) is None:
        return folder
    head, table = (folder.tensors.get(name) for name in family.head_and_table())
    if head is None or table is None or are_equal(root, head, table):
        return folder
    return replace(folder, config=untied)


def manifest_of(folder: HFFolder, root: Path) -> Manifest:
    """The folder as a checkpoint of iteration 0: weights, and the settings of their model."""
    settings, _ = settings_of(folder.config, str(root / CONFIG))
    config, family = ModelConfig(**settings), family_of(folder.config, CONFIG)
    return manifest_with(records_of(family, config, folder.tensors, root), folder, root)


def manifest_with(records: Mapping[str, TensorRecord], folder: HFFolder, root: Path) -> Manifest:
    """As `manifest_of`, of tensors whose places are known."""
    settings, words = settings_of(folder.config, str(root / CONFIG))
    config, family = ModelConfig(**settings), family_of(folder.config, CONFIG)
    absent_heads = absent_heads_of(family, config, folder.config.get("architectures"), records)
    ends: dict[str, int] = {}
    for x in folder.tensors.values():
        ends[x.file] = max(ends.get(x.file, 0), x.start + x.nbytes)
    state = {
        "train": {"iteration": 0, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": family.model,
        "origin": Provenance.of(folder.config, root).as_json(),
        ABSENT_HEADS: absent_heads,
        "vocab_size": words,
        "config": {
            **components_of(folder.config, root / CONFIG, root),
            "data": {"seq_length": config.max_position_embeddings},
            "optimizer": {},
            "checkpoint": {"save_optim": False},
        },
    }
    return Manifest(0, state, ends, {f"model/{name}": record for name, record in records.items()})


_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def components_of(config: Mapping[str, Any], source: Path, folder: Path | None) -> dict[str, dict[str, Any]]:
    """The settings that a config.json gives to a run, by component. source: the file; folder: where its tokenizer may
    lie."""
    settings, words = settings_of(config, str(source))
    dtype = dtype_in(Given(config, str(source)))
    # A folder that says its dtype says what the run is not trained in, too: a script may have another by default.
    precision = {flag: name == dtype for name, flag in _PRECISIONS.items()} if dtype is not None else {}
    tokenizer = {"model_vocab_size": words} | ({} if folder is None else _tokenizer_in(folder))
    return {"transformer": settings | precision, "tokenizer": tokenizer}


def _tokenizer_in(folder: Path) -> dict[str, Any]:
    """The settings of a folder's tokenizer; none if it has no file that says all of it."""
    if is_file(path := folder / "tokenizer.json"):
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}
    if not is_file(path := folder / "vocab.txt"):
        return {}
    beside = folder / TOKENIZER_CONFIG
    lower = read_json(beside).get("do_lower_case", True) if is_file(beside) else True
    kind = "BertWordPieceCase" if lower is False else "BertWordPieceLowerCase"
    return {"tokenizer_type": kind, "vocab_file": str(path)}


def open_hf_folder(root: Path, world: Axis = ALONE, device: torch.device | str = "cpu") -> StridedCheckpoint:
    """The model in a Hugging Face folder, as a checkpoint that any layout reads; reads no tensors.

    Every rank of `world` must call. The first rank reads config and headers for all.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            folder = _read(root)
            settings, _ = settings_of(folder.config, str(root / CONFIG))
            check_tied(folder, family_of(folder.config, CONFIG), ModelConfig(**settings), root)
            text = json.dumps(asdict(folder))
    raw = json.loads(collectives.broadcast_text(text, world, device))
    tensors = {
        name: TensorInFile(file, dtype, tuple(shape), start)
        for name, (file, dtype, shape, start) in raw["tensors"].items()
    }
    with collectives.raise_together(world, device):
        manifest = manifest_of(HFFolder(raw["config"], tensors, tuple(raw["notes"])), root)
    return StridedCheckpoint(root, manifest, "; ".join(raw["notes"]))
