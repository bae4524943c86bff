"""Launchers start a run again after whatever has ended it: it goes on by itself, to the bits of the run that nothing happened to.

torchrun's agent is torch's own, over ranks that it forks (forking_launcher.py); Slurm is a double (slurm_double.py) under the scripts of
examples/slurm. Processes, because they are signalled, killed and started again.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import pytest
from kill_campaign import Ranks, lives
from process_runs import GPT2, STEPS
from processes import ROOT, Job, Outcome, free_port
from slurm_double import Cluster
from stopped_runs import TINY, announced, differs_in, ended

HERE = Path(__file__).parent
SCRIPT, LAUNCHER, FAILING, MARKED = (
    str(HERE / f"{name}.py") for name in ("hanging_script", "forking_launcher", "failing_script", "marked_script")
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
    # The agent, which sees the end of rank 1 as well, may be faster than rank 0.
    assert set(re.findall("^rank 0: stopping, because (.*)$", told.stderr[0], re.MULTILINE)) <= {"rank 1 failed"}, told


@pytest.mark.parametrize("place", [pytest.param("importing", marks=pytest.mark.full), "training"])
def test_ranks_end_with_their_launcher(place, tmp_path):
    """An agent that is killed tells nobody: without a thread that waits for its end, or in the start-up without its store."""
    endless = split(RUN.format(root=tmp_path).replace("--train-iters 8", "--train-iters 100000"))
    with Job([[LAUNCHER, "2", MARKED, *endless]]) as job:
        ranks = Ranks(job)
        job.wait_for(lambda: [marks[-1] for marks in ranks.marks().values() if place in marks][1:])
        processes = ranks.processes().values()
        job.kill(0)
        deadline = time.monotonic() + 60
        while any(map(lives, processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        said = job.stderr(0)
        assert not any(map(lives, processes)), said
        for rank in range(2):
            late = place == "importing" and f"rank {rank} of 2 did not find the other ranks" in said
            assert late or f"rank {rank}: stopping, because its launcher" in said, said


# ---------------------------------------------------------------- Slurm

EXAMPLES = ROOT / "examples" / "slurm"
DIRECT, BY_TORCHRUN = EXAMPLES / "pretrain_gpt_srun.sbatch", EXAMPLES / "pretrain_gpt.sbatch"
SMALL = {"NUM_LAYERS": "2", "HIDDEN_SIZE": "16", "SEQ_LENGTH": "16", "MICRO_BATCH_SIZE": "1", "TRAIN_ITERS": "8"}
OFTEN = split("--log-interval 1 --eval-interval 3 --eval-iters 1 --save-interval 2")


class Site:
    """A folder that jobs are submitted from, whose pretrain_gpt.py can be made to pause or die; and the checkpoints' folder."""

    def __init__(self, folder: Path, hang: str = ""):
        self.folder, self.saved = folder / "site", folder / "saved"
        self.folder.mkdir(parents=True)
        (self.folder / "examples").symlink_to(ROOT / "examples")
        (self.folder / "pretrain_gpt.py").symlink_to(SCRIPT)
        self.variables = {"VENV": sys.prefix, "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "TENSOR_MP_SIZE": "1", **SMALL}
        self.variables |= {"CHECKPOINT_PATH": str(self.saved), "SLURM_SUBMIT_DIR": str(self.folder)}
        self.variables |= {"SLURM_GPUS_ON_NODE": "1", "MASTER_PORT": str(free_port())}
        self.variables |= {"HANG": hang} if hang else {}


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory) -> tuple[dict[str, tuple[str, str]], dict[str, object]]:
    """What the flags of the script train without Slurm, and without being disturbed."""
    folder = tmp_path_factory.mktemp("whole-job")
    site = Site(folder)
    (folder / "srun").write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "${@:4}"\n'
    )  # after --kill-on-bad-exit, python and the script
    (folder / "srun").chmod(0o755)
    environment = os.environ | site.variables | {"SLURM_NTASKS": "2", "PATH": f"{folder}:{os.environ['PATH']}"}
    told = subprocess.run(["bash", str(DIRECT), *OFTEN], env=environment, capture_output=True, text=True, check=True)
    with Job([[SCRIPT, *told.stdout.splitlines()]] * 2) as job:
        said = job.wait(60).succeeded().everything
    return {line[0]: line[1:] for line in _LINE.findall(said)}, ended(site.saved)


def assert_like_the_whole_job(cluster: Cluster, site: Site, whole_job: tuple[dict, dict], attempts: int) -> None:
    lines, end = whole_job
    found = _LINE.findall(cluster.said)
    assert {line[0] for line in found} == set(lines) and all(line[1:] == lines[line[0]] for line in found), cluster.said
    assert cluster.attempts == attempts and not list(site.saved.glob("*.partial*")), cluster.said
    assert not differs_in(ended(site.saved), end, may_keep_more=True), cluster.said


