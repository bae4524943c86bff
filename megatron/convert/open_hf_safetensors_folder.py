"""Open a Hugging Face folder as a checkpoint of ours: each tensor by our name, as byte ranges of the folder's files.

So each rank of any layout reads its boxes directly from the files, without a conversion and without a copy.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron.convert.families.config_fields import ConfigReader, dtype_in
from megatron.convert.families.hf_family_fields_and_param_mappings import (
    HEADS_OF_OTHER_TASKS,
    OUTPUT_LAYER,
    Family,
    ParamMapping,
)
from megatron.convert.families.read_and_write_hf_config import family_of, model_config_of, settings_of
from megatron.convert.families.strided_views_of_hf_weights import HeadCounts
from megatron.convert.formats.hf_config_and_safetensors_headers import (
    CONFIG,
    HFFolder,
    are_equal,
    read_hf_folder,
    read_json,
)
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.hf_provenance_and_tokenizer_files import TOKENIZER_CONFIG, Provenance
from megatron.convert.missing_params_and_absent_heads import ABSENT_HEADS, ALLOW_FLAG, absent_head_parameters
from megatron.convert.read_mxfp4 import BLOCKS, SCALES, mxfp4_record
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint, record_of
from megatron.core.dist_checkpointing.manifest_format import CheckpointError, Manifest, TensorRecord
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.storage.file_layer import is_file
from megatron.core.transformer.expected_parameter_shapes import parameter_shape
from megatron.core.transformer.model_config import ModelConfig

# ---------------------------------------------------------------- tensors


def param_mappings(family: Family, config: ModelConfig, *, stacked: bool = False) -> Iterator[ParamMapping]:
    """Yield the family's mappings for all layers of a model, whether or not the model has the parameter.

    stacked: its `stacked_mappings` instead.
    """
    for mapping in family.stacked_mappings if stacked else family.mappings:
        if mapping.gated not in (None, config.is_gated):
            continue
        layers = 1
        if "{i}" in mapping.param:
            layers = config.num_layers
        elif "{j}" in mapping.param:
            layers = config.decoder_layers
        for i in range(layers):
            if mapping.experts in (None, config.is_moe_layer(i)):
                yield mapping.of_layer(i, config.num_experts or 0)


def head_counts_of(config: ModelConfig) -> HeadCounts:
    """Return the sizes of a model's attention heads."""
    return HeadCounts(config.num_attention_heads, config.query_groups, config.head_width)


def tensor_records(
    family: Family, config: ModelConfig, vocab_size: int, tensors: Mapping[str, TensorInFile], root: Path
) -> dict[str, TensorRecord]:
    """Return our tensors, by name, made of a folder's `tensors`.

    Raises CheckpointError, with all of them, for tensors that are unknown, incomplete, or of another shape than
    the config says.
    """
    mappings = list(param_mappings(family, config))
    stacked = {mapping.param: mapping for mapping in param_mappings(family, config, stacked=True)}
    tensors = _by_current_names(family, [*mappings, *stacked.values()], tensors)
    records = {}
    used = set()
    problems = []
    has_parts = False  # of a parameter that is made of several tensors, some of which are missing
    wrong_counts: dict[int, list[str]] = {}  # a number of experts that is not the config's -> names of tensors with it
    for mapping in mappings:
        param = mapping.param
        is_published = any(name in tensors for name in mapping.hf_params)
        if param in stacked and not is_published and any(name in tensors for name in stacked[param].hf_params):
            mapping = stacked[param]
        hf_params = mapping.hf_params
        packed = [hf_params[0] + suffix for suffix in (BLOCKS, SCALES)]
        if not any(name in tensors for name in packed):
            packed = []
        present = [name for name in packed or hf_params if name in tensors]
        used.update(present)
        is_tied_output = param == f"{OUTPUT_LAYER}.weight" and not config.untie_embeddings_and_output_weights
        if not present or is_tied_output:
            continue
        missing = sorted({*(packed or hf_params)} - {*present})
        here, absent = ({_expert_number(name) for name in names} for names in (present, missing))
        if missing and None not in here | absent and max(here) < min(absent):
            wrong_counts.setdefault(max(here) + 1, []).append(present[0])
            continue
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 4 else ""
            shown = missing[:3] if more else missing
            problems.append(f"holds {present[0]!r} without {', '.join(map(repr, shown))}{more}")
            has_parts = True
            continue
        try:
            if packed:
                record = mxfp4_record(mapping.operation, *(tensors[name] for name in packed))
            else:
                record = record_of(mapping.operation, head_counts_of(config), [tensors[name] for name in hf_params])
        except ValueError as error:
            wrong = _of_odd_shape(present, tensors) or present
            names = ", ".join(map(repr, wrong[:6])) + (" and more" if len(wrong) > 6 else "")
            problems.append(f"holds {names} of other shapes than {CONFIG} says ({error})")
            continue
        records[param] = record
        # A model refuses other shapes when it loads them. A conversion makes no model, so a folder must be told by its config.
        expected = parameter_shape(config, param, vocab_size, config.max_position_embeddings) or record.shape
        if _has_all_experts(param) and record.shape[0] != expected[0]:
            wrong_counts.setdefault(record.shape[0], []).append(present[0])
        elif record.shape != expected:
            problems.append(
                f"holds {present[0]!r} of other shapes than {CONFIG} says ({param} would be {record.shape}, not {expected})"
            )
    ignored = _ignored_names(family)
    unknown = []
    for name in tensors:
        if name in used or ignored.fullmatch(name):
            continue
        number = _expert_number(name)
        is_further_expert = number is not None and re.sub(rf"\.{number}\.", ".0.", name) in used
        if is_further_expert and number >= (config.num_experts or 0):
            wrong_counts.setdefault(number + 1, []).append(name)
        else:
            unknown.append(name)
    if wrong_counts:
        count = max(wrong_counts)
        names = [name for names in wrong_counts.values() for name in names]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problems.append(
            f"holds {count} experts, and {CONFIG} says {config.num_experts}: {wrong_counts[count][0]!r}{more}"
        )
    problems += [f"holds {name!r:.80}, for which the model has no place" for name in unknown]
    if problems:
        advice = f"is it what {CONFIG} describes? Nothing was read"
        if has_parts:
            advice += (
                f"; fetch the folder again: {ALLOW_FLAG} goes on without whole parameters, and these are parts of one"
            )
        raise CheckpointError(root, problems, advice)
    return records


