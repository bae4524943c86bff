"""Predicted memory against published figures, closed forms, and what the tool is asked."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from documents import ROOT, commands_of

from megatron.core.config import ConfigError
from megatron.training.memory.activations import peak_of_rank, stage_bytes, tape_of_stage
from megatron.training.memory.anchors import gpt_parameters, layer_activations, zero_bytes_per_parameter
from megatron.training.memory.estimate import DEVICE, IN_MEMORY, KINDS, estimate, worst
from megatron.training.memory.parameters import parameter_count
from megatron.training.memory.report import amount, full_report, short_report
from megatron.training.memory.room import STATE, hint_of_fused, less_with, warning_of_room
from megatron.training.memory.sizes import LayerSizes, RunSizes
from tools import estimate_memory

GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 --vocab-size 51199 --bf16 "
    "--attention-dropout 0 --global-batch-size 1536 --make-vocab-size-divisible-by 1"
)


@cache
def sizes_of(words: str) -> RunSizes:
    return estimate_memory.read(words.split())[0]


def layer(**more) -> LayerSizes:
    """GPT-2's layer in bfloat16 with dropout behind its blocks, small numbers."""
    shape = dict(s=16, b=3, h=32, heads=4, kv_heads=4, all_kv_heads=4, d=8, f=128, words=64, positions=16)
    return LayerSizes(**shape | {"hidden_dropout": True, "param_bytes": 2, "residual_bytes": 2} | more)


def kept_by_layer(sizes: LayerSizes) -> int:
    """What one more layer adds to what a microbatch keeps."""
    one, two = (stage_bytes(RunSizes(sizes, layers=(range(n),)), 0).kept for n in (1, 2))
    return two - one


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_stages_take_what_the_paper_says(stage: int, gigabytes: float):
    """arXiv:1910.02054, figure 1: 7.5 B parameters on 64 ranks."""
    assert 7.5 * zero_bytes_per_parameter(stage, 64) == pytest.approx(gigabytes, rel=0.005)


# Bytes a parameter with d = 16: Megatron-LM's documentation of its distributed optimizer, and the same arithmetic for stages 2, 3.
PRECISIONS_AND_EXPECTED = [
    ("--bf16", 0, 18),
    ("--bf16", 1, 6 + 12 / 16),
    ("--bf16", 2, 2 + 16 / 16),
    ("--bf16", 3, 18 / 16),
    ("", 0, 16),
    ("", 1, 8 + 8 / 16),
    ("", 2, 4 + 12 / 16),
    ("", 3, 16 / 16),
]


@pytest.mark.parametrize(("precision", "stage", "expected"), PRECISIONS_AND_EXPECTED)
def test_state_follows_the_published_bytes_a_parameter(precision: str, stage: int, expected: float):
    run = sizes_of(f"{GPT3} --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8")
    if not precision:
        run = replace(run, layer=replace(run.layer, param_bytes=4, residual_bytes=4))
    run = replace(run, zero_stage=stage)
    held = parameter_count(run) / 8  # per tensor-parallel rank; norms and row biases are on each, tables on both ends
    assert sum(one.state for one in estimate(run)) == pytest.approx(expected * held, rel=0.005)


def test_parameters_of_gpt3():
    """174.6 B, arXiv:2104.04473, equation 2, whose terms leave out the final norm alone."""
    run = sizes_of(GPT3)
    assert parameter_count(run) == round(gpt_parameters(96, 12288, 51200, 2048)) + 2 * 12288
    assert parameter_count(run) == pytest.approx(174.6e9, rel=1e-3)


# What transformers' BertForPreTraining and BertForMaskedLM count for bert-base-uncased. Theirs have a norm behind the embedding, ours behind
# the last layer; without the order of sentences ours has no kinds of token either.
@pytest.mark.parametrize(("more", "expected"), [("", 110_106_428), (" --bert-no-binary-head", 109_514_298 - 2 * 768)])
def test_parameters_of_bert_base(more: str, expected: int):
    words = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --micro-batch-size 1"
    assert (
        parameter_count(sizes_of(f"--model bert {words} --vocab-size 30521 --make-vocab-size-divisible-by 1{more}"))
        == expected
    )


# arXiv:2205.05198, table 2, in units of s b h, without scores; ours has two numbers a row of each norm and one a row and head more.
SIZES_AND_UNITS = [
    (layer(), 34),
    (layer(t=4, heads=1, kv_heads=1, f=32), 10 + 24 / 4),
    (layer(t=4, heads=1, kv_heads=1, f=32, sequence_parallel=True), 34 / 4),
    (layer(recompute="uniform"), 2),
    (layer(recompute="block"), 2),
    (layer(recompute="uniform", t=4, sequence_parallel=True), 2 / 4),
    (layer(recompute="block", t=4, saves_parts=True), 2 / 4),
]


