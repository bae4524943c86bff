"""Our data sets against the published megatron-core package, byte for byte. Optional: the package is no dependency.

    pip install --target FOLDER --no-deps megatron-core==0.16.1
    MEGATRON_CORE_PATH=FOLDER python -m pytest tests/compat

Fill in the middle is no part of that package: its test also needs MEGATRON_LM_PATH, a checkout of Megatron-LM.

It runs in a process of its own (`oracle.py`), since it is called `megatron` too, and its results come back as files.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.bert_and_t5_samples import BertDataset, T5Dataset, batched_attention_masks
from megatron.core.datasets.blending_indices_and_dataset import exhaustive_indices, normalized, weighted_indices
from megatron.core.datasets.choose_masked_spans import MaskingRules, WordPieces
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_parallel_sampler_and_loader import loader
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig
from megatron.core.datasets.gpt_dataset_and_builder import GPTDataset, TokenRules, build_gpt_datasets
from megatron.core.datasets.index_map import IndexRequest, build_indices
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import DTYPES, IndexedDataset
from megatron.core.datasets.sentence_sample_map import SampleRequest, build_sample_map
from megatron.core.ops.attention.document_and_window_masks import Documents

CORE_PATH = os.environ.get("MEGATRON_CORE_PATH")
pytestmark = pytest.mark.skipif(
    CORE_PATH is None or not Path(CORE_PATH, "megatron", "core").is_dir(),
    reason="MEGATRON_CORE_PATH names no folder with megatron-core; see the head of this file",
)
ORACLE = Path(__file__).with_name("oracle.py")
TOKENIZER = types.SimpleNamespace(vocab_size=1000, eod=999, pad=998)


@pytest.fixture
def ask(tmp_path):
    """ask(cases) -> what megatron-core makes of each: arrays by name."""

    def run(cases: list[tuple[str, dict]]) -> list[dict[str, np.ndarray]]:
        output = tmp_path / "answers"
        output.mkdir(exist_ok=True)
        (output / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, "-I", str(ORACLE), CORE_PATH, str(output / "cases.json"), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return [dict(np.load(output / f"{i}.npz")) for i in range(len(cases))]

    return run


def write_random(prefix: Path, dice: random.Random, *, vocab: int = 997, eod: int = 999) -> str:
    """A token file of up to 60 documents, some of them empty."""
    longest = dice.choice([3, 20, 90])
    with IndexedDatasetWriter(prefix, dice.choice([np.uint16, np.int32, np.int64])) as writer:
        for _ in range(dice.randint(2, 60)):
            length = dice.randint(0, longest)
            writer.add_document([dice.randrange(vocab) for _ in range(length)] + [eod] * dice.randint(0, 1))
        writer.add_document([1] * 8)
    return str(prefix)


def random_gpt_case(dice: random.Random, prefix: str, cache: str) -> dict:
    count = len(IndexedDataset(prefix))
    first = dice.randint(0, count // 2)
    return {
        "prefix": prefix,
        "ids": [first, count],
        "num_samples": dice.choice([None, *(dice.randint(1, 400) for _ in range(5))]),
        "split": dice.choice(["train", "valid"]),
        "seed": dice.randrange(2**31),
        "seq_length": dice.choice([1, 2, 5, 8, 33]),
        "cache": cache,
        "add_extra_token_to_sequence": dice.random() < 0.7,
        "drop_last_partial_validation_sequence": dice.random() < 0.5,
    }


def request_of(case: dict) -> IndexRequest:
    keep_last = case["split"] == "valid" and not case["drop_last_partial_validation_sequence"]
    extra_token = int(case["add_extra_token_to_sequence"])
    return IndexRequest(
        tuple(case["ids"]), case["num_samples"], case["seq_length"], case["seed"], extra_token, not keep_last
    )


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected)


def test_gpt_indices_are_equal_on_hundreds_of_configurations(ask, tmp_path):
    dice = random.Random(7)
    prefixes = [write_random(tmp_path / f"data{i}", dice) for i in range(30)]
    cases = [random_gpt_case(dice, dice.choice(prefixes), str(tmp_path / f"cache{i}")) for i in range(700)]
    possible = []
    for case in cases:
        try:
            ours = build_indices(IndexedDataset(case["prefix"]).sequence_lengths, request_of(case))
        except ValueError:  # fewer tokens than one sample: refused here, an assertion or an endless loop there
            continue
        # It refuses an offset of -1: the end of the data in an empty last document.
        if len(ours.shuffle_index) and ours.sample_index.min() >= 0:
            possible.append((case, ours))
    assert len(possible) > 500
    answers = ask([("gpt", case) for case, _ in possible])
    for (_, ours), answer in zip(possible, answers):
        for name, array in ours._asdict().items():
            assert_same(array, answer[name])


def test_gpt_items_are_equal_with_every_rule(ask, tmp_path):
    dice = random.Random(9)
    prefix = write_random(tmp_path / "data", dice)
    cases = []
    for flags in itertools.product([False, True], repeat=3):
        rules = dict(zip(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), flags))
        for pad in (998, 999, 5):  # nothing else; what ends a document, and what ends a text, which 0.16 takes for text
            tokenizer = {"vocab_size": 1000, "eod": 999, "pad": pad}
            case = random_gpt_case(dice, prefix, str(tmp_path / "cache")) | {"num_samples": 40, "split": "valid"}
            cases.append(case | rules | {"items": 40, "tokenizer": tokenizer, "add_extra_token_to_sequence": True})
    for case, answer in zip(cases, ask([("gpt", case) for case in cases])):
        tokenizer, indexed = case["tokenizer"], IndexedDataset(prefix)
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        flags = {name: case[name] for name in names}
        rules = TokenRules(1000, 999, tokenizer["pad"], pad_is_text=tokenizer["pad"] == 5, **flags)
        dataset = GPTDataset(
            indexed, build_indices(indexed.sequence_lengths, request_of(case)), case["seq_length"], rules
        )
        for i in range(min(40, len(dataset))):
            for name, array in dataset[i].items():
                if name != "document_ids":
                    assert np.array_equal(array, answer[f"item_{name}"][i]), (case, i, name)
            if case["reset_attention_mask"]:
                mask = Documents(torch.from_numpy(dataset[i]["document_ids"])[None]).mask[0]
                assert np.array_equal(mask, answer["item_attention_mask"][i])


FIM_DATASET = Path(os.environ.get("MEGATRON_LM_PATH", ""), "megatron/training/datasets/fim_dataset.py")
FIM_TOKENS = {"prefix": "t200", "middle": "t201", "suffix": "t202", "pad": "t203", "eod": "t204"}


class Letters:
    """A token is a letter, or has a name."""

    vocab_size, eod, pad, vocab = 300, 204, None, {f"t{i}": i for i in range(300)}

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.skipif(not FIM_DATASET.is_file(), reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")
def test_rearranged_documents_are_equal(ask, tmp_path):
    dice = random.Random(13)
    cases = []
    for d in range(60):
        with IndexedDatasetWriter(tmp_path / f"data{d}", np.uint16) as writer:
            for _ in range(dice.randint(5, 40)):
                text = [dice.choice([*b"abc", 205]) if dice.random() < 0.3 else 97 for _ in range(dice.randint(0, 30))]
                writer.add_document(text + [204] * dice.choice([1, 1, 1, 2, 0]))
            writer.add_document([98] * 40)
        split = dice.random() < 0.5
        rules = {
            "fim_rate": dice.choice([0.0, 0.3, 0.9, 1.0]),
            "fim_spm_rate": dice.choice([0.0, 0.5, 1.0]),
            "fim_split_sample": "t205" if split else None,
            "fim_fragment_rate": dice.choice([0.2, 0.8]) if split else None,
            "fim_no_prefix": dice.choice([None, "ab"]),
        }
        names = [f"t{i}" for i in range(300)]
        config = {"seed": dice.randrange(2**31), "seq_length": dice.choice([8, 33, 90]), "cache": str(tmp_path / "c")}
        config["tokenizer"] = {"vocab_size": 300, "eod": 204, "pad": 250, "words": names}
        prefix = str(tmp_path / f"data{d}")
        count = len(IndexedDataset(prefix))
        cases.append(
            {"prefix": prefix, "ids": [0, count], "num_samples": 40, "items": 40, "rules": rules, "config": config}
        )
    given = [{**case, "rules": {**case["rules"], "fim_extra_tokens": FIM_TOKENS}} for case in cases]
    answers = ask([("fim", {"path": str(FIM_DATASET), **case}) for case in given])
    for case, answer in zip(cases, answers):
        indexed, seed, length = IndexedDataset(case["prefix"]), case["config"]["seed"], case["config"]["seq_length"]
        tokens = {f"fim_{name}_token": token for name, token in FIM_TOKENS.items()}
        fim = FillInTheMiddle(FimConfig(fim_data=True, **case["rules"], **tokens), Letters(), seed)
        request = IndexRequest(tuple(case["ids"]), 40, length, seed)
        indices = build_indices(indexed.sequence_lengths, request)
        dataset = GPTDataset(indexed, indices, length, TokenRules(300, 204), fim)
        for i in range(40):
            for name in ("tokens", "labels"):
                assert np.array_equal(dataset[i][name], answer[f"item_{name}"][i]), (case, i, name)


@pytest.mark.parametrize("dtype", [np.dtype(d).name for d in DTYPES.values()])
def test_files_of_either_are_read_by_the_other(ask, tmp_path, dtype):
    documents = [[[1, 2, 3], [4]], [], [[5, 6]]]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    ask([("write", {"prefix": str(theirs), "documents": documents, "dtype": dtype})])
    with IndexedDatasetWriter(ours, np.dtype(dtype)) as writer:
        writer.add_documents([1, 2, 3, 4, 5, 6], [3, 1, 2], [2, 0, 1])
    for ending in (".bin", ".idx"):
        assert theirs.with_suffix(ending).read_bytes() == ours.with_suffix(ending).read_bytes()


def test_files_that_megatron_wrote_give_the_same_batches_in_the_same_order(ask, tmp_path):
    """What a training script reads: files of its builder, of two types, on each data-parallel rank, also going on."""
    dice = random.Random(17)
    for dtype, vocab in (("uint16", 1000), ("int32", 70_000)):
        prefix, eod = str(tmp_path / dtype), vocab - 1
        documents = [[[dice.randrange(vocab - 2) for _ in range(dice.randint(0, 60))] + [eod]] for _ in range(50)]
        case = {"prefix": prefix, "ids": [0, 40], "num_samples": 130, "seed": 31, "seq_length": 16}
        case |= {"micro_batch_size": 3, "size": 2, "tokenizer": {"vocab_size": vocab, "eod": eod, "pad": vocab - 2}}
        case |= {"cache": str(tmp_path / "theirs"), "eod_mask_loss": True, "reset_position_ids": True}
        cases = [{**case, "rank": rank, "consumed": consumed} for rank in (0, 1) for consumed in (0, 60)]
        asked = [("write", {"prefix": prefix, "documents": documents, "dtype": dtype})]
        answers = ask(asked + [("batches", case) for case in cases])[1:]
        config = DataConfig(
            data_path=[prefix],
            split="8,1,1",
            seq_length=16,
            data_cache_path=str(tmp_path / "ours"),
            eod_mask_loss=True,
            reset_position_ids=True,
        )
        tokenizer = types.SimpleNamespace(vocab_size=vocab, eod=eod, pad=vocab - 2)
        train, _, _ = build_gpt_datasets(config, tokenizer, [130, 0, 0], 31)
        for case, answer in zip(cases, answers):
            where = {"data_parallel_rank": case["rank"], "data_parallel_size": 2, "consumed_samples": case["consumed"]}
            got = list(loader("single", train, "train", micro_batch_size=3, num_workers=1, **where))
            assert len(got) == len(answer["batch_tokens"]) > 10
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert np.array_equal(torch.stack([batch[name] for batch in got]), answer[f"batch_{name}"]), (
                    case,
                    name,
                )


def test_multimodal_files_of_either_are_read_by_the_other(ask, tmp_path):
    case = {"documents": [[[1, 2, 3], [4]], [[5, 6]]], "dtype": "int32", "modes": [[0, 1], [2]]}
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    with IndexedDatasetWriter(ours, np.int32, multimodal=True) as writer:
        writer.add_documents([1, 2, 3, 4, 5, 6], [3, 1, 2], [2, 1], [0, 1, 2])
    _, read = ask([("write", {"prefix": str(theirs), **case}), ("read", {"prefix": str(ours), "multimodal": True})])
    for ending in (".bin", ".idx"):
        assert theirs.with_suffix(ending).read_bytes() == ours.with_suffix(ending).read_bytes()
    assert read["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert read["modes"].tolist() == IndexedDataset(ours, multimodal=True).sequence_modes.tolist() == [0, 1, 2]


def test_blends_choose_the_same_data_sets(ask):
    dice = random.Random(3)
    blends = [[dice.random() + 1e-3 for _ in range(dice.choice([1, 2, 3, 11, 12, 13, 40]))] for _ in range(150)]
    blends += [[dice.choice([1, 1, 2, 5]) for _ in range(dice.randint(1, 20))] for _ in range(50)]  # ties
    sizes = [dice.choice([0, 1, 7, 3000]) for _ in blends]
    answers = ask([("blending", {"weights": weights, "size": size}) for weights, size in zip(blends, sizes)])
    for weights, size, answer in zip(blends, sizes, answers):
        # The oracle adds the weights one by one here; the last bit of the sum is no matter of this test.
        shares = [weight / sum(weights) for weight in weights]
        for name, array in weighted_indices(shares, size)._asdict().items():
            assert_same(array, answer[name])


def test_exhaustive_blends_choose_the_same_data_sets(ask):
    dice = random.Random(4)
    cases = [[dice.choice([1, 1, 5, dice.randint(1, 300)]) for _ in range(dice.randint(1, 20))] for _ in range(100)]
    answers = ask([("exhaustive_blending", {"sizes": sizes}) for sizes in cases])
    for sizes, answer in zip(cases, answers):
        for name, array in exhaustive_indices(sizes)._asdict().items():
            assert_same(array, answer[name])


def write_large(folder: Path, dice: random.Random, count: int) -> list[str]:
    """Token files with something for every split."""
    for i in range(count):
        with IndexedDatasetWriter(folder / f"data{i}", np.uint16) as writer:
            for _ in range(dice.randint(20, 60)):
                writer.add_document([dice.randrange(900) for _ in range(dice.randint(5, 30))])
    return [str(folder / f"data{i}") for i in range(count)]


def random_run(dice: random.Random, prefixes: list[str]) -> dict:
    """A whole run's data, by blends of the one kind or the other."""

    def blend() -> tuple[list[str], list[float] | None]:
        chosen = dice.sample(prefixes, dice.randint(1, len(prefixes)))
        return chosen, dice.choice([None, [dice.random() + 0.01 for _ in chosen]])

    case: dict = {"seed": dice.randrange(2**31), "seq_length": dice.choice([3, 8]), "items": 60}
    case["sizes"] = [dice.randint(1, 300) for _ in range(3)]
    if dice.random() < 0.5:
        case |= {"blend": blend(), "split": dice.choice(["6,2,2", "5,5,0", "1"])}
    else:
        case["blend_per_split"] = [blend(), dice.choice([None, blend()]), dice.choice([None, blend()])]
    return case