def _expert_number(name: str) -> int | None:
    """Return the number of the expert whose tensor has this name in a folder; None: no expert, or all in one."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _has_all_experts(param: str) -> bool:
    """Return whether a parameter of ours has a row for each expert of a layer."""
    return ".mlp.experts." in param or ".mlp.router." in param


def _of_odd_shape(names: list[str], tensors: Mapping[str, TensorInFile]) -> list[str]:
    """Return those of a parameter's tensors whose shape is not that of most experts."""
    kind_and_shape = {name: (name.rsplit(".", 2)[-2:], tensors[name].shape) for name in names}
    odd = []
    for name, (kind, shape) in kind_and_shape.items():
        others = [other for of_kind, other in kind_and_shape.values() if of_kind == kind]
        if 2 * others.count(shape) < len(others):
            odd.append(name)
    return odd


def _ignored_names(family: Family) -> re.Pattern[str]:
    return re.compile("|".join(family.ignored_tensors) or "(?!)")  # (?!) matches nothing


def _by_current_names(
    family: Family, mappings: list[ParamMapping], tensors: Mapping[str, TensorInFile]
) -> dict[str, TensorInFile]:
    """Return the tensors by the names of the family's table. An old file has other suffixes, or lacks the prefix."""
    known = {name for mapping in mappings for name in mapping.hf_params}
    ignored = _ignored_names(family)

    def current_name(name: str) -> str:
        if name in known:
            return name
        for old, new in family.old_suffixes:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        prefixed = family.prefix + name.removeprefix(family.prefix)
        return prefixed if prefixed in known or ignored.fullmatch(prefixed) else name

    return {current_name(name): x for name, x in tensors.items()}


def check_tied(folder: HFFolder, family: Family, config: ModelConfig, root: Path) -> None:
    """Refuse tensors that the model ties, such as output layer and word embeddings, and that differ in the files.

    Reads both tensors. Raises CheckpointError.
    """
    tensors = _by_current_names(family, list(family.mappings), folder.tensors)
    tied_pairs = list(family.tied_copies)
    if not config.untie_embeddings_and_output_weights:
        tied_pairs.append(family.output_and_embedding_weights())
    for first, second in tied_pairs:
        if first in tensors and second in tensors and not are_equal(root, tensors[first], tensors[second]):
            raise CheckpointError(
                root, f"{CONFIG} makes {first} and {second} one tensor, and one differs from the other", FETCH_AGAIN
            )


# ---------------------------------------------------------------- the checkpoint


def read_config_with_true_tying(root: Path) -> dict[str, Any]:
    """Return the config.json of a folder.

    Reads the headers of the weights where only they say whether weights are tied.
    """
    config = read_json(root / CONFIG)
    if family_of(config, str(root / CONFIG)).untied_config(config) is None:
        return config
    return _read(root).config


def _read(root: Path) -> HFFolder:
    """Read the config and the headers, with the config changed if it claims tied weights and the files have two."""
    folder = _without_head_of_another_task(read_hf_folder(root), root)
    family = family_of(folder.config, str(root / CONFIG))
    untied_config = family.untied_config(folder.config)
    if untied_config is None:
        return folder
    output, embedding = (folder.tensors.get(name) for name in family.output_and_embedding_weights())
    if output is None or embedding is None or are_equal(root, output, embedding):
        return folder
    return replace(folder, config=untied_config)


