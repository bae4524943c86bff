"""tools/benchmark.py: its FLOPs against a hand count, its table, and what it says to mistakes."""

import json

import pytest
from said import tells

import tools.benchmark as benchmark
from tools.benchmarking.contest import ratio
from tools.benchmarking.report import markdown, table
from tools.benchmarking.work import MODELS, Work

TINY = [
    "--model",
    "tiny",
    "--seq-length",
    "16",
    "--micro-batch-size",
    "1",
    "--rounds",
    "2",
    "--warmup",
    "1",
    "--steps",
    "1",
]


def test_flops_of_a_token_equal_a_count_by_hand():
    work = Work(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=10, seq_length=4)
    qkv, out, up, down, head = 8 * 24, 8 * 8, 8 * 32, 32 * 8, 8 * 10
    matrices = 2 * (qkv + out + up + down) + head
    scores_and_values = 2 * 2 * (4 / 2) * 8  # layers x two products x the half of 4 keys x width
    assert work.shape.multiplied_parameters == matrices
    assert work.flops_per_token == 3 * 2 * (matrices + scores_and_values)
    assert work.shape.flops_per_token(full_attention=True) == 3 * 2 * (matrices + 2 * scores_and_values)


def test_gpt2_small_has_the_parameters_of_gpt2():
    assert Work(**MODELS["gpt2-small"], seq_length=1024).parameters == 124_439_808
    assert Work(**MODELS["gpt2-small"]).padded_vocab_size == 50304


def test_ratio_is_of_medians_with_the_rounds_beside_it():
    assert ratio([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]) == (2.0, 1.0, 3.0)


def test_tables_are_aligned():
    assert table(["", "n"], [["a", "10"], ["bcd", "2"]]).splitlines() == [
        "|     |  n |",
        "| --- | -: |",
        "| a   | 10 |",
        "| bcd |  2 |",
    ]


@pytest.mark.full
def test_it_measures_ours_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    found = tmp_path / "found.json"
    assert (
        benchmark.main([*TINY, "--peers", "transformers", "--bf16", "--no-ceilings", "--profile", "--json", str(found)])
        == 0
    )
    printed, measured = capsys.readouterr().out, json.loads(found.read_text())
    assert list(measured["results"]) == ["ours"]
    assert "transformers is not installed" in printed
    ours = measured["results"]["ours"]
    assert sum(ours["phases"].values()) == pytest.approx(ours["seconds"], rel=0.5)
    assert markdown(measured) in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| ours bf16")]
    assert len(row.split("|")) == 10 and "| operator of our step" in printed


FLAGS_AND_SAID = [
    (["--micro-batch-size", "3", "--global-batch-size", "4"], "--micro-batch-size 3"),
    (["--hidden-size", "70", "--num-attention-heads", "4"], "--num-attention-heads 4"),
    (["--peers", "jax"], "--peers fp32 bf16"),
    (["--layers", "3"], "--layers"),
]


@pytest.mark.parametrize(("flags", "says"), FLAGS_AND_SAID)
def test_mistakes_are_said_in_a_line(flags: list[str], says: str, capsys):
    assert benchmark.main(["--model", "tiny", *flags]) == 2
    assert tells(capsys.readouterr().err, says)
