"""The companions of preprocessing, run as a user runs them: merging, inspecting, planning; and the page that shows them."""

import gzip
import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from said import tells
from token_files import NULL, contents, write

from megatron.core.datasets import DataConfig, build_gpt_datasets, planned_data_usage
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from tools import data_plan, inspect_dataset, merge_datasets, prepare_cache, stdlib_corpus

ROOT = Path(__file__).resolve().parents[3]


DOCUMENTS = [[[1, 2], [3]], [], [[4, 5, 6]], [[7]], [[], [8, 9]]]


@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_merged_files_hold_all_documents_in_order(tmp_path, monkeypatch, capsys, at_once):
    monkeypatch.setattr(merge_datasets, "_SEQUENCES_AT_ONCE", at_once)
    parts = [DOCUMENTS[:2], [], DOCUMENTS[2:], DOCUMENTS]
    prefixes = [write(tmp_path / f"p{i}", part) for i, part in enumerate(parts)]
    for given in (prefixes, [f"{prefixes[0]}.bin", f"{prefixes[1]}.idx", *prefixes[2:]], [tmp_path]):
        output = tmp_path / "new" / "merged"
        assert merge_datasets.main(["--input", *map(str, given), "--output-prefix", str(output)]) == 0
        assert contents(output) == [document for part in parts for document in part]
        assert IndexedDataset(output).dtype == np.uint16
    assert tells(capsys.readouterr().out, f"{tmp_path / 'new' / 'merged'} 10 18 4")


def test_trained_on_files_are_merged_and_inspected(tmp_path, capsys):
    """Training keeps its index in PREFIX/cache: the folder of the name is no folder of token files."""
    prefixes = [write(tmp_path / name, DOCUMENTS) for name in "ab"]
    for prefix in prefixes:
        config = DataConfig(data_path=[prefix], seq_length=2, split="1")
        build_gpt_datasets(config, types.SimpleNamespace(vocab_size=100, eod=99), [4, 0, 0], 1)
        assert Path(prefix).is_dir()
    for given in (prefixes, [tmp_path]):
        assert merge_datasets.main(["--input", *map(str, given), "--output-prefix", str(tmp_path / "out" / "c")]) == 0
        assert contents(tmp_path / "out" / "c") == DOCUMENTS * 2
        assert inspect_dataset.main(["--input", *map(str, given), "--verify"]) == 0
    assert capsys.readouterr().out.count("documents: 5") == 4


def test_merging_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write("a", DOCUMENTS)
    write("wide", DOCUMENTS, np.int32)
    Path("empty").mkdir()
    for arguments, code, reason in [
        ([], 2, "--input is needed; --output-prefix is needed"),
        (["--input", "a", "wide", "--output-prefix", "o"], 1, "the token types differ (a uint16, wide int32)"),
        (["--input", "a", "--output-prefix", "a"], 1, "--output-prefix a is one of the inputs"),
        (["--input", "none", "--output-prefix", "o"], 1, "none.idx does not exist"),
        (["--input", "empty", "--output-prefix", "o"], 1, "no token file (.idx) in this folder"),
    ]:
        assert merge_datasets.main(arguments) == code
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    assert not list(Path().glob("o*"))


