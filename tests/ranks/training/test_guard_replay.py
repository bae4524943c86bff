"""A microbatch computed twice: errors of a device are told from the program's, and the rank is named, in any layout; no number changes."""

import re

import pytest
import torch
from guard_runs import run, stopped, weights_of
from layouts import Layout
from local_ranks import run_ranks

from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.result_checks.rerun_first_microbatch_every_interval import (
    COMPUTED,
    RECEIVED,
    SENT,
    CommHashTrace,
    FirstDifference,
    first_difference,
)
from megatron.training.trainer import Trainer

LAYOUTS = {
    "alone": (Layout(), ""),
    "tp": (Layout(tp=2, sp=True), ""),
    "dp": (Layout(dp=2), "--overlap-grad-reduce"),
    "stage 2": (Layout(dp=2), "--zero-stage 2 --overlap-grad-reduce --overlap-param-gather"),
    "stage 3": (Layout(dp=2), "--zero-stage 3"),
    "pipeline": (Layout(tp=2, pp=2, dp=2), "--use-distributed-optimizer"),
    "interleaved": (Layout(pp=2, v=2, schedule="interleaved"), "--num-layers 4"),
    "zb-h1": (Layout(pp=2), "--pipeline-schedule zb-h1 --zero-stage 2"),
    "dropout and offload": (Layout(dp=2), "--optimizer-cpu-offload --hidden-dropout 0.3 --recompute-activations"),
}
FULL = [pytest.mark.full]
MARKS = {"dp": [], "stage 3": FULL}  # the others: python -m pytest -m sweep
CASES = [pytest.param(name, marks=MARKS.get(name, [pytest.mark.sweep])) for name in LAYOUTS]


def stages(layout: Layout) -> dict:
    return {"stages": layout.stages if layout.pp > 1 else None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.full
def test_a_replay_changes_no_bit_and_finds_nothing_where_nothing_is_wrong(case: str, capfd):
    layout, flags = LAYOUTS[case]

    def weights(more: str) -> list[torch.Tensor]:
        line = f"{flags} {more} {' '.join(layout.flags)}"
        return run_ranks(layout.sizes, lambda mesh: weights_of(run(line, mesh=mesh)), **stages(layout))

    plain = weights("")
    assert all(map(torch.equal, plain, weights("--rerun-interval 2")))
    assert "other bits" not in capfd.readouterr().out


def wrong_gradient(rank: int):
    """The second run of the third step has one bit other in a gradient of one rank, as it is added in the backward."""

    def prepare(trainer: Trainer) -> None:
        if trainer.mesh["world"].rank != rank:
            return
        calls = []
        parameter = next(p for n, p in trainer.model[0].module.named_parameters() if "layernorm" in n)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            # 4 microbatches a step over data-parallel ranks, and two runs of one before the third
            if len(calls) == 2 * (4 // trainer.mesh["dp"].size) + 2:
                grad = grad.clone()
                grad.view(torch.int32)[0] ^= 1
            return grad

        parameter.register_hook(hook)

    return prepare


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_differs_between_two_runs_names_its_rank(case: str):
    layout, flags = LAYOUTS[case]
    if case == "interleaved":
        pytest.skip("runs two microbatches")
    rank = layout.ranks - 1
    told = stopped(
        WrongNumbersError | RuntimeError, f"{flags} --rerun-interval 3", layout, prepare=wrong_gradient(rank)
    )
    assert re.search(
        rf"iteration 3, .* has other bits on rank {rank}, first in what it (sends|computes)", told[rank]
    ), told
    assert "a third run equals one of the two: the device fails at times" in told[rank]
    assert all(f"rank {rank}" in one for one in told)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("transient_error", "a third run equals one of the two"),
        pytest.param("persistent_error", "a third run differs from both", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2, pp=2, dp=2), marks=pytest.mark.sweep)], ids=str)
def test_an_injected_error_is_found(kind: str, said: str, layout: Layout):
    flags = f"--rerun-interval 1 --error-injection-rate 1 --error-injection-type {kind}"
    told = stopped(WrongNumbersError | RuntimeError, flags, layout)
    (wrong,) = {re.search(r"has other bits on rank (\d)", one)[1] for one in told}
    assert said in told[int(wrong)] and "iteration 1," in told[int(wrong)]


@pytest.mark.full
def test_statistics_count_and_do_not_stop(capfd):
    flags = "--rerun-mode report_stats --error-injection-rate 2 --error-injection-type persistent_error --seed 5"
    run_ranks({}, lambda mesh: run(flags, mesh=mesh))
    printed = capfd.readouterr().out
    differed = int(
        re.findall(r"iteration 4: 4 steps' first microbatch computed twice, (\d) with other bits", printed)[0]
    )
    assert 0 < differed < 4 and printed.count("WARNING: the first microbatch of iteration") == differed


@pytest.mark.full
def test_a_rejected_result_that_comes_again_stops_nothing(capfd):
    run_ranks(
        {},
        lambda mesh: run(
            "--rerun-interval 2 --error-injection-rate 1 --error-injection-type correct_result", mesh=mesh
        ),
    )
    assert capfd.readouterr().out.count("came again: no device failed") == 2


def test_a_rank_is_at_fault_where_it_had_received_the_same():
    def trail(*values: float) -> CommHashTrace:
        made = CommHashTrace()
        for how, value in zip((SENT, RECEIVED, COMPUTED), values, strict=True):
            made.note(how, "x", torch.tensor([value]))
        return made

    assert first_difference(trail(1, 2, 3), trail(1, 2, 3)) is None
    assert first_difference(trail(1, 2, 3), trail(1, 4, 5)) == FirstDifference(1, RECEIVED, "x")
    assert first_difference(trail(1, 2, 3), trail(0, 4, 5)).how == SENT
    assert first_difference(trail(1, 2, 3), CommHashTrace()).what == "other calls"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(), "--gated --activation silu --activation-func-clamp-value 0.01"),  # has gradients of 0, and of -0
        (
            Layout(dp=2, ep=2),
            "--zero-stage 3 --overlap-grad-reduce --overlap-param-gather --expert-model-parallel-size 2",
        ),
    ],
    ids=["zeros", "gathered ahead"],
)
def test_the_first_step_of_a_process_is_no_wrong_number(layout: Layout, flags: str):
    """It finds the order of gathers, and adds to zeros what later steps overwrite."""
    experts = f"{flags} --num-experts 8 --init-method-std 0.2 --train-iters 2 --rerun-interval 1"
    run_ranks(layout.sizes, lambda mesh: run(experts, mesh=mesh))
