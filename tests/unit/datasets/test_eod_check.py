"""Data made without --append-eod: said in one line where they are made, merged and trained on."""

import json
import types

import numpy as np
import pytest
from said import tells

from megatron.core.datasets import DataConfig, IndexedDatasetWriter, build_gpt_datasets
from tools import merge_datasets, preprocess_data

EOD = 99
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(EOD)]


def write(prefix, ends, sentences=False):
    """A document for each of `ends`, its last token; None: it is empty."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for end in ends:
            tokens = [] if end is None else [1, 2, 3, end]
            writer.add_document(tokens, [2, 2] if sentences and tokens else None)
    return str(prefix)


def lines_of_a_run(paths, **flags):
    """(what is said as strange, what is said in passing) of --append-eod"""
    said, passing = [], []
    config = DataConfig(data_path=paths, seq_length=4, split="1", data_cache_path=f"{paths[-1]}-cache", **flags)
    tokenizer = types.SimpleNamespace(vocab_size=100, eod=EOD)
    build_gpt_datasets(config, tokenizer, [4, 0, 0], 1, say=said.append, progress=passing.append)
    return [[line for line in lines if "--append-eod" in line] for lines in (said, passing)]


def test_a_run_says_once_which_data_have_no_ends(tmp_path):
    marked = write(tmp_path / "marked", [EOD] * 20)
    unmarked = [write(tmp_path / name, range(20), sentences) for name, sentences in (("a", False), ("b", True))]
    assert lines_of_a_run([marked]) == [[], []]
    assert lines_of_a_run([write(tmp_path / "gaps", [None, EOD, None, 5])]) == [[], []]
    assert lines_of_a_run([write(tmp_path / "none", [None, 5, None])])[0] == []
    said, passing = lines_of_a_run(["1", marked, "1", *unmarked[:1], "1", *unmarked[1:]])
    assert not said and len(passing) == 1 and f"{unmarked[0]} and 1 more" in passing[0] and marked not in passing[0]


def test_flags_that_look_for_ends_make_it_a_warning(tmp_path):
    unmarked, flags = write(tmp_path / "a", range(20)), {"reset_position_ids": True, "eod_mask_loss": True}
    said, passing = lines_of_a_run([unmarked], **flags)
    assert not passing and len(said) == 1
    assert unmarked in said[0] and tells(said[0], "--eod-mask-loss --reset-position-ids")
    assert lines_of_a_run([write(tmp_path / "b", [EOD] * 3)], **flags) == [[], []]


@pytest.mark.parametrize(("flags", "lines"), [([], 1), (["--append-eod"], 0), (["--split-sentences"], 0)])
def test_preprocessing_says_that_it_writes_no_ends(tmp_path, capsys, flags, lines):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "1 2"}) + "\n")
    arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *flags, *NULL]
    assert preprocess_data.main([*map(str, arguments)]) == 0
    assert capsys.readouterr().err.count("--append-eod") == lines


def test_merging_names_what_has_no_ends(tmp_path, capsys):
    kinds = {"marked": [EOD] * 9, "unmarked": range(9), "single": [5]}
    prefixes = [write(tmp_path / name, ends) for name, ends in kinds.items()]
    prefixes.append(write(tmp_path / "sentences", range(9), sentences=True))
    assert merge_datasets.main(["--input", *prefixes, "--output-prefix", str(tmp_path / "all")]) == 0
    error = capsys.readouterr().err
    assert "--append-eod" in error and error.count("\n") == 1
    assert [prefix in error for prefix in prefixes] == [False, True, False, False]
