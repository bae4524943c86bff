"""What a model keeps of the folder that it began as, beside its numbers: the family, ids of a text's ends, the
tokenizer's files.

    state["origin"] of a checkpoint    {"model_type": "mistral",            the family it is written back as
                                        "folder": "/models/Mistral-7B",     where the files are
                                        "kept": {"eos_token_id": 2},        keys of config.json, carried unchanged
                                        "files": {"tokenizer.json": sha256},  those that are carried
                        "ends": [2, 7]}                     the ids that end a text, by all files

A folder that is opened says the first three; a run that starts from it adds the others, so that what is carried later is
what it
began with. Plain JSON, which may come from anywhere and is checked before it is used. No torch.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.convert.families.family import START_ID
from megatron.convert.formats.read_hf_folder import json_of, path_inside
from megatron.convert.hf_tokenizer_config import TOKENIZER_CONFIG, for_both_versions
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.storage.file_layer import backend_of, exists, is_file, is_folder, read_start, write_all
from megatron.core.storage.paths import is_url, path_of

_TEMPLATES, GENERATION = "additional_chat_templates", "generation_config.json"
# Files of a folder that belong to its tokenizer and its use.
_CARRIED = (
    *(GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    "chat_template.jinja",
)
_TEMPLATE = re.compile(rf"{_TEMPLATES}/[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,120}}\.jinja")
_MOST_BYTES = 256 << 20  # of one of them
_END = "eos_token_id"
_IDS = ("bos_token_id", _END, "pad_token_id", "sep_token_id")
_MOST_IDS = 64
OTHER_FOLDER = "--tokenizer DIR of tools/checkpoint_convert.py takes them from another folder"


def _is_id(value: Any) -> bool:
    return type(value) is int and -(1 << 31) <= value < 1 << 31


def _is_kept(name: str, value: Any) -> bool:
    """Whether a key of a config.json is one that is carried, with a value that it may have."""
    if name in _IDS:
        are_ids = isinstance(value, list) and len(value) <= _MOST_IDS and all(map(_is_id, value))
        return value is None or _is_id(value) or are_ids
    if name == START_ID:
        return _is_id(value) and value >= 0
    if name == "initializer_range":
        return type(value) in (int, float) and math.isfinite(value)
    return name == "tokenizer_class" and isinstance(value, str) and bool(re.fullmatch(r"\w{1,100}", value))


def _is_carried(name: str) -> bool:
    return name in _CARRIED or bool(_TEMPLATE.fullmatch(name))


@dataclass(frozen=True)
class Provenance:
    """Where a model began. files: name -> sha256; None where the folder was opened just now, and is taken as it is.
    ends: None
    where the files are still to be asked."""

    model_type: str
    folder: str
    kept: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] | None = None
    ends: list[int] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], root: Path) -> "Provenance":
        """That of the folder `root` with this config.json."""
        place = str(root) if is_url(root) else os.path.abspath(root)
        return cls(config["model_type"], place, {name: x for name, x in config.items() if _is_kept(name, x)})

    @classmethod
    def in_state(cls, state: Mapping[str, Any], source: str) -> "Provenance | None":
        """That in the state of a checkpoint; None if it has none. Raises ConfigError."""
        raw = state.get("origin")
        if problems := origin_problems(raw):
            raise ConfigError([f"{source} holds a state that no run has written: {problem}" for problem in problems])
        return None if raw is None else cls(**raw)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_files(self, note: Callable[[str], object]) -> "Provenance":
        """With the hashes of the files that are in the folder now, and the ids that end a text by them. note: told of a
        file that
        cannot be carried or understood."""
        root, files = path_of(self.folder), {}
        for name in carried_in(root):
            data, wrong = _as_begun(root, name, None)
            if wrong:
                note(f"{root / name} will not be carried into folders that are written of this model: {wrong}")
            else:
                files[name] = hashlib.sha256(data).hexdigest()
        begun = replace(self, files=files)
        try:
            return replace(begun, ends=begun.end_ids())
        except CheckpointError as error:
            note(f"{error.file} {error.wrong}: the ids that end a text are those of config.json")
            return replace(begun, ends=_ids_in(self.kept.get(_END)))

    def end_ids(self) -> list[int]:
        """The ids that end a text, as transformers' generate() takes them: those of generation_config.json if it names
        some, else
        those of config.json; none if neither does. Raises CheckpointError for a file that cannot be read."""
        if self.ends is not None:
            return list(self.ends)
        root, said = path_of(self.folder), self.kept.get(_END)
        if self.files is None or GENERATION in self.files:
            data, wrong = _as_begun(root, GENERATION, (self.files or {}).get(GENERATION))
            found = json_of(data, root / GENERATION).get(_END) if not wrong else None
            if found is not None and not _is_kept(_END, found):
                raise CheckpointError(root / GENERATION, f"says {_END} {found!r:.80}", "give an id, or a list of ids")
            said = said if found is None else found
        return _ids_in(said)

    def without_tokenizer(self) -> "Provenance":
        """For a run that goes on with another tokenizer: ids and files are those of the first."""
        kept = {name: x for name, x in self.kept.items() if name == "initializer_range"}
        return replace(self, kept=kept, files={}, ends=[])


def _ids_in(said: Any) -> list[int]:
    """The ids of a key that has none, one or a list."""
    return [] if said is None else said if isinstance(said, list) else [said]


def origin_problems(raw: Any) -> list[str]:
    """What is wrong with the origin in a checkpoint's state, which may come from anywhere."""
    if raw is None:
        return []
    if not isinstance(raw, dict) or not {"model_type", "folder"} <= raw.keys() <= {f.name for f in fields(Provenance)}:
        return [f"origin is {raw!r:.80}, not an object of model_type, folder, kept, files and ends"]
    kept, files = raw.get("kept", {}), raw.get("files", {})
    ends = raw.get("ends", [])
    fits = {
        "model_type": bool(re.fullmatch(r"[\w.-]{1,100}", str(raw["model_type"]))),
        "folder": isinstance(raw["folder"], str) and bool(re.fullmatch(r"[^\x00-\x1f]{1,4096}", raw["folder"])),
        "kept": isinstance(kept, dict) and all(_is_kept(name, value) for name, value in kept.items()),
        "files": isinstance(files, dict)
        and all(_is_carried(name) and re.fullmatch("[0-9a-f]{64}", str(value)) for name, value in files.items()),
        "ends": isinstance(ends, list) and _is_kept(_END, ends),
    }
    return [f"origin/{name} is {raw[name]!r:.80}" for name, is_right in fits.items() if not is_right]


