"""Which sentences make up sample i of a masked data set, Megatron's choices to the last, as pure functions over numpy
arrays.

A sample is a run of sentences of one document, as long as a target length that is drawn for it:

    document      s0 s1 s2 s3 s4 s5 s6            row (first sentence, one past the last, target length)
    samples       |s0 s1 s2|s3 s4|s5 s6|          (0, 3, 128), (3, 5, 40), (5, 7, 128)

The files hold one sentence a sequence, as preprocessing with --split-sentences writes them.
"""

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_LONG_SENTENCE = 512  # a document of several sentences with one longer than this is left out
_UINT32 = 1 << 32


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
    targets, passes = _target_lengths(request), []
    count = 0
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
    rows = array("q")
    tokens_before = memoryview(ends)  # its items are plain numbers, at half the price of numpy's
    for start, past in documents:
        target = next(targets)
        while start < past:
            end = bisect_left(tokens_before, tokens_before[start] + target, start + 1, past)
            end = max(end, start + min_sentences)
            if end >= past - 1:
                end = past
            rows.extend((start, end, target))
            start, target = end, next(targets)
    return np.frombuffer(rows, np.int64).reshape(-1, 3)


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
    upper, lower = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
    twist = np.uint64(0xB5026F5AA96619E9)
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
