"""Whole runs of the training loop with ranks as threads: steps that grow, and everything by which a run stops and goes on.

Float64 and mock data, so that a layout may differ from one process by rounding alone, and a resumed run by nothing.
"""

import json
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of

import pretrain_gpt
from megatron.core import num_microbatches_calculator
from megatron.core.parallel.mesh import Mesh
from megatron.training.evaluate_window_chosen_by_iteration import first_sample_and_batches
from megatron.training.monitor.training_log import StepNumbers
from megatron.training.trainer import Trainer

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --fp64 --micro-batch-size 2 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 8 --log-interval 1 "
    "--eval-iters 0 --device cpu --clip-grad 0.5 "
)
ONE = ({}, "")
FOUR = ({"tp": 2, "pp": 2}, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel ")
INTERLEAVED = (FOUR[0], FOUR[1] + "--num-layers-per-virtual-pipeline-stage 1 ")
WITH_DATA = ({"tp": 2, "pp": 2, "dp": 2}, FOUR[1] + "--use-distributed-optimizer ")


@dataclass(frozen=True)
class Step:
    """What the log is told of one."""

    iteration: int
    consumed: int
    size: int
    lr: float
    norm: float
    losses: dict[str, float]


@dataclass
class Rank:
    steps: list[Step]
    state: dict


class Recorder:
    """In place of a TrainingLog."""

    def __init__(self):
        self.steps, self.losses = [], {}

    def add(self, losses, is_nan=False, *, skipped=False) -> None:
        self.losses = dict(losses)

    def line_if_due(self, step: StepNumbers) -> None:
        size, norm = step.global_batch_size, step.grad_norm
        self.steps.append(Step(step.iteration, step.consumed_samples, size, step.lr, norm, self.losses))

    paused = staticmethod(nullcontext)

    def state(self) -> dict:
        return {"sums": {}, "steps": 0, "nan_steps": 0}


def train(mesh: Mesh, flags: str, prepare=lambda trainer: None) -> Rank:
    """This rank's whole run."""
    with trainer_of(pretrain_gpt, mesh, MODEL + flags, predicts=False) as trainer:
        trainer.log = Recorder()
        prepare(trainer)
        trainer.run()
        return Rank(trainer.log.steps, trainer.state.as_json())


def run(layout: tuple[dict, str], flags: str, prepare=lambda trainer: None) -> Rank:
    """The last rank's, which knows the losses, after all agreed on what every rank knows."""
    sizes, more = layout
    ranks = run_ranks(sizes, partial(train, flags=more + flags, prepare=prepare))
    for rank in ranks:
        assert [(s.size, s.lr, s.norm) for s in rank.steps] == [(s.size, s.lr, s.norm) for s in ranks[-1].steps]
        assert rank.state == ranks[-1].state
    return ranks[-1]


def assert_close(got: list[Step], expected: list[Step]) -> None:
    """As test_parity: rounding in float64, amplified by a few updates."""
    for a, b in zip(got, expected, strict=True):
        assert (a.iteration, a.consumed, a.size, a.lr) == (b.iteration, b.consumed, b.size, b.lr)
        assert a.norm == pytest.approx(b.norm, rel=1e-9)
        assert a.losses == pytest.approx(b.losses, rel=1e-9)


# ---------------------------------------------------------------- steps that grow

RAMP = (
    "--global-batch-size 16 --rampup-batch-size 4 4 36 --train-samples 56 --lr-warmup-samples 20 --lr-decay-style cosine "
    "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.3 "
)
SIZES = [4, 4, 4, 8, 8, 12, 16]  # a longer ramp is in tests/unit/base/test_batch_size_schedule.py


LAYOUTS = {
    "one process": ONE,
    "1f1b": FOUR,
    "interleaved": INTERLEAVED,
    "dp": WITH_DATA,
    "zb-h1, zero 3": (WITH_DATA[0], FOUR[1] + "--pipeline-schedule zb-h1 --zero-stage 3 --overlap-param-gather "),
    "gpipe, recomputed": (FOUR[0], FOUR[1] + "--pipeline-schedule gpipe --recompute-activations "),
    "zero 2": ({"dp": 2}, "--zero-stage 2 --overlap-grad-reduce "),
}


@cache
def whole_ramp(name: str) -> Rank:
    return run(LAYOUTS[name], RAMP)


@pytest.mark.full  # a ramp of sizes, on paper, is in tests/unit/base/test_batch_size_schedule.py
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one process"])
def test_a_ramp_is_the_same_in_any_layout(name: str):
    """Also with dropout, whose masks depend on the numbers of the samples."""
    one_process = whole_ramp("one process")
    assert [step.size for step in one_process.steps] == SIZES
    assert [step.consumed for step in one_process.steps] == [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
    assert one_process.steps[-1].losses["lm loss"] < one_process.steps[0].losses["lm loss"]
    assert_close(whole_ramp(name).steps, one_process.steps)


@pytest.mark.parametrize("layout", [ONE, ({"dp": 2}, "")], ids=["one process", "dp"])
def test_megatrons_calculator_says_what_the_running_step_has(layout):
    """Also between steps, and after a validation with a batch size of its own."""
    found = []

    def prepare(trainer: Trainer) -> None:
        forward_step = trainer.pipeline.forward_step

        def asking(*args):
            found.append((num_microbatches_calculator.get_num_microbatches(), "inside"))
            return forward_step(*args)

        line_if_due = trainer.log.line_if_due

        def line(step):
            num_microbatches_calculator.update_num_microbatches(step.consumed_samples)
            found.append((num_microbatches_calculator.get_num_microbatches(), step.global_batch_size))
            assert num_microbatches_calculator.get_current_global_batch_size() == step.global_batch_size
            assert num_microbatches_calculator.get_current_running_global_batch_size() == step.global_batch_size
            assert num_microbatches_calculator.get_micro_batch_size() == 2
            line_if_due(step)

        trainer.pipeline.forward_step = asking
        trainer.log.line_if_due = line

    ramp = "--global-batch-size 16 --rampup-batch-size 4 4 12 --train-samples 40 --eval-interval 2 --eval-iters 1 "
    ranks = run(layout, ramp, prepare)
    replicas = layout[0].get("dp", 1)
    sizes = [step.size for step in ranks.steps]
    assert sizes == [4, 8, 16]
    lines = [entry for entry in found if entry[1] != "inside"]
    assert sorted(lines) == sorted([(size // (2 * replicas), size) for size in sizes] * replicas)
    of_steps = [size // (2 * replicas) for size in sizes for _ in range(size // 2)]
    in_training = Counter(of_steps)
    asked = Counter(count for count, where in found if where == "inside")
    assert all(asked[count] >= times for count, times in in_training.items()) and set(asked) == set(in_training)


@pytest.mark.full
def test_a_ramp_goes_on_where_it_stopped(tmp_path):
    """In the middle of a stage, to the last bit; and in another layout with the same sizes."""
    folder, whole = f"--save {tmp_path} ", whole_ramp("interleaved")
    first = run(INTERLEAVED, RAMP + folder + "--exit-interval 4")
    second = run(INTERLEAVED, RAMP + folder + f"--load {tmp_path}")
    assert [step.iteration for step in first.steps] == list(range(1, 5))
    assert first.steps + second.steps == whole.steps
    assert second.state == whole.state
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    for name in ("one process", "dp", "zero 2"):
        assert_close(run(LAYOUTS[name], RAMP + f"--load {tmp_path}").steps, whole.steps[4:])


@pytest.mark.full
@pytest.mark.parametrize("stop", [3, 4])
def test_a_ramp_over_data_parallel_ranks_goes_on_with_fewer(stop: int, tmp_path):
    """At the end of a stage and within one: sizes, rates and weights are those of a run that did not stop."""
    run(LAYOUTS["zb-h1, zero 3"], RAMP + f"--save {tmp_path} --exit-interval {stop}")
    for name in ("1f1b", "zero 2"):
        assert_close(run(LAYOUTS[name], RAMP + f"--load {tmp_path}").steps, whole_ramp("one process").steps[stop:])


@pytest.mark.full
def test_a_table_of_sizes_is_followed():
    flags = "--step-batch-size-schedule '0:4 96:12' --train-samples 50 "  # 96 tokens are 12 samples of 8
    ranks = run(FOUR, flags)
    assert [step.size for step in ranks.steps] == [4, 4, 4, 12, 12, 12]
    assert_close(ranks.steps, run(ONE, flags).steps)


@pytest.mark.full
def test_sizes_that_ranks_cannot_share_are_rounded_down():
    """Steps of 6 and 9 on two data-parallel ranks with micro-batches of 2."""
    flags = "--global-batch-size 9 --rampup-batch-size 6 3 10 --decrease-batch-size-if-needed --train-samples 30 "
    got = run(({"dp": 2}, ""), flags)
    assert [step.size for step in got.steps] == [4, 4, 4, 8, 8]
    assert_close(got.steps, run(({}, "--micro-batch-size 4 "), flags).steps)


@pytest.mark.full
def test_iterations_and_samples_are_two_words_for_one_run():
    iters = "--global-batch-size 4 --train-iters 5 --lr-warmup-iters 2 --lr-decay-iters 4 "
    samples = "--global-batch-size 4 --train-samples 23 --lr-warmup-samples 8 --lr-decay-samples 16 "
    assert run(ONE, iters).steps == run(ONE, samples).steps


# ---------------------------------------------------------------- resuming with another schedule

SHORT = "--global-batch-size 4 --train-iters 4 "


@pytest.mark.full
def test_a_resumed_run_keeps_to_its_schedule(tmp_path):
    folder = f"--save {tmp_path} --load {tmp_path} "
    whole = run(ONE, SHORT)
    run(ONE, SHORT + folder + "--exit-interval 2")
    with pytest.raises(RuntimeError, match=r"(?s)16.*32.*--train-iters.*--override-"):
        run(ONE, "--global-batch-size 4 --train-iters 8 " + folder)
    with pytest.raises(RuntimeError, match=r"(?s)0.*1\.96.*16.*28"):  # 1.9600000000000002
        run(ONE, "--global-batch-size 4 --train-iters 7 --lr-warmup-fraction 0.07 " + folder)
    longer = "--global-batch-size 4 --train-iters 8 --exit-interval 4 "
    followed = run(ONE, longer + f"--load {tmp_path} --use-checkpoint-opt_param-scheduler ")
    assert followed.steps == whole.steps[2:]
    overridden = run(ONE, longer + f"--load {tmp_path} --override-opt_param-scheduler ")
    assert [step.lr for step in overridden.steps] == pytest.approx([1e-2 * (1 - 12 / 32), 1e-2 * (1 - 16 / 32)])
    assert followed.state["schedules"]["learning_rate"]["decay"] == 16
    assert overridden.state["schedules"]["learning_rate"]["decay"] == 32


# ---------------------------------------------------------------- what is saved and loaded


@pytest.mark.full
def test_weights_alone_are_saved_and_loaded(tmp_path):
    folder = f"--save {tmp_path} --load {tmp_path} "
    run(FOUR, SHORT + folder + "--no-save-optim --exit-interval 2")
    manifest = json.loads((tmp_path / "iter_0000002" / "manifest.json").read_text())
    assert {name.split("/")[0] for name in manifest["tensors"]} == {"model"}
    with pytest.raises(RuntimeError, match=r"(?s)--no-save-optim.*--no-load-optim"):
        run(FOUR, SHORT + folder)
    assert [step.iteration for step in run(FOUR, SHORT + folder + "--no-load-optim").steps] == [3, 4]


@pytest.mark.full
def test_pretrained_weights_start_a_run_that_has_no_checkpoint(tmp_path, capsys):
    pretrained, own = tmp_path / "pretrained", tmp_path / "own"
    run(ONE, SHORT + f"--save {pretrained}")
    flags = SHORT + f"--save {own} --load {own} --pretrained-checkpoint {pretrained} --lr 3e-3 "
    first = run(ONE, flags + "--exit-interval 2")
    assert first.steps == run(ONE, SHORT + f"--load {pretrained} --finetune --lr 3e-3 --exit-interval 2").steps
    assert [step.iteration for step in run(ONE, flags).steps] == [3, 4], "then it goes on from its own"
    assert tells(capsys.readouterr().out, f"4 {pretrained}")
    with pytest.raises(RuntimeError, match=rf"(?s)--pretrained-checkpoint.*{own}/x"):
        run(ONE, SHORT + f"--pretrained-checkpoint {own}/x")


def saved_iterations(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "saved", "last"),
    [
        ("", [4], 4),
        ("--save-interval 3", [3, 4], 4),
        ("--save-interval 2 --exit-interval 2", [2], 2),
        ("--save-interval 3 --exit-interval 2", [2], 2),
        ("--exit-interval 4", [4], 4),
        ("--exit-interval 9", [4], 4),
        ("--exit-duration-in-mins 0", [1], 1),
        ("--exit-duration-in-mins 1000", [4], 4),
        ("--skip-train --eval-iters 1", [], 0),
    ],
)
def test_what_was_done_is_saved_once(flags: str, saved: list[int], last: int, tmp_path, capsys):
    assert run(ONE, SHORT + f"--save {tmp_path} {flags}").state["iteration"] == last
    assert saved_iterations(tmp_path) == saved
    assert capsys.readouterr().out.count("saved checkpoint at iteration") == len(saved)


# ---------------------------------------------------------------- stopping


@pytest.mark.full
def test_all_ranks_stop_where_one_was_signalled(tmp_path):
    """After the step in which the last of them heard of it. The handler itself is tried on processes."""

    def signal_one(trainer: Trainer) -> None:
        train_step, trainer.exits.listening = trainer._step, nullcontext  # signals come to the main thread alone

        def step(data) -> None:
            train_step(data)
            if trainer.state.iteration == 2 and trainer.mesh["world"].rank == 1:
                trainer.exits._note(signal.SIGTERM, None)

        trainer._step = step

    rank = run(FOUR, SHORT + f"--save {tmp_path} --exit-signal-handler", signal_one)
    assert [step.iteration for step in rank.steps] == [1, 2]
    assert saved_iterations(tmp_path) == [2]


# ---------------------------------------------------------------- validation

# (number of the validation, batches, batch size, samples in the set), then (first sample, batches)
WINDOWS = [
    ((0, 2, 4, 24), (0, 2)),
    ((2, 2, 4, 24), (16, 2)),
    ((3, 2, 4, 24), (0, 2)),
    ((1, 2, 4, 22), (8, 2)),
    ((2, 2, 4, 22), (0, 2)),
    ((5, 9, 4, 22), (0, 5)),
    ((5, 5, 4, 20), (0, 5)),
    ((0, 3, 4, 3), (0, 0)),
]


@pytest.mark.parametrize(("given", "expected"), WINDOWS)
def test_a_validation_reads_its_part_of_the_set(given, expected):
    assert first_sample_and_batches(*given) == expected


FLAGS_AND_PLACES = [
    ("--eval-iters 0", []),
    ("--eval-iters 1 --eval-interval 0", ["iteration 4 on validation set", "iteration 4 on test set"]),
    ("--eval-iters 3 --eval-interval 2", ["iteration 2", "iteration 4 on validation set", "iteration 4 on test set"]),
    ("--eval-iters 1 --eval-interval 5 --skip-train", ["iteration 0 on validation set", "iteration 0 on test set"]),
    ("--eval-iters 1 --eval-interval 2 --exit-interval 2", ["iteration 2"]),
]


@pytest.mark.full
@pytest.mark.parametrize(("flags", "where"), FLAGS_AND_PLACES)
def test_validations_come_when_asked(flags: str, where: list[str], capsys):
    run(ONE, SHORT + flags)
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation loss at" in line]
    assert [line.split(" | ")[0].removeprefix(" validation loss at ") for line in lines] == where


@pytest.mark.full
def test_a_validation_that_is_no_number_says_so_and_is_warned_of(capsys):
    """A rate of 1e30 makes weights of which nothing finite comes."""
    flags = "--eval-iters 1 --eval-interval 2 --lr 1e30 --no-check-for-nan-in-loss-and-grad"
    run(ONE, SHORT + flags)
    lines = capsys.readouterr().out.splitlines()
    first, *validations = [line for line in lines if line.startswith(" validation loss at")]
    assert first.endswith("| lm loss PPL: 4.851652E+08 | ")  # of a loss of 1e88: e^20, which is Megatron's most
    assert len(validations) == 2 and all("value: NAN | lm loss PPL: NAN |" in line for line in validations)
    warned = [line for line in lines if line.startswith("WARNING: validation at")]
    assert len(warned) == 2 and all("lm loss is nan" in line for line in warned)


@pytest.mark.full
def test_a_set_smaller_than_a_validation_is_read_whole(capsys, monkeypatch):
    """And one smaller than a batch not at all."""
    provider = pretrain_gpt.train_valid_test_datasets_provider

    def small(sizes):
        train_set, valid, test = provider(sizes)
        valid.num_samples, test.num_samples = 11, 3
        return train_set, valid, test

    def losses(flags: str) -> list[str]:
        run(ONE, SHORT + flags)
        return [
            line for line in capsys.readouterr().out.splitlines() if "validation loss" in line or "left out" in line
        ]

    exact = losses("--eval-iters 2 --eval-interval 0 ")
    monkeypatch.setattr(pretrain_gpt, "train_valid_test_datasets_provider", small)
    assert losses("--eval-iters 7 --eval-interval 0 ") == [
        "test set of 3 samples is left out: a global batch has 4",
        exact[0],
    ]