def words_of(blend: tuple[list[str], list[float] | None] | None) -> list[str] | None:
    """As the command line spells a blend."""
    if blend is None:
        return None
    prefixes, weights = blend
    return prefixes if weights is None else [word for pair in zip(map(repr, weights), prefixes) for word in pair]


def test_whole_runs_read_the_same_samples(ask, tmp_path):
    dice = random.Random(11)
    prefixes = write_large(tmp_path, dice, 13)
    cases = [random_run(dice, prefixes) for _ in range(60)]
    answers = ask([("blended_run", {**case, "cache": str(tmp_path / "theirs")}) for case in cases])
    for case, answer in zip(cases, answers):
        paths = {"data_path": words_of(case.get("blend")), "split": case.get("split")}
        for name, blend in zip(("train", "valid", "test"), case.get("blend_per_split", [])):
            paths[f"{name}_data_path"] = words_of(blend)
        config = DataConfig(seq_length=case["seq_length"], data_cache_path=str(tmp_path / "ours"), **paths)
        datasets = build_gpt_datasets(config, TOKENIZER, case["sizes"], case["seed"])
        for name, dataset in zip(("train", "valid", "test"), datasets):
            assert answer[f"{name}_length"] == (-1 if dataset is None else len(dataset)), case
            if dataset is not None:
                tokens = [dataset[i]["tokens"] for i in range(min(60, len(dataset)))]
                assert np.array_equal(tokens, answer[f"{name}_tokens"]), case


