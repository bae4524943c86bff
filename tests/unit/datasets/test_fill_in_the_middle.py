"""Fill in the middle: what is moved can be put back, and the choices for a sample depend on nothing but its number."""

import shlex
import types

import numpy as np
import pytest
from token_files import write as write_documents

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig, build_gpt_datasets
from megatron.core.datasets.data_parallel_sampler_and_loader import batches
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig, token_id
from megatron.core.tokenizers.tokenizer_registry import NullTokenizer
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check

PREFIX, MIDDLE, SUFFIX, PAD, EOD, SPLIT = 200, 201, 202, 203, 204, 205
NAMES = {"<fim_prefix>": PREFIX, "<fim_middle>": MIDDLE, "<fim_suffix>": SUFFIX, "<fim_pad>": PAD, "<file>": SPLIT}


class Letters:
    """A token is a character, so that any cut of a text is a cut of its tokens. first: ids that begin every text."""

    vocab_size, eod, pad, vocab = 300, EOD, None, NAMES

    def __init__(self, first: tuple[int, ...] = ()):
        self.first = list(first)

    def tokenize(self, text: str) -> list[int]:
        return self.first + [ord(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def fim(seed=5, tokenizer=None, **flags) -> FillInTheMiddle:
    return FillInTheMiddle(FimConfig(fim_data=True, **flags), tokenizer or Letters(), seed)


def tokens_of(text: str) -> np.ndarray:
    """`|` is the end of a document, `/` that of a fragment."""
    return np.array([{"|": EOD, "/": SPLIT}.get(letter, ord(letter)) for letter in text])


def put_back(tokens: list[int]) -> tuple[str, str]:
    """(order, text) of one document: PSM, SPM, or plain if nothing was moved."""
    if PREFIX not in tokens:
        return "plain", Letters().detokenize(tokens)
    assert tokens[0] == PREFIX and [tokens.count(t) for t in (PREFIX, SUFFIX, MIDDLE)] == [1, 1, 1]
    at, behind = tokens.index(SUFFIX), tokens.index(MIDDLE)
    assert at < behind
    if at == 1:  # the prefix and the middle have no border between them
        order, parts = "SPM", (tokens[behind + 1 :], tokens[at + 1 : behind])
    else:
        order, parts = "PSM", (tokens[1:at], tokens[behind + 1 :], tokens[at + 1 : behind])
    return order, "".join(map(Letters().detokenize, parts))


def room(text: str) -> np.ndarray:
    """A sample whose last document may be cut off: a tail of 30 letters behind the text."""
    return tokens_of(text + "|" + "z" * 30)


def test_moved_documents_hold_the_same_text():
    orders = {0.0: {"PSM", "SPM"}, 1.0: {"SPM"}}  # PSM with an empty prefix looks like SPM
    for spm_rate, expected in orders.items():
        change = fim(fim_rate=1.0, fim_spm_rate=spm_rate)
        for number in range(50):
            got = change(room("hello there|b|some more text"), number)
            ends = np.flatnonzero(got == EOD)
            documents = [part[part != EOD].tolist() for part in np.split(got, ends)][:3]
            found = [put_back(document) for document in documents]
            assert [text for _, text in found] == ["hello there", "b", "some more text"]
            assert {order for order, _ in found} <= expected


@pytest.mark.full
def test_as_many_documents_are_moved_as_the_rates_say():
    """Within four standard deviations of 2,000 draws: 0.3 +- 0.041 and, of some 600, 0.8 +- 0.065."""
    change = fim(fim_rate=0.3, fim_spm_rate=0.8)
    samples = [change(room("x" * 40), i) for i in range(2000)]
    moved = [got for got in samples if got[0] == PREFIX]
    assert abs(len(moved) / 2000 - 0.3) < 0.041
    suffix_first = sum(got[1] == SUFFIX for got in moved) / len(moved)
    assert abs(suffix_first - (0.8 + 0.2 / 41)) < 0.065  # one of 41 first cuts leaves no prefix


def test_the_choices_depend_on_the_number_and_the_seed_alone():
    text = room("the quick brown fox|jumps over the lazy dog")
    first = {i: fim()(text, i).tolist() for i in range(40)}
    assert {i: fim()(text, i).tolist() for i in reversed(range(40))} == first
    assert len({tuple(tokens) for tokens in first.values()}) > 10
    assert fim(seed=6)(text, 3).tolist() != fim(seed=7)(text, 3).tolist()
    assert fim()(text, 2**33 + 1).tolist() != first[1]


def test_what_becomes_too_long_is_cut_and_what_becomes_too_short_is_filled():
    always, never = fim(fim_rate=1.0), fim(fim_rate=0.0)
    assert len(always(tokens_of("abc|defg"), 0)) == 8
    assert never(tokens_of("abc|defg"), 0).tolist() == tokens_of("abc|defg").tolist()
    assert never(tokens_of("a||||b"), 0).tolist() == [*tokens_of("a|b"), PAD, PAD, PAD]
    assert never(tokens_of("|||"), 0).tolist() == [PAD] * 3


def test_fragments_are_moved_each_by_itself():
    change = fim(fim_rate=1.0, fim_split_sample="<file>", fim_fragment_rate=1.0)
    for number in range(20):
        document = change(room("first file/second/third"), number)
        document = document[: np.flatnonzero(document == EOD)[0]]
        fragments = [part[part != SPLIT].tolist() for part in np.split(document, np.flatnonzero(document == SPLIT))]
        assert [put_back(fragment)[1] for fragment in fragments] == ["first file", "second", "third"]
    some = fim(fim_rate=1.0, fim_split_sample="<file>", fim_fragment_rate=0.0)
    assert some(room("first/second"), 0).tolist()[:12] == tokens_of("first/second").tolist()


def test_some_texts_are_left_alone():
    change = fim(fim_rate=1.0, fim_no_prefix="#!")
    assert change(room("#! script"), 0)[:9].tolist() == tokens_of("#! script").tolist()
    assert change(room("script #!"), 0)[0] == PREFIX
    assert fim(fim_rate=1.0)(room("half a ch\ufffd"), 0)[:10].tolist() == tokens_of("half a ch\ufffd").tolist()


def test_what_begins_every_text_is_not_repeated():
    change = fim(tokenizer=Letters(first=(7,)), fim_rate=1.0)
    assert 7 not in change(room("hello there"), 1)


def write(prefix, documents):
    return write_documents(prefix, [[[*map(ord, text), EOD]] for text in documents])


def test_samples_are_rearranged_alike_by_any_number_of_readers(tmp_path):
    texts = ["".join(chr(97 + (d * k) % 26) for k in range(20 + d)) for d in range(60)]
    config = DataConfig(
        data_path=[write(tmp_path / "a", texts)], seq_length=50, split="1", data_cache_path=str(tmp_path)
    )

    def build(**flags):
        return build_gpt_datasets(config, Letters(), [60, 0, 0], 1, fim=FimConfig(**flags))[0]

    plain, changed = build(), build(fim_data=True, fim_rate=1.0)
    items = [changed[i] for i in range(40)]
    assert all(item["tokens"].shape == item["labels"].shape == (50,) for item in items)
    assert not any(np.array_equal(items[i]["tokens"], plain[i]["tokens"]) for i in range(40))
    for item in items:
        assert np.array_equal(item["tokens"][1:], item["labels"][:-1])
        assert np.array_equal(item["loss_mask"], item["labels"] != PAD)
    for workers, rank, size in ((0, 0, 1), (3, 1, 2)):
        read = list(batches(build(fim_data=True, fim_rate=1.0), 8, 2, rank, size, num_workers=workers))[:4]
        for k, batch in enumerate(read):
            first = 8 + k * 2 * size + rank * 2
            assert np.array_equal(batch["tokens"], np.stack([items[first]["tokens"], items[first + 1]["tokens"]]))


def test_tokens_are_found_by_name_or_as_a_text_of_one_token():
    assert token_id(Letters(), "<fim_pad>") == PAD
    assert token_id(NullTokenizer(100), "17") == 17
    assert token_id(NullTokenizer(100), "17 18") is None
    assert token_id(NullTokenizer(100), "<fim_pad>") is None


def test_mistakes_say_what_to_change():
    with pytest.raises(ConfigError, match=r"(?s)--fim-rate.*2.*--fim-split-sample.*--fim-fragment-rate"):
        FimConfig(fim_rate=2, fim_split_sample="x")
    with pytest.raises(ConfigError) as caught:
        fim(tokenizer=NullTokenizer(9), fim_prefix_token="3", fim_eod_token="none")
    assert [problem.split()[0] for problem in caught.value.problems] == shlex.split(
        "--fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token"
    )
    ends = types.SimpleNamespace(vocab=NAMES, eod=EOD, tokenize=lambda text: [1, *map(ord, text), 2])
    with pytest.raises(ConfigError, match="tokenizer"):
        fim(tokenizer=ends)


def test_made_up_data_cannot_be_rearranged():
    small = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --seq-length 8 --train-iters 1 --lr 1"
    words = [*small.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--mock-data", "--fim-data"]
    config, _, _ = parse_args(words)
    with pytest.raises(ConfigError, match=r"--fim-data.*--mock-data"):
        check(config, 1)