@pytest.mark.parametrize(("sizes", "units"), SIZES_AND_UNITS)
def test_activations_of_a_layer_are_the_published_ones(sizes: LayerSizes, units: float):
    sbh, rows = sizes.s * sizes.b * sizes.h, sizes.tokens
    small = 0 if sizes.recompute else 2 * rows * 2 * 4 + sizes.s * sizes.b * sizes.heads * 4
    assert layer_activations(sizes) == units * sbh
    # A model of one layer has that many for "block"; with two, the second is kept.
    ours = (
        stage_bytes(RunSizes(sizes, layers=(range(1),), p=1), 0).kept
        - stage_bytes(RunSizes(sizes, layers=(range(0),), p=1), 0).kept
    )
    assert ours == pytest.approx(units * sbh + small)


def test_the_plain_kernel_keeps_seven_bytes_a_score():
    """float32 softmax, mask, what is dropped in bfloat16: 4 + 1 + 2, where the paper has 2 + 1 + 2; and three times s b h e."""
    fused, plain = layer(), layer(fused_attention=False, attention_dropout=True)
    sbh, scores = 16 * 3 * 32, 3 * 4 * 16 * 16
    more = kept_by_layer(plain) - kept_by_layer(fused)
    logsumexp, causal = 16 * 3 * 4 * 4, 16 * 16
    assert more == 7 * scores + causal - logsumexp + (3 * 2 - 6) * sbh


@pytest.mark.parametrize(
    ("schedule", "live"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (8, 8, 8, 8)), ("zb-h1", (4, 4, 4, 4))]
)
def test_activations_count_the_microbatches_alive(schedule: str, live: tuple[int, ...]):
    """Stages in the middle keep p - r microbatches (1F1B), m (GPipe), p (ZB-H1, some of them the factors of products only)."""
    sizes = layer()
    run = RunSizes(sizes, layers=tuple(range(n, n + 1) for n in range(4)), p=4, m=8, schedule=schedule)
    ranks = estimate(run)
    for rank in (1, 2):
        at = stage_bytes(run, rank)
        expected = (live[rank] - 1) * at.kept + at.backward
        if schedule == "zb-h1":
            assert at.kept_for_weights < at.kept and ranks[rank].bytes["activations"] <= expected
        else:
            assert ranks[rank].bytes["activations"] == expected


def test_the_sums_of_a_step_are_counted():
    """Stage 1 on 4 ranks: a shard of float32 sums, beside the whole; rounded to bfloat16, a copy of all and a shard of that."""
    run = RunSizes(layer(), layers=(range(2),), shards=4, zero_stage=1)
    whole = estimate(run)[0].bytes["gradients"]
    assert estimate(run)[0].bytes["communication"] == whole // 4
    rounded = replace(run, reduce_in_bf16=True)
    assert estimate(rounded)[0].bytes["communication"] == whole // 2 + whole // 8


def test_stage_3_holds_two_units_while_one_is_fetched_ahead():
    sizes = layer(tied=False, words=8, positions=0)
    run = RunSizes(sizes, layers=(range(6),), shards=2, zero_stage=3, overlap_gather=True)
    of_layer = 12 * 32 * 32 + 13 * 32
    got = estimate(run)[0].bytes["communication"]
    assert (
        got == 2 * of_layer * 2 + of_layer * 4
    )  # parameters of two layers, gradients of one; its sum takes the place of parameters


# Elements of a model of 6 layers without positions, whose parts come out even: 12 h^2 + 13 h a layer, two tables, a norm.
_H = 32
_NUMEL_OF_LAYER = 12 * _H * _H + 13 * _H
_NUMEL = 6 * _NUMEL_OF_LAYER + 2 * 8 * _H + 2 * _H


def even(**more) -> RunSizes:
    return RunSizes(layer(tied=False, words=8, positions=0), layers=(range(6),), **more)


