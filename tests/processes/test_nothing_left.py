"""However a run ends, nothing of it is left running, in shared memory, or in temporary folders. Processes, because they are ended."""

import os
import time
from pathlib import Path

import pytest
from process_runs import GPT2, STEPS
from processes import Job

from megatron.training.fault_tolerance.hang_watch_folder import read_statuses

SCRIPT = str(Path(__file__).with_name("hanging_script.py"))
RUN = [
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "100",
    "--train-iters",
    "60",
    "--eval-iters",
    "0",
]
SAVES = ["--save-interval", "2", "--async-save", "--use-distributed-optimizer", "--log-interval", "50"]
SOON = ["--hang-timeout", "3", "--hang-timeout-floor", "1"]

# what happens to a rank, flags -> the exit codes of both
ENDINGS = {
    ("1 stop all_reduce@training 20", ""): (4, -9),
    ("0 SIGTERM training 5", "--exit-signal-handler"): (0, 0),
    ("0 SIGTERM training 5", ""): (-15, 1),  # the second ends by an error: it misses the first
}


def run_folders(processes: set[int]) -> list[str]:
    """The folders in shared memory in which one of these processes has written where it is."""
    return [str(one) for one in Path("/dev/shm").glob("megatron-*") if processes & {p.pid for p in read_statuses(one)}]


@pytest.mark.parametrize(
    "hang, flags", [case if "stop" in case[0] else pytest.param(*case, marks=pytest.mark.full) for case in ENDINGS]
)
def test_nothing_is_left_of_a_run_however_it_ends(hang, flags, tmp_path, monkeypatch):
    (temporary := tmp_path / "temporary").mkdir()
    copies = ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local"]
    copies += ["--non-persistent-local-ckpt-dir", str(tmp_path / "copies")]
    monkeypatch.setenv("HANG", hang)
    monkeypatch.setenv("TMPDIR", str(temporary))
    folders = ["--save", str(tmp_path / "saved"), *copies]
    with Job([[SCRIPT, *GPT2, *STEPS, *RUN, *SAVES, *SOON, *folders, *flags.split()]] * 2) as job:
        job.wait_for(lambda: len(job.left()) > 2)  # the ranks, and the processes that write their checkpoints
        ranks = {process.pid for process in job.processes}
        assert run_folders(ranks)
        ended, since = job.wait(60), time.monotonic()
        while job.left() and time.monotonic() < since + 5.0:  # the system takes a moment to end a process
            time.sleep(0.02)
        assert job.left() == [], ended
    assert ended.codes == ENDINGS[hang, flags], ended
    assert run_folders(ranks) == [] and os.listdir(temporary) == [], ended
