"""Megatron's `MegatronTokenizer.from_pretrained`."""

import json
from pathlib import Path
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_registry import Tokenizer

METADATA = "tokenizer_metadata.json"  # Megatron's file beside a tokenizer
# Megatron's library -> our type. Of the library "megatron" the path is the type.
TYPES = {
    "huggingface": "HuggingFaceTokenizer",
    "null": "NullTokenizer",
    "null-text": "NullTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
}


class MegatronTokenizer:
    """Makes tokenizers from a path and what Megatron writes beside it."""

    def __init__(self) -> None:
        raise OSError(
            "MegatronTokenizer is not built by itself; call MegatronTokenizer.from_pretrained(tokenizer_path)"
        )

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | dict[str, Any] | None = None, **kwargs: Any
    ) -> Tokenizer:
        """Return the tokenizer of a file or folder.

        metadata_path: a dictionary, or a file of JSON, whose "library" is one of Megatron's; default: the file
        tokenizer_metadata.json beside the tokenizer, and where there is none the library that reads such a file.
        kwargs: vocab_file, merges_file, vocab_size, num_special_tokens, special_tokens, pattern, as Megatron passes
        them; others have no effect. Raises ValueError for a library that is not known.
        """
        library = _library(tokenizer_path, metadata_path)
        kind = tokenizer_path if library == "megatron" else TYPES.get(library)
        if kind is None:
            raise ValueError(
                f"the tokenizer library {library!r} is not known; use one of {', '.join((*TYPES, 'megatron'))}"
            )
        settings: dict[str, Any] = {"tokenizer_type": kind}
        if library not in ("megatron", "null", "null-text"):
            settings["tokenizer_model"] = tokenizer_path
        for name, ours in (("vocab_file", "vocab_file"), ("merges_file", "merge_file"), ("vocab_size", "vocab_size")):
            if kwargs.get(name) is not None:
                settings[ours] = kwargs[name]
        if library == "tiktoken":
            for name in ("pattern", "num_special_tokens", "special_tokens"):
                if kwargs.get(name) is not None:
                    settings[f"tiktoken_{name}"] = kwargs[name]
        return build_tokenizer(TokenizerConfig(**settings))

    @staticmethod
    def write_metadata(tokenizer_path: str, tokenizer_library: str, **others: Any) -> None:
        """Write the library beside a tokenizer, for `from_pretrained`. others: kept in the file."""
        _metadata_file(tokenizer_path).write_text(json.dumps({"library": tokenizer_library, **others}))


def _library(tokenizer_path: str | None, metadata: str | dict[str, Any] | None) -> str:
    """Return Megatron's name of the library that reads a tokenizer."""
    if metadata is None and tokenizer_path is not None and _metadata_file(tokenizer_path).exists():
        metadata = str(_metadata_file(tokenizer_path))
    if isinstance(metadata, str):
        metadata = json.loads(Path(metadata).read_text())
    if metadata is not None:
        return str(metadata.get("library"))
    return "sentencepiece" if str(tokenizer_path).endswith(".model") else "huggingface"


def _metadata_file(tokenizer_path: str) -> Path:
    """Return the path of Megatron's file beside a tokenizer, a file or a folder."""
    path = Path(tokenizer_path)
    return (path if path.is_dir() else path.parent) / METADATA


__getattr__ = names_of_megatron(__name__)
