"""Whatever breaks on one rank ends the job, soon and with its reason. Processes, because it is they that die."""

import re
import signal
from pathlib import Path

import pytest
from process_runs import GPT2, STEPS, rewound
from processes import PRETRAIN_GPT, Job, Layout, Outcome, free_port, pretrain, run, start
from said import tells

SOON = 30.0  # seconds in which the ranks that are left notice that one is gone
FAILING = str(Path(__file__).with_name("failing_script.py"))
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "90"]
LATEST = "latest_checkpointed_iteration.txt"
DIES = [*GPT2, *STEPS, *MOCK, "--fails-rank"]


@pytest.mark.parametrize(
    "layout, killed", [(Layout(dp=2), 0), pytest.param(Layout(tp=2, pp=2, sp=True), 3, marks=pytest.mark.full)], ids=str
)
def test_a_killed_rank_ends_the_others(layout, killed, data, tmp_path):
    """And the last complete checkpoint goes on as the killed run went on, to the last digit."""
    log = ["--train-iters", "2000", "--log-interval", "1", "--eval-iters", "0"]
    flags = [*GPT2, *STEPS, *data, *log, "--save", str(tmp_path), "--save-interval", "2", *layout.flags]
    with start([PRETRAIN_GPT, *flags], layout.ranks) as job:
        job.wait_for(lambda: "saved checkpoint at iteration 4" in job.stdout(0))
        job.kill(killed)
        died = job.wait(SOON)
    assert died.codes[killed] == -signal.SIGKILL
    assert all(code == 1 for rank, code in enumerate(died.codes) if rank != killed), died
    for rank, said in enumerate(died.stderr):
        if rank != killed:
            assert said.count(f"rank {rank}: stopping, because ") == 1 and "Traceback" not in said, died
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    resumed = pretrain([*flags, "--load", str(tmp_path), "--exit-interval", "2"], layout)
    assert [line.iteration for line in resumed.training] == list(range(saved + 1, saved + 3))
    printed = {line.iteration: line.text for line in died.training}
    for line in resumed.training:
        assert printed.get(line.iteration, line.text) == line.text


def test_a_run_killed_while_its_first_checkpoint_becomes_the_latest_loses_nothing(tmp_path):
    """Its folder is complete and no file names it yet: the same command goes on from it."""
    folder = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1", "--train-iters", "2"]
    flags = [*GPT2, *STEPS, *MOCK, *folder, "--log-interval", "1", "--eval-iters", "0"]
    died = run([FAILING, *flags, "--fails-rank", "0", "--fails-how", "dies while saving"], timeout=60)
    assert died.codes == (-signal.SIGKILL,) and not (tmp_path / LATEST).exists(), died
    resumed = pretrain(flags)
    assert [line.iteration for line in (*died.training, *resumed.training)] == [1, 2]
    assert "WARNING" in resumed.stdout[0] and int((tmp_path / LATEST).read_text()) == 2


def test_a_rank_asked_to_end_ends_the_job_in_order(data, tmp_path):
    """Told to one rank, all finish the same step, save it once, and end with 0."""
    log = ["--train-iters", "2000", "--log-interval", "1", "--eval-iters", "0"]
    flags = [*GPT2, *STEPS, *data, *log, "--save", str(tmp_path), "--exit-signal-handler", *Layout(dp=2).flags]
    with start([PRETRAIN_GPT, *flags], 2) as job:
        job.wait_for(lambda: "iteration        3/" in job.stdout(1))
        job.ask_to_end(0)
        ended = job.wait(SOON).succeeded()
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert [line.iteration for line in ended.training] == list(range(1, saved + 1))
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_{saved:07d}"]
    assert tells(ended.stdout[0], f"{saved} SIGTERM")


LAYOUTS_AND_MESSAGES = [
    (Layout(tp=2, pp=2), 1, "before", "KeyError: 'the disk is on fire'"),
    (Layout(pp=2), 0, "after", "KeyError: 'the disk is on fire'"),
    pytest.param(Layout(dp=2), 0, "nan", "the gradient's norm is nan", marks=pytest.mark.full),  # as under torchrun
    (Layout(pp=2), 1, "memory", "were asked for at once in failing_forward_step"),
]


@pytest.mark.parametrize("layout, rank, how, message", LAYOUTS_AND_MESSAGES)
def test_an_error_on_one_rank_is_said_once_and_ends_all(layout, rank, how, message):
    """With the rank that had it; a gradient that is not finite is an error of every rank, and one of them says it."""
    flags = [*DIES, str(rank), "--fails-how", how, *layout.flags]
    outcome = run([FAILING, *flags], layout.ranks, timeout=60)
    assert set(outcome.codes) == {3 if how == "nan" else 1}, outcome
    assert outcome.everything.count(message) == 1, outcome
    begins = {"nan": " the sum of the step's losses", "memory": " out of memory"}.get(
        how, "\nTraceback"
    )  # the one tells all, of the other the calls must be seen
    (failed,) = [i for i, said in enumerate(outcome.stderr) if said.startswith(f"rank {i} failed:{begins}")]
    assert failed == rank or how == "nan"
    for other, said in enumerate(outcome.stderr):
        assert other == failed or tells(said, f"{other} {failed}"), outcome


