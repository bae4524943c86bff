"""Samples for BERT and T5 from files of sentences: the rows of a map (`sample_map`) as items, with words hidden (`masking`).

Item i hides some words of sample i with a generator seeded by i alone: BERT puts a mask in each one's place, T5 a
sentinel in
the place of each span, and asks for the spans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.ambiguous_pad_token import FILLED
from megatron.core.datasets.mask_selection import MaskingRules, WordPieces, choose_spans, joined_lists
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.vocab_check import joined


class TextSample(NamedTuple):
    """The sentences of a sample, its target length, and its own generator."""

    sentences: list[list[int]]
    target: int
    rng: np.random.RandomState


@dataclass(eq=False)
class _MaskedDataset:
    """The samples of `sample_map`; a subclass makes the item of one."""

    indexed: IndexedDataset
    sample_map: np.ndarray
    seq_length: int
    seed: int
    pieces: WordPieces
    rules: MaskingRules

    def __len__(self) -> int:
        return len(self.sample_map)

    def _text(self, i: int) -> TextSample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        row = self.sample_map[i].tolist()  # first sentence, one past the last, target length
        numbers = range(*row[:2])
        sentences = self.indexed[row[0] : row[1]]
        pieces, places = self.pieces, [(k, 0) for k in numbers]
        joined(sentences, places, self.indexed, len(pieces.words), pieces.tokenizer, pieces.beyond)
        rng = np.random.RandomState((self.seed + i) % (1 << 32))
        return TextSample([sentence.tolist() for sentence in sentences], row[2], rng)

    def _spans(self, tokens: list[int], text: TextSample) -> Iterator[list[int]]:
        words = self.pieces.whole_words(tokens, self.rules.whole_words)
        return choose_spans(words, len(tokens), text.target, self.rules, text.rng)


@dataclass(eq=False)
class BertDataset(_MaskedDataset):
    """Two parts of a text, in order or swapped, with hidden words; one part without `binary_head`."""

    binary_head: bool = True

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """text, types (0 or 1: which part), labels (-1 where nothing was hidden), padding_mask, loss_mask: int64 [s];
        is_random
        (whether the parts are swapped) and truncated: int64."""
        text = self._text(i)
        parts, swapped = self._two_parts(text)
        a, b = parts
        truncated = _truncate(a, b, text.target, text.rng)
        tokens = [self.pieces.cls, *a, self.pieces.sep] + ([*b, self.pieces.sep] if b else [])
        types = [0] * (len(a) + 2) + [1] * (len(tokens) - len(a) - 2)
        labels, shown = [-1] * self.seq_length, list(tokens)
        for span in self._spans(tokens, text):
            for position in span:
                labels[position] = tokens[position]
                shown[position] = self._shown(tokens[position], text.rng)
        pad, labels = self.pieces.pad, np.array(labels, np.int64)
        tokens, shown = (_padded(row, self.seq_length, FILLED) for row in (tokens, shown))
        padding = tokens == FILLED
        if not self.pieces.pad_is_text:  # a word that was replaced by the pad counts as padding, as in Megatron core
            padding |= (shown == pad) & (tokens != pad)
        return {
            "text": np.where(shown == FILLED, pad, shown),
            "types": _padded(types, self.seq_length, 0),
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "padding_mask": (~padding).astype(np.int64),
            "loss_mask": (labels >= 0).astype(np.int64),
            "truncated": np.array(truncated, np.int64),
        }

    def _two_parts(self, text: TextSample) -> tuple[list[list[int]], bool]:
        """(the parts as they stand, whether they are swapped)"""
        if not self.binary_head:
            return [joined_lists(text.sentences), []], False
        count = len(text.sentences)
        pivot = text.rng.randint(1, count) if count >= 3 else 1
        parts = [joined_lists(text.sentences[:pivot]), joined_lists(text.sentences[pivot:])]
        swapped = text.rng.random_sample() < 0.5
        return parts[::-1] if swapped else parts, bool(swapped)

    def _shown(self, token: int, rng: np.random.RandomState) -> int:
        """The token in the place of a hidden one: mostly the mask, else any word or the token itself."""
        if rng.random_sample() < 0.8:
            return self.pieces.mask
        return int(rng.randint(0, len(self.pieces.words))) if rng.random_sample() >= 0.5 else token


def _padded(values: list[int], length: int, fill: int) -> np.ndarray:
    return np.array(values + [fill] * (length - len(values)), np.int64)


def _truncate(a: list[int], b: list[int], target: int, rng: np.random.RandomState) -> bool:
    """Cut the longer of two lists at either end, token by token, until both have at most `target`; whether any was cut."""
    truncated = len(a) + len(b) > target
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if rng.random_sample() < 0.5 else -1)
    return truncated


@dataclass(eq=False)
class T5Dataset(_MaskedDataset):
    """A text with a sentinel in the place of each hidden span, and the spans behind their sentinels."""

    decoder_seq_length: int

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """text_enc, enc_mask [s]; text_dec, labels (-1 for padding), loss_mask, dec_mask [decoder_seq_length];
        truncated: int64.

        The masks of encoder and decoder are 0 at padding, which reads as token 0; `attention_masks` makes pairs of them.
        """
        text = self._text(i)
        pieces, length = self.pieces, self.decoder_seq_length
        whole = joined_lists(text.sentences)
        tokens = whole[: text.target]
        spans = sorted(self._spans(tokens, text))
        if len(spans) > len(pieces.sentinels):
            counts = f"{len(spans)} spans, but there are {len(pieces.sentinels)} sentinels"
            raise ValueError(f"sample {i} hides {counts}; raise --vocab-extra-ids")
        encoder, end = [], 0
        asked: list[int] = []
        for span, sentinel in zip(spans, pieces.sentinels):
            encoder += [*tokens[end : span[0]], sentinel]
            asked += [sentinel, *tokens[span[0] : span[-1] + 1]]
            end = span[-1] + 1
        if len(asked) >= length:
            raise ValueError(f"sample {i} asks for {len(asked) + 1} tokens; raise --decoder-seq-length ({length})")
        item = {
            "text_enc": _padded(encoder + tokens[end:], self.seq_length, FILLED),
            "text_dec": _padded([pieces.bos, *asked], length, FILLED),
            "labels": _padded([*asked, pieces.eos], length, FILLED),
            "loss_mask": _padded([1] * (len(asked) + 1), length, 0),
            "truncated": np.array(len(whole) > len(tokens), np.int64),
        }
        for mask, name in (("enc_mask", "text_enc"), ("dec_mask", "text_dec")):
            padding = item[name] == FILLED
            item[mask] = (~padding).astype(np.int64)
            item[name][padding] = 0
        return item


def attention_masks(enc_mask: np.ndarray, dec_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which keys a query may not see, for the encoder, the decoder, and the decoder's look at the encoder.

    enc_mask [b, s], dec_mask [b, t]: 0 at padding, as T5's items have them. Bool [b, 1, s, s], [b, 1, t, t], [b, 1, t,
    s], True
    where a pair is hidden: where either is padding and, in the decoder, where the key comes after the query.
    """

    def seen(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return (queries[:, None, :, None] > 0) & (keys[:, None, None, :] > 0)

    earlier = np.tri(dec_mask.shape[1], dtype=bool)  # a key at or before its query
    return ~seen(enc_mask, enc_mask), ~(seen(dec_mask, dec_mask) & earlier), ~seen(dec_mask, enc_mask)
