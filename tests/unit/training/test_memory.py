"""Predicted memory against published figures, closed forms, and what the tool is asked."""

import json
import random
import re
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from documents import ROOT, commands_of
from said import tells
from script_run import leaving_nothing_of

from megatron.core.base.dataclass_flags import ConfigError
from megatron.training.memory.dry_run_of_one_rank import Job, dry_run, mesh_of
from megatron.training.memory.flags_that_reduce_memory import STATE, capacity_warning, flags_that_reduce
from megatron.training.memory.forecast_memory_along_schedule import (
    DEVICE,
    IN_MEMORY,
    KINDS,
    Forecast,
    RankMemory,
    forecast,
    peak_along_schedule,
    worst,
)
from megatron.training.memory.predicted_memory_table import abridged_stage_table, amount
from tools import estimate_memory
from tools.estimating.job import read
from tools.script import script_at

GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 --vocab-size 51199 --bf16 "
    "--attention-dropout 0 --global-batch-size 1536 --make-vocab-size-divisible-by 1"
)
NO_MASKS = "--attention-dropout 0 --hidden-dropout 0"  # where state is counted alone: half of the time goes into masks
LAYERS = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --vocab-size 60 --bf16 --attention-dropout 0 "


@cache
def job_of(words: str) -> Job:
    return read(words.split()).job


@cache
def ranks_of(words: str) -> list[RankMemory]:
    return forecast(job_of(words))


@pytest.mark.full
def test_gpt3_on_a_thousand_ranks_is_estimated_in_one_process(capsys, monkeypatch):
    """174.6 B parameters, arXiv:2104.04473, equation 2: 12 L h^2 (1 + 13 / 12 h + (V + s) / 12 L h), which leaves out the final norm. Of
    Megatron-LM's distributed optimizer 6 + 12 / d bytes a parameter: 6.75 with d = 16."""
    words = f"{GPT3} --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer {NO_MASKS}"
    monkeypatch.setattr("tools.estimating.estimate.forecast", lambda job: ranks_of(words))  # not once more below
    assert estimate_memory.main(words.split()) == 0
    out = capsys.readouterr().out
    published = 12 * 96 * 12288**2 * (1 + 13 / (12 * 12288) + (51200 + 2048) / (12 * 96 * 12288))
    assert f"{round(published) + 2 * 12288:,} parameters; 1,024 rank(s)" in out and "<- most" in out
    held = published / 8
    assert sum(one.state for one in ranks_of(words)) == pytest.approx(6.75 * held, rel=0.01)


# Bytes a parameter with d = 16: Megatron-LM's documentation of its distributed optimizer, and the same arithmetic for stages 2, 3.
@pytest.mark.parametrize(
    ("precision", "stage", "expected"),
    [
        ("--bf16", 0, 18),
        ("--bf16", 1, 6 + 12 / 16),
        ("--bf16", 2, 2 + 16 / 16),
        ("--bf16", 3, 18 / 16),
        ("", 1, 8 + 8 / 16),
        ("", 3, 16 / 16),
    ],
)
def test_state_follows_the_published_bytes_a_parameter(precision: str, stage: int, expected: float):
    """arXiv:1910.02054, figure 1, in our precisions."""
    words = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 127"
    )
    (one,) = ranks_of(f"{words} {NO_MASKS} {precision} --world-size 16 --zero-stage {stage} --device cpu")
    assert one.state == pytest.approx(expected * one.parameters, rel=0.01)


# What transformers' BertForPreTraining and BertForMaskedLM count for bert-base-uncased. Theirs have a norm behind the embedding, ours behind
# the last layer; without the order of sentences ours has no kinds of token either.
@pytest.mark.full
@pytest.mark.parametrize(("more", "expected"), [("", 110_106_428), (" --bert-no-binary-head", 109_514_298 - 2 * 768)])
def test_parameters_of_bert_base(more: str, expected: int):
    words = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --micro-batch-size 1"
    (one,) = ranks_of(f"--model bert {words} {NO_MASKS} --vocab-size 30521 --make-vocab-size-divisible-by 1{more}")
    assert one.parameters == expected


@pytest.mark.full
def test_stages_of_an_encoder_and_of_a_decoder_are_told_apart():
    """As many layers on each of four stages: the sum over the stages is the model of one process."""
    words = (
        f"--model t5 {LAYERS} --num-layers 4 --decoder-seq-length 16 --untie-embeddings-and-output-weights {NO_MASKS}"
    )
    split = "--world-size 4 --pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 2"
    (one,), four = ranks_of(words), ranks_of(f"{words} {split}")
    assert sum(stage.parameters for stage in four) == one.parameters
    cross = 4 * 64 * 64 + 64  # of a decoder's layer
    assert four[2].parameters == four[1].parameters - 64 + 2 * cross, "the encoder's end has a norm"


