"""Read the vocabulary of the tokenizer in a Hugging Face folder. Its files are read as data; none of them is run.

No torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.convert.formats.hf_config_and_safetensors_headers import json_of
from megatron.convert.hf_provenance_and_tokenizer_files import TOKENIZER_CONFIG, aux_files_in, read_aux_file
from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.vocabulary_changes_and_embedding_rows import checked, in_tokenizer_json


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token -> id, from the first file that holds a vocabulary; None for a folder without such a file.

    Raises ValueError, OSError or ImportError for a file that cannot be read.
    """
    files = aux_files_in(folder)
    for name, read in _READERS.items():
        if name not in files:
            continue
        vocabulary = read(read_aux_file(folder, name), folder / name)
        if name == "tokenizer.json" or "added_tokens.json" not in files:  # tokenizer.json has the added tokens itself
            return vocabulary
        return vocabulary | _read_json_vocabulary(read_aux_file(folder, "added_tokens.json"), folder)
    return None


def read_bos_eos_ids(folder: Path) -> dict[str, int]:
    """Return bos_token_id and eos_token_id, by the tokens that the folder's files name.

    An id that they do not name is absent. Raises ValueError, OSError, ImportError or CheckpointError for a file
    that cannot be read.
    """
    config = _read_object(folder, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in config:
        # a folder from before this key: special_tokens_map.json then takes precedence, as in transformers
        config |= _read_object(folder, "special_tokens_map.json")
    tokens = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        tokens[f"{name}_id"] = token.get("content") if isinstance(token, dict) else token
    vocabulary = {}
    if any(tokens.values()):
        vocabulary = read_vocabulary(folder) or {}
    return {key: vocabulary[token] for key, token in tokens.items() if isinstance(token, str) and token in vocabulary}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return a file's JSON object; {} if the folder does not have the file."""
    if name not in aux_files_in(folder):
        return {}
    return json_of(read_aux_file(folder, name), folder / name)


def _read_tokenizer_json(data: bytes, path: Path) -> dict[str, int]:
    return in_tokenizer_json(json_of(data, path))


def _read_json_vocabulary(data: bytes, path: Path) -> dict[str, int]:
    return checked(json_of(data, path))


def _read_lines(data: bytes, path: Path) -> dict[str, int]:
    lines = data.decode().removesuffix("\n").split("\n")
    return checked({line.rstrip("\r"): i for i, line in enumerate(lines)})


def _read_sentencepiece(data: bytes, path: Path) -> dict[str, int]:
    sentencepiece = optional_package("sentencepiece", "SentencePieceTokenizer")
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
    return {model.id_to_piece(i): i for i in range(model.get_piece_size())}


# in the order in which they are looked for
_READERS: Mapping[str, Callable[[bytes, Path], dict[str, int]]] = {
    "tokenizer.json": _read_tokenizer_json,
    "vocab.json": _read_json_vocabulary,
    "vocab.txt": _read_lines,
    "tokenizer.model": _read_sentencepiece,
    "spiece.model": _read_sentencepiece,
}
