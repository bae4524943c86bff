"""tools/preprocess_data.py --sft writes what training makes of the same JSON lines."""

from pathlib import Path

import numpy as np
import pytest
from sft_folder import chats, write_lines, write_tokenizer

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.sft_dataset import build_sft_datasets
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools import preprocess_data


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_files_give_the_samples_of_the_lines(workers: int, tmp_path: Path, capsys):
    write_tokenizer(tmp_path / "model")
    path = write_lines(tmp_path / "a.jsonl", [*chats(15), {"messages": []}, *chats(15)])
    words = ["--sft", "--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", str(workers)]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "model")]
    assert preprocess_data.main(words) == 1
    assert "a.jsonl:16: has no message of the assistant" in capsys.readouterr().err
    assert preprocess_data.main([*words, "--on-error", "skip"]) == 0
    told = capsys.readouterr().err
    assert "1 lines skipped" in told and f"--data-path {tmp_path}/out_sft_document\n" in told

    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "model")))
    datasets = []
    for data in (path, tmp_path / "out_sft_document"):
        settings = {
            "seq_length": 80,
            "split": "1,0,0",
            "sft": True,
            "reset_position_ids": True,
            "reset_attention_mask": True,
        }
        config = DataConfig(data_path=[str(data)], **settings)
        datasets.append(build_sft_datasets(config, tokenizer, [30, 0, 0], 7, say=lambda line: None)[0])
    lines, files = datasets
    assert len(lines) == len(files) >= 30
    for i in range(len(lines)):
        assert all(np.array_equal(lines[i][name], files[i][name]) for name in lines[i])


def test_flags_of_texts_are_refused(tmp_path: Path, capsys):
    words = ["--sft", "--input", "a.parquet", "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    assert preprocess_data.main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]) == 2
    told = capsys.readouterr().err
    assert "--append-eod is about texts" in told and "a Parquet file was given" in told