def kept_by_layer(more: str) -> float:
    """What one more layer adds to what a microbatch keeps, in units of s b h."""
    kept = []
    for layers in (1, 2):
        job = job_of(f"{LAYERS} --num-layers {layers} {more}")
        changes = dry_run(job, 0).changes
        kept.append(next(change.left["activations"] for (op, _, _), change in changes.items() if op.name == "F"))
    return (kept[1] - kept[0]) / (32 * 2 * 64)


# arXiv:2205.05198, table 2, without scores and the masks of the two dropouts, 2 s b h there: ours are drawn again, from two words a row of
# each and one a column, 3/8 of s b h here. Ours has two numbers a row of each norm and one a row and head more: 1/4 to 1/2 of s b h here.
@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "units"),
    [
        ("", 32),
        ("--normalization RMSNorm", 32),
        ("--tensor-model-parallel-size 4 --world-size 4", 8 + 24 / 4),
        ("--tensor-model-parallel-size 4 --world-size 4 --sequence-parallel", 32 / 4),
        ("--recompute-granularity full --recompute-method uniform", 2),
        ("--recompute-granularity selective --recompute-modules mlp", 32 - 16),
        ("--recompute-granularity selective --recompute-modules layernorm", 32 - 4),
        ("--compile regions", 32 - 12),
        ("--compile regions --normalization RMSNorm", 32 - 12),
        ("--compile regions --tensor-model-parallel-size 4 --world-size 4", 4 + 16 / 4),
        ("--compile regions --tensor-model-parallel-size 4 --world-size 4 --sequence-parallel", 20 / 4),
        ("--compile layers", 32 - 12),
    ],
)
def test_activations_of_a_layer_are_the_published_ones(more: str, units: float):
    words = 0 if "full" in more else 3 / 8
    assert units <= kept_by_layer(more) <= units + words + 0.51


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "live"), [("1f1b", (4, 3, 2)), ("gpipe", (8, 8, 8)), ("zb-h1", (4, 4, 4))])
def test_activations_count_the_microbatches_alive(schedule: str, live: tuple[int, ...]):
    """Stages in the middle keep p - r microbatches (1F1B), m (GPipe), p (ZB-H1, some of them the factors of products only)."""
    words = f"{LAYERS} --num-layers 4 --pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 16 --pipeline-schedule {schedule}"
    ranks = ranks_of(words)
    kept = ranks[1].bytes["activations"] - ranks[2].bytes["activations"]
    if schedule == "1f1b":
        assert kept * 32 == pytest.approx(32.8 * 32 * 32 * 2 * 64, rel=0.02)
    else:
        assert abs(kept) < 0.1 * ranks[1].bytes["activations"]


@pytest.mark.full
def test_offloaded_inputs_wait_on_the_host():
    """1F1B has 3 microbatches alive on rank 1 of 4, each with the inputs of two recomputed layers."""
    words = (
        f"{LAYERS} --num-layers 8 --pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 8 "
        "--recompute-granularity full --recompute-method uniform --cpu-offloading-num-layers 2 --hidden-dropout 0"
    )
    away = ranks_of(words)[1]
    assert away.by_tier["host"]["activations"] == 3 * 2 * 32 * 2 * 64 * 2
    assert any("in host memory: activations" in line for line in abridged_stage_table([away]))


def test_profiles_say_what_a_rank_runs_where_it_is_not_the_first_of_its_stage():
    job = job_of(f"{LAYERS} --num-layers 2 --tensor-model-parallel-size 2 --world-size 2")
    assert [mesh_of(job.runtime.config, 2, rank)["tp"].rank for rank in (0, 1)] == [0, 1]
    profile = dry_run(job, 1)
    assert peak_along_schedule(profile, 0)[DEVICE]["activations"] > 0 and profile.layers == 2


@pytest.mark.full
def test_the_page_on_offloading_shows_the_table_of_its_own_command(capsys):
    page = ROOT / "docs" / "offload.md"
    (command,) = commands_of(page)
    assert estimate_memory.main(command.removeprefix("python pretrain_gpt.py").split()) == 0
    (shown,) = re.findall(r"^  0 +4 .* MiB$", page.read_text(), re.MULTILINE)
    assert shown.split() in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.full
