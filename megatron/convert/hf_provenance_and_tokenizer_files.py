"""Record which folder a model came from, beside its numbers: the family, ids of special tokens, the tokenizer's files.

    state["origin"] of a checkpoint   {"model_type": "mistral",              the family that it is written back as
                                       "folder": "/models/Mistral-7B",       where the files are
                                       "kept": {"eos_token_id": 2},          keys of config.json, copied unchanged
                                       "files": {"tokenizer.json": sha256},  files that are copied into exported folders
                                       "ends": [2, 7]}                       ids that end a text, by all of these files

Opening a folder gives the first three; a run that starts from it adds the others, so that a later export has
the files that the run began with. The record is plain JSON, which may come from anywhere and is checked before
it is used. No torch.

tokenizer_config.json is written in a spelling that transformers 4 and 5 both read:

    5 writes                                        both read
    "tokenizer_class": "TokenizersBackend"          "tokenizer_class": "PreTrainedTokenizerFast"
    "extra_special_tokens": ["</s>", ...]           "additional_special_tokens": ["</s>", ...]

transformers 4 knows no class of the first name, and takes an object where 5 lists further special tokens; 5 reads the
older names too. tests/compat/test_transformers.py compares the ids of both.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.convert.families.hf_family_fields_and_param_mappings import START_ID
from megatron.convert.formats.hf_config_and_safetensors_headers import json_of, path_inside
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lfs_pointer import FETCH_LFS, LFS_POINTER, is_lfs_pointer
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.storage.file_layer import backend_of, exists, is_file, is_folder, read_start, write_all
from megatron.core.storage.path_or_url import is_url, path_of

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
_TOKENS_MAP = "special_tokens_map.json"
_TEMPLATES = "additional_chat_templates"  # a folder
# Files of a Hugging Face folder, beside config and weights, that its tokenizer and its users need.
_AUX_FILES = (
    *(GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
    "chat_template.jinja",
)
_TEMPLATE = re.compile(rf"{_TEMPLATES}/[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,120}}\.jinja")
_MOST_BYTES = 256 << 20  # of one of these files
_EOS_ID = "eos_token_id"
_SPECIAL_IDS = ("bos_token_id", _EOS_ID, "pad_token_id", "sep_token_id")
_MOST_IDS = 64
# Numbers of training, which no flag here takes from the file.
_NUMBERS = ("initializer_range", "router_aux_loss_coef", "router_jitter_noise")
OTHER_FOLDER = "--tokenizer DIR of tools/checkpoint_convert.py takes them from another folder"

# tokenizer_config.json: transformers 5 -> the spelling that 4 and 5 read
_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
_NEW_TOKENS_KEY = "extra_special_tokens"
_OLD_TOKENS_KEY = "additional_special_tokens"


def _is_id(value: Any) -> bool:
    return type(value) is int and -(1 << 31) <= value < 1 << 31


def _is_kept(name: str, value: Any) -> bool:
    """Return whether a key of a config.json is copied to exported folders, and its value is a valid one."""
    if name in _SPECIAL_IDS:
        if isinstance(value, list):
            return len(value) <= _MOST_IDS and all(map(_is_id, value))
        return value is None or _is_id(value)
    if name == START_ID:
        return _is_id(value) and value >= 0
    if name in _NUMBERS:
        return type(value) in (int, float) and math.isfinite(value)
    if name == "output_router_logits":
        return isinstance(value, bool)
    return name == "tokenizer_class" and isinstance(value, str) and bool(re.fullmatch(r"\w{1,100}", value))


def _is_aux_file(name: str) -> bool:
    return name in _AUX_FILES or bool(_TEMPLATE.fullmatch(name))


@dataclass(frozen=True)
class Provenance:
    """The folder that a model came from; the module's docstring explains the fields.

    files None: the folder was opened just now, and its files are taken as they are. ends None: the files have
    not been asked yet.
    """

    model_type: str
    folder: str
    kept: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] | None = None  # name -> sha256
    ends: list[int] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], root: Path) -> "Provenance":
        """Return the record of the folder `root` with this config.json."""
        folder = str(root) if is_url(root) else os.path.abspath(root)
        kept = {name: value for name, value in config.items() if _is_kept(name, value)}
        return cls(config["model_type"], folder, kept)

    @classmethod
    def in_state(cls, state: Mapping[str, Any], source: str) -> "Provenance | None":
        """Return the record in a checkpoint's state; None if it has none.

        Raises ConfigError for one that is invalid.
        """
        raw = state.get("origin")
        problems = provenance_problems(raw)
        if problems:
            raise ConfigError([f"{source} holds a state that no run has written: {problem}" for problem in problems])
        return None if raw is None else cls(**raw)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_files(self, note: Callable[[str], object]) -> "Provenance":
        """Return the record with the hashes of the folder's files as they are now, and the ids that end a text by them.

        note: called with a line about each file that cannot be copied or understood.
        """
        root = path_of(self.folder)
        hashes = {}
        for name in aux_files_in(root):
            data, problem = _read_unchanged(root, name, None)
            if problem:
                note(f"{root / name} will not be carried into folders that are written of this model: {problem}")
            else:
                hashes[name] = hashlib.sha256(data).hexdigest()
        hashed = replace(self, files=hashes)
        try:
            return replace(hashed, ends=hashed.end_ids())
        except CheckpointError as error:
            note(f"{error.file} {error.wrong}: the ids that end a text are those of config.json")
            return replace(hashed, ends=_as_id_list(self.kept.get(_EOS_ID)))

    def end_ids(self) -> list[int]:
        """Return the ids that end a text, as generate() of transformers takes them.

        They are those of generation_config.json if it names some, else those of config.json; none if neither does.
        Raises CheckpointError for a file that cannot be read.
        """
        if self.ends is not None:
            return list(self.ends)
        root = path_of(self.folder)
        end_ids = self.kept.get(_EOS_ID)
        if self.files is None or GENERATION in self.files:
            data, problem = _read_unchanged(root, GENERATION, (self.files or {}).get(GENERATION))
            if not problem:
                generation_ids = json_of(data, root / GENERATION).get(_EOS_ID)
                if generation_ids is not None:
                    if not _is_kept(_EOS_ID, generation_ids):
                        wrong = f"says {_EOS_ID} {generation_ids!r:.80}"
                        raise CheckpointError(root / GENERATION, wrong, "give an id, or a list of ids")
                    end_ids = generation_ids
        return _as_id_list(end_ids)

    def without_tokenizer(self) -> "Provenance":
        """Return the record for a run that continues with another tokenizer: without the first one's ids and files."""
        kept = {name: value for name, value in self.kept.items() if name in (*_NUMBERS, "output_router_logits")}
        return replace(self, kept=kept, files={}, ends=[])


