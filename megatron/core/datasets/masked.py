"""Samples for BERT and T5: which sentences make up sample i, and which of its words are hidden, Megatron's choices to the last.

A sample is a run of sentences of one document, as long as a target length that is drawn for it:

    document      s0 s1 s2 s3 s4 s5 s6            row (first sentence, one past the last, target length)
    samples       |s0 s1 s2|s3 s4|s5 s6|          (0, 3, 128), (3, 5, 40), (5, 7, 128)

Item i hides some words of sample i with a generator seeded by i alone: BERT puts a mask in each one's place, T5 a sentinel in
the place of each span, and asks for the spans. The files hold one sentence a sequence, as preprocessing with
--split-sentences writes them.
"""

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megatron.core.config import FlagConfig, Share, knob
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.known_ids import joined

_LONG_SENTENCE = 512  # a document of several sentences with one longer than this is left out
_UINT32 = 1 << 32


@dataclass(frozen=True)
class MaskedDataConfig(FlagConfig):
    """Masked words, for pretrain_bert.py."""

    mask_prob: Annotated[float, "(0, 1)"] = knob(0.15, "share of a sample's words that the model restores")
    short_seq_prob: Share = knob(
        0.1, "share of samples that are shorter than --seq-length asks: of any length from 2 on"
    )
    bert_binary_head: bool = knob(
        True,
        "restore words only: a sample may then be one sentence, and nothing is asked about the order of two",
        flags=("--bert-no-binary-head",),
    )


@dataclass(frozen=True)
class MaskingRules:
    """How words are hidden. geometric: span lengths as SpanBERT draws them (arXiv:1907.10529), else with weights 1/n."""

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    longer_ngrams: bool = False
    geometric: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1 or self.max_ngram < 1:
            raise ValueError(
                f"--mask-prob ({self.probability}) must lie between 0 and 1, max_ngram ({self.max_ngram}) be at least 1"
            )
        if self.geometric and self.longer_ngrams:
            raise ValueError("geometric span lengths have no use for longer_ngrams; give one of them")


@dataclass(frozen=True)
class SampleRequest:
    """Which samples: ids_range counts documents; num_samples None takes each document once.

    max_length: of a sample's sentences together, without special tokens; short_probability: of a target below it.
    """

    ids_range: tuple[int, int]
    num_samples: int | None
    max_length: int
    min_sentences: int
    short_probability: float
    seed: int

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"{self.max_length} tokens of text in a sample are too few; raise --seq-length")
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"--short-seq-prob ({self.short_probability}) must lie between 0 and 1")


# -------------------------------------------------------------------- which sentences