def test_what_is_offloaded_is_counted_where_it_lives():
    (rank,) = estimate(even(shards=2, zero_stage=3, tier="file", offload_params=True))
    part = _NUMEL // 2
    assert rank.on["file"] == {"parameters": 2 * part, "optimizer": 12 * part}
    assert rank.on["host"] == {"slices": 3 * 12 * part}  # all of a small model is in a slice
    assert rank.on[DEVICE]["gradients"] == 4 * part and rank.total == sum(rank.on[DEVICE].values())
    text = "\n".join(short_report([rank]))
    assert f"in a file: parameters {amount(2 * part)}, masters and moments {amount(12 * part)}" in text
    assert short_report([rank])[1].split()[-3:] == ["device", "host", "file"]
    (host,) = estimate(even(tier="host", offload_fraction=0.25))
    assert 0.25 * 12 * _NUMEL <= host.on["host"]["optimizer"] < 0.4 * 12 * _NUMEL  # rounded up to whole parameters
    assert host.on["host"]["optimizer"] + host.on[DEVICE]["optimizer"] == 12 * _NUMEL == host.bytes["optimizer"]


def recomputed_in_four_stages(**more) -> RunSizes:
    """Two recomputed layers a stage, each a group."""
    return RunSizes(
        layer(recompute="uniform", **more), layers=tuple(range(2 * n, 2 * n + 2) for n in range(4)), p=4, m=8
    )


def test_offloaded_inputs_wait_on_the_host():
    """1F1B has 3 microbatches alive on rank 1: 3 x 2 inputs. On the device, of the 4 of two others, the 2 of the last forward are still
    on their way out; of a microbatch in its backward the next input is on its way in, and lies where it would have waited."""
    plain, away = (estimate(recomputed_in_four_stages(offloaded_layers=n))[1] for n in (0, 2))
    one = 16 * 3 * 32 * 2
    assert away.on["host"] == {"activations": 3 * 2 * one}
    assert away.on[DEVICE]["activations"] == plain.on[DEVICE]["activations"] - 4 * one + 2 * one
    assert any("in host memory: activations" in line for line in short_report([away]))
    half = estimate(recomputed_in_four_stages(offloaded_layers=1))[1]
    assert half.on["host"] == {"activations": 3 * one}


def test_offloaded_inputs_wait_in_the_file():
    """Read back in blocks of 1 MiB of the host, two layers at a time."""
    away = estimate(replace(recomputed_in_four_stages(offloaded_layers=2), tier="file", offload_fraction=0.0))[1]
    assert away.on["file"] == {"activations": 3 * 2 * 16 * 3 * 32 * 2}
    assert away.on["host"] == {"slices": 2 * 2**20}


def test_slots_take_what_inputs_do_and_are_all_there_at_once():
    """At the peak, in the backward of a stage's first group, the input of the second is gone, and its slot is not. A slot is a multiple
    of 512 bytes, as an input of 6 x 512 is; one of 18 x 33 x 2 is not. Of GPipe all microbatches wait."""
    plain, slots = (estimate(recomputed_in_four_stages(contiguous=on))[1].total for on in (False, True))
    assert slots == plain + 16 * 3 * 32 * 2
    run = replace(recomputed_in_four_stages(contiguous=True, s=6, h=33), schedule="gpipe")
    got = estimate(run)[1].total - estimate(replace(run, layer=replace(run.layer, contiguous=False)))[1].total
    one = 6 * 3 * 33 * 2
    assert got == 8 * 2 * (3 * 512 - one) + one


def test_the_sums_of_two_chunks_end_one_after_the_other():
    """bfloat16 gradients, summed in float32 over 2 ranks: while the first chunk's sum is taken, 2 bytes an element have been received of
    both, and 4 of half of the first are made. No transfer is left then, and none counted beside."""
    sizes = layer(tied=False, words=8, positions=0, main_grad_bytes=2)
    run = RunSizes(
        sizes,
        layers=tuple(range(n, n + 1) for n in range(4)),
        p=2,
        m=4,
        schedule="interleaved",
        shards=2,
        zero_stage=1,
        overlap_reduce=True,
        sums_wide=True,
    )
    first, second = _NUMEL_OF_LAYER, _NUMEL_OF_LAYER + 8 * _H + 2 * _H
    assert estimate(run)[1].bytes["communication"] == max(4 * first + 2 * second, 4 * second)


