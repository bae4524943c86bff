"""Samples for BERT and T5 from files of sentences: the item of a row of the sample map (`sample_map`), with words hidden (`masking`).

Item i hides some words of sample i with a generator seeded by i alone: BERT puts a mask in each one's place, T5 a sentinel in
the place of each span, and asks for the spans.
"""

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.known_ids import joined
from megatron.core.datasets.masking import MaskingRules, WordPieces, choose_spans, joined_lists


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

    def _sentences(self, i: int) -> tuple[list[list[int]], int, np.random.RandomState]:
        """The sentences of sample i, its target length, and its own generator."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        first, past, target = self.sample_map[i].tolist()
        sentences = self.indexed[first:past]
        places = [(k, 0) for k in range(first, past)]
        joined(sentences, places, self.indexed, len(self.pieces.words), self.pieces.tokenizer)
        random = np.random.RandomState((self.seed + i) % (1 << 32))
        return [sentence.tolist() for sentence in sentences], target, random


@dataclass(eq=False)
class BertDataset(_MaskedDataset):
    """Two parts of a text, in order or swapped, with hidden words; one part without `binary_head`."""

    binary_head: bool = True

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """text, types (0 or 1: which part), labels (-1 where nothing was hidden), padding_mask, loss_mask: int64 [s]; is_random
        (whether the parts are swapped) and truncated: int64."""
        sentences, target, rng = self._sentences(i)
        a, b, swapped = self._two_parts(sentences, rng)
        truncated = _truncate(a, b, target, rng)
        tokens = [self.pieces.cls, *a, self.pieces.sep] + ([*b, self.pieces.sep] if b else [])
        types = [0] * (len(a) + 2) + [1] * (len(tokens) - len(a) - 2)
        words = self.pieces.whole_words(tokens, self.rules.whole_words)
        labels = [-1] * self.seq_length
        shown = list(tokens)
        for span in choose_spans(words, len(tokens), target, self.rules, rng):
            for position in span:
                labels[position] = tokens[position]
                shown[position] = self._shown(tokens[position], rng)
        padding = [self.pieces.pad] * (self.seq_length - len(tokens))
        columns = {
            "text": shown + padding,
            "types": types + padding,
            "labels": labels,
            "is_random": int(swapped),
            # A word that was replaced by the padding token counts as padding, as in the files in the wild.
            "padding_mask": [int(token != self.pieces.pad) for token in shown + padding],
            "loss_mask": [int(label >= 0) for label in labels],
            "truncated": int(truncated),
        }
        return {name: np.array(values, np.int64) for name, values in columns.items()}

    def _two_parts(self, sentences: list[list[int]], rng: np.random.RandomState) -> tuple[list[int], list[int], bool]:
        if not self.binary_head:
            return joined_lists(sentences), [], False
        pivot = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        a, b = joined_lists(sentences[:pivot]), joined_lists(sentences[pivot:])
        swapped = rng.random_sample() < 0.5
        return (b, a, True) if swapped else (a, b, False)

    def _shown(self, token: int, rng: np.random.RandomState) -> int:
        """What stands for a hidden token: mostly the mask, else any word or the token itself."""
        if rng.random_sample() < 0.8:
            return self.pieces.mask
        return int(rng.randint(0, len(self.pieces.words))) if rng.random_sample() >= 0.5 else token


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
        """text_enc, enc_mask [s]; text_dec, labels (-1 for padding), loss_mask, dec_mask [decoder_seq_length]; truncated: all int64.

        The masks of encoder and decoder are 0 at padding, which reads as token 0; `attention_masks` makes pairs of them.
        """
        sentences, target, rng = self._sentences(i)
        tokens = joined_lists(sentences)
        truncated, tokens = len(tokens) > target, tokens[:target]
        words = self.pieces.whole_words(tokens, self.rules.whole_words)
        spans = sorted(choose_spans(words, len(tokens), target, self.rules, rng))
        if len(spans) > len(self.pieces.sentinels):
            raise ValueError(
                f"sample {i} hides {len(spans)} spans, but there are {len(self.pieces.sentinels)} sentinels; raise "
                "--vocab-extra-ids"
            )
        encoder, asked, end = [], [], 0
        for span, sentinel in zip(spans, self.pieces.sentinels):
            encoder += [*tokens[end : span[0]], sentinel]
            asked += [sentinel, *tokens[span[0] : span[-1] + 1]]
            end = span[-1] + 1
        encoder += tokens[end:]
        decoder, labels = [self.pieces.bos, *asked], [*asked, self.pieces.eos]
        padding = self.decoder_seq_length - len(decoder)
        if padding < 0:
            raise ValueError(
                f"sample {i} asks for {len(decoder)} tokens; raise --decoder-seq-length ({self.decoder_seq_length})"
            )
        pad = self.pieces.pad
        columns = {
            "text_enc": encoder + [pad] * (self.seq_length - len(encoder)),
            "text_dec": decoder + [pad] * padding,
            "labels": labels + [-1] * padding,
            "loss_mask": [1] * len(labels) + [0] * padding,
            "truncated": int(truncated),
        }
        item = {name: np.array(values, np.int64) for name, values in columns.items()}
        for mask, text in (("enc_mask", "text_enc"), ("dec_mask", "text_dec")):
            item[mask] = (item[text] != pad).astype(np.int64)
        for text in ("text_enc", "text_dec", "labels"):
            item[text][item[text] == pad] = 0
        return item


def attention_masks(enc_mask: np.ndarray, dec_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which keys a query may not see, for the encoder, the decoder, and the decoder's look at the encoder.

    enc_mask [b, s], dec_mask [b, t]: 0 at padding, as T5's items have them. Bool [b, 1, s, s], [b, 1, t, t], [b, 1, t, s], True
    where a pair is hidden: where either is padding and, in the decoder, where the key comes after the query.
    """

    def seen(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return (queries[:, None, :, None] > 0) & (keys[:, None, None, :] > 0)

    earlier = np.tri(dec_mask.shape[1], dtype=bool)  # a key at or before its query
    return ~seen(enc_mask, enc_mask), ~(seen(dec_mask, dec_mask) & earlier), ~seen(dec_mask, enc_mask)
