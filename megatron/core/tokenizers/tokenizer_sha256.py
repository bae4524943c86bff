"""Hash the tokenizer's settings and files.

A checkpoint keeps the hash, since another vocabulary of the same size gives other ids to the same text. The keys of
what is hashed are therefore data: they cannot be renamed.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import changes
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS

_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_NOT_HASHED = ("truncation", "padding")  # keys of a tokenizer.json: settings of its last user, which are not read


def tokenizer_sha256(config: TokenizerConfig, tokenizer: Any) -> str:
    """Return the SHA-256 of `config`, the content of its files, and the ids that end and pad a document.

    Only the content of a file counts: it may move, and a JSON file may be formatted anew. Settings that only other
    types of tokenizer read, such as --merge-file without a BPE, do not count. tokenizer: built from `config`.
    """
    # settings that only other types read
    others = set()
    for kind in TOKENIZERS.values():
        others |= {*kind.needs, *kind.reads}
    others -= {*config.type.needs, *config.type.reads}

    # the settings that differ from their defaults, so that a new flag does not change the hash of older settings
    content = {name: value for name, (_, value) in changes(config).items() if name not in others}
    paths = {}
    for name in _FILES:
        path = content.pop(name, None)
        if path is not None:
            paths[name] = path

    content["ids"] = tokenizer.vocab_size
    for name in ("eod", "pad"):
        content[name] = getattr(tokenizer, name, None)
    # only where there is something, so that the hash of a tokenizer.json that needs no other file stays
    hashed_changes = getattr(tokenizer, "hashed_changes", None)
    if hashed_changes:
        content["beside"] = hashed_changes
    for name, path in paths.items():
        content[name] = _file_sha256(path)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: str) -> str | None:
    """Return the SHA-256 of the content of a file, or of a folder's tokenizer.json; None if it cannot be read."""
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # not JSON
        return hashlib.sha256(content).hexdigest()
    if isinstance(value, dict):
        value = {key: entry for key, entry in value.items() if key not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
