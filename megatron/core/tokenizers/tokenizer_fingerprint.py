"""A hash of the tokenizer's settings and files: another vocabulary of the same size gives other ids to the same text."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import changes
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS

_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_NOT_READ = ("truncation", "padding")  # of a tokenizer.json: settings of whoever saved it last


def tokenizer_sha256(config: TokenizerConfig, tokenizer: Any) -> str:
    """SHA-256 of `config`, the content of its files, and the ids that end and pad a document.

    Only the content of a file counts: it may move, and a JSON file may be formatted anew. Settings that only other types of
    tokenizer read, such as --merge-file without a BPE, do not count. tokenizer: built from `config`.
    """
    # Defaults are left out, so that a new flag does not change the hash of older settings.
    others = {name for kind in TOKENIZERS.values() for name in (*kind.needs, *kind.reads)}
    others -= {*config.type.needs, *config.type.reads}
    said = {name: value for name, (_, value) in changes(config).items() if name not in others}
    paths = {name: path for name in _FILES if (path := said.pop(name, None)) is not None}
    said |= {"ids": tokenizer.vocab_size} | {name: getattr(tokenizer, name, None) for name in ("eod", "pad")}
    # Only where there is something to say, so that the hash of a tokenizer.json that says all by itself stays.
    said |= {"beside": beside} if (beside := getattr(tokenizer, "beside", None)) else {}
    said |= {name: _content(path) for name, path in paths.items()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _content(path: str) -> str | None:
    """SHA-256 of the content of a file; None if it cannot be read."""
    path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    try:
        held = json.loads(content)
    except (ValueError, RecursionError):  # not JSON
        return hashlib.sha256(content).hexdigest()
    if isinstance(held, dict):
        held = {key: value for key, value in held.items() if key not in _NOT_READ}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
