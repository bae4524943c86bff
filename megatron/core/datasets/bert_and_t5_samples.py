"""Samples for BERT and T5 from files of sentences: rows of a sample map (`sentence_sample_map`), with hidden words.

Item i hides some words of sample i (`choose_masked_spans`) with a generator seeded by seed + i. BERT puts a mask in the
place of each hidden word; T5 puts a sentinel in the place of each hidden span, and its decoder must write the spans:

    text     Thank you for inviting me to your party        hidden: "for inviting" and "party"
    BERT     Thank you [MASK] [MASK] me to your [MASK]
    T5       encoder  Thank you <0> me to your <1>
             decoder  <bos> <0> for inviting <1> party      labels  <0> for inviting <1> party <eos>
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.choose_masked_spans import MaskingRules, WordPieces, choose_spans, concatenate
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.pad_token_is_text import FILLED
from megatron.core.datasets.token_ids_without_embedding_row import concatenate_checked


class TextSample(NamedTuple):
    """The sentences of a sample, its target length, and its own generator."""

    sentences: list[list[int]]
    target: int
    rng: np.random.RandomState


@dataclass(eq=False)
class _MaskedDataset:
    """The samples of `sample_map`, [samples, 3]; a subclass makes an item of each."""

    indexed: IndexedDataset
    sample_map: np.ndarray
    seq_length: int
    seed: int
    pieces: WordPieces
    rules: MaskingRules

    def __len__(self) -> int:
        return len(self.sample_map)

    def _text(self, i: int) -> TextSample:
        """Read the sentences of sample i."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        first, past, target = self.sample_map[i].tolist()
        sentences = self.indexed[first:past]
        # check the token ids; the concatenation itself is not needed
        pieces = self.pieces
        places = [(sentence, 0) for sentence in range(first, past)]
        concatenate_checked(sentences, places, self.indexed, len(pieces.words), pieces.tokenizer, pieces.without_row)
        rng = np.random.RandomState((self.seed + i) % (1 << 32))
        return TextSample([sentence.tolist() for sentence in sentences], target, rng)

    def _spans(self, tokens: list[int], text: TextSample) -> Iterator[list[int]]:
        words = self.pieces.whole_words(tokens, self.rules.whole_words)
        return choose_spans(words, len(tokens), text.target, self.rules, text.rng)


