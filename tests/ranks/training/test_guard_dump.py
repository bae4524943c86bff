"""A bad step on disk is computed again by one command: to the bit in the same layout, to rounding in another, and the bad tensor is named."""

import math
from pathlib import Path

import pytest
from guard_runs import ALONE, stopped
from layouts import Layout
from said import tells

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import open_checkpoint
from megatron.training.result_checks import ten_times_largest_loss_rule
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.step import NotFiniteError
from megatron.training.trainer import Trainer
from tools import replay_step

DROPS = "--hidden-dropout 0.2 --nan-action stop "


@pytest.fixture
def anything_is_a_spike(monkeypatch):
    """From the second step on."""
    monkeypatch.setattr(ten_times_largest_loss_rule, "SAMPLES", 4)
    monkeypatch.setattr(ten_times_largest_loss_rule, "FACTOR", 1e-3)


def dumped(folder: Path, flags: str, layout: Layout = ALONE, **how) -> str:
    (told, *_) = stopped(
        WrongNumbersError, f"{flags} --check-for-spiky-loss --spike-action stop --bad-step-dir {folder}", layout, **how
    )
    return told


@pytest.mark.full
def test_a_dumped_step_comes_again_to_the_bit(tmp_path, anything_is_a_spike, capfd):
    told = dumped(tmp_path / "bad", DROPS)
    assert (
        f"The step is in {tmp_path}/bad/iter_0000001; tools/replay_step.py" in told and "This was iteration 2" in told
    )
    replay_step.main([str(tmp_path / "bad"), "--device", "cpu"])
    printed = capfd.readouterr().out
    assert printed.count("comes again, to the bit") == 3 and "iteration 2 of the run: microbatch" in printed
    assert "No tensor was found that is not finite." in printed


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--fp64", pytest.param("--bf16 --zero-stage 3", marks=pytest.mark.sweep)])
def test_another_layout_computes_it_to_rounding(flags: str, tmp_path, anything_is_a_spike, capfd):
    """Saved by eight ranks, or by ZeRO 3's, and read by one process."""
    layout = Layout(dp=2) if "zero" in flags else Layout(tp=2, pp=2, dp=2)
    dumped(tmp_path, DROPS + flags, layout)
    tensors = open_checkpoint(tmp_path).manifest.tensors
    assert tensors["batch/tokens"].shape == (4, 8) and not any(name.startswith("optimizer") for name in tensors)
    replay_step.main([str(tmp_path), "--device", "cpu"])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("   loss", "   norm", " tokens"))]
    assert "to the bit" in lines[1] and len(lines) == 3
    for line in lines:
        assert "to the bit" in line or float(line.split()[-4]) < (1e-12 if "fp64" in flags else 1e-2), line


@pytest.mark.full
def test_a_bad_weight_is_named_again(tmp_path, capfd):
    def prepare(trainer: Trainer) -> None:
        for name, parameter in trainer.model[0].module.named_parameters():
            if "layers.1.input_layernorm.weight" in name:
                parameter.data[3] = math.nan

    layout = Layout(dp=2)
    told = stopped(NotFiniteError, f"--bad-step-dir {tmp_path}", layout, prepare=prepare)
    assert "The step is in" in told[1]
    capfd.readouterr()
    replay_step.main([str(tmp_path), "--device", "cpu"])
    printed = capfd.readouterr().out
    assert "loss nan comes again, to the bit" in printed
    assert "not finite: the weight language_model.decoder.layers.1.input_layernorm.weight, before the step." in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_dump_is_refused_and_said_by_the_first_rank(rank, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(parallel_state, "launched_rank", lambda: rank)
    with pytest.raises(SystemExit) as refused:
        replay_step.main([str(tmp_path)])
    said = capfd.readouterr().err
    assert refused.value.code == 2 and (tells(said, f"{tmp_path} --bad-step-dir") if rank == 0 else said == "")


@pytest.mark.full
def test_a_dump_that_cannot_be_written_hides_nothing(tmp_path, anything_is_a_spike):
    (tmp_path / "file").write_text("")
    told = dumped(tmp_path / "file" / "bad", "")
    assert "could not be written to --bad-step-dir" in told and "has a loss of" in told
