"""The tokenizer of a checkpoint, and no other: tools that read text for a trained model build it here."""

import sys
from dataclasses import replace
from typing import Any

from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.convert.read_hf_token_to_id import read_vocabulary
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference import SavedSettings
from megatron.core.storage.path_or_url import path_of
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256
from megatron.core.tokenizers.vocabulary_changes_and_embedding_rows import changed_or_lost_tokens, vocabulary_of


def tokenizer_of_checkpoint(
    tokenizer_flags: dict[str, Any], saved: SavedSettings, state: dict[str, Any], source: str
) -> Tokenizer:
    """Build the tokenizer of a checkpoint. Raises ConfigError for another one, and what building a tokenizer raises.

    tokenizer_flags: fields of `TokenizerConfig` from the command line, which override the checkpoint's. state: of the
    checkpoint. source: its name in errors.
    """
    tokenizer_config = replace(saved.tokenizer, **tokenizer_flags)
    for flag, reason in tokenizer_config.without_effect.items():
        if flag[2:].replace("-", "_") in tokenizer_flags:
            print(f"no effect here: {flag}: {reason}", file=sys.stderr, flush=True)
    try:
        tokenizer = build_tokenizer(tokenizer_config)
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; if it has moved since the training, give its new place by this flag") from None
    if (tokenizer_config.model_vocab_size or tokenizer.vocab_size) != saved.vocab_size:
        raise ConfigError(
            f"the checkpoint has a vocabulary of {saved.vocab_size}, the tokenizer ({tokenizer.name}) one of "
            f"{tokenizer.vocab_size}; give the checkpoint's tokenizer: --tokenizer-type and its files"
        )
    if state.get("tokenizer_sha256") not in (None, tokenizer_sha256(tokenizer_config, tokenizer)):
        raise ConfigError(
            f"the tokenizer ({tokenizer.name}) has the size of the checkpoint's tokenizer, but its files differ; give the "
            "checkpoint's: --tokenizer-type and its files"
        )
    check_folder_vocabulary(state, source, tokenizer)
    return tokenizer


def check_folder_vocabulary(state: dict[str, Any], source: str, tokenizer: Tokenizer) -> None:
    """Check that a Hugging Face folder's model is used with that folder's tokenizer.

    Raises ConfigError if it is not.
    """
    origin = Provenance.in_state(state, source)
    vocabulary = vocabulary_of(tokenizer)
    if origin is None or vocabulary is None or state.get("tokenizer_sha256") is not None:
        return  # no such folder, no vocabulary to compare, or the hash has been compared already
    try:
        folder_vocabulary = read_vocabulary(path_of(origin.folder))
    except (ValueError, OSError, ImportError):  # an unreadable vocabulary is not compared
        return
    if folder_vocabulary is None:
        return
    differing = changed_or_lost_tokens(folder_vocabulary, vocabulary)
    if differing:
        raise ConfigError(
            f"{source} holds a model of another tokenizer than {tokenizer.name}: {differing}; leave the flags of the tokenizer "
            "out to take the folder's"
        )
