"""Flags of Megatron core 0.18 and 0.19: each in combination with layouts, against one process or against what it stands for.

More layouts: python -m pytest tests/ranks/training/test_flags_of_newer_releases.py -m sweep
"""

import contextlib
import io
import json
import re
from functools import cache
from pathlib import Path

import pytest
from local_ranks import run_ranks
from said import tells
from script_run import settings_of, trainer_of
from tiny_run import pieces_of_chunks, put_together
from whole_run import run

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.index_map import requested_samples
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 59 --make-vocab-size-divisible-by 8 --fp64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --eval-iters 1 --eval-interval 1 --num-workers 0 "
    "--mock-data --tokenizer-type NullTokenizer --device cpu --log-interval 1 "
)


@cache
def outcome(flags: str, sizes: tuple[tuple[str, int], ...] = (), *, reads: bool = True) -> tuple[dict, list[str]]:
    """The whole model after a run, and the losses of training and validation. reads: no shards of parameters."""
    flags = RUN + flags

    def work(mesh) -> list:
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False) as trainer:
            trainer.run()
            return pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {}) if reads else []

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        pieces = run_ranks(dict(sizes), work, stages=settings_of(pretrain_gpt, flags)[0].stages)
    lines = [
        line.partition("lm loss")[2].split("|")[0] for line in printed.getvalue().splitlines() if "lm loss" in line
    ]
    return put_together(pieces) if reads else {}, lines


def assert_same(got: tuple[dict, list[str]], expected: tuple[dict, list[str]]) -> None:
    for name, tensor in got[0].items():
        assert (tensor - expected[0][name]).abs().max() <= 1e-10 * expected[0][name].abs().max(), name
    assert got[1] == expected[1] and len(got[1]) >= 4


# ---------------------------------------------------------------- batches and times of validation


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        pytest.param("--eval-micro-batch-size 4", (), marks=pytest.mark.sweep),
        (
            "--eval-micro-batch-size 1 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
            (("pp", 2), ("dp", 2)),
        ),
        pytest.param(
            "--eval-micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
            (("tp", 2),),
            marks=pytest.mark.full,
        ),
    ],
)
def test_validation_has_the_losses_of_any_microbatch(flags: str, sizes: tuple):
    assert_same(outcome(flags, sizes), outcome(""))


def test_microbatches_of_validation_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError) as error:
        check(parse_args((RUN + "--eval-micro-batch-size 3").split()).config, 1)
    assert tells(
        str(error.value),
        "--global-batch-size (8) multiple of 3 --eval-micro-batch-size change --eval-global-batch-size",
    )


@pytest.mark.full
def test_validation_starts_at_the_iteration_asked_for(capsys):
    short = "--train-iters 6 --eval-interval 2 --eval-iters 1 --global-batch-size 2 "
    run(short + "--start-eval-at-iter 4")
    text = capsys.readouterr().out
    assert re.findall(r"validation loss at iteration (\d+)", text) == ["4", "6", "6"]
    run(short)
    assert re.findall(r"validation loss at iteration (\d+)", capsys.readouterr().out) == ["2", "4", "6", "6"]


def test_left_out_validations_request_no_samples():
    """As Megatron core 0.19 counts: 11 points of 100 iterations, of which 300 // 10 are left out; never fewer than the one at the end."""
    assert requested_samples(100, 10, 2, 4, start_eval_at_iter=30) == [400, (11 - 3) * 8, 8]
    assert requested_samples(100, 10, 2, 4, start_eval_at_iter=1000) == [400, 8, 8]


# ---------------------------------------------------------------- data and vocabulary


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", (("tp", 2), ("cp", 2))),
        pytest.param(
            "--pipeline-model-parallel-size 2 --zero-stage 1", (("pp", 2), ("dp", 2)), marks=pytest.mark.sweep
        ),
    ],
)
def test_masked_documents_have_the_numbers_of_one_process(flags: str, sizes: tuple):
    masked = "--dataloader-inter-document-masking --position-embedding-type rope "
    assert_same(outcome(masked + flags, sizes), outcome(masked))
    assert (
        outcome(masked)[1] == outcome("--reset-attention-mask --reset-position-ids --position-embedding-type rope ")[1]
    )


