"""The tokenizers, each a class with the members of `Tokenizer`, chosen by name in `TOKENIZERS`."""

import os
from collections.abc import Callable
from typing import Any, Protocol

from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

# The names under which published tokenizers keep these tokens, in the order in which they are looked for.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]")


class Tokenizer(Protocol):
    """What the rest of the code relies on."""

    name: str
    vocab_size: int  # every id is below it
    eod: int  # the id that ends a document
    pad: int | None  # None: there is none

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, name: str, tokenizer: Any, eod: int, pad: int | None):
        self.name = name
        self.eod = eod
        self.pad = pad
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
        self._tokenizer = tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`; with those that the tokenizer's own template adds, such as a first `<s>`."""
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class NullTokenizer:
    """Text that is numbers already: "5 17 3" is [5, 17, 3]. Ids 0 to vocab_size - 1, and one more: end-of-document."""

    name = "NullTokenizer"
    pad = None

    def __init__(self, vocab_size: int, eod: int | None = None):
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size if eod is None else eod

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer reads whole numbers separated by spaces: {error}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"ids from {min(ids)} to {max(ids)} are not all between 0 and {self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "GPT2BPETokenizer and HuggingFaceTokenizer need the package tokenizers: pip install tokenizers"
        ) from None
    return tokenizers


def _check_exists(path: str, flag: str) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{flag} {path}: there is no such file")


def gpt2_bpe_tokenizer(config: TokenizerConfig) -> LibraryTokenizer:
    """GPT-2's byte-level BPE. `<|endoftext|>` within a text is read as the characters it is made of, as in Megatron."""
    library = _library()
    _check_exists(config.vocab_file, "--vocab-file")
    _check_exists(config.merge_file, "--merge-file")
    try:
        model = library.models.BPE.from_file(config.vocab_file, config.merge_file)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{config.vocab_file} and {config.merge_file} make no BPE: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    eod = tokenizer.token_to_id(EOD_NAMES[0])
    if eod is None:
        raise ValueError(f"{config.vocab_file} has no {EOD_NAMES[0]}, which ends documents; is it GPT-2's vocab.json?")
    return LibraryTokenizer("GPT2BPETokenizer", tokenizer, eod, None)


def huggingface_tokenizer(config: TokenizerConfig) -> LibraryTokenizer:
    """What the tokenizer.json says. Its end-of-document token is the first of EOD_NAMES among its special tokens."""
    library = _library()
    path = config.tokenizer_model
    path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    _check_exists(path, "--tokenizer-model")
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    eod, pad = (next((special[name] for name in names if name in special), None) for names in (EOD_NAMES, PAD_NAMES))
    if eod is None:
        raise ValueError(
            f"{path} has no special token that ends documents: it has {sorted(special) or 'none'}, looked for are "
            f"{', '.join(EOD_NAMES)}; add one of them to the file"
        )
    return LibraryTokenizer("HuggingFaceTokenizer", tokenizer, eod, pad)


def null_tokenizer(config: TokenizerConfig) -> NullTokenizer:
    return NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id)


# A fork adds its own here.
TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": gpt2_bpe_tokenizer,
    "HuggingFaceTokenizer": huggingface_tokenizer,
    "NullTokenizer": null_tokenizer,
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names.

    Raises ValueError (or its file-system kin) with the flag to change, ImportError if the library it needs is missing.
    """
    if config.tokenizer_type is None:
        raise ValueError(f"no tokenizer; set --tokenizer-type to one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[config.tokenizer_type](config)