def test_what_megatron_cached_is_read(ask, tmp_path):
    """Nothing is built where the same run of Megatron left its cache, and every sample is the same."""
    dice = random.Random(12)
    prefixes = write_large(tmp_path, dice, 6)
    cases = [random_run(dice, prefixes) | {"cache": str(tmp_path / f"cache{i}")} for i in range(30)]
    plain_runs = []
    for case in cases:
        paths = {"data_path": words_of(case.get("blend")), "split": case.get("split")}
        for name, blend in zip(("train", "valid", "test"), case.get("blend_per_split", [])):
            paths[f"{name}_data_path"] = words_of(blend)
        config = DataConfig(seq_length=case["seq_length"], **paths)
        plain = replace(config, data_cache_path=str(tmp_path / "plain"))
        plain_runs.append((config, build_gpt_datasets(plain, TOKENIZER, case["sizes"], case["seed"])))
    ask([("blended_run", {**case, "items": 1}) for case in cases])
    for case, (config, expected) in zip(cases, plain_runs):
        said, done = [], []
        config = replace(config, data_cache_path=case["cache"])
        got = build_gpt_datasets(config, TOKENIZER, case["sizes"], case["seed"], say=said.append, progress=done.append)
        assert not [line for line in done if "building" in line] and not [line for line in said if "not taken" in line]
        assert [line for line in done if "from Megatron's cache" in line]
        for mine, theirs in zip(got, expected):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert len(mine) == len(theirs)
                assert all(np.array_equal(mine[i]["tokens"], theirs[i]["tokens"]) for i in range(len(mine)))