@dataclass(eq=False)
class BertDataset(_MaskedDataset):
    """Two parts of a text, in order or swapped, with hidden words; one part without `binary_head`."""

    binary_head: bool = True

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return item i: int64 arrays, [s] unless noted.

        text; types: 0 or 1, which part; labels: -1 where nothing was hidden; padding_mask: 0 at padding; loss_mask: 1
        where a word was hidden. Scalars: is_random, whether the parts are swapped; truncated, whether text was cut off.
        """
        text = self._text(i)
        (a, b), swapped = self._two_parts(text)
        truncated = _truncate(a, b, text.target, text.rng)

        # [CLS] a [SEP] b [SEP]
        pieces = self.pieces
        tokens = [pieces.cls, *a, pieces.sep]
        types = [0] * len(tokens)
        if b:
            tokens += [*b, pieces.sep]
            types += [1] * (len(b) + 1)

        # hide words; the draws of a span and of what is shown in its place alternate, as in Megatron
        labels = [-1] * self.seq_length
        shown = list(tokens)
        for span in self._spans(tokens, text):
            for position in span:
                labels[position] = tokens[position]
                shown[position] = self._replacement(tokens[position], text.rng)

        # pad to [s]
        labels = np.array(labels, np.int64)
        tokens = _pad(tokens, self.seq_length, FILLED)
        shown = _pad(shown, self.seq_length, FILLED)
        is_padding = tokens == FILLED
        if not pieces.pad_is_text:  # a word that was replaced by the pad counts as padding, as in Megatron core
            is_padding |= (shown == pieces.pad) & (tokens != pieces.pad)
        return {
            "text": np.where(shown == FILLED, pieces.pad, shown),
            "types": _pad(types, self.seq_length, 0),
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "padding_mask": (~is_padding).astype(np.int64),
            "loss_mask": (labels >= 0).astype(np.int64),
            "truncated": np.array(truncated, np.int64),
        }

    def _two_parts(self, text: TextSample) -> tuple[list[list[int]], bool]:
        """Return (the two parts in the order of the sample, whether they are swapped).

        The second is empty without a head.
        """
        if not self.binary_head:
            return [concatenate(text.sentences), []], False
        count = len(text.sentences)
        pivot = text.rng.randint(1, count) if count >= 3 else 1
        parts = [concatenate(text.sentences[:pivot]), concatenate(text.sentences[pivot:])]
        swapped = text.rng.random_sample() < 0.5
        if swapped:
            parts.reverse()
        return parts, bool(swapped)

    def _replacement(self, token: int, rng: np.random.RandomState) -> int:
        """Return the token shown for a hidden one: 80 % the mask, 10 % any token, 10 % the hidden token itself."""
        if rng.random_sample() < 0.8:
            return self.pieces.mask
        if rng.random_sample() >= 0.5:
            return int(rng.randint(0, len(self.pieces.words)))
        return token


def _pad(values: list[int], length: int, fill: int) -> np.ndarray:
    """Pad `values` to int64 [length]."""
    return np.array(values + [fill] * (length - len(values)), np.int64)


def _truncate(a: list[int], b: list[int], target: int, rng: np.random.RandomState) -> bool:
    """Shorten two lists in place to at most `target` tokens together; returns whether any token was cut off.

    One token at a time is cut off the longer list, at a random end.
    """
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
        """Return item i, int64: text_enc, enc_mask [s]; text_dec, labels, loss_mask, dec_mask [t]; truncated, a scalar.

        s is seq_length, t is decoder_seq_length. labels are -1 at padding. enc_mask and dec_mask are 0 at padding,
        where the text is token 0; `batched_attention_masks` makes masks of pairs of them.
        """
        text = self._text(i)
        pieces = self.pieces
        full_text = concatenate(text.sentences)
        tokens = full_text[: text.target]
        spans = sorted(self._spans(tokens, text))
        if len(spans) > len(pieces.sentinels):
            raise ValueError(
                f"sample {i} masks {len(spans)} spans, but there are only {len(pieces.sentinels)} sentinels; raise "
                "--vocab-extra-ids"
            )

        # encoder: a sentinel in the place of each span; decoder: each sentinel and its span
        encoder: list[int] = []
        decoder: list[int] = []
        end = 0  # of the last span
        for span, sentinel in zip(spans, pieces.sentinels):
            first, past = span[0], span[-1] + 1
            encoder += [*tokens[end:first], sentinel]
            decoder += [sentinel, *tokens[first:past]]
            end = past
        encoder += tokens[end:]
        length = self.decoder_seq_length
        if len(decoder) >= length:
            raise ValueError(
                f"sample {i} needs {len(decoder) + 1} tokens in the decoder; raise --decoder-seq-length ({length})"
            )

        # pad to [s] and [t]
        text_enc = _pad(encoder, self.seq_length, FILLED)
        text_dec = _pad([pieces.bos, *decoder], length, FILLED)
        enc_mask = text_enc != FILLED
        dec_mask = text_dec != FILLED
        return {
            "text_enc": np.where(enc_mask, text_enc, 0),
            "text_dec": np.where(dec_mask, text_dec, 0),
            "labels": _pad([*decoder, pieces.eos], length, FILLED),
            "loss_mask": _pad([1] * (len(decoder) + 1), length, 0),
            "truncated": np.array(len(full_text) > len(tokens), np.int64),
            "enc_mask": enc_mask.astype(np.int64),
            "dec_mask": dec_mask.astype(np.int64),
        }


def batched_attention_masks(enc_mask: np.ndarray, dec_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the masks of the encoder, of the decoder, and of the decoder's cross-attention to the encoder.

    enc_mask [b, s], dec_mask [b, t]: 0 at padding, as T5's items have them. The masks: bool [b, 1, s, s], [b, 1, t, t]
    and [b, 1, t, s], True where a query may not see a key: where either is padding and, in the decoder, where the key
    comes after the query.
    """

    def visible(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return (queries[:, None, :, None] > 0) & (keys[:, None, None, :] > 0)  # [b, 1, queries, keys]

    causal = np.tri(dec_mask.shape[1], dtype=bool)  # [t, t], a key at or before its query
    encoder_mask = ~visible(enc_mask, enc_mask)
    decoder_mask = ~(visible(dec_mask, dec_mask) & causal)
    cross_attention_mask = ~visible(dec_mask, enc_mask)
    return encoder_mask, decoder_mask, cross_attention_mask
