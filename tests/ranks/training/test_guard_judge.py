"""A step with wrong numbers: it is stopped, skipped or reported as asked, and computed again; the first bad tensor is named.

Whole runs from their flags, with ranks as threads, of a GPT in which one tensor is spoiled for chosen samples.
"""

import json
import math
import re

import pytest
import torch
from guard_runs import run, stopped, weights_of
from layouts import Layout
from local_ranks import run_ranks
from torch import Tensor

from megatron.core.parallel.mesh import Mesh
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.result_checks import ten_times_largest_loss_rule
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.result_checks.ten_times_largest_loss_rule import SpikeDetector
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.step import NotFiniteError
from megatron.training.trainer import Trainer


def spoil_module(name: str, sample: int, backward: bool = False):
    """NaN in one element of a module's output, or of its gradient, for one sample."""

    def prepare(trainer: Trainer) -> None:
        for chunk in trainer.model:
            keys = next(m.keys for m in chunk.modules() if hasattr(m, "keys"))
            for at, module in chunk.module.named_modules():
                if at.endswith(name):

                    def hook(module, inputs, output, keys=keys):
                        first = output[0] if isinstance(output, tuple) else output
                        if keys.samples[0] == sample and first.requires_grad:
                            bad = torch.zeros_like(first)
                            bad.view(-1)[0] = math.nan
                            if backward:
                                first.register_hook(lambda grad: grad + bad)
                            else:
                                first = first + bad
                        return (first, *output[1:]) if isinstance(output, tuple) else first

                    module.register_forward_hook(hook)

    return prepare


# ---------------------------------------------------------------- not finite
WHOLE = Layout(tp=2, sp=True, pp=2, dp=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout(), marks=pytest.mark.sweep), pytest.param(WHOLE, marks=pytest.mark.full), Layout(dp=2)],
    ids=str,
)
@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.full), True], ids=["forward", "backward"])
def test_the_first_bad_tensor_is_named_alike_in_every_layout(layout: Layout, backward: bool):
    """Sample 6 is in the second step, microbatch 2 of one process, or microbatch 1 of the first of two data-parallel ranks."""
    for told in stopped(NotFiniteError, "", layout, prepare=spoil_module("layers.1.mlp", 6, backward)):
        assert "the same: the data, the weights or the program" in told and "This was iteration 2;" in told
        what = "the gradient of the output of " if backward else "the output of "
        found = re.search(
            r"The first tensor that is not finite: (.*layers\.1\.\S+), in the (\w+) of microbatch (\d) \(sample 6\)",
            told,
        )
        assert found, told
        assert found[1].startswith(what) and found[2] == ("backward" if backward else "forward")
        assert found[3] == ("1" if layout.dp == 2 else "2")
        assert backward or found[1].endswith("layers.1.mlp") or ".mlp." in found[1]


@pytest.mark.full
def test_a_bad_weight_and_a_bad_loss_are_named():
    def prepare(trainer: Trainer) -> None:
        next(p for n, p in trainer.model[0].module.named_parameters() if "layers.1.input" in n).data[3] = math.inf

    (told,) = stopped(NotFiniteError, "", prepare=prepare)
    assert re.search(r"not finite: the weight \S*layers\.1\.input\S*, before the step\.", told)
    (told,) = stopped(NotFiniteError, "", spoil=lambda sample, loss: loss * math.nan if sample == 5 else loss)
    assert "not finite: the loss, in the forward of microbatch 1 (sample 5) on rank 0." in told


def once(sample: int, factor: float):
    """Spoils a sample's loss the first time that it is computed."""
    seen = []

    def spoil(at: int, loss: Tensor) -> Tensor:
        if at == sample and not seen:
            seen.append(at)
            return loss * factor
        return loss

    return spoil


@pytest.mark.full
def test_numbers_that_do_not_come_again_are_a_devices():
    (told,) = stopped(NotFiniteError, "", spoil=once(5, math.nan))
    assert (
        "a device computes wrongly" in told
        and "The first tensor" not in told
        and "the losses of ranks 0 differ" in told
    )


