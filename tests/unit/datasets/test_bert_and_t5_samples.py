"""BERT and T5 samples: known draws, what every item must hold, and corpora that give none."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.bert_and_t5_samples import BertDataset, T5Dataset, batched_attention_masks
from megatron.core.datasets.choose_masked_spans import MaskingRules, WordPieces
from megatron.core.datasets.sentence_sample_map import SampleRequest, build_sample_map, mersenne_twister_64

CLS, SEP, MASK, PAD, BOS, EOS = 1, 2, 3, 0, 4, 5
WORDS = tuple(f"##{i}" if i % 4 == 3 and i > 10 else f"{i}" for i in range(120))
PIECES = WordPieces(WORDS, CLS, SEP, MASK, PAD, BOS, EOS, sentinels=tuple(range(100, 120)))


def write(prefix, documents):
    """documents: the lengths of the sentences of each."""
    rng = np.random.RandomState(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for lengths in documents:
            writer.add_document(rng.randint(6, 100, sum(lengths)), lengths)
    return IndexedDataset(prefix)


def sample_map(indexed, n=None, length=20, sentences=2, short=0.1, seed=1):
    request = SampleRequest((0, indexed.document_count), n, length, sentences, short, seed)
    return build_sample_map(indexed.sequence_lengths, indexed.document_indices, request)


def test_the_generator_gives_its_published_draws():
    """The 10,000th draw of the seed 5489 is in the C++ standard, [rand.predef]."""
    assert next(itertools.islice(mersenne_twister_64(5489), 9999, None)) == 9981545732273789042


def test_rows_are_runs_of_sentences_of_one_document(tmp_path):
    indexed = write(tmp_path / "a", [[5, 6, 7, 8, 9, 3], [4], [], [600, 3], [10, 11]])
    rows = sample_map(indexed, short=0.0)
    # Three sentences reach 18 < 20 tokens, the fourth 26, and two remain; one sentence, none, and a long one give nothing.
    assert sorted(rows.tolist()) == [[0, 4, 20], [4, 6, 20], [9, 11, 20]]
    assert rows.dtype == np.uint32
    assert len(sample_map(indexed, n=4, short=0.0)) == 6  # whole passes
    targets = {target for _, _, target in sample_map(indexed, n=500, short=0.5).tolist()}
    assert min(targets) >= 2
    assert max(targets) == 20
    assert len(targets) > 10


def rows_sentence_by_sentence(documents, n, length, sentences, ratio, seed):
    """The rows before they are shuffled, as they are defined: one sentence after the other, a target drawn for each row: one
    in `ratio` of them is short."""
    rng, rows, first = np.random.RandomState(seed), [], 0

    def target():
        draw = int(rng.randint(0, 2**32, dtype=np.uint32))
        return 2 + draw % (length - 1) if draw % ratio == 0 else length

    while len(rows) < n:
        first = 0
        for document in documents:
            if len(document) >= sentences and (len(document) == 1 or max(document) <= 512):
                goal, start = target(), 0
                for i in range(1, len(document) + 1):
                    full = sum(document[start:i]) >= goal and len(document) - i > 1 and i - start >= sentences
                    if i == len(document) or full:
                        rows.append([first + start, first + i, goal])
                        goal, start = target(), i
            first += len(document)
    return rows


@pytest.mark.parametrize("sentences", [1, 2])
def test_looking_sentences_up_gives_what_walking_gives(tmp_path, sentences):
    """With empty sentences, empty documents and sentences that are too long among them."""
    rng = np.random.RandomState(3)
    choices = [0, 1, 2, 5, 9, 30, 30, 511, 512, 513]
    documents = [rng.choice(choices, rng.randint(0, 12), p=[0.1] * 10).tolist() for _ in range(80)]
    documents += [rng.randint(0, 9, 40).tolist() for _ in range(20)]
    expected = rows_sentence_by_sentence(documents, 400, 25, sentences, 5, 11)
    got = sample_map(write(tmp_path / "a", documents), 400, 25, sentences, 0.2, 11)
    assert sorted(got.tolist()) == sorted(expected) and got.tolist() != expected


# probability -> one draw in how many is short: C's round takes halves away from zero. Past int32 only the draw 0 is short.
ONE_IN = {1.0: 1, 2 / 3: 2, 0.4: 3, 2 / 7: 4, 2 / 9: 5, 0.1: 10, 1e-4: 10_000, 1e-10: 2**32, 1e-310: 2**32}


@pytest.mark.parametrize("probability", ONE_IN)
def test_as_many_samples_are_short_as_in_c(tmp_path, probability):
    documents = [[5] * 9] * 3
    expected = rows_sentence_by_sentence(documents, 60, 30, 2, ONE_IN[probability], 4)
    assert sorted(sample_map(write(tmp_path / "a", documents), 60, 30, 2, probability, 4).tolist()) == sorted(expected)


def test_a_bert_item_hides_words_of_two_parts(tmp_path):
    indexed = write(tmp_path / "a", [[5, 6, 7, 8, 9, 3], [10, 11]])
    dataset = BertDataset(indexed, sample_map(indexed, n=40), 23, 7, PIECES, MaskingRules(), binary_head=True)
    swapped = 0
    for i in range(len(dataset)):
        item = dataset[i]
        first, past, target = dataset.sample_map[i].tolist()
        source = np.concatenate(indexed[first:past]).tolist()
        text = np.where(item["labels"] >= 0, item["labels"], item["text"])
        tokens = text[: int(item["padding_mask"].sum())].tolist()
        assert tokens[0] == CLS
        assert tokens[-1] == SEP
        assert tokens.count(SEP) == 2
        middle = tokens.index(SEP)
        assert item["types"].tolist() == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1) + [0] * (
            23 - len(tokens)
        )
        a, b = tokens[1:middle], tokens[middle + 1 : -1]
        assert len(a) + len(b) <= target
        assert set(a + b) <= set(source)
        if not item["truncated"]:
            assert (b + a if item["is_random"] else a + b) == source
        assert np.array_equal(item["loss_mask"], item["labels"] >= 0)
        assert 0.15 * target < 1 or item["loss_mask"].any()
        swapped += int(item["is_random"])
        again = dataset[i]
        assert all(np.array_equal(again[key], item[key]) for key in item)
    assert 0 < swapped < len(dataset)


def test_a_t5_item_asks_for_what_the_sentinels_stand_for(tmp_path):
    indexed = write(tmp_path / "a", [[5, 6, 7, 8, 9, 3], [40]])
    rules = MaskingRules(max_ngram=10, geometric=True)
    rows = sample_map(indexed, n=40, length=30, sentences=1)
    dataset = T5Dataset(indexed, rows, 32, 7, PIECES, rules, decoder_seq_length=32)
    for i in range(len(dataset)):
        item = dataset[i]
        first, past, target = rows[i].tolist()
        asked = item["labels"][item["loss_mask"] == 1].tolist()
        assert asked[-1] == EOS
        assert item["text_dec"][: len(asked)].tolist() == [BOS, *asked[:-1]]
        spans, sentinel = {}, None
        for token in asked[:-1]:
            sentinel = token if token >= 100 else sentinel
            spans.setdefault(sentinel, []).extend([token] if token < 100 else [])
        whole = [t for token in item["text_enc"].tolist() for t in spans.get(token, [token] if token != PAD else [])]
        assert whole == np.concatenate(indexed[first:past]).tolist()[:target]


def test_padding_and_what_comes_later_are_hidden():
    """Two of three encoder tokens and one of two decoder tokens are there; x is hidden."""
    encoder, decoder, cross = batched_attention_masks(np.array([[1, 1, 0]]), np.array([[1, 0]]))
    pictures = [
        ["".join("x" if hidden else "." for hidden in row) for row in mask[0, 0]] for mask in (encoder, decoder, cross)
    ]
    assert pictures == [["..x", "..x", "xxx"], [".x", "xx"], ["..x", "xxx"]]
    _, decoder, _ = batched_attention_masks(np.ones((2, 1)), np.ones((2, 3)))
    assert decoder[:, 0].tolist() == [[[False, True, True], [False, False, True], [False, False, False]]] * 2


def test_padding_of_t5_reads_as_token_0(tmp_path):
    indexed = write(tmp_path / "a", [[5, 6]])
    rows = sample_map(indexed, n=1, length=30, sentences=1)
    item = T5Dataset(indexed, rows, 32, 7, replace(PIECES, pad=119), MaskingRules(), decoder_seq_length=32)[0]
    for text, mask in (("text_enc", "enc_mask"), ("text_dec", "dec_mask")):
        assert item[mask].any() and not item[mask].all()
        assert not item[text][item[mask] == 0].any() and item[text][item[mask] == 1].all()


def test_a_corpus_that_gives_no_sample_is_refused(tmp_path):
    indexed = write(tmp_path / "a", [[5], [7], [], [600, 2]])
    with pytest.raises(ValueError, match=r"(?s)4.*2.*--bert-no-"):
        sample_map(indexed, n=10)
    assert len(sample_map(indexed, n=10, sentences=1)) == 10
    empty = write(tmp_path / "b", [[]])
    with pytest.raises(ValueError, match="1 document"):
        sample_map(empty, sentences=0)


def test_settings_that_cannot_work_say_what_to_change(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)--mask-prob.*1.5.*0.*1"):
        MaskingRules(1.5)
    with pytest.raises(ValueError, match="longer_ngrams"):
        MaskingRules(geometric=True, longer_ngrams=True)
    with pytest.raises(ValueError, match="--seq-length"):
        SampleRequest((0, 1), 1, 1, 1, 0.1, 1)
    with pytest.raises(ValueError, match=r"(?s)--short-seq-prob.*2"):
        SampleRequest((0, 1), 1, 9, 1, 2, 1)
    indexed = write(tmp_path / "a", [[30]])
    rows = sample_map(indexed, length=30, sentences=1)
    few = WordPieces(WORDS, CLS, SEP, MASK, PAD, BOS, EOS)
    with pytest.raises(ValueError, match=r"(?s)0.*--vocab-extra-ids"):
        T5Dataset(indexed, rows, 32, 7, few, MaskingRules(), decoder_seq_length=32)[0]
    with pytest.raises(ValueError, match=r"(?s)--decoder-seq-length.*3"):
        T5Dataset(indexed, rows, 32, 7, PIECES, MaskingRules(), decoder_seq_length=3)[0]
    with pytest.raises(IndexError, match="sample 1 of 1"):
        BertDataset(indexed, rows, 32, 7, PIECES, MaskingRules(), binary_head=False)[1]
