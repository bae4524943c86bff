"""The interface of a tokenizer, and the registry from which `--tokenizer-type` chooses one.

A script adds its own, whose name then is a value of the flag:

    TOKENIZERS["Letters"] = TokenizerType(lambda config: Letters(config.vocab_file), needs=("vocab_file",))
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.tokenizers import hf_tokenizer_json, huggingface_bpe_wordpiece_tiktoken, sentencepiece_tokenizer


class Tokenizer(Protocol):
    """The attributes and methods that the rest of the code uses.

    A tokenizer may also have `tokenize_batch`, many texts in one call, and `pad_is_text`: whether its pad also occurs
    in texts. One for masked words also has cls, sep, mask (ids) and vocab, inv_vocab (token to id and back). If its
    `tokenize` adds tokens, it also has `tokenize_sentences`, which does not: masked data sets put their own tokens
    around a sample.
    """

    name: str
    vocab_size: int  # every id is below it
    eod: int | None  # the id that ends a document; None: there is none, and none can be appended
    pad: int | None  # None: there is none

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class TokenizerType:
    """One value of --tokenizer-type.

    build: makes the tokenizer from a `TokenizerConfig`; it raises ValueError (or OSError) with the flag to change, and
    ImportError if a library is missing. needs: fields of the config that must be given; reads: other fields that it
    reads. computes: a text that is equal for types that give equal ids from equal files; a resume compares it.
    """

    build: Callable[[Any], Tokenizer]
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    computes: str | None = None


class NullTokenizer:
    """A tokenizer of texts that are ids: "5 17 3" is [5, 17, 3].

    Ids are 0 to vocab_size - 1, and one for end-of-document.
    """

    name = "NullTokenizer"
    pad = None

    def __init__(self, vocab_size: int, eod: int | None = None):
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size if eod is None else eod

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer reads only numbers separated by spaces: {error}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"token ids from {min(ids)} to {max(ids)}: all must be between 0 and {self.vocab_size - 1}"
            )
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)


_SENTINELS = ("vocab_extra_ids",)
_TIKTOKEN = ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
_MODEL = ("tokenizer_model",)
_BERT = TokenizerType(huggingface_bpe_wordpiece_tiktoken.bert_word_piece_tokenizer, ("vocab_file",), _SENTINELS)

# (build, needs, reads) of each type
_TYPES = {
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
    "GPT2BPETokenizer": TokenizerType(
        huggingface_bpe_wordpiece_tiktoken.gpt2_bpe_tokenizer, ("vocab_file", "merge_file")
    ),
    "SentencePieceTokenizer": TokenizerType(sentencepiece_tokenizer.sentence_piece_tokenizer, _MODEL, _SENTINELS),
    "GPTSentencePieceTokenizer": TokenizerType(sentencepiece_tokenizer.gpt_sentence_piece_tokenizer, _MODEL),
    "Llama2Tokenizer": TokenizerType(sentencepiece_tokenizer.llama2_tokenizer, _MODEL),
    "HuggingFaceTokenizer": TokenizerType(
        hf_tokenizer_json.huggingface_tokenizer, _MODEL, ("tokenizer_transformers_version",)
    ),
    "TikTokenizer": TokenizerType(huggingface_bpe_wordpiece_tiktoken.tik_tokenizer, _MODEL, _TIKTOKEN),
    "NullTokenizer": TokenizerType(
        lambda config: NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id),
        ("vocab_size",),
        ("null_tokenizer_eod_id",),
    ),
}
_NAMED_TYPES = {name: replace(kind, computes=name) for name, kind in _TYPES.items()}
TOKENIZERS: Registry[TokenizerType] = Registry("TOKENIZERS", TokenizerType, _NAMED_TYPES)