@pytest.mark.full
def test_without_reruns_a_step_is_computed_once():
    (told,) = stopped(NotFiniteError, "--rerun-mode disabled", spoil=once(5, math.nan))
    assert "omputed again" not in told


@pytest.mark.parametrize("layout", [pytest.param(Layout(), marks=pytest.mark.sweep), Layout(dp=2)], ids=str)
@pytest.mark.full
def test_a_skipped_step_changes_nothing_and_training_goes_on(layout: Layout, capfd):
    def work(mesh: Mesh) -> tuple[Tensor, TrainState]:
        before = []
        spoil = lambda sample, loss: loss * math.nan if sample == 5 else loss  # noqa: E731

        def prepare(trainer: Trainer) -> None:
            step = trainer._step
            trainer._step = lambda data: (before.append(weights_of(trainer)), step(data))

        trainer = run("--nan-action skip " + " ".join(layout.flags), spoil=spoil, prepare=prepare, mesh=mesh)
        assert torch.equal(before[1], before[2]) and not torch.equal(before[2], before[3])
        assert trainer.optimizer.step_count == 3
        return trainer.state

    for state in run_ranks(layout.sizes, work):
        assert (state.iteration, state.consumed_train_samples, state.scheduled_train_samples) == (4, 16, 12)
    printed = capfd.readouterr().out
    assert (
        "WARNING: iteration 2: the sum of the step's losses is nan" in printed and "its update is left out" in printed
    )
    lines = [line for line in printed.splitlines() if "number of nan iterations" in line]
    assert ["iterations:   1 | number of nan iterations:   1" in line for line in lines] == [False, True, False, False]


# ---------------------------------------------------------------- far larger than before
def test_large_values_are_ten_times_the_largest_of_the_first_hundred():
    state: dict = {}
    values = SpikeDetector(state)
    assert not any(values.is_too_large(float(i % 7), 10) for i in range(10)) and values.largest == 6.0
    assert [values.is_too_large(x) for x in (59.9, 60.0, -61.0, math.nan, math.inf)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    resumed = SpikeDetector(json.loads(json.dumps(state)))
    assert resumed.is_too_large(60.0) and not resumed.is_too_large(59.0) and resumed.largest == 6.0


FEW = "--check-for-spiky-loss --check-for-large-grads "


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(dp=2, pp=2), marks=pytest.mark.sweep)], ids=str)
def test_a_bad_batch_is_a_spike_and_reported_by_microbatch(layout: Layout, capfd, monkeypatch):
    """Sample 9 has a loss thirty times as large, from the third step on 8 microbatches are known."""
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 8)
    spoil = lambda sample, loss: loss * 30 if sample == 9 else loss  # noqa: E731
    run_ranks(
        layout.sizes, lambda mesh: run(FEW + " ".join(layout.flags), spoil=spoil, mesh=mesh), stages=layout.stages
    )
    printed = capfd.readouterr().out
    found = re.findall(
        r"WARNING: iteration (\d): microbatch (\d) of data-parallel rank (\d) \(samples 9 to 9\) has a loss of", printed
    )
    assert [*{*found}] == [("3", "0", "1") if layout.dp == 2 else ("3", "1", "0")]
    assert "Computed again, the numbers are the same" in printed and "As asked, training goes on" in printed
    assert "iteration        4/" in printed


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, dp=2, pp=2)], ids=str)
def test_the_loss_of_a_spike_is_that_of_the_whole_microbatch(layout: Layout, capfd, monkeypatch):
    """One process is the oracle: a context-parallel rank has half of a sample's tokens, and each half another mean."""
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 8)
    spoil = lambda sample, loss: loss * 30 if sample == 9 else loss  # noqa: E731

    def told(layout: Layout) -> set[tuple[str, float, float]]:
        flags = f"{FEW} --fp64 --attention-dropout 0 --hidden-dropout 0 --context-parallel-size {layout.cp} "
        work = lambda mesh: run(flags + " ".join(layout.flags), spoil=spoil, mesh=mesh)  # noqa: E731
        run_ranks(layout.sizes, work, stages=layout.stages if layout.pp > 1 else None)
        line = r"\(samples (9 to 9)\) has a loss of (\S+), at least 10 times the largest of the first 8 \((\S+)\)"
        return {(where, float(loss), float(of)) for where, loss, of in re.findall(line, capfd.readouterr().out)}

    assert told(layout) == told(Layout()) != set()