# ---------------------------------------------------------------- the files


def carried_in(root: Path) -> list[str]:
    """The names of the files of a folder that are carried."""
    names = [name for name in _CARRIED if is_file(root / name)]
    if exists(root / _TEMPLATES):
        names += [
            name for file in backend_of(root).names(root / _TEMPLATES) if _is_carried(name := f"{_TEMPLATES}/{file}")
        ]
    return names


def check_chosen(chosen: Path) -> None:
    """Raises ConfigError for a folder with nothing to carry."""
    if not carried_in(chosen):
        there = f"holds none of {', '.join(_CARRIED)}" if is_folder(chosen) else "is no folder"
        raise ConfigError(
            f"{chosen} {there}; give the folder with the tokenizer's files as --tokenizer, or leave it out"
        )


def carry(origin: Provenance | None, chosen: Path | None, target: Path, note: Callable[[str], object]) -> list[str]:
    """Copy the files of the folder `chosen`, or else of the origin, as they are; returns their names.
    tokenizer_config.json may
    change its spelling, for transformers 4.

    note: told, in a line, of files that should have been there. Raises CheckpointError or OSError for a file of `chosen`, or
    one that cannot be written.
    """
    if chosen is not None:
        return [_write(name, read_carried(chosen, name), target) for name in carried_in(chosen)]
    if origin is None:
        note(f"no tokenizer is written: the model did not begin as a folder that has its files; {OTHER_FOLDER}")
        return []
    root = path_of(origin.folder)
    wanted = dict.fromkeys(carried_in(root)) if origin.files is None else origin.files
    written, lacking = [], []
    for name, sha256 in wanted.items():
        data, wrong = _as_begun(root, name, sha256)
        if wrong:
            lacking.append(f"{name} ({wrong})")
        else:
            written.append(_write(name, data, target))
    if lacking:
        note(f"not written, as {root} does not hold them as the run began: {', '.join(lacking)}; {OTHER_FOLDER}")
    return written


def _as_begun(root: Path, name: str, sha256: str | None) -> tuple[bytes, str]:
    """(the content of a file, ""), or (nothing, why it is not carried)."""
    try:
        data = read_carried(root, name)
    except FileNotFoundError:
        return b"", "not there"
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}"
    except CheckpointError as error:
        return b"", str(error.wrong)
    is_it = sha256 is None or hashlib.sha256(data).hexdigest() == sha256
    return data, "" if is_it else "changed since"


def read_carried(root: Path, name: str) -> bytes:
    path = root / name if is_url(root) else path_inside(root, name)
    data = read_start(path, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise CheckpointError(path, f"has more than {_MOST_BYTES} bytes", "is it a file of a tokenizer?")
    return data


def _write(name: str, data: bytes, target: Path) -> str:
    path = target / name
    if not exists(path.parent):
        backend_of(path).make_folder(path.parent)
    with backend_of(path).open(path, "wb") as file:
        write_all(file, for_both_versions(data) if name == TOKENIZER_CONFIG else data, path)
        backend_of(path).sync(file)
    return name