@pytest.mark.full
def test_a_job_that_slurm_warns_saves_and_is_queued_again(whole_job, tmp_path):
    """Over two nodes: no step is computed twice."""
    site = Site(tmp_path, "0 pause training 4")
    with Cluster(tmp_path, nodes=2, tasks=2) as cluster:
        cluster.sbatch(DIRECT, OFTEN, site.variables)
        cluster.wait_for("pausing")
        cluster.warn()
        assert cluster.run_to_the_end() == 0, cluster.said
        assert_like_the_whole_job(cluster, site, whole_job, attempts=2)
        assert len(_LINE.findall(cluster.said)) == 8 and "exiting at iteration 3, after SIGUSR1" in cluster.said
        assert cluster.calls()[-2:] == ["requeue 17", "show job 17"]


# what befalls the job where a rank pauses -> how far it has come when it goes on, if that is certain
BEFALLS = {
    "warned in the start-up": ("0 pause building_the_model 1", lambda cluster: cluster.warn(), 0),
    "warned in a save": ("1 pause saving 1", lambda cluster: cluster.warn(), 3),
    "warned in a validation": ("0 pause validating 1", lambda cluster: cluster.warn(), 3),
    "preempted": ("0 pause training 4", lambda cluster: cluster.preempt(grace=20.0), 3),
    "preempted, with too little grace": ("0 pause training 4", lambda cluster: cluster.preempt(grace=0.5), 2),
    "a node lost in a save": ("1 pause saving 2", lambda cluster: cluster.lose_node(), 2),
    "a rank killed in a step": ("1 SIGKILL training 4", None, 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BEFALLS)
def test_a_job_goes_on_after_what_slurm_does_to_it(name, whole_job, tmp_path):
    hang, befall, saved = BEFALLS[name]
    site = Site(tmp_path, hang)
    with Cluster(tmp_path, nodes=2, tasks=2) as cluster:
        cluster.sbatch(DIRECT, OFTEN, site.variables)
        if befall is not None:
            cluster.wait_for("pausing")
            befall(cluster)
        assert cluster.run_to_the_end() == 0, cluster.said
        assert_like_the_whole_job(cluster, site, whole_job, attempts=2)
        went_on = re.findall(r"going on from iteration (\d+)", cluster.said)
        assert [int(one) for one in went_on] == ([saved] if saved else []), cluster.said


@pytest.mark.full
def test_a_job_of_torchruns_is_warned_and_queued_again(whole_job, tmp_path):
    """One torchrun a node; it passes SIGTERM on, and ends with a code of its own."""
    site = Site(tmp_path, "0 pause training 4")
    with Cluster(tmp_path, nodes=2, tasks=2) as cluster:
        cluster.sbatch(BY_TORCHRUN, OFTEN, site.variables)
        cluster.wait_for("pausing")
        cluster.warn()
        assert cluster.run_to_the_end() == 0, cluster.said
        assert_like_the_whole_job(cluster, site, whole_job, attempts=2)


@pytest.mark.full
def test_torchrun_on_each_node_starts_the_ranks_again_without_the_queue(whole_job, tmp_path):
    site = Site(tmp_path, "1 SIGKILL training 6;0 SIGKILL saving 1")
    with Cluster(tmp_path, nodes=2, tasks=2) as cluster:
        cluster.sbatch(BY_TORCHRUN, OFTEN, site.variables | {"RESTARTS": "2"})
        assert cluster.run_to_the_end() == 0, cluster.said
        assert_like_the_whole_job(cluster, site, whole_job, attempts=1)


# (exit code of the step, whether it saves, restarts so far, preempted) -> whether the job is queued again
DECISIONS = {
    "done": (0, True, 0, False, False),
    "preempted, and saved": (0, True, 0, True, True),
    "preempted in the start-up": (0, False, 3, True, True),
    "refused": (2, False, 0, False, False),
    "wrong numbers": (3, True, 4, False, False),
    "failed at once, the first time": (1, False, 0, False, True),
    "failed at once again": (1, False, 1, False, False),
    "hung, but came further": (137, True, 7, False, True),
}


@pytest.mark.parametrize("code, saves, restarts, preempted, again", DECISIONS.values(), ids=DECISIONS)
def test_which_failures_are_queued_again(code, saves, restarts, preempted, again, tmp_path):
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("2\n")
    (tmp_path / "scontrol").write_text(
        f'#!/usr/bin/env bash\necho "$@" >>{tmp_path}/calls\necho PreemptTime={"9999-01-01T00:00:00" if preempted else "None"}\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    step = f"echo 4 >{latest};" * saves + f"exit {code}"
    script = f"set -euo pipefail; source {EXAMPLES}/requeue.sh; run_and_requeue USR1 bash -c {json.dumps(step)}"
    variables = {"SLURM_JOB_ID": "17", "CHECKPOINT_PATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(["bash", "-c", script], env=os.environ | variables, capture_output=True, text=True)
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert ("requeue 17" in calls) == again and done.returncode == (0 if again else code), done
