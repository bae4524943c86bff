"""Launchers start a run again after whatever has ended it: it goes on by itself, to the bits of the run that nothing happened to.

torchrun's agent is torch's own, over ranks that it forks (forking_launcher.py). Processes, because they are killed and started again.
"""

import re
from pathlib import Path
from shlex import split

import pytest
from conftest import GPT2, STEPS
from processes import Job, Outcome, free_port
from stopped_runs import TINY, announced, differs_in, ended

HERE = Path(__file__).parent
SCRIPT, LAUNCHER, FAILING = (
    str(HERE / name) for name in ("hanging_script.py", "forking_launcher.py", "failing_script.py")
)
RUN = TINY.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 3") + (
    "--train-iters 8 --save-interval 2 --global-batch-size 2 --use-distributed-optimizer --save {root} --load {root}"
)
_LINE = re.compile(r"iteration +(\d+)/.*?\| (consumed samples.*?) elapsed.*?(\| learning rate.*\|)")
AT_ALL_PLACES = "1 SIGKILL training 6;0 SIGKILL saving 2;1 SIGKILL building_the_model 1;0 SIGKILL validating 1"


def words(root: Path) -> list[str]:
    return [SCRIPT, *split(RUN.format(root=root))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[str, tuple[str, str]], dict[str, object]]:
    """The run that nothing happens to: its line of each iteration, and what it ends in."""
    root = tmp_path_factory.mktemp("whole")
    with Job([words(root)] * 2) as job:
        told = job.wait(60).succeeded()
    return {line[0]: line[1:] for line in _LINE.findall(told.everything)}, ended(root)


def assert_like_the_whole(said: str, root: Path, whole: tuple[dict, dict], attempts: int) -> None:
    """Every line of every attempt, and the last checkpoint; and no attempt has begun before what was said to be saved."""
    lines, end = whole
    assert all(line[1:] == lines[line[0]] for line in _LINE.findall(said)) and announced(said) == 8, said
    starts = [int(line) for line in re.findall(r"going on from iteration (\d+)", said)]
    assert starts == sorted(starts) and said.count(" rank(s) on cpu: ") == attempts, said
    assert not differs_in(ended(root), end), said


def test_torchrun_starts_a_run_again_that_was_killed_at_any_place(whole, tmp_path, monkeypatch):
    """In a step, in a save, in the start-up, in a validation, one after the other."""
    monkeypatch.setenv("HANG", AT_ALL_PLACES)
    monkeypatch.setenv("RESTARTS", "4")
    with Job([[LAUNCHER, "2", *words(tmp_path)]]) as job:
        told = job.wait(120).succeeded()
    assert_like_the_whole(told.stdout[0], tmp_path, whole, attempts=5)


@pytest.mark.full
def test_the_agents_of_two_machines_start_a_run_again(whole, tmp_path, monkeypatch):
    """A rank of one is killed, and later a rank of the other."""
    for name, value in {"HANG": AT_ALL_PLACES, "RESTARTS": "4", "NODES": "2", "MEETING_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    jobs = []
    for node in range(2):
        monkeypatch.setenv("NODE_RANK", str(node))
        jobs.append(Job([[LAUNCHER, "1", *words(tmp_path)]]))
    with jobs[0], jobs[1]:
        told = [job.wait(120).succeeded().stdout[0] for job in jobs]
    assert_like_the_whole("".join(told), tmp_path, whole, attempts=5)


@pytest.mark.full
def test_each_attempt_tells_of_its_own_failure(monkeypatch):
    """The store of torchrun's agent outlives an attempt, and what was written into it."""
    monkeypatch.setenv("RESTARTS", "1")
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "9"]
    fails = ["--fails-rank", "1", "--fails-how", "before"]
    with Job([[LAUNCHER, "2", FAILING, *GPT2, *STEPS, *mock, *fails]]) as job:
        told: Outcome = job.wait(60)
    assert len(re.findall("^rank 1 failed:$", told.stderr[0], re.MULTILINE)) == 2, told
    assert told.stderr[0].count("rank 0: stopping, because rank 1 failed") == 2, told
