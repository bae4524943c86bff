"""One job of a SLURM cluster, on this machine: doubles of sbatch, srun and scontrol, the variables that SLURM sets, and its signals.

    with Cluster(tmp_path, nodes=2, tasks=2) as cluster:
        cluster.sbatch(script, flags, environment)     the first attempt begins
        cluster.wait_for("iteration        3/")
        cluster.warn()                                 the signal of `#SBATCH --signal`, minutes before the limit
        cluster.run_to_the_end()                       with all attempts that `scontrol requeue` asks for; the exit code of the last

As SLURM does, sbatch runs a copy of the script, without the tasks' variables; srun hands signals on to its tasks, ends the step when a task
fails (--kill-on-bad-exit), and ends with the highest exit code; at the limit tasks get SIGTERM, and everything SIGKILL after a grace time.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

JOB = "17"
SRUN = """
import os, signal, subprocess, sys, time
environment, words = os.environ, sys.argv[1:]
kills = False
while words[0].startswith("--"):
    kills |= words.pop(0) == "--kill-on-bad-exit=1"
nodes, tasks = int(environment["SLURM_JOB_NUM_NODES"]), int(environment["SLURM_NTASKS"])
each = tasks // nodes
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "localhost"}
started = []
with open(environment["SPOOL"] + "/tasks", "w") as told:
    for task in range(tasks):
        # All "nodes" are this machine, so each rank finds the others here.
        here = {"SLURM_PROCID": task, "SLURM_LOCALID": task % each, "SLURM_NODEID": task // each}
        more = step | {"SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if each < tasks else str(tasks)}
        more |= {name: str(value) for name, value in here.items()}
        started.append(subprocess.Popen(words, env=environment | more, start_new_session=True))
        told.write(f"{started[-1].pid}\\n")
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: [one.send_signal(number) for one in started])
ended_at = None
while any(one.poll() is None for one in started):
    if kills and any(one.poll() for one in started):
        if ended_at is None:
            ended_at = time.monotonic()
            [one.send_signal(signal.SIGTERM) for one in started]
        elif time.monotonic() > ended_at + float(environment["KILL_WAIT"]):
            [os.killpg(one.pid, signal.SIGKILL) for one in started if one.poll() is None]
    time.sleep(0.02)
sys.exit(max(code if code >= 0 else 128 - code for code in (one.returncode for one in started)))
"""
SCONTROL = """
import os, sys
with open(os.environ["SPOOL"] + "/calls", "a") as told:
    told.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost")
elif sys.argv[1:3] == ["show", "job"]:
    path = os.environ["SPOOL"] + "/preempted"
    at = open(path).read() if os.path.exists(path) else "None"
    print("JobId=17\\n   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=" + at)
"""


class Cluster:
    """The cluster and its one job. Leaving the block kills what is left of the job."""

    def __init__(self, folder: Path, *, nodes: int = 1, tasks: int = 2, kill_wait: float = 10.0):
        """tasks: in all. kill_wait: seconds between SIGTERM and SIGKILL of a step whose task has failed."""
        self.spool, self._log = folder / "spool", folder / "job.log"
        self.spool.mkdir(parents=True)
        self._size = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS": str(tasks), "KILL_WAIT": str(kill_wait)}
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (self.spool / name).write_text(f"#!{sys.executable} -IS\n{text}")
            (self.spool / name).chmod(0o755)
        self.attempts = 0
        self._batch: subprocess.Popen | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    # ---------------------------------------------------------------- the commands

    def sbatch(self, script: Path, words: Sequence[str], environment: dict[str, str]) -> None:
        """Begin the first attempt. The script's `#SBATCH` lines say what is sent when, and whether the job may be queued again."""
        self._copy = self.spool / "slurm_script"
        self._copy.write_text(script.read_text())
        self._words, self._environment = list(words), environment
        self.asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE))
        self._begin()

    def calls(self) -> list[str]:
        """What the job has asked scontrol for."""
        path = self.spool / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def _begin(self) -> None:
        (self.spool / "tasks").unlink(missing_ok=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "WORLD_SIZE"))
        }
        environment |= self._environment | self._size
        environment |= {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "localhost", "SPOOL": str(self.spool)}
        environment["PATH"] = f"{self.spool}:{environment['PATH']}"
        if self.attempts:
            environment["SLURM_RESTART_COUNT"] = str(self.attempts)
        self.attempts += 1
        with self._log.open("ab") as log:  # --open-mode=append
            self._batch = subprocess.Popen(
                ["bash", str(self._copy), *self._words],
                env=environment,
                cwd=self.spool,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    # ---------------------------------------------------------------- what befalls the job

    def warn(self) -> None:
        """Minutes before the limit: to the batch shell alone (`--signal=B:...`), or to all tasks."""
        to, _, name = self.asked["signal"].partition("@")[0].rpartition(":")
        number = signal.Signals[f"SIG{name}"]
        if to == "B":
            self._batch.send_signal(number)
        else:
            self._signal_tasks(number)

    def time_is_up(self, grace: float) -> None:
        """SIGTERM to all tasks; everything that is there after `grace` seconds is killed."""
        self._signal_tasks(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._batch.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill()

    def preempt(self, grace: float) -> None:
        """The same, and a job that may be queued again is, unless it has ended by itself."""
        (self.spool / "preempted").write_text(time.strftime("%Y-%m-%dT%H:%M:%S"))
        self._signal_tasks(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._batch.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._lose_unless_ended()

    def lose_node(self) -> None:
        """Everything dies at once; SLURM queues the job again."""
        self._lose_unless_ended()

    def _lose_unless_ended(self) -> None:
        if self._batch.poll() is None:
            self._kill()
            if "requeue" in self.asked:
                with (self.spool / "calls").open("a") as calls:
                    calls.write(f"requeue {JOB}\n")

    # ---------------------------------------------------------------- waiting

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Until the job has printed it."""
        deadline = time.monotonic() + seconds
        while text not in self.said:
            assert self._batch.poll() is None and time.monotonic() < deadline, (
                f"waited in vain for {text!r}:\n{self.said}"
            )
            time.sleep(0.02)

    def run_to_the_end(self, seconds: float = 120.0, most: int = 5) -> int:
        """Follow every requeue; the exit code of the last attempt."""
        while self._await_batch(seconds) is not None and self._is_queued_again():
            assert self.attempts < most, f"queued again for ever:\n{self.said}"
            self._begin()
        return self._batch.returncode

    def _await_batch(self, seconds: float) -> int:
        try:
            return self._batch.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended after {seconds} s:\n{self.said}") from None

    def _is_queued_again(self) -> bool:
        return self.calls().count(f"requeue {JOB}") >= self.attempts

    def tasks(self) -> list[int]:
        path = self.spool / "tasks"
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    def _signal_tasks(self, number: int) -> None:
        for task in self.tasks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(task, number)

    def _kill(self) -> None:
        """All processes of the job: the batch shell, srun, and each task with its children."""
        if self._batch is None:
            return
        for leader in (self._batch.pid, *self.tasks()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        self._batch.wait()
