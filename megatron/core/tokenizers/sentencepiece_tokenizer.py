"""Tokenizers that the package `sentencepiece` runs, from a tokenizer.model: plain, GPT-style and Llama-style.

Plain: special tokens are added after the model's own pieces, as Megatron numbers them, and text may hold them by name.
GPT-style: the model's pieces alone. Llama-style: those, and every text begins with `<s>`. The file of a published T5,
which the
files beside it tell, has the sentinels of transformers in the place of Megatron's tokens.
"""

import functools
import itertools
import os
import re
from typing import Any

from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.bpe_wordpiece_tiktoken import check_exists
from megatron.core.tokenizers.hf_special_tokens import object_in


class PieceTokenizer:
    """A sentencepiece model. first: ids that begin every text; last: those that end it."""

    def __init__(self, name: str, path: str, model: Any, first: tuple[int, ...] = (), last: tuple[int, ...] = ()):
        self.name, self.path = name, path
        self.vocab_size = model.get_piece_size()
        self.bos, self.eos = model.bos_id(), model.eos_id()
        self.unk, self.eod = model.unk_id(), self.eos
        self.pad = model.pad_id() if model.pad_id() >= 0 else None
        self._model = model
        self._first, self._last = list(first), list(last)

    @functools.cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {self._model.id_to_piece(i): i for i in range(self._model.get_piece_size())}

    @functools.cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id -> token."""
        return {i: token for token, i in self.vocab.items()}

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._first + ids + self._last for ids in self.tokenize_sentences(texts)]

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        """`tokenize` of each without what begins and ends every text: parts of a sample, around which data sets put
        tokens."""
        return self._model.encode(texts, out_type=int, num_threads=1)

    def detokenize(self, ids: list[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class SpecialPieceTokenizer(PieceTokenizer):
    """A sentencepiece model with <CLS>, <SEP>, <EOD>, <MASK>, padding, begin, end and <extra_id_...> added to it."""

    def __init__(self, name: str, path: str, model: Any, extra_ids: int):
        super().__init__(name, path, model)
        self.special: dict[str, int] = {}
        self.cls, self.sep = self._add("<CLS>"), self._add("<SEP>")
        self.eod, self.mask = self._add("<EOD>"), self._add("<MASK>")
        self.pad = self._add_own(model.pad_id(), "<PAD>")
        self.bos, self.eos = self._add_own(model.bos_id(), "<BOS>"), self._add_own(model.eos_id(), "<EOS>")
        self.additional_special_tokens_ids = [self._add(f"<extra_id_{i}>") for i in range(extra_ids)]
        self.vocab_size = len(self.vocab)

    @functools.cached_property
    def _cut(self) -> re.Pattern:
        """The special tokens, the longest first."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _add(self, token: str) -> int:
        self.special[token] = self.vocab.setdefault(token, len(self.vocab))
        return self.special[token]

    def _add_own(self, i: int, name: str) -> int:
        """The model's own piece i, or one of this name where it has none."""
        return self._add(self._model.id_to_piece(i) if i >= 0 else name)

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        """Ids; the name of a special token in a text becomes its id, and the parts between are encoded by themselves."""
        parts = [self._cut.split(text) for text in texts]  # odd parts are special tokens
        plain = iter(super().tokenize_sentences([part for cut in parts for part in cut[::2]]))
        result = []
        for cut in parts:
            ids = next(plain)
            for token in cut[1::2]:
                ids = [*ids, self.special[token], *next(plain)]
            result.append(ids)
        return result

    def detokenize(self, ids: list[int]) -> str:
        """Text of `ids`; special tokens appear by name."""
        names = {i: token for token, i in self.special.items()}
        words: list[str] = []
        for special, run in itertools.groupby(map(int, ids), names.__contains__):
            found = list(run)
            words += [names[i] for i in found] if special else [self._model.decode(found)]
        return " ".join(words)


class T5PieceTokenizer(SpecialPieceTokenizer):
    """The sentencepiece model of a published T5, with the ids of transformers: after the pieces come the sentinels, the
    first of
    them last, and `</s>` ends a text, which has no begin."""

    def __init__(self, name: str, path: str, model: Any, extra_ids: int):
        PieceTokenizer.__init__(self, name, path, model, last=(model.eos_id(),))
        self.bos = None  # nor are there cls, sep and mask
        own = [i for i in (model.pad_id(), model.eos_id(), model.unk_id()) if i >= 0]
        self.special = {model.id_to_piece(i): i for i in own}
        self.additional_special_tokens_ids = [self._add(f"<extra_id_{k}>") for k in reversed(range(extra_ids))][::-1]
        self.vocab_size = len(self.vocab)


_OF_T5 = ("T5Tokenizer", "MT5Tokenizer")


def _sentinels_of_t5(path: str) -> int | None:
    """How many sentinels transformers adds to the model `path`; None if it is not that of a published T5.

    The folder says so, by tokenizer_class in tokenizer_config.json, or by model_type in config.json where there is no
    such class.
    """
    folder = os.path.dirname(path)
    config = object_in(folder, "tokenizer_config.json")
    kind = config.get("tokenizer_class")
    if kind is None:
        is_t5 = object_in(folder, "config.json").get("model_type") in ("t5", "mt5")
    else:
        is_t5 = isinstance(kind, str) and kind.removesuffix("Fast") in _OF_T5
    count = config.get("extra_ids", 100)
    return (count if type(count) is int else 100) if is_t5 else None


def _load(config: Any) -> Any:
    sentencepiece = optional_package("sentencepiece", config.tokenizer_type)
    check_exists(config.tokenizer_model, "--tokenizer-model")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=config.tokenizer_model)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{config.tokenizer_model} is no sentencepiece model: {error}") from None


def sentence_piece_tokenizer(config: Any) -> SpecialPieceTokenizer:
    """Megatron's: special tokens after the pieces. For the file in a published T5's folder: transformers'."""
    model, path = _load(config), config.tokenizer_model
    sentinels = _sentinels_of_t5(path)
    if sentinels is not None and model.eos_id() >= 0:
        return T5PieceTokenizer("SentencePieceTokenizer", path, model, config.vocab_extra_ids or sentinels)
    return SpecialPieceTokenizer("SentencePieceTokenizer", path, model, config.vocab_extra_ids)


def gpt_sentence_piece_tokenizer(config: Any) -> PieceTokenizer:
    return _with_end(PieceTokenizer("GPTSentencePieceTokenizer", config.tokenizer_model, _load(config)), config)


def llama2_tokenizer(config: Any) -> PieceTokenizer:
    model = _load(config)
    if model.bos_id() < 0:
        raise ValueError(f"{config.tokenizer_model} has no begin-of-text piece; use GPTSentencePieceTokenizer")
    return _with_end(PieceTokenizer("Llama2Tokenizer", config.tokenizer_model, model, (model.bos_id(),)), config)


def _with_end(tokenizer: PieceTokenizer, config: Any) -> PieceTokenizer:
    if tokenizer.eod < 0:
        raise ValueError(f"{config.tokenizer_model} has no end-of-text piece, which ends documents; train it with one")
    return tokenizer
