"""The tokenizers, each a class with the members of `Tokenizer`, chosen by name in `TOKENIZERS`."""

from collections.abc import Callable
from typing import Protocol

from megatron.core.tokenizers import library, sentence_piece
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.tokenizers.word_memory import packed


class Tokenizer(Protocol):
    """What the rest of the code relies on. A tokenizer may also have `tokenize_batch` (many texts
    in one call) or `tokenize_packed`, see below.

    Those made for masked words have cls, sep, mask (ids) and vocab, inv_vocab (token to id and back) besides.
    """

    name: str
    vocab_size: int  # every id is below it
    eod: int  # the id that ends a document
    pad: int | None  # None: there is none

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


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


def null_tokenizer(config: TokenizerConfig) -> NullTokenizer:
    return NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id)


# A fork adds its own here.
TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "BertWordPieceLowerCase": library.bert_word_piece_tokenizer,
    "BertWordPieceCase": library.bert_word_piece_tokenizer,
    "GPT2BPETokenizer": library.gpt2_bpe_tokenizer,
    "SentencePieceTokenizer": sentence_piece.sentence_piece_tokenizer,
    "GPTSentencePieceTokenizer": sentence_piece.gpt_sentence_piece_tokenizer,
    "Llama2Tokenizer": sentence_piece.llama2_tokenizer,
    "HuggingFaceTokenizer": library.huggingface_tokenizer,
    "TikTokenizer": library.tik_tokenizer,
    "NullTokenizer": null_tokenizer,
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `config` names.

    Raises ValueError (or its file-system kin) with the flag to change, ImportError if the library it needs is missing.
    """
    if config.tokenizer_type is None:
        raise ValueError(f"no tokenizer; set --tokenizer-type to one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[config.tokenizer_type](config)


def tokenize_packed(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    """The ids of each text, end to end as int32 of this machine: what the tokenizer is fastest at."""
    if hasattr(tokenizer, "tokenize_packed"):
        return tokenizer.tokenize_packed(texts)
    if hasattr(tokenizer, "tokenize_batch"):
        return list(map(packed, tokenizer.tokenize_batch(texts)))
    return [packed(tokenizer.tokenize(text)) for text in texts]
