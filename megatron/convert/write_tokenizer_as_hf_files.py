"""Write the tokenizer of a run as the files of a Hugging Face folder, for a model that did not begin as such a folder.

    GPT2BPETokenizer         vocab.json, merges.txt, tokenizer.json, tokenizer_config.json
    BertWordPiece...         vocab.txt, tokenizer_config.json
    HuggingFaceTokenizer     tokenizer.json, and what lies beside it

The other types have no counterpart with the same ids, or no files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.convert.hf_provenance_and_tokenizer_files import (
    GENERATION,
    OTHER_FOLDER,
    TOKENIZER_CONFIG,
    aux_files_in,
    read_aux_file,
)
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256

_GPT2_END = "<|endoftext|>"


def files_of_tokenizer(
    settings: Mapping[str, Any] | None, sha256: str | None, note: Callable[[str], object]
) -> dict[str, bytes]:
    """Return name -> content of the files of a run's tokenizer; {} if there are none to write.

    settings: the tokenizer's, as a checkpoint holds them. sha256: its hash in the run; files that have changed since
    are not written. note: called with a line about why nothing is written.
    """
    kind = (settings or {}).get("tokenizer_type")
    if kind is None or kind == "NullTokenizer":
        note(f"no tokenizer is written: the run had none with files; {OTHER_FOLDER}")
        return {}
    if kind not in _WRITERS:
        note(f"no tokenizer is written: transformers has none with the ids of a {kind}; {OTHER_FOLDER}")
        return {}
    try:
        config = build(TokenizerConfig, dict(settings))
        tokenizer = build_tokenizer(config)
        if sha256 is not None and tokenizer_sha256(config, tokenizer) != sha256:
            note(f"no tokenizer is written: its files have changed since the run; {OTHER_FOLDER}")
            return {}
        return _WRITERS[kind](config, tokenizer)
    except (ConfigError, CheckpointError, ValueError, OSError, ImportError) as error:
        note(f"no tokenizer is written: {error}; {OTHER_FOLDER}")
        return {}


def _gpt2(config: TokenizerConfig, tokenizer: Any) -> dict[str, bytes]:
    library = type(tokenizer.library).from_str(tokenizer.library.to_str())  # a copy
    library.add_special_tokens([_GPT2_END])  # it is in the vocabulary, and keeps its id
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), _GPT2_END),
    }
    return {
        "vocab.json": Path(config.vocab_file).read_bytes(),
        "merges.txt": Path(config.merge_file).read_bytes(),
        "tokenizer.json": library.to_str(pretty=True).encode(),
        TOKENIZER_CONFIG: _as_json(settings),
    }


def _bert(config: TokenizerConfig, tokenizer: Any) -> dict[str, bytes]:
    normalizer = tokenizer.rules["normalizer"]
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }
    return {"vocab.txt": Path(config.vocab_file).read_bytes(), TOKENIZER_CONFIG: _as_json(settings)}


def _hugging_face(config: TokenizerConfig, tokenizer: Any) -> dict[str, bytes]:
    path = Path(tokenizer.path)
    files = {}
    for name in aux_files_in(path.parent):
        if name != GENERATION:  # it is of a model
            files[name] = read_aux_file(path.parent, name)
    files["tokenizer.json"] = path.read_bytes()  # the file may have another name
    return files


def _as_json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2) + "\n").encode()


_WRITERS: dict[str, Callable[[TokenizerConfig, Any], dict[str, bytes]]] = {
    "GPT2BPETokenizer": _gpt2,
    "BertWordPieceLowerCase": _bert,
    "BertWordPieceCase": _bert,
    "HuggingFaceTokenizer": _hugging_face,
}
