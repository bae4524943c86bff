"""tools/benchmark.py: its FLOPs against a hand count, its table, and what it says to mistakes."""

import json
from dataclasses import asdict, replace

import pytest
from said import tells

import tools.benchmark as benchmark
from tools.benchmarking import records, works
from tools.benchmarking.contest import check_losses, ratio
from tools.benchmarking.report import markdown, overview, table
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


def test_flops_and_parameters_of_a_bert_have_its_heads_dense_layer():
    """BERT-base's 110,106,428 parameters with both heads, as transformers counts BertForPreTraining's."""
    work = Work(
        **{**MODELS["bert-small"], "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    )
    layers = 2 * (8 * 24 + 8 * 8 + 8 * 32 + 32 * 8)
    scores_and_values = 2 * 2 * work.seq_length * 8  # layers x two products x keys x width
    assert work.flops_per_token == 3 * 2 * (layers + 8 * 8 + 8 * 10 + scores_and_values)
    base = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30522, "seq_length": 512}
    assert Work(**MODELS["bert-small"] | base).parameters == 110_106_428


@pytest.mark.parametrize("name", ["framework", "llama-small", "bert-small"])
def test_flops_of_a_work_are_those_of_the_closed_form(name: str):
    work = Work(**MODELS[name])
    assert work.flops_per_token == work.shape.flops_per_token(full_attention=name == "bert-small")
    assert work.flops_per_token_full_attention == work.shape.flops_per_token(full_attention=True)


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


@pytest.mark.sweep
def test_it_measures_ours_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    found = tmp_path / "found.json"
    assert (
        benchmark.main(
            [*TINY, "--peers", "transformers", "plain", "--bf16", "--no-ceilings", "--profile", "--json", str(found)]
        )
        == 0
    )
    printed, measured = capsys.readouterr().out, json.loads(found.read_text())
    assert list(measured["results"]) == ["ours", "plain PyTorch"]  # and they have the same losses
    assert "transformers is not installed" in printed
    ours = measured["results"]["ours"]
    assert sum(ours["phases"].values()) == pytest.approx(ours["seconds"], rel=0.5)
    assert markdown(measured) in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| ours bf16")]
    assert len(row.split("|")) == 12 and "| operator of our step" in printed


def test_works_are_chosen_by_prefix_and_group():
    assert len(works.chosen(["readme"])) == 20 and len(works.chosen(["readme"], half=False)) == 10
    assert list(works.chosen(["parallel", "llama-4x512-fp32", "gpt-28m-2x512-fp32", "gpt-28m"])) == [
        *("parallel-dp", "parallel-zero3", "parallel-tp", "parallel-pp"),
        *("llama-4x512-fp32", "llama-4x512-fp32-dropout"),
        *("gpt-28m-2x512-fp32", "gpt-28m-2x512-fp32-dropout", "gpt-28m-2x512-bf16", "gpt-28m-2x512-bf16-dropout"),
    ]
    assert works.unknown(["gpt2", "gpt3"]) == ["gpt3"]


def test_the_time_of_works_is_told_beforehand_from_the_ceilings(capsys):
    small, large = (works.chosen([name])[name] for name in ("gpt-28m-2x512-fp32", "gpt2-2x1024-bf16"))
    limits = {"fp32_tflops": 1000.0, "bf16_tflops": 0.5}
    by_hand = 2 * 2048 * large.flops_per_token / 0.5e12  # a step at half the ceiling
    assert benchmark.seconds_of(small, limits, 10) == 10 * 0.5  # a turn takes half a second at least
    assert benchmark.seconds_of(large, limits, 10) == pytest.approx(10 * by_hand)
    config = benchmark.BenchmarkConfig(peers=["plain"], limit_seconds=60.0)
    benchmark.tell_plan(config, {small: ("a", 3), large: ("b", 9)}, limits)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "a: 3 rounds of 2 contenders, about 5 s and their starts"
    assert told[1].startswith("b: 9 rounds of 2 contenders") and "--limit-seconds 60" in told[2]
    benchmark.tell_plan(config, {small: ("a", 3)}, {})
    assert not capsys.readouterr().err  # nothing is known without ceilings


def test_a_work_that_fails_does_not_keep_the_next_from_being_measured(monkeypatch, capsys):
    def measure(config, work, limits, rounds, until):
        if work.num_query_groups:
            raise benchmark.Stopped("ours: a region ran eager")
        return {"steps": {"ours": [{}] * rounds}}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(records, "merged", lambda mine: {"rounds": records.rounds_of(mine)})
    monkeypatch.setattr(benchmark, "overview", str)
    given = ["--works", "llama-4x512-fp32", "parallel-dp", "--peers", "none", "--no-ceilings", "--rounds", "3"]
    assert benchmark.main(given) == 1
    said = capsys.readouterr()
    assert said.out.strip() == "{'parallel-dp': {'rounds': 3}}"
    assert "llama-4x512-fp32-dropout is not measured: ours: a region ran eager" in said.err.splitlines()[-1]


def test_every_named_work_has_the_sizes_of_a_run():
    for name, work in works.chosen(works.GROUPS).items():
        assert not list(work.problems()) and work.num_microbatches >= 1, name
        assert work.tokens == {"gpt-28m": 1024}.get(name[:7], 512 * work.global_batch_size if work.ranks > 1 else 2048)


PARAMETERS = {"llama-small": 8 * (768 * (2 * 768 + 2 * 256) + 3 * 768 * 2048) + 2 * 32000 * 768 + 17 * 768}


def test_parameters_of_other_families_equal_a_count_by_hand():
    assert Work(**MODELS["llama-small"]).parameters == PARAMETERS["llama-small"]
    h, words, s = 8, 10, 4
    bert = Work(1, h, 2, words, s, family="bert")
    tables, layer = words * h + s * h + 2 * h, 12 * h * h + 13 * h
    heads = (h * h + h) + 2 * h + words + (h * h + h) + (2 * h + 2)
    assert bert.parameters == tables + layer + 2 * h + heads


def said_of(**losses: float) -> dict[str, dict]:
    return {name: {"loss_before": loss, "loss_after": loss} for name, loss in losses.items()}


def test_contenders_with_other_losses_are_refused():
    work = Work(**MODELS["tiny"])
    check_losses(said_of(ours=5.0, peer=5.00004), work)
    check_losses(said_of(ours=5.0, peer=5.005), replace(work, bf16=True))
    with pytest.raises(ValueError, match=r"ours 5[.]000000, peer 5[.]000100"):
        check_losses(said_of(ours=5.0, peer=5.0001), work)


def record(seconds: float, peer: float, code: str = "a") -> dict:
    def step(s: float) -> dict:
        return {"seconds": s, "cpu_seconds": s, "phases": {"forward": s}, "peak_bytes": 2**30}

    contenders = {title: {"library": kind, "bf16": None} for title, kind in (("ours", "ours"), ("x", "plain"))}
    work = Work(**MODELS["tiny"])
    return {
        "work": asdict(work),
        "code": code,
        "contenders": contenders,
        "ceilings": {"fp32_tflops": 1.0, "bf16_tflops": 2.0},
        "flops_per_token": work.flops_per_token,
        "about": {"ours": {}, "x": {}},
        "steps": {"ours": [step(seconds)], "x": [step(peer)]},
        "not_measured": {},
    }


def test_rounds_of_several_runs_count_together_where_all_is_the_same(tmp_path):
    file = tmp_path / "r.jsonl"
    for one in (record(1.0, 2.0), record(1.0, 9.0, code="b"), record(2.0, 3.0)):
        records.append_record(file, one)
    file.write_text(file.read_text() + '{"cut')
    mine = records.same(records.read_records(file), {"code": "a"})
    assert records.rounds_of(mine) == 2
    merged = records.merged(mine)
    assert merged["results"]["ours"]["all_seconds"] == [1.0, 2.0]
    (row,) = [line for line in overview({"tiny": merged}).splitlines() if line.startswith("| tiny")]
    assert "1.500 / 2.500" in row and "1.75 (1.50-2.00)" in row


FLAGS_AND_SAID = [
    (["--micro-batch-size", "3", "--global-batch-size", "4"], "--micro-batch-size 3"),
    (["--hidden-size", "70", "--num-attention-heads", "4"], "--num-attention-heads 4"),
    (["--peers", "jax"], "--peers fp32 bf16"),
    (["--layers", "3"], "--layers"),
    (["--compile", "whole"], "--compile whole regions"),
    (["--works", "gpt3"], "--works gpt3"),
    (["--records", "rounds.jsonl"], "--records --works"),
    (["--parallel", "tp", "--num-attention-heads", "1"], "--parallel tp 1"),
    (["--parallel", "pp", "--num-layers", "3"], "--parallel --num-layers 3 2"),
    (["--parallel", "dp", "--global-batch-size", "6"], "--global-batch-size 6 4"),
]


@pytest.mark.parametrize(("flags", "says"), FLAGS_AND_SAID)
def test_mistakes_are_said_in_a_line(flags: list[str], says: str, capsys):
    assert benchmark.main(["--model", "tiny", *flags]) == 2
    assert tells(capsys.readouterr().err, says)