def test_weights_are_normalized_to_the_last_bit(ask):
    dice = random.Random(5)
    cases = [[dice.random() for _ in range(dice.randint(1, 300))] for _ in range(200)]
    for weights, answer in zip(cases, ask([("normalize", {"weights": weights}) for weights in cases])):
        assert normalized(weights) == answer["shares"].tolist()


WORDS = [f"{'##' if i % 3 == 1 and i > 10 else ''}w{i}" for i in range(400)]  # the last 100 are sentinels
PIECES = WordPieces(tuple(WORDS), cls=1, sep=2, mask=3, pad=0, bos=4, eos=5, sentinels=tuple(range(300, 400)))


def write_sentences(prefix: Path, dice: random.Random) -> str:
    """Documents of 1 to 9 sentences; some sentences are too long."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(dice.randint(3, 25)):
            longest = dice.choice([5, 30, 90])
            lengths = [600 if dice.random() < 0.01 else dice.randint(1, longest) for _ in range(dice.randint(1, 9))]
            writer.add_document([dice.randrange(6, 300) for _ in range(sum(lengths))], lengths)
        writer.add_document([7] * 12, [5, 4, 3])
    return str(prefix)


# Inverses that end in .5, one that the int32 there does not hold, and plain ones.
SHORT = [0.0, 0.1, 0.5, 0.4, 2 / 3, 2 / 9, 2 / 13, 0.15, 0.3, 1.0, 1e-10]


def masked_case(dice: random.Random, prefix: str, cache: str) -> dict:
    geometric = dice.random() < 0.5
    return {
        "prefix": prefix,
        "ids": [dice.randint(0, 2), IndexedDataset(prefix).document_count],
        "num_samples": dice.randint(1, 150),  # one epoch, None, fails there
        "items": 25,
        "config": {
            "seed": dice.randrange(2**31),
            "seq_length": dice.choice([24, 64, 128]),
            "cache": cache,
            "vocab_words": WORDS,
            "masking_probability": dice.choice([0.15, 0.3]),
            "short_sequence_probability": dice.choice(SHORT),
            "masking_max_ngram": dice.choice([1, 3, 10]),
            "masking_do_full_word": dice.random() < 0.7,
            "masking_do_permutation": False,
            "masking_use_longer_ngrams": not geometric and dice.random() < 0.3,
            "masking_use_geometric_distribution": geometric,
        },
    }


def parts_of(case: dict, *, special_tokens: int, min_sentences: int) -> tuple:
    """Our data set's arguments."""
    config, indexed = case["config"], IndexedDataset(case["prefix"])
    rules = MaskingRules(
        config["masking_probability"],
        config["masking_max_ngram"],
        config["masking_do_full_word"],
        config["masking_use_longer_ngrams"],
        config["masking_use_geometric_distribution"],
    )
    request = SampleRequest(
        tuple(case["ids"]),
        case["num_samples"],
        config["seq_length"] - special_tokens,
        min_sentences,
        config["short_sequence_probability"],
        config["seed"],
    )
    sample_map = build_sample_map(indexed.sequence_lengths, indexed.document_indices, request)
    return indexed, sample_map, config["seq_length"], config["seed"], PIECES, rules