def build_sample_map(lengths: np.ndarray, document_array: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Rows (first sentence, one past the last, target length), shuffled: [rows, 3] uint32, uint64 where needed.

    There are rows of whole passes over the documents until `num_samples` are reached. Raises ValueError if no document
    gives a sample. A row takes about 2 microseconds, its sentences a few nanoseconds each.
    """
    documents = _eligible_documents(lengths, document_array, request)
    if not len(documents):
        raise ValueError(
            f"none of {request.ids_range[1] - request.ids_range[0]} documents gives a sample: each needs at least "
            f"{request.min_sentences} sentence(s), none of them over {_LONG_SENTENCE} tokens; preprocess with "
            "--split-sentences, or use --bert-no-binary-head, for which one sentence is enough"
        )
    begin = int(documents[0, 0])  # sentences are counted from here, so that only those of the split are held
    ends = np.cumsum(np.append(0, lengths[begin : documents[-1, 1]]), dtype=np.int64)
    documents = (documents - begin).tolist()
    targets, passes, count = _target_lengths(request), [], 0
    while not passes or (request.num_samples is not None and count < request.num_samples):
        passes.append(_rows_of_pass(documents, ends, request.min_sentences, targets))
        count += len(passes[-1])
    rows = np.concatenate(passes)
    rows[:, :2] += begin
    return rows.astype(np.uint64 if len(lengths) >= _UINT32 else np.uint32)[_fisher_yates(count, request.seed + 1)]


def _eligible_documents(lengths: np.ndarray, document_array: np.ndarray, request: SampleRequest) -> np.ndarray:
    """(first sentence, one past the last) of the documents that give samples: [documents, 2] int64."""
    first, past = request.ids_range
    borders = np.asarray(document_array[first : past + 1], np.int64)
    documents = np.stack((borders[:-1], borders[1:]), axis=1)
    documents = documents[documents[:, 1] > documents[:, 0]]
    if not len(documents):
        return documents
    begin = documents[0, 0]
    longest = np.maximum.reduceat(lengths[begin : documents[-1, 1]], documents[:, 0] - begin)
    sizes = documents[:, 1] - documents[:, 0]
    return documents[(sizes >= request.min_sentences) & ((sizes == 1) | (longest <= _LONG_SENTENCE))]


def _rows_of_pass(
    documents: list[list[int]], ends: np.ndarray, min_sentences: int, targets: Iterator[int]
) -> np.ndarray:
    """The rows of one pass over the documents: [rows, 3] int64. ends: the tokens before each sentence, and of all.

    Sentences are added until the target is reached, unless only one would remain; the next target is drawn at each row. The
    token sums never fall, so that the sentence which reaches a target is looked up and not walked to.
    """
    firsts, pasts, chosen = array("q"), array("q"), array("q")
    tokens_before = memoryview(ends)  # its items are plain numbers, at half the price of numpy's
    for start, past in documents:
        target = next(targets)
        while start < past:
            end = bisect_left(tokens_before, tokens_before[start] + target, start + 1, past)
            end = max(end, start + min_sentences)
            if end >= past - 1:
                end = past
            firsts.append(start)
            pasts.append(end)
            chosen.append(target)
            start, target = end, next(targets)
    return np.stack([np.frombuffer(column, np.int64) for column in (firsts, pasts, chosen)], axis=1)


def _target_lengths(request: SampleRequest) -> Iterator[int]:
    """One target after the other: the maximum, or with the short probability one from 2 to it."""
    longest = request.max_length
    if not request.short_probability:
        return itertools.repeat(longest)
    ratio = _one_in(request.short_probability)
    rng = np.random.RandomState(request.seed % _UINT32)

    def block() -> list[int]:
        draws = rng.randint(0, _UINT32, 4096, dtype=np.uint32).astype(np.int64)
        return np.where(draws % ratio == 0, 2 + draws % (longest - 1), longest).tolist()

    return itertools.chain.from_iterable(iter(block, None))


def _one_in(probability: float) -> int:
    """One draw in how many is taken: 1 / probability as C rounds it, halves up (Python's `round` takes 2.5 to 2).

    What does not fit C's int32 stands for a number above every draw, so that only the draw 0 is taken.
    """
    inverse = 1 / probability + 0.5
    return int(inverse) if inverse < 1 << 31 else _UINT32


def _fisher_yates(count: int, seed: int) -> np.ndarray:
    """The order in which 0..count-1 end up, each i from the last down having changed places with draw % (i + 1)."""
    sizes = np.arange(count, 1, -1, dtype=np.uint64)
    draws = np.fromiter(mersenne_twister_64(seed), np.uint64, len(sizes))
    order = np.arange(count)
    places = memoryview(order)
    for i, j in zip(range(count - 1, 0, -1), memoryview((draws % sizes).astype(np.int64))):
        places[i], places[j] = places[j], places[i]
    return order


def mersenne_twister_64(seed: int) -> Iterator[int]:
    """The draws of MT19937-64 (Nishimura, ACM TOMACS 10, 2000), a block of 312 at a time."""
    n, m = 312, 156
    upper, lower, twist = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF), np.uint64(0xB5026F5AA96619E9)
    words = [seed % (1 << 64)]
    for i in range(1, n):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % (1 << 64))
    state = np.array(words, np.uint64)

    def next_words(own: np.ndarray, following: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        mixed = (own & upper) | (following & lower)
        return ahead ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), twist, np.uint64(0))

    while True:
        state[:m] = next_words(state[:m], state[1 : m + 1], state[m:])
        state[m : n - 1] = next_words(state[m : n - 1], state[m + 1 :], state[: m - 1])
        state[n - 1 :] = next_words(state[n - 1 :], state[:1], state[m - 1 : m])
        x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield from (x ^ (x >> np.uint64(43))).tolist()


# -------------------------------------------------------------------- which words


def choose_spans(
    words: list[list[int]], count: int, target: int, rules: MaskingRules, rng: np.random.RandomState
) -> Iterator[list[int]]:
    """The positions of one hidden span after the other.

    words: the positions of each word's tokens; count: tokens of the sample; target: its target length, which bounds the
    budget too. The generator is shared with the caller, who draws between two spans.
    """
    budget = min(rules.probability * target, max(1, round(count * rules.probability)))
    weights = 1.0 / np.arange(1, rules.max_ngram + 1)
    weights /= weights.sum(keepdims=True)
    weights = weights[::-1] if rules.longer_ngrams else weights
    chances = np.cumsum(
        weights / weights.sum(keepdims=True)
    )  # as RandomState.choice sums them; it would anew at each draw
    chances = (chances / chances[-1]).tolist()
    starts = list(range(len(words)))
    rng.shuffle(starts)
    hidden: set[int] = set()
    for start in starts:
        if len(hidden) >= budget:
            return
        if rules.geometric:
            size = min(int(rng.geometric(0.2)), rules.max_ngram)
        else:
            size = 1 + bisect_right(chances, rng.random_sample())
        span = _joined(words[start : start + size])
        while len(hidden) + len(span) > budget and size > 1:
            size -= 1
            span = _joined(words[start : start + size])
        if len(hidden) + len(span) > budget or hidden.intersection(span):
            continue
        hidden.update(span)
        yield span


@dataclass(frozen=True)
class WordPieces:
    """What the masked data sets know of the tokenizer. words: the text of each token id; tokenizer: its name, for messages."""

    words: tuple[str, ...]
    cls: int
    sep: int
    mask: int
    pad: int
    bos: int = -1
    eos: int = -1
    sentinels: tuple[int, ...] = ()
    tokenizer: str = "the tokenizer of this run"

    def whole_words(self, tokens: list[int], whole: bool) -> list[list[int]]:
        """The positions of each word's tokens, without those of CLS and SEP; whole False: each token is a word."""
        found: list[list[int]] = []
        for position, token in enumerate(tokens):
            if token in (self.cls, self.sep):
                continue
            if whole and found and self.words[token].startswith("##"):
                found[-1].append(position)
            else:
                found.append([position])
        return found


def _joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


# -------------------------------------------------------------------- items


class _MaskedDataset:
    """Samples of `sample_map`; a subclass makes the item of one."""

    def __init__(
        self,
        indexed: IndexedDataset,
        sample_map: np.ndarray,
        seq_length: int,
        seed: int,
        pieces: WordPieces,
        rules: MaskingRules,
    ):
        self.indexed, self.sample_map, self.seq_length = indexed, sample_map, seq_length
        self.seed, self.pieces, self.rules = seed, pieces, rules

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
        random = np.random.RandomState((self.seed + i) % _UINT32)
        return [sentence.tolist() for sentence in sentences], target, random


class BertDataset(_MaskedDataset):
    """Two parts of a text, in order or swapped, with hidden words; one part without `binary_head`."""

    def __init__(self, *parts, binary_head: bool = True, **more):
        super().__init__(*parts, **more)
        self.binary_head = binary_head

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
            return _joined(sentences), [], False
        pivot = rng.randint(1, len(sentences)) if len(sentences) >= 3 else 1
        a, b = _joined(sentences[:pivot]), _joined(sentences[pivot:])
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


class T5Dataset(_MaskedDataset):
    """A text with a sentinel in the place of each hidden span, and the spans behind their sentinels."""

    def __init__(self, *parts, decoder_seq_length: int, **more):
        super().__init__(*parts, **more)
        self.decoder_seq_length = decoder_seq_length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """text_enc, enc_mask [s]; text_dec, labels (-1 for padding), loss_mask, dec_mask [decoder_seq_length]; truncated: all int64.

        The masks of encoder and decoder are 0 at padding, which reads as token 0; `attention_masks` makes pairs of them.
        """
        sentences, target, rng = self._sentences(i)
        tokens = _joined(sentences)
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