def test_hybrid_shards_divide_optimizer_state_over_both_axes():
    (rank,) = estimate(even(shards=2, replicas=2, zero_stage=3, divides_outer=True))
    held = [rank.bytes[kind] for kind in KINDS[:3]]
    assert held == [2 * _NUMEL // 2, 4 * _NUMEL // 2, 12 * _NUMEL // 4]


def test_bfloat16_gradients_have_float32_sums_of_a_shard():
    run = even(shards=2, zero_stage=1)
    run = replace(run, layer=replace(run.layer, main_grad_bytes=2))
    assert estimate(run)[0].bytes["gradients"] == 2 * _NUMEL + 4 * _NUMEL // 2
    assert estimate(replace(run, zero_stage=2))[0].bytes["gradients"] == 4 * _NUMEL // 2


# Of the 34 s b h: the outputs of the norms are 2 each, what GELU and the product behind it take 8 each.
@pytest.mark.parametrize(
    ("modules", "units"),
    [(("mlp",), 34 - 16), (("layernorm",), 34 - 4), (("mlp", "layernorm"), 34 - 20), (("core_attn",), 34)],
)
def test_what_is_computed_again_is_not_kept(modules: tuple[str, ...], units: int):
    sizes = layer(recompute="selective", recompute_modules=modules)
    scores = 0 if "core_attn" in modules else sizes.s * sizes.b * sizes.heads * 4
    assert kept_by_layer(sizes) == units * sizes.s * sizes.b * sizes.h + 2 * sizes.tokens * 2 * 4 + scores


def test_a_fused_kernel_keeps_what_it_adds_to_the_scores_of_padding():
    gpt = layer()
    assert kept_by_layer(replace(gpt, model="bert")) == kept_by_layer(gpt) + gpt.s * gpt.b * 2


def test_every_step_of_a_tape_is_named_and_counted():
    names = [step.name for segment in tape_of_stage(RunSizes(layer(), layers=(range(1),)), 0) for step in segment.steps]
    assert names[:3] == ["shared", "words", "dropout"] and names[-1] == "loss"
    assert peak_of_rank([], {}) == 0


def test_a_thousand_ranks_are_estimated_in_one_process(capsys):
    words = (
        f"{GPT3} --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel"
    )
    assert estimate_memory.main([*words.split(), "--use-distributed-optimizer"]) == 0
    out = capsys.readouterr().out
    assert "1,024 rank(s)" in out and "<- most" in out
    for published in ("arXiv:2104.04473", "6.75 bytes a parameter", "arXiv:2205.05198"):
        assert published in out.split("agrees with")[1]
    assert "differs" not in out


def test_the_page_on_offloading_shows_the_table_of_its_own_command(capsys):
    page = ROOT / "docs" / "offload.md"
    (command,) = commands_of(page)
    assert estimate_memory.main(command.removeprefix("python pretrain_gpt.py").split()) == 0
    (shown,) = re.findall(r"^  0 +4 .* MiB$", page.read_text(), re.MULTILINE)
    assert shown.split() in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_json_says_what_the_table_says(capsys):
    words = f"{GPT3} --world-size 64 --pipeline-model-parallel-size 8 --json".split()
    assert estimate_memory.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    ranks = estimate(estimate_memory.read(words)[0])
    assert said["worst_total_bytes"] == worst(ranks).total == max(stage["total"] for stage in said["stages"])
    assert [{kind: stage[kind] for kind in KINDS} for stage in said["stages"]] == [one.bytes for one in ranks]


WORDS_AND_PROBLEMS = [
    ("--hiden-size 3", "unknown flag --hiden-size; did you mean --hidden-size?"),
    ("--world-size 0", "--world-size is 0; it must be at least 1"),
    ("--world-size 10 --tensor-model-parallel-size 4", "--world-size 10"),
    ("--model bert --mask-prob 0.3 --reset-attention-mask", "--reset-attention-mask has no meaning for BERT"),
    ("--zero-stage 3 --fixed-order-grad-reduce", "leave out --zero-stage 3"),
]


@pytest.mark.parametrize(("words", "problem"), WORDS_AND_PROBLEMS)
def test_bad_input_is_refused_in_the_usual_words(words: str, problem: str, capsys):
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --vocab-size 9"
    assert estimate_memory.main([*small.split(), *words.split()]) == 2
    message = capsys.readouterr().err
    assert (
        message.startswith("cannot estimate, 1 problem(s):") and problem.split(" is")[0] in message
    ) or "10 is not" in message


def test_what_is_missing_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        estimate_memory.read(["--vocab-size", "9"])
    assert error.value.problems == ["--micro-batch-size is required", "--seq-length is required"]


@pytest.mark.parametrize("more", ["", "--bert-binary-head --model bert", "--num-layers two"])
def test_a_vocabulary_size_is_asked_for_and_no_tokenizer(more: str):
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    with pytest.raises(ConfigError) as error:
        estimate_memory.read([*small.split(), *more.split()])
    assert error.value.problems[-1].startswith("--vocab-size N is required: the number of words is enough")


# A model of 7 billion parameters. Of each of 32 x 4096 x 4096 scores a plain kernel keeps 7 bytes in a layer, see above.
SEVEN = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --bf16 --vocab-size 32000"


def test_dropout_that_keeps_a_fused_kernel_away_is_hinted_at(capsys):
    plain, fused = (estimate(sizes_of(SEVEN + more))[0].bytes["activations"] for more in ("", " --attention-dropout 0"))
    assert estimate_memory.main(SEVEN.split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"--attention-dropout 0 uses the fused kernel: activations {amount(fused)} instead of {amount(plain)}"
    )
    assert plain - fused == pytest.approx(32 * 7 * 32 * 4096**2, rel=0.05)
    for more in ("--attention-dropout 0", "--attention-backend unfused", "--seq-length 64"):
        run = sizes_of(f"{SEVEN} {more}")
        assert hint_of_fused(run, estimate(run)) == []


def test_the_start_of_a_run_shows_few_stages():
    run = RunSizes(layer(), layers=tuple(range(n, n + 1) for n in range(12)), p=12, m=12)
    lines = short_report(estimate(run))
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "10", "11"]
    assert any("worst rank: stage 0" in line for line in full_report(run, estimate(run)))


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB")])
def test_amounts(size: int, text: str):
    assert amount(size) == text