def _as_id_list(ids: Any) -> list[int]:
    """Return the ids of a key whose value is null, one id, or a list of ids."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def provenance_problems(raw: Any) -> list[str]:
    """Return what is wrong with the record in a checkpoint's state, which may come from anywhere; [] if nothing is."""
    if raw is None:
        return []
    known_fields = {f.name for f in fields(Provenance)}
    if not isinstance(raw, dict) or not {"model_type", "folder"} <= raw.keys() <= known_fields:
        return [f"origin is {raw!r:.80}, not an object of model_type, folder, kept, files and ends"]
    kept = raw.get("kept", {})
    files = raw.get("files", {})
    ends = raw.get("ends", [])

    def are_hashed_files() -> bool:
        return isinstance(files, dict) and all(
            _is_aux_file(name) and re.fullmatch("[0-9a-f]{64}", str(sha256)) for name, sha256 in files.items()
        )

    is_valid = {
        "model_type": bool(re.fullmatch(r"[\w.-]{1,100}", str(raw["model_type"]))),
        "folder": isinstance(raw["folder"], str) and bool(re.fullmatch(r"[^\x00-\x1f]{1,4096}", raw["folder"])),
        "kept": isinstance(kept, dict) and all(_is_kept(name, value) for name, value in kept.items()),
        "files": are_hashed_files(),
        "ends": isinstance(ends, list) and _is_kept(_EOS_ID, ends),
    }
    return [f"origin/{name} is {raw[name]!r:.80}" for name, valid in is_valid.items() if not valid]


# ---------------------------------------------------------------- the files


def aux_files_in(root: Path) -> list[str]:
    """Return the names of a folder's files that are copied into exported folders."""
    names = [name for name in _AUX_FILES if is_file(root / name)]
    if exists(root / _TEMPLATES):
        templates = [f"{_TEMPLATES}/{file}" for file in backend_of(root).names(root / _TEMPLATES)]
        names += [name for name in templates if _is_aux_file(name)]
    return names


def check_tokenizer_folder(chosen: Path) -> None:
    """Raise ConfigError for a folder without any file of a tokenizer."""
    if not aux_files_in(chosen):
        wrong = f"holds none of {', '.join(_AUX_FILES)}" if is_folder(chosen) else "is no folder"
        raise ConfigError(
            f"{chosen} {wrong}; give the folder with the tokenizer's files as --tokenizer, or leave out --tokenizer"
        )


