"""Scripts run as real processes over gloo, and what they print read back: the harness of tests/processes.

    outcome = pretrain(flags, Layout(tp=2, pp=2))       pretrain_gpt.py as 4 processes, from start to end
    outcome.training[-1].loss                           of the last rank's last training line

    with start([PRETRAIN_GPT, *flags], ranks=2) as job: a job in the background; leaving the block ends it
        job.kill(1)
        outcome = job.wait(timeout=30)

Scripts are forked from a process that has imported torch already (`nursery.py`); modules (-m) and commands (-c) are started from nothing.

Every line that looks like a training or validation line must match the format that scripts parse, to the blank.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layouts import Layout
from nursery import Child, born

ONE_PROCESS = Layout()
ROOT = Path(__file__).resolve().parents[2]
PRETRAIN_GPT, PRETRAIN_BERT = str(ROOT / "pretrain_gpt.py"), str(ROOT / "pretrain_bert.py")

_GRACE = 40.0  # seconds that the other ranks have to end once one has failed
_LAUNCHER_VARIABLES = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(SLURM|OMPI|PMIX?|MPI|PALS)_.*"
)

# launcher -> what it calls (rank, ranks, rank on the node, ranks of the node), and what else it sets
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {}),
    "srun": (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        {"SLURM_STEP_ID": "0"},
    ),
    "Open MPI": (*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), {}),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", {}),
}


# ---------------------------------------------------------------- what is run


def pretrain(
    flags: Sequence[str], layout: Layout = ONE_PROCESS, *, script: str = PRETRAIN_GPT, timeout: float = 120.0
) -> "Outcome":
    """pretrain_gpt.py, or another script, from start to end; every rank must succeed."""
    return run([script, *flags, *layout.flags], layout.ranks, timeout=timeout).succeeded()


def run(
    arguments: Sequence[str],
    ranks: int = 1,
    *,
    more: Mapping[int, Sequence[str]] | None = None,
    launcher: str = "torchrun",
    timeout: float = 120.0,
) -> "Outcome":
    """`python ARGUMENTS` as `ranks` processes until all have ended, however they end. `more`: rank -> arguments it alone has."""
    with start(arguments, ranks, more=more, launcher=launcher) as job:
        return job.wait(timeout)


def start(
    arguments: Sequence[str],
    ranks: int = 1,
    *,
    more: Mapping[int, Sequence[str]] | None = None,
    launcher: str = "torchrun",
) -> "Job":
    """`python ARGUMENTS` as `ranks` processes in the background; a single one is told of no launcher."""
    return Job([[*arguments, *(more or {}).get(rank, ())] for rank in range(ranks)], launcher)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job:
    """Processes that were told of one another, one a rank. Only these are ever waited for or killed."""

    def __init__(self, commands: Sequence[Sequence[str]], launcher: str = "torchrun"):
        """commands: of each rank, what follows `python`. launcher: whose variables they are given."""
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._began = time.monotonic()
        self.processes: list[subprocess.Popen | Child] = []
        port = free_port()
        for rank, command in enumerate(commands):
            self.processes.append(self._start(rank, command, _environment(rank, len(commands), port, launcher)))

    def _start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen | Child:
        out, err, folder = self._path(rank, "out"), self._path(rank, "err"), self._folder.name
        for path in (out, err):
            path.touch()
        if command[0].endswith(".py"):
            return born(command, environment, folder, out, err)
        with out.open("wb") as out_file, err.open("wb") as err_file:
            return subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,  # so that a process which starts others is ended with them
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._folder.cleanup()

    def stdout(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._path(rank, "out").read_text(errors="replace")

    def stderr(self, rank: int) -> str:
        return self._path(rank, "err").read_text(errors="replace")

    def running(self) -> list[int]:
        """The ranks whose processes have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def left(self) -> list[int]:
        """The processes that work in the job's folder: its ranks, and what they have started, whoever is above those by now."""
        numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return [number for number in numbers if _works_in(number) == self._folder.name]

    def kill(self, rank: int) -> None:
        """End one rank as a machine that loses power would: it says goodbye to nobody."""
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait()

    def ask_to_end(self, rank: int) -> None:
        """Signal one rank as a cluster does when its time is up."""
        self.processes[rank].send_signal(signal.SIGTERM)

    def wait_for(self, is_so: Callable[[], bool], timeout: float = 60.0) -> None:
        """Return when `is_so()` holds; fail if it does not, or if a rank ends before."""
        deadline = time.monotonic() + timeout
        while not is_so():
            if len(self.running()) < len(self.processes) or time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {timeout} s, or a rank has ended\n{self._report()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 120.0) -> "Outcome":
        """How it ended. A job that has not ended after `timeout` seconds, or `_GRACE` after a rank failed, fails the test."""
        deadline = time.monotonic() + timeout
        while self.running():
            if any(process.poll() for process in self.processes):
                deadline = min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() > deadline:
                hanging = self.running()
                self._end()
                raise AssertionError(f"ranks {hanging} did not end\n{self._report()}")
            time.sleep(0.01)
        ranks = range(len(self.processes))
        return Outcome(
            codes=tuple(process.returncode for process in self.processes),
            stdout=tuple(self.stdout(rank) for rank in ranks),
            stderr=tuple(self.stderr(rank) for rank in ranks),
            seconds=time.monotonic() - self._began,
        )

    def _end(self) -> None:
        """Ask those still running to end, and a few seconds later make them (a launcher passes the request on)."""
        for ask in (signal.SIGTERM, signal.SIGKILL):
            for rank in self.running():
                os.killpg(self.processes[rank].pid, ask)
            deadline = time.monotonic() + 3.0
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.02)

    def _report(self) -> str:
        ranks = range(len(self.processes))
        codes = [process.poll() for process in self.processes]
        return _tails(codes, [self.stdout(rank) for rank in ranks], [self.stderr(rank) for rank in ranks])

    def _path(self, rank: int, stream: str) -> Path:
        return Path(self._folder.name) / f"rank{rank}.{stream}"


