"""The tokens of the tokenizer that lies in a Hugging Face folder. Its files are read as data; none of them is run. No
torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.convert.formats.read_hf_folder import json_of
from megatron.convert.hf_origin import carried_in, read_carried
from megatron.convert.hf_tokenizer_config import TOKENIZER_CONFIG
from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.vocabulary_diff import checked, in_tokenizer_json


def vocabulary_in(folder: Path) -> dict[str, int] | None:
    """Token -> id, of the folder's first file that holds a whole vocabulary; None without such a file.

    Raises ValueError, OSError or ImportError for a file that cannot be read.
    """
    there = carried_in(folder)
    for name, read in _READERS.items():
        if name in there:
            found = read(read_carried(folder, name), folder / name)
            is_whole = name == "tokenizer.json" or "added_tokens.json" not in there
            return found if is_whole else found | _plain(read_carried(folder, "added_tokens.json"), folder)
    return None


def end_ids_in(folder: Path) -> dict[str, int]:
    """bos_token_id and eos_token_id, by the tokens that the files name; without an id that they do not say.

    Raises ValueError, OSError, ImportError or CheckpointError for a file that cannot be read.
    """
    said = _object(folder, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in said:  # the other file is older, and then counts, as in transformers
        said |= _object(folder, "special_tokens_map.json")
    tokens = {f"{name}_id": said.get(name) for name in ("bos_token", "eos_token")}
    tokens = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    ids = vocabulary_in(folder) or {} if any(tokens.values()) else {}
    return {key: ids[token] for key, token in tokens.items() if isinstance(token, str) and token in ids}


def _object(folder: Path, name: str) -> dict[str, Any]:
    return json_of(read_carried(folder, name), folder / name) if name in carried_in(folder) else {}


def _fast(data: bytes, path: Path) -> dict[str, int]:
    return in_tokenizer_json(json_of(data, path))


def _plain(data: bytes, path: Path) -> dict[str, int]:
    return checked(json_of(data, path))


def _lines(data: bytes, path: Path) -> dict[str, int]:
    lines = data.decode().removesuffix("\n").split("\n")
    return checked({line.rstrip("\r"): i for i, line in enumerate(lines)})


def _pieces(data: bytes, path: Path) -> dict[str, int]:
    sentencepiece = optional_package("sentencepiece", "SentencePieceTokenizer")
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ValueError(f"{path} is no sentencepiece model: {error}") from None
    return {model.id_to_piece(i): i for i in range(model.get_piece_size())}


_READERS: Mapping[str, Callable[[bytes, Path], dict[str, int]]] = {
    "tokenizer.json": _fast,
    "vocab.json": _plain,
    "vocab.txt": _lines,
    "tokenizer.model": _pieces,
    "spiece.model": _pieces,
}
