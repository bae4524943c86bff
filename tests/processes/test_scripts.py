"""The ways in which users start a run. Processes, because the launcher and the caller's torch.distributed are what is tested."""

import re
from pathlib import Path
from shlex import split

import pytest
from process_runs import STEPS
from processes import PRETRAIN_GPT, Job, Layout, Outcome, free_port, log_lines, run

OWN_SCRIPT = str(Path(__file__).with_name("own_script.py"))
TWO_STEPS = split("--exit-interval 2 --eval-interval 2 --eval-iters 1")


# 63 words and the end of a document: the padded vocabulary, which scripts use as Megatron's do, is 64 on one rank and on two.
OWN_FLAGS = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 63 --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 1 --train-iters 4 --log-interval 1"
)


def own_script(layout: Layout, *more: str) -> Outcome:
    """A fork's script, which initialises torch.distributed before it calls `pretrain`."""
    return run([OWN_SCRIPT, *OWN_FLAGS, *STEPS, *TWO_STEPS, *layout.flags, *more], layout.ranks).succeeded()


@pytest.fixture(scope="module")
def own_script_on_4() -> Outcome:
    return own_script(Layout(tp=2, pp=2))


def test_a_forks_script_trains_over_tp_and_pp_as_in_one_process(own_script_on_4):
    """Its own model of our layers, batch, loss and data; its torch.distributed is adopted."""
    one = own_script(Layout())
    for part in ("training", "validation"):
        expected = [line.loss for line in getattr(one, part)]
        assert expected and [line.loss for line in getattr(own_script_on_4, part)] == pytest.approx(expected, rel=2e-4)
    assert len(one.training) == 2 and one.training[1].loss < one.training[0].loss
    assert "4 rank(s) on cpu: tp 2, pp 2, dp 1" in own_script_on_4.stdout[0]
    assert own_script_on_4.everything.count("building a mixer ...") == 1


def test_data_is_read_by_the_first_tensor_rank_only(own_script_on_4):
    """On both ends of the pipeline: 2 steps and 1 validation of 8 samples each."""
    reads = [int(re.search(rf"rank {rank} read (\d+) samples", own_script_on_4.stdout[rank])[1]) for rank in range(4)]
    assert reads[1] == reads[3] == 0
    assert 24 <= reads[0] <= 40 and reads[0] == reads[2], "what is read ahead is at most two microbatches of a data set"


@pytest.mark.full  # the flags of a script's own are tested in one process
def test_a_forks_script_reads_on_stages_between_and_has_flags_of_its_own():
    one, four = own_script(Layout(), "--activation-power", "1"), own_script(Layout(pp=4), "--activation-power", "1")
    assert [line.loss for line in four.training] == pytest.approx([line.loss for line in one.training], rel=2e-4)


@pytest.mark.full
def test_runs_under_torchrun(twenty_steps):
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launcher, PRETRAIN_GPT, *flags]]) as job:
        outcome = job.wait(60).succeeded()
    lines = [line.text for line in log_lines(outcome.stdout[0])]
    expected = twenty_steps("gpt2", Layout(pp=2)).training[:2]
    assert lines[:2] == [line.text for line in expected]
    assert len(lines) == 3, "one line of each step and one of the validation, from one rank"


@pytest.mark.full  # as test_sbatch_trains_on_two_nodes of test_examples.py, which starts them by its script
def test_runs_as_two_nodes_of_one_rank(twenty_steps):
    """Two launches of torchrun on one machine, which meet over its loopback as those of two machines do over a network."""
    flags = [*twenty_steps.flags("gpt2"), *TWO_STEPS, *Layout(pp=2).flags]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    launch += ["--master-port", str(free_port())]
    with Job([[*launch, "--node-rank", str(node), PRETRAIN_GPT, *flags] for node in range(2)]) as job:
        outcome = job.wait(60).succeeded()
    expected = [line.text for line in twenty_steps("gpt2", Layout(pp=2)).training[:2]]
    assert [line.text for text in outcome.stdout for line in log_lines(text)][:2] == expected


@pytest.mark.full  # the variables are a table in tests/unit/parallel/test_launcher_environment.py
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
