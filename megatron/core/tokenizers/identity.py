"""Which tokenizer this is, by what its files hold: another one of the same size gives other ids to the same text."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron.core.config import changes
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.tokenizers.tokenizers import TOKENIZERS

_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_NOT_READ = ("truncation", "padding")  # of a tokenizer.json: settings of whoever saved it last


def tokenizer_sha256(config: TokenizerConfig, tokenizer: Any) -> str:
    """SHA-256 of what `config` and its files say, and of the ids that end and pad a document.

    A file may move, and a JSON file may be laid out anew: only its content counts. Settings of other types of tokenizer, such
    as --merge-file without a BPE, tell nothing apart. tokenizer: the one that `config` builds.
    """
    # Without what has its default: a flag that comes later leaves the hash of older settings as it is.
    others = {name for kind in TOKENIZERS.values() for name in (*kind.needs, *kind.reads)}
    others -= {*config.type.needs, *config.type.reads}
    said = {name: value for name, (_, value) in changes(config).items() if name not in others}
    paths = {name: path for name in _FILES if (path := said.pop(name, None)) is not None}
    said |= {"ids": tokenizer.vocab_size} | {name: getattr(tokenizer, name, None) for name in ("eod", "pad")}
    said |= {name: _content(path) for name, path in paths.items()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _content(path: str) -> str | None:
    """SHA-256 of what a file holds; None for one that cannot be read."""
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