def test_copying_more_than_there_is_leaves_no_output(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    with (
        pytest.raises(ValueError, match=r"(?s)a\.bin.*2"),
        open(tmp_path / "a.bin", "rb") as file,
        IndexedDatasetWriter(tmp_path / "o", np.uint16) as writer,
    ):
        writer.copy_documents(file, 0, [10], [1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_an_inspected_file_is_described(tmp_path, capsys):
    prefix = write(tmp_path / "a", DOCUMENTS)
    assert inspect_dataset.main(["--input", prefix, "--document", "0", "-1", *NULL]) == 0
    output = capsys.readouterr().out
    for line in (
        "documents: 5, of which 1 empty",
        "sequences: 6",
        "tokens: 9, stored as uint16",
        "shortest 0, median 2, mean 1.8, longest 3",
        "bytes: 18 (.bin), 154 (.idx)",
        "document 0: 2 sequences",
        "sequence 1, 1 tokens: 3",
        "document 4: 2 sequences",
        "text: '8 9'",
    ):
        assert line in output
    write(tmp_path / "none", [])
    assert inspect_dataset.main(["--input", str(tmp_path / "none"), "--verify", *NULL]) == 0
    assert "tokens a document: none" in capsys.readouterr().out


def test_verifying_reads_every_token(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspect_dataset, "_TOKENS_AT_ONCE", 4)
    prefix = write(tmp_path / "a", DOCUMENTS, np.int32)
    assert inspect_dataset.main(["--input", prefix, "--verify"]) == 0
    assert "largest token 9" in capsys.readouterr().out
    assert (
        inspect_dataset.main(["--input", prefix, "--verify", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"])
        == 0
    )
    assert tells(capsys.readouterr().out, "10 3 4")
    for token in (10, -1):
        tokens = np.fromfile(f"{prefix}.bin", "<i4")
        tokens[6] = token  # the only one of document 3, which is sequence 3
        tokens.tofile(f"{prefix}.bin")
        assert (
            inspect_dataset.main(
                ["--input", prefix, "--verify", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
            )
            == 1
        )
        assert tells(capsys.readouterr().err, f"0 3 {token}")
    (tmp_path / "a.bin").write_bytes(b"12")
    assert inspect_dataset.main(["--input", prefix]) == 1
    assert "2 bytes" in capsys.readouterr().err
    assert inspect_dataset.main([]) == 2


def test_an_unknown_document_is_named(tmp_path, capsys):
    assert inspect_dataset.main(["--input", write(tmp_path / "a", DOCUMENTS), "--document", "5"]) == 1
    assert "--document 5:" in capsys.readouterr().err


def test_a_plan_counts_what_a_run_reads(tmp_path, capsys):
    """By hand: 90 of 100 documents are for training; a quarter of 40 x 5 samples is 50, of 8 tokens each 400."""
    small = write(tmp_path / "small", [[[1] * 10]] * 100)
    large = write(tmp_path / "large", [[[1] * 50]] * 100)
    length = ["--seq-length", "8", "--global-batch-size", "5", "--train-iters", "40", "--split", "90,10,0"]
    assert data_plan.main(["--data-path", "1", small, "3", large, *length, "--eval-iters", "0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0] == ["25.00%", "90", "900", "1,800", "50", "400", "0.44", small]
    assert rows[1] == ["75.00%", "90", "4,500", "9,000", "150", "1,200", "0.27", large]
    assert rows[2] == ["100.00%", "180", "5,400", "10,800", "200", "1,600", "0.30", "all"]
    # By default validation is planned too, as in training: 100 batches of 5 at the end, of 2 after iterations 20 and 40 and then.
    for more, read in {"": "500", "--eval-interval 20 --eval-global-batch-size 2": "600"}.items():
        assert data_plan.main(["--data-path", "1", small, "3", large, *length, *more.split()]) == 0
        tables = [table.splitlines() for table in capsys.readouterr().out.split("\n\n")]
        assert [table[0] for table in tables] == ["train", "valid"] and tables[1][-1].split()[4] == read
    # Without weights each is read once at most, in proportion to its (T - 1) // 8 samples: 124 and 624.
    assert (
        data_plan.main(["--data-path", small, large, "--seq-length", "8", "--train-samples", "1200", "--split", "1"])
        == 0
    )
    *lines, last = capsys.readouterr().out.splitlines()[1:]
    assert last == "validation and test are not planned: give --global-batch-size"
    rows = [line.split() for line in lines]
    assert [row[4] for row in rows] == ["124", "624", "748"]
    assert [row[6] for row in rows] == ["0.99", "1.00", "1.00"]


@pytest.mark.parametrize("kind", ["data-args-path", "per-split-data-args-path", "splits"])
def test_a_plan_understands_every_way_to_name_data(tmp_path, capsys, kind):
    """The same validation data, 4 batches of 5 samples of 8 tokens, of a file of 100 documents of 10 tokens, or a tenth of it."""
    train, valid = write(tmp_path / "train", [[[1] * 10]] * 100), write(tmp_path / "valid", [[[1] * 10]] * 100)
    (tmp_path / "list.txt").write_text(f"1 {train}\n")
    (tmp_path / "lists.json").write_text(json.dumps({"train": [train], "valid": ["1", valid]}))
    flags = {
        "data-args-path": ["--data-args-path", str(tmp_path / "list.txt"), "--split", "90,10,0"],
        "per-split-data-args-path": ["--per-split-data-args-path", str(tmp_path / "lists.json")],
        "splits": ["--train-data-path", train, "--valid-data-path", valid],
    }[kind]
    whole = kind != "data-args-path"
    length = ["--seq-length", "8", "--global-batch-size", "5", "--train-iters", "40", "--eval-iters", "4"]
    assert data_plan.main([*flags, *length]) == 0
    tables = [table.splitlines() for table in capsys.readouterr().out.split("\n\n")]
    assert [table[0] for table in tables] == ["train", "valid"]
    assert tables[0][2].split()[1:5] == [
        "100" if whole else "90",
        "1,000" if whole else "900",
        "2,000" if whole else "1,800",
        "200",
    ]
    assert tables[1][2].split()[1:6] == [
        "100" if whole else "10",
        "1,000" if whole else "100",
        "2,000" if whole else "200",
        "20",
        "160",
    ]


ARGUMENTS_AND_REASONS = [
    ("", 2, "--train-iters"),
    ("--train-samples 5", 2, "--data-path PREFIX"),
    ("--mock-data --seq-length 8 --train-samples 5", 2, "--mock-data"),
    ("--data-path a --seq-length 0 --train-samples 5", 2, "--seq-length is 0"),
    ("--data-path a --seq-length 8 --train-iters 5", 2, "need --global-batch-size"),
    ("--data-path -1 a 2 b --seq-length 8 --train-samples 5", 2, "-1.0"),
    ("--data-path none --seq-length 8 --train-samples 5", 1, "none.idx"),
    ("--data-path e --seq-length 8 --train-samples 5", 1, "0"),
    ("--data-path 1 z 1 a --seq-length 8 --train-samples 5 --split 1", 1, "0"),
    ("--data-path a --seq-length 8 --train-samples 5 --split 0,1", 1, "leaves nothing to training"),
]


@pytest.mark.parametrize(("arguments", "code", "reason"), ARGUMENTS_AND_REASONS)
def test_planning_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, reason):
    monkeypatch.chdir(tmp_path)
    write("a", DOCUMENTS)
    write("e", [])
    write("z", [[[]]])
    assert data_plan.main(shlex.split(arguments)) == code
    error = capsys.readouterr().err
    assert tells(error, reason) and error.count("\n") == 1


RUN = [*NULL, *shlex.split("--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1")]


def test_the_help_of_prepare_cache_shows_what_it_reads(capsys):
    with pytest.raises(SystemExit):
        prepare_cache.main(["--help"])
    said = capsys.readouterr().out
    assert tells(
        said, "--prepare-cache-world-size --data-path --seq-length --split --fim-rate --eval-iters --seed --mask-prob"
    )
    assert "--adam-beta1" not in said and "--hidden-dropout" not in said


def test_a_cache_is_prepared_once_for_all_that_a_run_asks_for(tmp_path, capsys):
    """3 steps of 4 samples, validation after each second one and at the end: 2 x 2 batches of 4; at the end 2 for the test."""
    prefix, cache = write(tmp_path / "a", [[[1] * 10]] * 100), tmp_path / "cache"
    length = shlex.split("--train-iters 3 --eval-interval 2 --eval-iters 2 --split 8,1,1")
    size = ["--micro-batch-size", "2", "--prepare-cache-world-size", "2"]
    arguments = [*RUN, *size, *length, "--data-path", prefix, "--data-cache-path", str(cache)]
    assert prepare_cache.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.count("building") == 3
    assert [tells(said, f"{count} 8") for count in (12, 16, 8)] == [True] * 3
    config = DataConfig(data_path=[prefix], seq_length=8, split="8,1,1", data_cache_path=str(cache))
    again, tokenizer = [], types.SimpleNamespace(vocab_size=101, eod=100)
    build_gpt_datasets(config, tokenizer, [12, 16, 8], 1234, progress=again.append)
    assert not [line for line in again if "building" in line]


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ("--micro-batch-size 1 --train-iters 1", 2, "give --prepare-cache-world-size"),
        ("--micro-batch-size 1 --train-iters 1 --prepare-cache-world-size 0", 2, "0 1"),
        ("--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --mock-data", 2, "--mock-data"),
        ("--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --data-path none", 2, "none.idx"),
        (
            "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --data-path a --prepare-cache-model rnn",
            2,
            "choose from",
        ),
        (
            "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --data-path a --prepare-cache-model bert",
            2,
            "BERT --tokenizer-type BertWordPieceLowerCase",
        ),
        ("--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --data-path e", 1, "0"),
        (
            "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --data-path a --fim-data",
            2,
            "--fim-prefix-token <fim_prefix>",
        ),
    ],
)
def test_preparing_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, reason):
    monkeypatch.chdir(tmp_path)
    write("a", DOCUMENTS)
    write("e", [])
    assert prepare_cache.main([*RUN, *shlex.split(arguments)]) == code
    error = capsys.readouterr().err
    assert tells(error, reason) and error.count("\n") == 1


def test_a_long_blend_is_not_listed_whole_at_the_start():
    usages = [planned_data_usage.DataUsage(f"set{i}", 1, 100, 200, i, 10) for i in range(30)]
    shown = planned_data_usage.usage_lines("train", usages)
    assert len(shown) == 21
    assert tells(shown[3], "0.69% set3 1 100 200 3 10 0.30")
    assert "and 10 more data sets" in shown[-1]


def test_each_docstring_is_a_document_once():
    sources = [
        '"""A."""\ndef f():\n  "B.\\d"\nclass C:\n  "A."\n',
        'x = "no docstring"',
        "no Python (",
        'async def g():\n  """ D.\n  E. """',
    ]
    assert list(stdlib_corpus.docstrings(sources)) == ["A.", "B.\\d", "D.\nE. "]


def commands_of(page):
    """The commands of the page's bash blocks as words; comments and continued lines as bash reads them."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.full
def test_every_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """In the order of the page, in a folder with examples/ alone: the tools called as functions, gzip and the like by their names here."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    ran = set()
    for words in commands_of(ROOT / "docs/data_preparation.md"):
        if words[:2] == ["gzip", "--keep"]:
            Path(f"{words[2]}.gz").write_bytes(gzip.compress(Path(words[2]).read_bytes()))
            continue
        if words[0] == "echo":
            assert words[2] == ">"
            Path(words[3]).write_text(words[1])
            continue
        if words[0] == "printf":
            assert words[2] == ">"
            Path(words[3]).write_text(words[1].replace("\\n", "\n"))
            continue
        if words[:2] == ["python", "-c"]:
            assert words[3] == ">"
            with open(words[4], "wb") as output:
                subprocess.run([sys.executable, *words[1:3]], stdout=output, check=True)
            continue
        if words[0] == "zcat":
            monkeypatch.setattr(
                sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.decompress(Path(words[1]).read_bytes())))
            )
            assert words[2] == "|"
            words = words[3:]
        assert words[0] == "python", f"the test does not know how to run {words}"
        tool = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))
        assert tool.main(words[2:]) == 0, (words, capsys.readouterr().err)
        ran.add(tool.__name__.removeprefix("tools."))
    tools = {"stdlib_corpus", "train_tokenizer", "preprocess_data", "inspect_dataset", "merge_datasets", "data_plan"}
    assert ran == tools | {"prepare_cache", "index_cache"}
    documents = [json.loads(line)["text"] for line in Path("plain.jsonl").read_text().splitlines()]
    assert documents == ["A first document,\nof two lines.", "A second one."]
    assert tells(capsys.readouterr().out, "70.00% data/library_text_document")
    assert len(list(Path("cache").glob("*-train-sample_index.npy"))) == 2, "of the two files of the blend"
    assert len(IndexedDataset("data/merged_text_document")) == 2 * len(IndexedDataset("data/library_text_document"))
