"""The ways in which users start a run. Processes, because the launcher and the caller's torch.distributed are what is tested."""

import re
from pathlib import Path
from shlex import split

import pytest
from processes import PRETRAIN_GPT, Job, Layout, Outcome, free_port, log_lines, run

OWN_SCRIPT = str(Path(__file__).with_name("own_script.py"))
TWO_STEPS = split("--exit-interval 2 --eval-interval 2 --eval-iters 1")


@pytest.fixture(scope="module")
def own_script(twenty_steps) -> Outcome:
    """Two steps on 4 ranks of a script that initialises torch.distributed before it calls `pretrain`."""
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(tp=2, pp=2).flags]
    return run([OWN_SCRIPT, *flags], 4).succeeded()


def test_adopts_initialised_torch_distributed(own_script, twenty_steps):
    expected = twenty_steps("gpt2").training[:2]
    assert [line.loss for line in own_script.training] == pytest.approx([line.loss for line in expected], rel=2e-4)
    assert "4 rank(s) on cpu: tp 2, pp 2, dp 1" in own_script.stdout[0]


def test_data_is_read_by_the_first_tensor_rank_only(own_script):
    """On both ends of the pipeline: 2 steps and 1 validation of 8 samples each."""
    reads = [int(re.search(rf"rank {rank} read (\d+) samples", own_script.stdout[rank])[1]) for rank in range(4)]
    assert reads == [24, 0, 24, 0]


def test_runs_under_torchrun(twenty_steps):
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launcher, PRETRAIN_GPT, *flags]]) as job:
        outcome = job.wait(60).succeeded()
    lines = [line.text for line in log_lines(outcome.stdout[0])]
    expected = twenty_steps("gpt2", Layout(pp=2)).training[:2]
    assert lines[:2] == [line.text for line in expected]
    assert len(lines) == 3, "one line of each step and one of the validation, from one rank"


def test_runs_as_two_nodes_of_one_rank(twenty_steps):
    """Two launches of torchrun on one machine, which meet over its loopback as those of two machines do over a network."""
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    launch += ["--master-port", str(free_port())]
    with Job([[*launch, "--node-rank", str(node), PRETRAIN_GPT, *flags] for node in range(2)]) as job:
        outcome = job.wait(60).succeeded()
    expected = [line.text for line in twenty_steps("gpt2", Layout(pp=2)).training[:2]]
    assert [line.text for text in outcome.stdout for line in log_lines(text)][:2] == expected


@pytest.mark.full  # the variables are a table in tests/pure/test_launch.py
@pytest.mark.parametrize("launcher", ["srun", "Open MPI", "MPICH"])
def test_runs_with_the_variables_of_other_launchers(launcher, twenty_steps):
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    outcome = run([PRETRAIN_GPT, *flags], 2, launcher=launcher).succeeded()
    assert outcome.printed[:2] == [line.text for line in twenty_steps("gpt2", Layout(pp=2)).training[:2]]


@pytest.mark.full  # as torchrun, but for one argument
def test_runs_under_the_launch_module_which_passes_the_local_rank(twenty_steps):
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    launcher = ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launcher, PRETRAIN_GPT, *flags]]) as job:
        outcome = job.wait(60).succeeded()
    expected = [line.text for line in twenty_steps("gpt2", Layout(pp=2)).training[:2]]
    assert [line.text for line in log_lines(outcome.stdout[0])][:2] == expected