@pytest.mark.full
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_spike_skips_or_stops_as_asked(action: str, monkeypatch):
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 8)
    spoil = lambda sample, loss: loss * 30 if sample == 9 else loss  # noqa: E731
    flags = f"{FEW} --spike-action {action}"
    if action == "stop":
        assert "has a loss of" in stopped(WrongNumbersError, flags, spoil=spoil)[0]
    else:
        (count,) = run_ranks({}, lambda mesh: run(flags, spoil=spoil, mesh=mesh).optimizer.step_count)
        assert count == 3


@pytest.mark.full
def test_a_large_gradient_is_found_where_the_loss_is_usual(capfd, monkeypatch):
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 2)
    spoil = lambda sample, loss: loss.detach() + 60 * (loss - loss.detach()) if sample == 13 else loss  # noqa: E731
    run_ranks({}, lambda mesh: run(FEW, spoil=spoil, mesh=mesh))
    printed = capfd.readouterr().out
    assert "WARNING: iteration 4: the gradient's norm is" in printed and "has a loss of" not in printed


@pytest.mark.full
def test_a_spike_that_does_not_come_again_stops_the_run(monkeypatch):
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 8)
    (told,) = stopped(WrongNumbersError, FEW, spoil=once(9, 30.0))
    assert "a device computes wrongly" in told and "This was iteration 3" in told


@pytest.mark.full
@pytest.mark.parametrize("stage", [pytest.param("", marks=pytest.mark.sweep), "--zero-stage 3"])
def test_a_reported_step_is_trained_with_the_numbers_it_had(stage: str, monkeypatch):
    """The step that is computed again leaves the same bits as the one that is computed once."""
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 8)
    spoil = lambda sample, loss: loss * 30 if sample == 9 else loss  # noqa: E731

    def weights(flags: str) -> list[Tensor]:
        return run_ranks({"dp": 2}, lambda mesh: weights_of(run(f"{stage} {flags}", spoil=spoil, mesh=mesh)))

    assert all(map(torch.equal, weights(""), weights(FEW)))


# ---------------------------------------------------------------- batches
def test_kept_batches_come_again_and_go_on():
    kept = RewindableBatches(iter(range(6)))
    kept.begin()
    assert [next(kept), next(kept)] == [0, 1]
    kept.rewind()
    assert [next(kept), next(kept), next(kept)] == [0, 1, 2] and iter(kept) is kept
    kept.begin()
    kept.rewind()
    assert list(kept) == [3, 4, 5]


def test_left_out_iterations_consume_their_samples_and_train_nothing(capfd):
    seen: list[int] = []

    def spoil(sample: int, loss: Tensor) -> Tensor:
        seen.append(sample)
        return loss

    (trainer,) = run_ranks({}, lambda mesh: run("--iterations-to-skip 2 4", spoil=spoil, mesh=mesh))
    assert seen == [*range(4), *range(8, 12)] and trainer.optimizer.step_count == 2
    assert (trainer.state.consumed_train_samples, trainer.state.scheduled_train_samples) == (16, 8)
    printed = capfd.readouterr().out
    assert "iteration 2 is left out, as --iterations-to-skip asks: samples 4 to 7" in printed
    assert printed.count("number of skipped iterations:   1") == 2