def copy_aux_files(
    origin: Provenance | None, chosen: Path | None, target: Path, note: Callable[[str], object]
) -> list[str]:
    """Copy the files of the folder `chosen`, by default those of the origin, unchanged; return their names.

    tokenizer_config.json and special_tokens_map.json may change their spelling, for transformers 4. note: called with a
    line about files that are missing. Raises CheckpointError or OSError for a file of `chosen`, or for one that cannot
    be written.
    """
    if chosen is not None:
        return write_aux_files({name: read_aux_file(chosen, name) for name in aux_files_in(chosen)}, target)
    if origin is None:
        note(f"no tokenizer is written: the model did not begin as a folder that has its files; {OTHER_FOLDER}")
        return []
    root = path_of(origin.folder)
    hashes = dict.fromkeys(aux_files_in(root)) if origin.files is None else origin.files
    found = {}
    missing = []
    for name, sha256 in hashes.items():
        data, problem = _read_unchanged(root, name, sha256)
        if problem:
            missing.append(f"{name} ({problem})")
        else:
            found[name] = data
    if missing:
        note(f"not written, as {root} does not hold them as the run began: {', '.join(missing)}; {OTHER_FOLDER}")
    return write_aux_files(found, target)


def write_aux_files(files: Mapping[str, bytes], target: Path) -> list[str]:
    """Write files, by name, in spellings that transformers 4 and 5 read; return their names. Raises OSError."""
    return [_write(name, data, target) for name, data in readable_by_transformers_4(files).items()]


def _read_unchanged(root: Path, name: str, sha256: str | None) -> tuple[bytes, str]:
    """Return (the content of a file, ""), or (any content, why it is not copied). sha256 None: any content counts."""
    try:
        data = read_aux_file(root, name)
    except FileNotFoundError:
        return b"", "not there"
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}"
    except CheckpointError as error:
        return b"", str(error.wrong)
    is_unchanged = sha256 is None or hashlib.sha256(data).hexdigest() == sha256
    return data, "" if is_unchanged else "changed since"


def read_aux_file(root: Path, name: str) -> bytes:
    """Return the content of a file of the folder. Raises OSError, or CheckpointError for one that is too large."""
    path = root / name if is_url(root) else path_inside(root, name)
    data = read_start(path, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise CheckpointError(path, f"has more than {_MOST_BYTES} bytes", "is it a file of a tokenizer?")
    if is_lfs_pointer(data):
        raise CheckpointError(path, LFS_POINTER, FETCH_LFS)
    return data


def _write(name: str, data: bytes, target: Path) -> str:
    path = target / name
    if not exists(path.parent):
        backend_of(path).make_folder(path.parent)
    with backend_of(path).open(path, "wb") as file:
        write_all(file, data, path)
        backend_of(path).sync(file)
    return name


def readable_by_transformers_4(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a folder's files with transformers 5's spellings replaced by those that 4 reads too.

    files: name -> content; tokenizer_config.json and special_tokens_map.json may change. Any other content is
    returned unchanged, to the byte.
    """
    config = _json_object(files.get(TOKENIZER_CONFIG))
    tokens_map = _json_object(files.get(_TOKENS_MAP))
    before = json.dumps([config, tokens_map])

    kind = config.get("tokenizer_class")
    if isinstance(kind, str) and kind in _CLASSES:
        config["tokenizer_class"] = _CLASSES[kind]

    # the list of further special tokens, as 5 reads it from both files
    if isinstance(config.get(_NEW_TOKENS_KEY), list) or isinstance(tokens_map.get(_NEW_TOKENS_KEY), list):
        tokens = config.get(_NEW_TOKENS_KEY) or config.get(_OLD_TOKENS_KEY) or tokens_map.get(_OLD_TOKENS_KEY) or []
        if isinstance(tokens, list):
            tokens = list(tokens)
            reads_map = "added_tokens_decoder" not in config
            if reads_map and isinstance(tokens_map.get(_NEW_TOKENS_KEY), list):
                tokens += [token for token in tokens_map[_NEW_TOKENS_KEY] if token not in tokens]
            config[_OLD_TOKENS_KEY] = tokens
            if _OLD_TOKENS_KEY in tokens_map:
                tokens_map[_OLD_TOKENS_KEY] = tokens
        for content in (config, tokens_map):
            if isinstance(content.get(_NEW_TOKENS_KEY), list):
                del content[_NEW_TOKENS_KEY]

    if json.dumps([config, tokens_map]) == before:
        return dict(files)
    result = dict(files)
    for name, content in ((TOKENIZER_CONFIG, config), (_TOKENS_MAP, tokens_map)):
        if content != _json_object(files.get(name)):
            result[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return result


def _json_object(content: bytes | None) -> dict[str, Any]:
    """Return the object in a file that is copied and not judged; {} for any other content."""
    try:
        value = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