def test_json_says_what_the_table_says(capsys):
    words = f"{LAYERS} --num-layers 4 --world-size 4 --pipeline-model-parallel-size 4 --json".split()
    assert estimate_memory.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    ranks = forecast(read(words).job)
    assert said["worst_total_bytes"] == worst(ranks).total == max(stage["total"] for stage in said["stages"])
    assert [{kind: stage[kind] for kind in KINDS} for stage in said["stages"]] == [one.bytes for one in ranks]


WORDS_AND_PROBLEMS = [
    ("--hiden-size 3", "unknown flag --hiden-size; did you mean --hidden-size?"),
    ("--world-size 0", "--world-size is 0; it must be at least 1"),
    ("--world-size x", "--world-size: invalid int value"),
    ("--rank 0", "--rank 0 is the rank that --measure trains"),
    ("--measure --rank 2", "--world-size 1 has rank 0 alone"),
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


FORKS = {  # script -> flags that only it takes
    "examples/minimal_fork/pretrain.py": "--pipeline-schedule rounds --branch-scale 0.7 --phrase-length 8",
    "tests/promises/v_schedule/pretrain.py": "--pipeline-schedule v --num-virtual-stages-per-pipeline-rank 2",
}


@pytest.mark.full
@pytest.mark.parametrize("script", FORKS)
def test_the_model_of_a_script_is_estimated_with_its_flags_and_tables(script: str, capsys):
    words = f"{LAYERS} --num-layers 4 --world-size 2 --pipeline-model-parallel-size 2 {FORKS[script]}"
    with leaving_nothing_of((ROOT / script).parent):
        assert estimate_memory.main(["--model", str(ROOT / script), *words.split()]) == 0
    assert "2 rank(s)" in capsys.readouterr().out


@pytest.mark.full
def test_what_a_script_draws_is_drawn_again_in_the_run():
    job, drawn = job_of(f"{LAYERS} --num-layers 2"), []

    def model_provider(*args, **options):
        drawn.append((random.random(), np.random.rand(), torch.rand(1, device="cpu")))
        return job.model_provider(*args, **options)

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    forecast(job._replace(model_provider=model_provider))
    assert drawn and before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


SCRIPT = """
from megatron.core.enums import ModelType
from megatron.training.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider
"""


@pytest.mark.full
def test_the_order_of_arguments_of_an_old_script_is_known(tmp_path, capsys):
    words = f"{LAYERS} --num-layers 2".replace("--seq-length 32 ", "").split()
    said = []
    for call in (
        "forward_step, None, {'seq_length': 64}",
        "ModelType.encoder_or_decoder, forward_step, args_defaults={'seq_length': 64}",
    ):
        path = tmp_path / "pretrain.py"
        path.write_text(f"{SCRIPT}pretrain(train_valid_test_datasets_provider, model_provider, {call})")
        assert estimate_memory.main(["--model", str(path), *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    path.write_text(SCRIPT)
    assert estimate_memory.main(["--model", str(path)]) == 2
    assert tells(capsys.readouterr().err, f"{path} pretrain()")
    path.write_text(
        f"{SCRIPT}pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder)"
    )
    with pytest.raises(TypeError, match="forward_step"):
        script_at(str(path))


def test_an_error_of_the_script_in_the_prediction_is_told_with_its_line():
    """The run goes on without a prediction: nothing but the log's one line says where the script failed."""

    def forward_step(data_iterator, model):
        return loss_that_is_not_imported(model)  # noqa: F821

    prediction = Forecast(job_of(f"{LAYERS} --num-layers 2 --device cpu")._replace(forward_step=forward_step))
    assert prediction.ranks == []
    line = forward_step.__code__.co_firstlineno + 1
    assert (
        prediction.problem
        == f"NameError: name 'loss_that_is_not_imported' is not defined, in line {line} of {__file__}"
    )


def test_help_needs_no_torch():
    """Python refuses to import a module that is None; the script's flags stand where the help says."""
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help']; runpy.run_path(sys.argv[0], run_name='__main__')"
    tool = ROOT / "tools/estimate_memory.py"
    text = subprocess.run(
        [sys.executable, "-c", code.replace("sys.argv[0]", repr(str(tool)))], capture_output=True, text=True, check=True
    )
    own = "--world-size --model --json --measure --rank docs/flags.md"
    assert tells(text.stdout, own) and "python pretrain_gpt.py --help" in text.stdout


def test_what_is_missing_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        read(["--vocab-size", "9"])
    assert error.value.problems == ["--micro-batch-size is required", "--seq-length is required"]


@pytest.mark.parametrize("more", ["", "--bert-binary-head --model bert", "--num-layers two"])
def test_a_vocabulary_size_is_asked_for_and_no_tokenizer(more: str):
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    with pytest.raises(ConfigError) as error:
        read([*small.split(), *more.split()])
    assert error.value.problems[-1].startswith("--vocab-size N is required: the number of words is enough")


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_scores_wait_for_the_backward_of_the_plain_kernel_alone(model: str):
    """Of each of 2 x 4 x 256 x 256 scores it keeps 6 bytes in a layer: a float32 softmax and what is dropped in bfloat16."""
    words = f"--model {model} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --micro-batch-size 2 --bf16"
    tiles, plain = (
        ranks_of(f"{words} --vocab-size 60 {more}")[0].bytes["activations"]
        for more in ("", "--attention-backend unfused")
    )
    assert plain - tiles >= 2 * 6 * 2 * 4 * 256 * 256


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB")])
def test_amounts(size: int, text: str):
    assert amount(size) == text


WIDE = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 63 --micro-batch-size 4"


@pytest.mark.parametrize(
    ("words", "largest", "flags", "others"),
    [
        (
            "--seq-length 512 --attention-backend unfused",
            "activations",
            ["--attention-backend auto", "--recompute-granularity full", "below 4", "--bf16"],
            ["--zero-stage"],
        ),
        (
            "--seq-length 512 --recompute-granularity full --recompute-method uniform --attention-dropout 0",
            "activations",
            ["below 4"],
            ["--recompute-granularity", "--attention-backend"],
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
        (
            "--seq-length 8 --num-experts 64 --world-size 4 --expert-model-parallel-size 2",
            "optimizer state",
            ["a smaller --num-experts or --moe-ffn-hidden-size", "a higher --expert-model-parallel-size, --tensor"],
            ["--recompute"],
        ),
        (
            "--seq-length 8 --num-experts 4 --moe-ffn-hidden-size 4096 --world-size 4 --expert-model-parallel-size 4",
            "optimizer state",
            ["a smaller --num-experts or --moe-ffn-hidden-size", "a higher --tensor"],
            ["--expert-model-parallel-size"],
        ),
    ],
)
def test_a_run_without_room_says_what_takes_most_and_what_makes_it_less(words, largest, flags, others):
    job, ranks = job_of(f"{WIDE} {words}"), ranks_of(f"{WIDE} {words}")
    config, need = job.runtime.config, worst(ranks).total
    assert capacity_warning(config, job.runtime.world_size, ranks, need) == []
    assert capacity_warning(config, job.runtime.world_size, ranks, None) == []
    (line,) = capacity_warning(config, job.runtime.world_size, ranks, need - 1)
    assert line.startswith(f"WARNING: predicted {amount(need)} a rank, this device has {amount(need - 1)}:")
    assert largest in line and all(flag in line for flag in flags) and not any(flag in line for flag in others), line


@pytest.mark.full
@pytest.mark.parametrize(("shares", "tiers"), [(0, ("device",)), (2, IN_MEMORY)], ids=["device", "machine"])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.sweep)])
def test_half_precision_is_advised_for_a_state_where_its_masters_do_not_outweigh_it(world, shares, tiers):
    """In float32 a parameter takes 16 bytes with its gradient and moments, in bfloat16, with its master, 18."""
    flags = [f"--zero-stage {stage}" for stage in range(4 if world > 1 else 1)] + [
        "--optimizer-cpu-offload",
        "--offload-dir x",
    ]
    advised = set()
    for more in flags:
        words = [f"{WIDE} --seq-length 8 --world-size {world} {more} {p} --device cpu" for p in ("", "--bf16")]
        now, then = (max(one.state_within(*tiers) for one in ranks_of(of)) for of in words)
        said = "--bf16" in flags_that_reduce(job_of(words[0]).runtime.config, world, STATE, shares=shares)
        assert said == (then < 0.99 * now), (more, now, then)  # beside a few padded elements
        advised |= {more} if said else set()
    assert "--zero-stage 0" not in advised and "--offload-dir x" in advised


@pytest.mark.full
def test_what_is_offloaded_to_the_host_needs_room_where_that_is_the_device():
    words = f"{WIDE} --seq-length 8 --optimizer-cpu-offload"
    (one,), config = ranks_of(words), job_of(words).runtime.config
    assert one.tiers["host"] > 0
    assert capacity_warning(config, 1, [one], one.total) == []
    (line,) = capacity_warning(config, 1, [one], one.total, shares=2)
    assert "free for each of its 2 rank(s)" in line and "--offload-dir" in line