@pytest.mark.parametrize(
    "layout, when",
    [
        (Layout(tp=2, pp=2), "building"),
        (Layout(dp=3), "meeting"),
        *(pytest.param(Layout(**two), "building", marks=pytest.mark.full) for two in ({"tp": 2}, {"pp": 2})),
    ],
    ids=str,
)
def test_a_rank_that_dies_while_the_job_starts_ends_the_others_who_name_it(layout, when):
    """While the ranks meet none of them has a connection of the back end that would break; the last of them comes after the death."""
    flags = ["1", "--fails-how", f"dies while {when}", "--global-batch-size", "12", *layout.flags]
    with start([FAILING, *DIES, *flags], layout.ranks) as job:
        dead = job.processes[1].pid
        outcome = job.wait(SOON)
    assert outcome.codes[1] == 9 and all(code == 1 for rank, code in enumerate(outcome.codes) if rank != 1), outcome
    assert outcome.everything.count(": stopping, because rank 1 (on ") == layout.ranks - 1, outcome
    assert outcome.everything.count(f"process {dead}) has ended without a word") == layout.ranks - 1, outcome
    assert "Traceback" not in outcome.everything and outcome.seconds < SOON, outcome


@pytest.mark.full
def test_torchrun_ends_with_the_message_which_names_step_and_checkpoint(tmp_path):
    """Its last block, some forty lines further down, is what a user sees first."""
    flags = [*DIES, "0", "--fails-how", "nan", "--save", str(tmp_path), "--save-interval", "1", *Layout(dp=2).flags]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launch, FAILING, *flags]]) as job:
        outcome = job.wait(60)
    said, block = outcome.stderr[0].split("Root Cause (first observed failure):")
    assert outcome.codes == (1,) and len(re.findall("^rank [01] failed: ", said, re.MULTILINE)) == 1, outcome
    for text in ("the gradient's norm is nan", "iteration 2;", "that of iteration 1:", f"--load {tmp_path}"):
        assert said.count(text) >= 1 and block.count(text) == 1, outcome


@pytest.mark.full
def test_a_rank_that_dies_before_it_joins_ends_the_job_by_its_launcher():
    """The others wait for it to come, and only who started it knows that it will not."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launch, FAILING, *DIES, "1", "--fails-how", "dies before it joins", *Layout(tp=2).flags]]) as job:
        outcome = job.wait(60)
    assert outcome.codes[0] > 0 and outcome.seconds < SOON, outcome
    assert "exitcode" in outcome.stderr[0], outcome


@pytest.mark.parametrize("ranks", [1, 2])
def test_missing_data_file_stops_every_rank(ranks, data, tmp_path):
    missing = str(tmp_path / "nothing_text_document")  # the start of the log names it too, among the settings
    flags = [*GPT2, *STEPS, *data, "--train-iters", "2", "--data-path", missing]
    assert_stopped(run([PRETRAIN_GPT, *flags], ranks, timeout=30), f"{missing}.idx does not exist")


def test_data_of_another_tokenizer_stop_every_rank(data):
    """Tokens past the vocabulary are found by the rank that reads them, in the first step."""
    flags = [*GPT2, *STEPS, *data, "--train-iters", "2", "--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    outcome = run([PRETRAIN_GPT, *flags, *Layout(tp=2).flags], 2, timeout=60)
    assert_stopped(outcome, "the tokenizer's vocabulary has 301")


@pytest.mark.full
@pytest.mark.parametrize("part", ["rank_00001.bin", "manifest.json"])
def test_damaged_checkpoint_is_refused(part, twenty_steps, tmp_path):
    """One byte is not what was saved."""
    made_by = Layout(pp=2)
    twenty_steps("gpt2", made_by)
    root = rewound(twenty_steps.saved("gpt2", made_by), 10, tmp_path / "damaged")
    damaged = root / "iter_0000010" / part
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    flags = [*twenty_steps.flags("gpt2"), "--load", str(root), *made_by.flags]
    assert_stopped(run([PRETRAIN_GPT, *flags], 2, timeout=30), str(damaged))


@pytest.mark.full  # as in test_refused_on_layouts.py, but that the processes end
def test_a_checkpoint_of_another_model_is_refused(twenty_steps):
    """All that differs in one message."""
    twenty_steps("gpt2", Layout(pp=2))
    flags = [*twenty_steps.flags("llama"), "--load", str(twenty_steps.saved("gpt2", Layout(pp=2)))]
    outcome = run([PRETRAIN_GPT, *flags], 2, timeout=30)
    assert_stopped(outcome, "swiglu: the checkpoint has False, this run has True")
    assert tells(outcome.everything, "LayerNorm RMSNorm")


@pytest.mark.full  # as in test_refused_on_layouts.py, but that the processes end
def test_a_folder_that_cannot_be_written_stops_every_rank(data, tmp_path):
    """At the start, and not when it is first needed."""
    (tmp_path / "file").write_text("in the way")
    folder = f"{tmp_path}/file/checkpoints"
    flags = [*GPT2, *STEPS, *data, "--train-iters", "1", "--eval-iters", "0", "--save", folder]
    assert_stopped(run([PRETRAIN_GPT, *flags], 2, timeout=30), f"--save {folder} cannot be written")


def assert_stopped(outcome: Outcome, said: str) -> None:
    """Every rank ended by itself, and one message, not a stack of calls from each rank, names what is wrong."""
    assert all(code > 0 for code in outcome.codes), outcome
    assert said in outcome.everything, outcome
    assert "Traceback" not in outcome.everything, outcome
    assert len([line for line in outcome.everything.splitlines() if said in line]) == 1, outcome


@pytest.mark.full
def test_a_script_that_leaves_the_job_to_the_interpreter_ends_well():
    """Threads of the back end that outlive the interpreter would abort the process now and then: exit code -6."""
    run([str(Path(__file__).with_name("leaving_script.py"))], ranks=2).succeeded()