def assert_same_items(dataset, answer: dict[str, np.ndarray], names: tuple[str, ...]) -> None:
    assert_same(dataset.sample_map, answer["sample_index"])
    for i in range(min(25, len(dataset))):
        item = dataset[i]
        for name in names:
            assert np.array_equal(item[name], answer[f"item_{name}"][i]), (i, name)


def test_bert_samples_are_equal(ask, tmp_path):
    dice = random.Random(21)
    cases = []
    for i in range(120):
        case = masked_case(dice, write_sentences(tmp_path / f"data{i}", dice), str(tmp_path / f"cache{i}"))
        case["config"]["classification_head"] = dice.random() < 0.6
        cases.append(case)
    for case, answer in zip(cases, ask([("bert", case) for case in cases])):
        head = case["config"]["classification_head"]
        dataset = BertDataset(*parts_of(case, special_tokens=3, min_sentences=1 + head), binary_head=head)
        names = ("text", "types", "labels", "is_random", "padding_mask", "loss_mask", "truncated")
        assert_same_items(dataset, answer, names)


def test_t5_samples_are_equal(ask, tmp_path):
    dice = random.Random(22)
    cases = []
    for i in range(80):
        case = masked_case(dice, write_sentences(tmp_path / f"data{i}", dice), str(tmp_path / f"cache{i}"))
        length = case["config"]["seq_length"]
        case["config"] |= {"sequence_length_decoder": length, "pad": dice.choice([0, 399])}  # in no text
        cases.append(case)
    for case, answer in zip(cases, ask([("t5", case) for case in cases])):
        length = case["config"]["seq_length"]
        parts = list(parts_of(case, special_tokens=2, min_sentences=1))
        parts[4] = replace(PIECES, pad=case["config"]["pad"])
        dataset = T5Dataset(*parts, decoder_seq_length=length)
        names = ("text_enc", "text_dec", "labels", "loss_mask", "truncated", "enc_mask", "dec_mask")
        assert_same_items(dataset, answer, names)
        items = [dataset[i] for i in range(min(25, len(dataset)))]
        masks = batched_attention_masks(
            *(np.stack([item[name] for item in items]) for name in ("enc_mask", "dec_mask"))
        )
        for name, mask in zip(("enc", "dec", "cross"), masks):
            assert_same(mask, answer[f"attention_{name}"])