def test_a_vocabulary_without_padding_must_divide_among_the_ranks():
    model = parse_args((RUN + "--no-pad-vocab-size").split()).config.transformer
    assert (model.padded_vocab_size(60, 2), model.padded_vocab_size(61, 1)) == (60, 61)
    with pytest.raises(
        ConfigError, match=r"vocabulary of 61 .* --tensor-model-parallel-size \(2\); leave out --no-pad-vocab-size"
    ):
        model.padded_vocab_size(61, 2)


@pytest.mark.full
def test_a_vocabulary_without_padding_has_the_numbers_of_one_with_it():
    """60 entries: 59 and the end of documents."""
    assert_same(outcome("--no-pad-vocab-size --tensor-model-parallel-size 2", (("tp", 2),)), outcome(""))


# ---------------------------------------------------------------- FSDP is ZeRO 3


def test_fsdp_is_another_name_of_zero_3():
    stages = [
        DataParallelConfig(use_megatron_fsdp=True).stage,
        DataParallelConfig(use_torch_fsdp2=True).stage,
        DataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads").stage,
        DataParallelConfig(use_megatron_fsdp=True, use_distributed_optimizer=True).stage,
        parse_args(["--use-custom-fsdp"]).config.data_parallel.stage,
    ]
    assert stages == [3, 3, 2, 3, 3]
    with pytest.raises(ConfigError, match=r"--zero-stage 1 and --use-torch-fsdp2 give different ZeRO stages: 1, 3"):
        DataParallelConfig(use_torch_fsdp2=True, zero_stage=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --tensor-model-parallel-size 2", (("tp", 2), ("dp", 2))),
        pytest.param("--use-torch-fsdp2 --context-parallel-size 2", (("cp", 2), ("dp", 2)), marks=pytest.mark.sweep),
    ],
)
def test_fsdp_has_the_numbers_of_one_process(flags: str, sizes: tuple):
    assert_same(outcome(flags, sizes, reads=False), outcome(""))


# ---------------------------------------------------------------- another iteration


@pytest.mark.full
def test_a_checkpoint_may_count_as_that_of_another_iteration(tmp_path: Path, capsys):
    """Samples and steps go back; the learning rate goes on from the checkpoint's place."""
    root = tmp_path / "saved"
    short = f"--global-batch-size 2 --save {root} --lr-decay-style linear --lr-decay-iters 10 --save-interval 2 "
    run(short + "--train-iters 4")
    before = capsys.readouterr().out
    run(short + f"--load {root} --train-iters 3 --override-ckpt-iteration 1 --override-opt_param-scheduler")
    after = capsys.readouterr().out
    assert (
        "the checkpoint of iteration 4 counts as that of iteration 1: training goes on at sample 2 instead of 8"
        in after
    )
    assert re.findall(r"iteration +(\d+)/", before) == ["1", "2", "3", "4"]
    assert re.findall(r"iteration +(\d+)/", after) == ["2", "3"]
    rates = [float(rate) for rate in re.findall(r"learning rate: ([\dE.+-]+)", before + after)]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 6
    saved = json.loads((root / "iter_0000003/manifest.json").read_text())["state"]["train"]
    assert (saved["iteration"], saved["consumed_train_samples"]) == (3, 6)


@pytest.mark.full
def test_another_iteration_needs_a_run_that_goes_on_with_the_same_batches(checkpoints: Path, refused):
    assert tells(
        refused(f"--load {checkpoints} --train-iters 8 --override-ckpt-iteration 1 --finetune"), "--finetune leave one"
    )
    text = refused(f"--load {checkpoints} --train-iters 8 --override-ckpt-iteration 1 --global-batch-size 4")
    assert tells(text, "--global-batch-size (4) steps of 1 --global-batch-size 1 leave it out")
