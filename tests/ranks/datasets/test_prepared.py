"""A run whose index cache was prepared builds nothing: the whole of a training command, as one rank within this process."""

import re
import shlex

import numpy as np
import pretrain_t5
import pytest
from whole_run import run

import pretrain_bert
from megatron.core.datasets import IndexedDatasetWriter
from tools import prepare_cache

T5 = "--decoder-seq-length 12 --vocab-extra-ids 5"
LOG_LINE = re.compile(r"\| consumed samples:|validation loss at")


@pytest.mark.full
@pytest.mark.parametrize("blended", [False, True])
def test_a_prepared_run_builds_nothing(tmp_path, capsys, blended):
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for i in range(100):
            writer.add_document([i % 31] * 40)
    prefix, cache = str(tmp_path / "text"), tmp_path / "cache"
    paths = ["0.7", prefix, "0.3", prefix] if blended else [prefix]
    flags = shlex.split(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 31 "
        "--micro-batch-size 2 --global-batch-size 8 --lr 0.1 --log-interval 1 --device cpu --split 8,1,1 --train-iters 2 "
        "--eval-interval 2 --eval-iters 1"
    ) + ["--data-path", *paths, "--data-cache-path", str(cache)]
    assert prepare_cache.main(flags) == 0
    assert "building the index of" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    run(flags, tiny=[])
    printed = capsys.readouterr().out
    assert "building the index" not in printed
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
    said = re.findall(r"^(\w+) data: (\S+%) .* ([\d,]+) samples of 8 are read", printed, re.MULTILINE)
    # 16 samples for training; 11.2 and 4.8 of them are rounded up.
    expected = [("70.59%", "12"), ("29.41%", "5")] if blended else [("100.00%", "16")]
    assert [tuple(rest) for split, *rest in said if split == "train"] == expected
    assert [split for split, *_ in said] == [split for split in ("train", "valid", "test") for _ in expected]
    assert len(LOG_LINE.findall(printed)) == 2 + 2, "two steps, validation and test; no line of the plan looks like one"
    assert prepare_cache.main(flags) == 0
    assert "building the index" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("blended, head", [(True, ""), (False, "--bert-no-binary-head"), (False, T5)])
def test_a_prepared_bert_builds_nothing(tmp_path, capsys, blended, head):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for i in range(60):
            writer.add_document([5 + i % 30] * 12, [3] * 4)
    prefix, cache = str(tmp_path / "text"), tmp_path / "cache"
    flags = shlex.split(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --mask-prob 0.3 --lr 0.1 --log-interval 1 "
        f"--micro-batch-size 2 --global-batch-size 8 --device cpu --split 8,1,1 --train-iters 2 --eval-interval 2 --eval-iters 1 {head}"
    ) + ["--vocab-file", str(tmp_path / "vocab.txt"), "--data-cache-path", str(cache)]
    flags += ["--data-path", *(["0.7", prefix, "0.3", prefix] if blended else [prefix])]
    script, model = (pretrain_t5, "t5") if head == T5 else (pretrain_bert, "bert")
    assert prepare_cache.main(["--prepare-cache-model", model, *flags]) == 0
    assert "building the index of" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    run(flags, tiny=[], script=script, args_defaults={"tokenizer_type": "BertWordPieceLowerCase"})
    printed = capsys.readouterr().out
    assert "building the index" not in printed and len(LOG_LINE.findall(printed)) == 2 + 2
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
