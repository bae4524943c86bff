"""Decide which sentences make up sample i of a masked data set: bit for bit Megatron's `build_mapping` (helpers.cpp).

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

_LONG_SENTENCE = 512  # tokens; a document of several sentences with a longer one is left out
_UINT32 = 1 << 32


@dataclass(frozen=True)
class SampleRequest:
    """The samples of a split. The names of the fields are part of the hash that names a cache: they cannot change.

    ids_range: the documents [first, past) of the split. num_samples: None takes each document once. max_length: tokens
    of a sample's sentences together, without special tokens. short_probability: of a target length below max_length.
    """

    ids_range: tuple[int, int]
    num_samples: int | None
    max_length: int
    min_sentences: int
    short_probability: float
    seed: int

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"{self.max_length} tokens of text per sample are too few; raise --seq-length")
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"--short-seq-prob ({self.short_probability}) must be between 0 and 1")


def build_sample_map(lengths: np.ndarray, document_array: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Return rows (first sentence, one past the last, target length), shuffled: [rows, 3] uint32, uint64 where needed.

    Epochs over the documents are added until there are `num_samples` rows; the last one is complete. Raises ValueError
    if no document gives a sample. A row takes about 2 microseconds, its sentences a few nanoseconds each.

    lengths: [sentences], tokens of each. document_array: [documents + 1], sentences before each document.
    """
    documents = _eligible_documents(lengths, document_array, request)  # [documents, 2]
    if not len(documents):
        raise ValueError(
            f"none of {request.ids_range[1] - request.ids_range[0]} documents gives a sample: a sample needs a "
            f"document of at least {request.min_sentences} sentence(s), without a sentence of more than "
            f"{_LONG_SENTENCE} tokens; preprocess with --split-sentences, or use --bert-no-binary-head, which needs "
            "only one sentence"
        )

    # count sentences from the first of the split, so that only the split's sentences are in memory
    begin = int(documents[0, 0])
    tokens_before = np.cumsum(np.append(0, lengths[begin : documents[-1, 1]]), dtype=np.int64)  # [sentences + 1]
    documents = (documents - begin).tolist()

    targets = _target_lengths(request)
    rows_of_epochs = []
    count = 0
    while True:
        rows_of_epochs.append(_rows_of_epoch(documents, tokens_before, request.min_sentences, targets))
        count += len(rows_of_epochs[-1])
        if request.num_samples is None or count >= request.num_samples:
            break
    rows = np.concatenate(rows_of_epochs)  # [rows, 3]
    rows[:, :2] += begin
    dtype = np.uint64 if len(lengths) >= _UINT32 else np.uint32
    return rows.astype(dtype)[_fisher_yates(count, request.seed + 1)]


def _eligible_documents(lengths: np.ndarray, document_array: np.ndarray, request: SampleRequest) -> np.ndarray:
    """Return (first sentence, one past the last) of the documents that give samples: [documents, 2] int64.

    They have enough sentences, and if there are several, none is too long.
    """
    first, past = request.ids_range
    borders = np.asarray(document_array[first : past + 1], np.int64)
    documents = np.stack((borders[:-1], borders[1:]), axis=1)  # [documents, 2]
    documents = documents[documents[:, 1] > documents[:, 0]]  # without empty ones
    if not len(documents):
        return documents
    begin = documents[0, 0]
    longest = np.maximum.reduceat(lengths[begin : documents[-1, 1]], documents[:, 0] - begin)  # [documents]
    num_sentences = documents[:, 1] - documents[:, 0]  # [documents]
    has_enough = num_sentences >= request.min_sentences
    has_no_long_one = (num_sentences == 1) | (longest <= _LONG_SENTENCE)
    return documents[has_enough & has_no_long_one]


def _rows_of_epoch(
    documents: list[list[int]], tokens_before: np.ndarray, min_sentences: int, targets: Iterator[int]
) -> np.ndarray:
    """Return the rows of one epoch: [rows, 3] int64.

    tokens_before: [sentences + 1], the tokens before each sentence, and of all.

    Sentences are added to a sample until its target is reached; a single remaining sentence is added too. A next target
    is drawn after each row, and one at the begin of each document. Megatron walks from sentence to sentence; since the
    sums of tokens never fall, the sentence that reaches the target is found here by bisection.
    """
    rows = array("q")
    sums = memoryview(tokens_before)  # its items are plain numbers, which cost half as much as numpy's
    for first, past in documents:
        target = next(targets)
        while first < past:
            end = bisect_left(sums, sums[first] + target, first + 1, past)
            end = max(end, first + min_sentences)
            if end >= past - 1:
                end = past
            rows.extend((first, end, target))
            first = end
            target = next(targets)
    return np.frombuffer(rows, np.int64).reshape(-1, 3)


def _target_lengths(request: SampleRequest) -> Iterator[int]:
    """Yield target lengths: the maximum, or with the short probability a number from 2 to the maximum."""
    longest = request.max_length
    if not request.short_probability:
        return itertools.repeat(longest)
    ratio = _one_in(request.short_probability)
    rng = np.random.RandomState(request.seed % _UINT32)

    def draw_block() -> list[int]:
        draws = rng.randint(0, _UINT32, 4096, dtype=np.uint32).astype(np.int64)
        return np.where(draws % ratio == 0, 2 + draws % (longest - 1), longest).tolist()

    return itertools.chain.from_iterable(iter(draw_block, None))  # without end


def _one_in(probability: float) -> int:
    """Return n such that one draw in n gives a short target: 1 / probability rounded as in C, halves up.

    Python's `round` would take 2.5 to 2. A result that does not fit C's int32 becomes 2**32, above every draw, so that
    only the draw 0 gives a short target.
    """
    inverse = 1 / probability + 0.5
    return int(inverse) if inverse < 1 << 31 else _UINT32


def _fisher_yates(count: int, seed: int) -> np.ndarray:
    """Return 0..count-1 shuffled, [count]: each i, from the last down, is swapped with place draw % (i + 1)."""
    sizes = np.arange(count, 1, -1, dtype=np.uint64)  # i + 1 of each swap
    draws = np.fromiter(mersenne_twister_64(seed), np.uint64, len(sizes))
    partners = (draws % sizes).astype(np.int64)
    order = np.arange(count)
    places = memoryview(order)  # plain numbers are swapped faster than numpy's
    for i, j in zip(range(count - 1, 0, -1), memoryview(partners)):
        places[i], places[j] = places[j], places[i]
    return order


def mersenne_twister_64(seed: int) -> Iterator[int]:
    """Yield the draws of MT19937-64 (Nishimura, ACM TOMACS 10, 2000), computed in blocks of 312.

    C++: std::mt19937_64.
    """
    n, m = 312, 156  # words of the state; distance of the words that are mixed
    upper, lower = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
    twist = np.uint64(0xB5026F5AA96619E9)
    words = [seed % (1 << 64)]
    for i in range(1, n):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % (1 << 64))
    state = np.array(words, np.uint64)

    def next_words(current: np.ndarray, following: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        mixed = (current & upper) | (following & lower)
        return ahead ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), twist, np.uint64(0))

    while True:
        # advance the state: the second part needs words of the first, the last word the very first
        state[:m] = next_words(state[:m], state[1 : m + 1], state[m:])
        state[m : n - 1] = next_words(state[m : n - 1], state[m + 1 :], state[: m - 1])
        state[n - 1 :] = next_words(state[n - 1 :], state[:1], state[m - 1 : m])
        # temper
        x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield from (x ^ (x >> np.uint64(43))).tolist()
