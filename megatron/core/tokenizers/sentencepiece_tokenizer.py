"""Tokenizers over the package `sentencepiece`, from a tokenizer.model: plain, GPT-style and Llama-style.

Plain: special tokens are added after the model's own pieces, as Megatron numbers them, and text may contain them by
name. GPT-style: the model's pieces alone. Llama-style: those, and every text begins with `<s>`. For the file of a
published T5 (the files beside it tell) the sentinels of transformers are added in place of Megatron's tokens.
"""

import functools
import itertools
import os
import re
from typing import Any

from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.hf_special_tokens import read_json_object
from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import check_exists


class PieceTokenizer:
    """A sentencepiece model. first: ids that begin every text; last: those that end it."""

    def __init__(self, name: str, path: str, model: Any, first: tuple[int, ...] = (), last: tuple[int, ...] = ()):
        self.name = name
        self.path = path
        self.vocab_size = model.get_piece_size()
        self.bos = model.bos_id()
        self.eos = model.eos_id()
        self.unk = model.unk_id()
        self.eod = self.eos
        self.pad = model.pad_id() if model.pad_id() >= 0 else None
        self._model = model
        self._first = list(first)
        self._last = list(last)

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
        """Return the ids of each text without those that begin and end every text.

        Data sets put special tokens around their samples themselves.
        """
        return self._model.encode(texts, out_type=int, num_threads=1)

    def detokenize(self, ids: list[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class SpecialPieceTokenizer(PieceTokenizer):
    """A sentencepiece model with <CLS>, <SEP>, <EOD>, <MASK>, padding, begin, end and <extra_id_...> added to it."""

    def __init__(self, name: str, path: str, model: Any, extra_ids: int):
        super().__init__(name, path, model)
        self.special: dict[str, int] = {}
        # in this order, which decides their ids
        self.cls = self._add("<CLS>")
        self.sep = self._add("<SEP>")
        self.eod = self._add("<EOD>")
        self.mask = self._add("<MASK>")
        self.pad = self._add_piece(model.pad_id(), "<PAD>")
        self.bos = self._add_piece(model.bos_id(), "<BOS>")
        self.eos = self._add_piece(model.eos_id(), "<EOS>")
        self.additional_special_tokens_ids = [self._add(f"<extra_id_{i}>") for i in range(extra_ids)]
        self.vocab_size = len(self.vocab)

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern:
        """A pattern of all special tokens, the longest first."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _add(self, token: str) -> int:
        """Make `token` special, with the next free id unless it is a piece; returns its id."""
        self.special[token] = self.vocab.setdefault(token, len(self.vocab))
        return self.special[token]

    def _add_piece(self, i: int, name: str) -> int:
        """Make the model's own piece i special, or a token of this name where i is negative; returns its id."""
        return self._add(self._model.id_to_piece(i) if i >= 0 else name)

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text.

        The name of a special token in a text becomes its id, and the parts between are encoded by themselves.
        """
        # cut each text into ordinary parts (even) and special tokens (odd), and encode all ordinary parts in one call
        parts_of_texts = [self._special_pattern.split(text) for text in texts]
        ordinary = [part for parts in parts_of_texts for part in parts[::2]]
        encoded = iter(super().tokenize_sentences(ordinary))

        result = []
        for parts in parts_of_texts:
            ids = next(encoded)
            for special_token in parts[1::2]:
                ids = [*ids, self.special[special_token], *next(encoded)]
            result.append(ids)
        return result

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids`; special tokens appear by name."""
        names = {i: token for token, i in self.special.items()}
        words: list[str] = []
        for is_special, group in itertools.groupby(map(int, ids), names.__contains__):
            group_ids = list(group)
            if is_special:
                words += [names[i] for i in group_ids]
            else:
                words.append(self._model.decode(group_ids))
        return " ".join(words)


class HFT5SentencePieceTokenizer(SpecialPieceTokenizer):
    """The sentencepiece model of a published T5, with the ids of transformers.

    After the pieces come the sentinels in reverse, <extra_id_0> last. `</s>` ends every text, and nothing begins it.
    """

    def __init__(self, name: str, path: str, model: Any, extra_ids: int):
        PieceTokenizer.__init__(self, name, path, model, last=(model.eos_id(),))
        self.bos = None  # nor are there cls, sep and mask
        piece_ids = [i for i in (model.pad_id(), model.eos_id(), model.unk_id()) if i >= 0]
        self.special = {model.id_to_piece(i): i for i in piece_ids}
        sentinels = [self._add(f"<extra_id_{k}>") for k in reversed(range(extra_ids))]
        self.additional_special_tokens_ids = sentinels[::-1]  # from <extra_id_0> on
        self.vocab_size = len(self.vocab)


_T5_CLASSES = ("T5Tokenizer", "MT5Tokenizer")


def _t5_sentinels(path: str) -> int | None:
    """Return how many sentinels transformers adds to the model `path`; None if it is not that of a published T5.

    A published T5 is known by tokenizer_class in tokenizer_config.json, or without it by model_type in config.json.
    """
    folder = os.path.dirname(path)
    config = read_json_object(folder, "tokenizer_config.json")
    kind = config.get("tokenizer_class")
    if kind is None:
        is_t5 = read_json_object(folder, "config.json").get("model_type") in ("t5", "mt5")
    else:
        is_t5 = isinstance(kind, str) and kind.removesuffix("Fast") in _T5_CLASSES
    if not is_t5:
        return None
    count = config.get("extra_ids", 100)
    return count if type(count) is int else 100


def _load(config: Any) -> Any:
    """Read the sentencepiece model. Raises ValueError for a file that is none."""
    sentencepiece = optional_package("sentencepiece", config.tokenizer_type)
    check_exists(config.tokenizer_model, "--tokenizer-model")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=config.tokenizer_model)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{config.tokenizer_model} is not a sentencepiece model: {error}") from None


def sentence_piece_tokenizer(config: Any) -> SpecialPieceTokenizer:
    """Build Megatron's tokenizer, with special tokens after the pieces.

    In a published T5's folder it is that of transformers.
    """
    model = _load(config)
    path = config.tokenizer_model
    sentinels = _t5_sentinels(path)
    if sentinels is not None and model.eos_id() >= 0:
        return HFT5SentencePieceTokenizer("SentencePieceTokenizer", path, model, config.vocab_extra_ids or sentinels)
    return SpecialPieceTokenizer("SentencePieceTokenizer", path, model, config.vocab_extra_ids)


def gpt_sentence_piece_tokenizer(config: Any) -> PieceTokenizer:
    """Build a tokenizer of the model's pieces alone."""
    tokenizer = PieceTokenizer("GPTSentencePieceTokenizer", config.tokenizer_model, _load(config))
    _check_has_end(tokenizer, config)
    return tokenizer


def llama2_tokenizer(config: Any) -> PieceTokenizer:
    """Build a tokenizer of the model's pieces, where `<s>` begins every text."""
    model = _load(config)
    if model.bos_id() < 0:
        raise ValueError(f"{config.tokenizer_model} has no begin-of-text piece; use GPTSentencePieceTokenizer")
    tokenizer = PieceTokenizer("Llama2Tokenizer", config.tokenizer_model, model, first=(model.bos_id(),))
    _check_has_end(tokenizer, config)
    return tokenizer


def _check_has_end(tokenizer: PieceTokenizer, config: Any) -> None:
    if tokenizer.eod < 0:
        raise ValueError(
            f"{config.tokenizer_model} has no end-of-text piece, which must end each document; train it with one"
        )