def _works_in(process: int) -> str:
    """The working folder of a process; empty if it has ended, or is another user's."""
    try:
        return os.readlink(f"/proc/{process}/cwd")
    except OSError:
        return ""


def _environment(rank: int, ranks: int, port: int, launcher: str) -> dict[str, str]:
    """This process' environment without its launcher's variables, and with those of a launcher of `ranks` processes."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
    environment["OMP_NUM_THREADS"] = "1"
    if ranks > 1:
        *names, others = LAUNCHERS[launcher]
        environment |= dict(zip(names, map(str, (rank, ranks, rank, ranks)))) | others | {"MASTER_PORT": str(port)}
        if launcher == "torchrun":
            environment["MASTER_ADDR"] = "127.0.0.1"
    return environment


# ---------------------------------------------------------------- what it printed


@dataclass(frozen=True)
class TrainingLine:
    """One line of a log interval. `text` is all of it but the times, to compare digit for digit."""

    iteration: int
    consumed_samples: int
    lr: float
    loss: float
    grad_norm: float
    text: str


@dataclass(frozen=True)
class ValidationLine:
    where: str
    loss: float
    perplexity: float
    text: str


@dataclass(frozen=True)
class Outcome:
    """How the processes of a job ended, and what each of them printed."""

    codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    seconds: float

    @property
    def training(self) -> list[TrainingLine]:
        """The training lines of the last rank."""
        return training_lines(self.stdout[-1])

    @property
    def validation(self) -> list[ValidationLine]:
        return validation_lines(self.stdout[-1])

    @property
    def printed(self) -> list[str]:
        """Training and validation lines of the last rank in order, without times."""
        return [line.text for line in log_lines(self.stdout[-1])]

    @property
    def everything(self) -> str:
        return "".join(self.stdout + self.stderr)

    def succeeded(self) -> "Outcome":
        assert not any(self.codes), f"the job failed\n{_tails(self.codes, self.stdout, self.stderr)}"
        return self

    def __str__(self) -> str:
        return _tails(self.codes, self.stdout, self.stderr)


_TRAINING = re.compile(
    r" \[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\] iteration (?P<iteration>[ \d]{7}\d)/[ \d]{7}\d"
    r" \| consumed samples: (?P<samples>[ \d]{11}\d)"
    r" \| elapsed time per iteration \(ms\): (?P<milliseconds>\d+\.\d)"
    r" \| learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d)"
    r" \| global batch size: [ \d]{4}\d"
    r" \| lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d)"
    r"(?: \| (?:sop|restart) loss: \d\.\d{6}E[+-]\d\d)?"
    r"(?: \| (?:(?:seq_|global_)?load_balancing_loss|z_loss): \d\.\d{6}E[+-]\d\d)*"
    r" \| loss scale: \d+\.\d"
    r" \| grad norm: (?P<grad_norm>\d+\.\d{3})"
    r" \| number of skipped iterations: [ \d]{2}\d"
    r" \| number of nan iterations: [ \d]{2}\d \|"
)
_VALIDATION = re.compile(
    r" validation loss at (?P<where>iteration \d+(?: on (?:validation|test) set)?)"
    r" \| lm loss value: (?P<loss>\d\.\d{6}E[+-]\d\d)"
    r" \| lm loss PPL: (?P<perplexity>\d\.\d{6}E[+-]\d\d)"
    r"(?: \| sop accuracy value: \d\.\d{6}E[+-]\d\d"
    r" \| sop loss value: \d\.\d{6}E[+-]\d\d \| sop loss PPL: \d\.\d{6}E[+-]\d\d)? \| "
)


def log_lines(text: str) -> list[TrainingLine | ValidationLine]:
    """The training and validation lines in `text`; one that is not exactly as scripts expect it fails."""
    found = [_training_line(line) or _validation_line(line) for line in text.splitlines()]
    return [line for line in found if line is not None]


def training_lines(text: str) -> list[TrainingLine]:
    return [line for line in log_lines(text) if isinstance(line, TrainingLine)]


def validation_lines(text: str) -> list[ValidationLine]:
    return [line for line in log_lines(text) if isinstance(line, ValidationLine)]


def _training_line(line: str) -> TrainingLine | None:
    if "consumed samples" not in line and "grad norm:" not in line:
        return None
    found = _TRAINING.fullmatch(line)
    assert found, f"not the training line that scripts parse: {line!r}"
    untimed = line.replace(f"[{found['time']}]", "[]").replace(f"(ms): {found['milliseconds']} ", "(ms): ")
    return TrainingLine(
        iteration=int(found["iteration"]),
        consumed_samples=int(found["samples"]),
        lr=float(found["lr"]),
        loss=float(found["loss"]),
        grad_norm=float(found["grad_norm"]),
        text=untimed,
    )


def _validation_line(line: str) -> ValidationLine | None:
    if "validation loss" not in line and "lm loss value" not in line:
        return None
    found = _VALIDATION.fullmatch(line)
    assert found, f"not the validation line that scripts parse: {line!r}"
    return ValidationLine(found["where"], float(found["loss"]), float(found["perplexity"]), line)


def _tails(codes: Sequence[int | None], stdout: Sequence[str], stderr: Sequence[str], lines: int = 12) -> str:
    """The end of what each rank printed, for messages."""
    parts = [
        f"--- rank {rank}, exit code {code}, {name}:\n" + "\n".join(text.splitlines()[-lines:])
        for rank, code in enumerate(codes)
        for name, text in (("stdout", stdout[rank]), ("stderr", stderr[rank]))
        if text
    ]
    return "\n".join(parts) or f"exit codes {list(codes)}, nothing printed"
