"""The index algorithms against plain loops, closed forms and tables."""

import math
import random

import numpy as np
import pytest

from megatron.core.datasets.index_map import (
    IndexRequest,
    build_document_index,
    build_indices,
    build_sample_index,
    build_shuffle_index,
    num_epochs,
    parse_split,
    requested_samples,
    samples_in,
    separate_final_epoch,
    split_ranges,
)


def walk(lengths, documents, num_samples, s, x):
    """The sample index by walking from token to token, as the format's definition reads."""
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range(num_samples):
        need = s + x
        while True:
            here = lengths[documents[position]] - offset
            if here >= need:
                offset += need - x
                break
            need -= here
            if position == len(documents) - 1:
                offset = lengths[documents[position]] - x
                break
            position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


def request(n, s=8, x=1, drop_last=True, seed=3, ids=(0, 1)):
    return IndexRequest(ids, n, s, seed, x, drop_last)


@pytest.mark.full
@pytest.mark.parametrize("x", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_sample_index_equals_the_walk(x, drop_last):
    dice = random.Random(17 * x + drop_last)
    compared = 0
    for _ in range(1500):
        longest = dice.choice([1, 1, 2, 9, 60])
        lengths = np.array([dice.randint(0, longest) for _ in range(dice.choice([1, 2, 7, 40]))], np.int32)
        documents = np.array([dice.randrange(len(lengths)) for _ in range(dice.randint(1, 60))], np.int32)
        s = dice.choice([1, 2, 3, 8, 33])
        k = samples_in(int(lengths[documents].sum()), request(None, s, x, drop_last))
        if k < 1:
            continue
        index = build_sample_index(lengths, documents, k, s, x)
        assert index.tolist() == [list(row) for row in walk(lengths.tolist(), documents.tolist(), k, s, x)]
        compared += 1
    assert compared > 1000


LENGTHS_AND_ROWS = [
    ([10], 3, 1, 3, [(0, 0), (0, 3), (0, 6), (0, 9)]),  # one document, nothing left over
    ([10], 5, 0, 2, [(0, 0), (0, 5), (0, 10)]),  # zero remaining: the offset is the length
    ([3, 0, 0, 4], 3, 1, 2, [(0, 0), (3, 0), (3, 3)]),  # empty documents are passed over
    ([3, 0, 0, 4], 3, 0, 2, [(0, 0), (0, 3), (3, 3)]),
    ([1, 1, 1, 1, 1], 2, 1, 2, [(0, 0), (2, 0), (4, 0)]),  # one-token documents
    ([4, 4], 5, 1, 2, [(0, 0), (1, 1), (1, 3)]),  # the tokens run out in the last sample
    ([4, 4, 0], 5, 1, 2, [(0, 0), (1, 1), (2, -1)]),  # ... and the last document is empty
]


@pytest.mark.parametrize(("lengths", "s", "x", "k", "rows"), LENGTHS_AND_ROWS)
def test_sample_index_of_small_cases(lengths, s, x, k, rows):
    index = build_sample_index(np.array(lengths, np.int32), np.arange(len(lengths)), k, s, x)
    assert [tuple(row) for row in index.tolist()] == rows
    assert index.dtype == np.int32


def test_sample_index_is_the_same_however_much_is_computed_at_once(monkeypatch):
    lengths = np.random.RandomState(0).randint(0, 20, 300).astype(np.int32)
    whole = build_sample_index(lengths, np.arange(300), 900, 3, 1)
    monkeypatch.setattr("megatron.core.datasets.index_map._CHUNK", 7)
    assert np.array_equal(whole, build_sample_index(lengths, np.arange(300), 900, 3, 1))
    lengths[13:40] = 400  # many blocks of rows within a block of documents
    walked = walk(lengths.tolist(), range(300), 3000, 3, 0)
    assert build_sample_index(lengths, np.arange(300), 3000, 3, 0).tolist() == [list(row) for row in walked]


def test_sample_index_widens_with_the_longest_document():
    lengths = np.array([2**31 + 10], np.int64)
    index = build_sample_index(lengths, np.arange(1), 2, 2**30, 1)
    assert index.dtype == np.int64
    assert index.tolist() == [[0, 0], [0, 2**30], [0, 2**31]]


def test_num_epochs_is_the_smallest_count_that_suffices():
    for tokens in (1, 2, 7, 64, 1000):
        for n in (1, 2, 5, 63, 500):
            for s, x in ((1, 0), (1, 1), (8, 1), (33, 0)):
                count = 1
                while count * tokens < n * s + x:
                    count += 1
                assert num_epochs(tokens, request(n, s, x)) == count
    assert num_epochs(5, request(None, 1000)) == 1


@pytest.mark.parametrize(
    ("tokens", "n", "epochs", "separate"),
    # 1001 tokens at S = 10 are 100 samples an epoch; 0.80 of them are 80
    [
        (1001, 100, 1, False),
        (1001, 101, 2, True),  # 1 needed of the second epoch
        (1001, 179, 2, True),  # 79 needed
        (1001, 180, 2, False),  # 80 needed
        (1001, 200, 2, False),
    ],
)
def test_a_little_used_final_epoch_is_shuffled_apart(tokens, n, epochs, separate):
    assert num_epochs(tokens, request(n, 10)) == epochs
    assert separate_final_epoch(tokens, epochs, request(n, 10)) == separate


TOKENS_AND_COUNTS = [
    (9, 1, True, 1),
    (16, 1, True, 1),
    (17, 1, True, 2),
    (16, 0, True, 2),
    (9, 1, False, 1),
    (10, 1, False, 2),
    (16, 0, False, 2),
    (2**24 + 2, 1, False, 2**24 // 8),  # single precision: 2**24 + 1 reads as 2**24, a sample is lost
    (2**24 + 4, 1, False, 2**24 // 8 + 1),  # 2**24 + 3 reads as 2**24 + 4
    (2**26 + 1 + 5 * 8, 1, False, 2**23 + 5),
    (8 * (2**24 + 1) + 1, 1, False, 2**24),
    (8 * (2**24 + 3) + 1, 1, False, 2**24 + 3),  # would be rounded up past the end of the data
]


@pytest.mark.parametrize(("tokens", "x", "drop_last", "count"), TOKENS_AND_COUNTS)
def test_samples_in_rounds_down_or_up_in_single_precision(tokens, x, drop_last, count):
    assert samples_in(tokens, request(None, 8, x, drop_last)) == count


def test_document_index_uses_the_generator_in_the_defined_order():
    ids = np.arange(4, 9)
    rng = np.random.RandomState(7)
    whole = [i for _ in range(3) for i in ids]
    rng.shuffle(whole)  # a list takes the same draws as an array
    assert build_document_index(ids, 3, False, np.random.RandomState(7)).tolist() == whole

    rng = np.random.RandomState(7)
    earlier, last = [i for _ in range(2) for i in ids], list(ids)
    rng.shuffle(earlier)
    rng.shuffle(last)
    index = build_document_index(ids, 3, True, np.random.RandomState(7))
    assert index.tolist() == earlier + last
    assert index.dtype == np.int32


@pytest.mark.parametrize(("before", "total"), [(6, 6), (4, 6), (0, 5)])
def test_shuffle_index_shuffles_the_parts_one_after_the_other(before, total):
    rng = np.random.RandomState(5)
    first, last = list(range(before)), list(range(before, total))
    rng.shuffle(first)
    rng.shuffle(last)
    index = build_shuffle_index(before, total, np.random.RandomState(5))
    assert index.tolist() == first + last
    assert index.dtype == np.uint32


def test_indices_draw_documents_first_and_samples_second():
    lengths = np.array([50, 3, 0, 21, 40, 7, 33], np.int32)
    for n in (None, 3, 12, 13, 20, 23, 61):
        wanted = request(n, 10, seed=1234, ids=(1, 6))
        indices = build_indices(lengths, wanted)
        tokens = 3 + 0 + 21 + 40 + 7
        epochs = 1 if n is None else math.ceil((n * 10 + 1) / tokens)
        before = ((epochs - 1) * tokens - 1) // 10
        separate = epochs > 1 and n - before < int(0.80 * ((tokens - 1) // 10))
        rng = np.random.RandomState(1234)
        documents = build_document_index(np.arange(1, 6), epochs, separate, rng)
        total = (epochs * tokens - 1) // 10
        assert indices.document_index.tolist() == documents.tolist()
        rows = walk(lengths.tolist(), documents.tolist(), total, 10, 1)
        assert indices.sample_index.tolist() == [list(row) for row in rows]
        shuffled = build_shuffle_index(before if separate else total, total, rng)
        assert indices.shuffle_index.tolist() == shuffled.tolist()
        assert n is None or total >= n


TEXTS_AND_SHARES = [
    ("1,1,2", [0.25, 0.25, 0.5]),
    ("'98, 2'", [0.98, 0.02, 0.0]),
    ("1", [1.0, 0.0, 0.0]),
    ("0.5 .25 .25", [0.5, 0.25, 0.25]),
]


@pytest.mark.parametrize(("text", "shares"), TEXTS_AND_SHARES)
def test_split_strings_become_shares(text, shares):
    assert parse_split(text) == shares


TEXTS_AND_REASONS = [
    ("", "one to three shares"),
    ("0,0,0", "one to three shares"),
    ("1,2,3,4", "one to three shares"),
    ("-1,2", "one to three shares"),
    ("1.2.3,4", "not a number"),
]


@pytest.mark.parametrize(("text", "reason"), TEXTS_AND_REASONS)
def test_bad_split_strings_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_split(text)


TEXTS_AND_RANGES = [
    ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
    ("969,30,1", 10, [(0, 10), (10, 10), (10, 10)]),
    ("1,1", 5, [(0, 2), (2, 5), None]),  # 2.5 rounds to even: 2
    ("1,1", 7, [(0, 4), (4, 7), None]),  # 3.5 rounds to even: 4
    ("0,1,0", 3, [None, (0, 3), None]),
]


@pytest.mark.parametrize(("text", "count", "ranges"), TEXTS_AND_RANGES)
def test_split_ranges_round_half_to_even(text, count, ranges):
    assert split_ranges(parse_split(text), count) == ranges


ARGUMENTS_AND_SAMPLES = [
    ((100, 10, 5, 8), [800, 440, 40]),
    ((99, 10, 5, 8), [792, 400, 40]),
    ((3, 1000, 1, 2), [6, 2, 2]),
    ((10, 0, 0, 4), [40, 0, 0]),
    ((10, 0, 5, 4), [40, 20, 20]),  # validated once, at the end
]


@pytest.mark.parametrize(("arguments", "samples"), ARGUMENTS_AND_SAMPLES)
def test_requested_samples(arguments, samples):
    assert requested_samples(*arguments) == samples


def test_impossible_requests_say_what_to_change():
    with pytest.raises(ValueError, match=r"0 samples.*1"):
        request(0)
    with pytest.raises(ValueError, match=r"(?s)seq_length.*0.*1"):
        request(1, s=0)
    with pytest.raises(ValueError, match=r"extra_token \(2\) 0 or 1"):
        request(1, x=2)
    for lengths, n in (([0, 0], 4), ([8, 9], None)):
        with pytest.raises(ValueError, match=r"(?s)9.*--split.*--seq-length"):
            build_indices(np.array(lengths, np.int32), request(n))


def test_an_epoch_stable_order_does_not_change_when_a_run_gets_longer():
    lengths = np.array([50, 3, 0, 21, 40, 7, 33], np.int32)
    tokens, longest = 154, None
    for n in (300, 60, 35, 16, 14, 3):
        indices = build_indices(lengths, IndexRequest((0, 7), n, 10, 5, epoch_stable=True))
        epochs = -(-(n * 10 + 1) // tokens)
        assert len(indices.document_index) == 7 * epochs
        assert len(indices.shuffle_index) == (epochs * tokens - 1) // 10 >= n
        assert sorted(indices.shuffle_index) == list(range(len(indices.shuffle_index)))
        for epoch in range(epochs):
            assert sorted(indices.document_index[epoch * 7 : epoch * 7 + 7]) == list(range(7))
        rows = walk(lengths.tolist(), indices.document_index.tolist(), len(indices.shuffle_index), 10, 1)
        assert indices.sample_index.tolist() == [list(row) for row in rows]
        longest = longest or indices
        for part, whole in zip(indices, longest):
            assert np.array_equal(part, whole[: len(part)])
    shuffled = longest.document_index.reshape(-1, 7)
    assert not np.array_equal(shuffled[0], shuffled[1])