WIDE = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 63 --micro-batch-size 4"


@pytest.mark.parametrize(
    ("words", "largest", "flags", "others"),
    [
        (
            "--seq-length 512",
            "activations",
            ["--attention-dropout 0", "--recompute-granularity full", "below 4", "--bf16"],
            ["--zero-stage"],
        ),
        (
            "--seq-length 512 --recompute-granularity full --recompute-method uniform --attention-dropout 0",
            "activations",
            ["below 4"],
            ["--recompute-granularity", "--attention-dropout"],
        ),
        (
            "--seq-length 8 --hidden-size 512 --world-size 4",
            "optimizer state",
            ["--zero-stage 3", "--offload-dir"],
            ["--recompute", "--bf16"],
        ),
        (
            "--seq-length 8 --hidden-size 512 --world-size 4 --zero-stage 3 --bf16 --offload-params --offload-dir x",
            "",
            [],
            ["--zero-stage 3", "--offload-dir", "--bf16"],
        ),
    ],
)
def test_a_run_without_room_says_what_takes_most_and_what_makes_it_less(words, largest, flags, others):
    run = sizes_of(f"{WIDE} {words}")
    ranks = estimate(run)
    need = worst(ranks).total
    assert warning_of_room(run, ranks, need) == warning_of_room(run, ranks, None) == []
    (line,) = warning_of_room(run, ranks, need - 1)
    assert line.startswith(f"WARNING: predicted {amount(need)} a rank, this device has {amount(need - 1)}:")
    assert largest in line and all(flag in line for flag in flags) and not any(flag in line for flag in others), line


@pytest.mark.parametrize(("shares", "tiers"), [(0, ("device",)), (2, IN_MEMORY)], ids=["device", "machine"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_half_precision_is_advised_for_a_state_where_its_masters_do_not_outweigh_it(world, shares, tiers):
    """In float32 a parameter takes 16 bytes with its gradient and moments, in bfloat16, with its master, 18."""
    flags = [f"--zero-stage {stage}" for stage in range(4 if world > 1 else 1)] + [
        "--optimizer-cpu-offload",
        "--offload-dir x",
    ]
    advised = set()
    for more in flags:
        run, half = (sizes_of(f"{WIDE} --seq-length 8 --world-size {world} {more} {p}") for p in ("", "--bf16"))
        now, then = (max(one.state_within(*tiers) for one in estimate(of)) for of in (run, half))
        said = "--bf16" in less_with(run, STATE, shares=shares)
        assert said == (then < 0.99 * now), (more, now, then)  # beside a few padded elements
        advised |= {more} if said else set()
    assert "--zero-stage 0" not in advised and "--offload-dir x" in advised


def test_what_is_offloaded_to_the_host_needs_room_where_that_is_the_device():
    run = sizes_of(f"{WIDE} --seq-length 8 --optimizer-cpu-offload")
    (one,) = estimate(run)
    assert one.tiers["host"] > 0
    assert warning_of_room(run, [one], one.total) == []
    (line,) = warning_of_room(run, [one], one.total, shares=2)
    assert "free for each of its 2 rank(s)" in line and "--offload-dir" in line