def _without_head_of_another_task(folder: HFFolder, root: Path) -> HFFolder:
    """Return the folder without the tensors of a classifier, if it is of an architecture that has one."""
    architectures = folder.config.get("architectures")
    if not isinstance(architectures, list):
        return folder
    left_out = []
    for names, suffixes in HEADS_OF_OTHER_TASKS.items():
        if any(isinstance(name, str) and name.endswith(suffixes) for name in architectures):
            left_out += [name for name in folder.tensors if re.fullmatch(names, name)]
    if not left_out:
        return folder
    tensors = {name: x for name, x in folder.tensors.items() if name not in left_out}
    note = f"{root} holds the head of another task, which is not read: {', '.join(sorted(left_out))}"
    return replace(folder, tensors=tensors, notes=(*folder.notes, note))


def manifest_of(folder: HFFolder, root: Path) -> Manifest:
    """Return the folder as a checkpoint of iteration 0: weights, and the settings of their model."""
    settings, vocab_size = settings_of(folder.config, str(root / CONFIG))
    config = model_config_of(settings, str(root / CONFIG))
    family = family_of(folder.config, CONFIG)
    return manifest_with(tensor_records(family, config, vocab_size, folder.tensors, root), folder, root)


def manifest_with(records: Mapping[str, TensorRecord], folder: HFFolder, root: Path) -> Manifest:
    """Return the manifest as `manifest_of` does, for tensors whose positions are known."""
    settings, vocab_size = settings_of(folder.config, str(root / CONFIG))
    config = model_config_of(settings, str(root / CONFIG))
    family = family_of(folder.config, CONFIG)
    absent_heads = absent_head_parameters(family, config, folder.config.get("architectures"), records)
    file_ends: dict[str, int] = {}
    for x in folder.tensors.values():
        file_ends[x.file] = max(file_ends.get(x.file, 0), x.start + x.nbytes)
    state = {
        "train": {"iteration": 0, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": family.model,
        "origin": Provenance.of(folder.config, root).as_json(),
        ABSENT_HEADS: absent_heads,
        "vocab_size": vocab_size,
        "config": {
            **settings_by_component(folder.config, root / CONFIG, root),
            "data": {"seq_length": config.max_position_embeddings},
            "optimizer": {},
            "checkpoint": {"save_optim": False},
        },
    }
    return Manifest(0, state, file_ends, {f"model/{name}": record for name, record in records.items()})


_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def settings_by_component(config: Mapping[str, Any], source: Path, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return the settings that a config.json gives to a run, by component.

    source: the config.json, for errors. folder: where its tokenizer may be; None: nowhere.
    """
    settings, vocab_size = settings_of(config, str(source))
    model_config_of(settings, str(source))  # refuses a model that cannot be, with the file
    dtype = dtype_in(ConfigReader(config, str(source)))
    # A folder that names its dtype also sets the other precisions to False: a script may have another one by default.
    precision = {} if dtype is None else {flag: name == dtype for name, flag in _PRECISIONS.items()}
    tokenizer: dict[str, Any] = {"model_vocab_size": vocab_size}
    if folder is not None:
        tokenizer |= _tokenizer_in(folder)
    return {"transformer": settings | precision, "tokenizer": tokenizer}


def _tokenizer_in(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's tokenizer; {} if no single file of it describes the full tokenizer."""
    path = folder / "tokenizer.json"
    if is_file(path):
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}
    path = folder / "vocab.txt"
    if not is_file(path):
        return {}
    tokenizer_config = folder / TOKENIZER_CONFIG
    lower_case = True
    if is_file(tokenizer_config):
        lower_case = read_json(tokenizer_config).get("do_lower_case", True)
    kind = "BertWordPieceCase" if lower_case is False else "BertWordPieceLowerCase"
    return {"tokenizer_type": kind, "vocab_file": str(path)}


def open_hf_folder(root: Path, world: Axis = ALONE, device: torch.device | str = "cpu") -> StridedCheckpoint:
    """Open the model in a Hugging Face folder as a checkpoint that any layout can load; reads no tensors but tied ones.

    Every rank of `world` must call. The first rank reads config and headers, and broadcasts them.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            folder = _read(root)
            settings, _ = settings_of(folder.config, str(root / CONFIG))
            check_tied(folder, family_of(folder.config, CONFIG), model_config_of(settings, str(root / CONFIG)), root)
            text = json.dumps(asdict(folder))
    raw = json.loads(collectives.broadcast_text(text, world, device))
    tensors = {
        name: TensorInFile(file, dtype, tuple(shape), start)
        for name, (file, dtype, shape, start) in raw["tensors"].items()
    }
    with collectives.raise_together(world, device):
        manifest = manifest_of(HFFolder(raw["config"], tensors, tuple(raw["notes"])), root)
    return StridedCheckpoint(root, manifest, "; ".join(raw["notes"]))
