"""The processes of a job on one machine share a folder in memory, of a few kilobytes; the last of them removes it.

    rank_00003          status of the rank (`core/base/rank_status.py`)
    rank_00003.stack    its stacks, once somebody has requested them by SIGUSR2
    alarm               "pid started" of the rank that examines the others
    verdict             its diagnosis, in JSON
    seen_00003          the rank has read the diagnosis
    slow                its time is when a slow rank was last reported
    go                  all ranks have read the diagnosis, or there is no more time: end

The folder is named after the job as the launcher describes it, so all ranks find it without communication. A run that
was killed as a whole leaves it; the next run of this user on the machine removes it. Pure.
"""

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

from megatron.core.base.rank_status import RankStatus, RankStatusWriter, read_status
from megatron.training.fault_tolerance.process_stat import process_state

# Variables that tell jobs on one machine apart, by launcher.
_JOB = (
    # torchrun
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    # Slurm
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_NODEID",
    # MPI
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
_OLD = 10.0  # seconds: a younger folder may belong to a job that begins
_ATTEMPTS = 20  # to enter the folder while others remove it


def folder_of_job(environment: Mapping[str, str], *, alone: bool) -> Path:
    """Return the folder's path. alone: of a job of one process, which shares it with nobody."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    job = [f"{name}={environment.get(name, '')}" for name in _JOB]
    words = [str(os.getpid())] if alone else job
    return base / f"megatron-{os.getuid()}-{zlib.crc32(' '.join(words).encode()):08x}"


def make_run_folder(folder: Path) -> None:
    """Create the folder, for this user alone, and remove what killed runs have left. Raises OSError.

    Other ranks of the job, and other jobs, may do the same at this moment: see `create_status_in_run_folder`.
    """
    for other in folder.parent.glob(f"megatron-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            was_old = _is_old(other)  # before files are removed from it, which changes its time
            _remove_left_files(other)
            if other != folder and was_old:
                other.rmdir()  # fails if a rank has just entered it
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    os.utime(folder)  # a folder of the same name, left by a killed run, is in use again


def create_status_in_run_folder(folder: Path, rank: int, ranks: int, started: int) -> RankStatusWriter:
    """Create the folder, and this rank's status in it. Raises OSError.

    A rank of another job that took the folder for a killed run's, or one of this job that has ended already, may remove
    it before the status is in it: then both are created again.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            make_run_folder(folder)
            return RankStatusWriter(status_path(folder, rank), rank, ranks, started)
        except (FileNotFoundError, FileExistsError):  # the latter: created by another, and removed at once
            if attempts == _ATTEMPTS:
                raise


def status_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's status."""
    return folder / f"rank_{rank:05}"


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _OLD


def _remove_left_files(folder: Path) -> None:
    """Remove the files of a folder in which no rank is alive, but for those that a beginning job has just written."""
    if _has_live_rank(folder):
        return
    for path in folder.iterdir():
        if _is_old(path):
            path.unlink(missing_ok=True)


def read_statuses(folder: Path) -> list[RankStatus]:
    """Return the statuses of all ranks in the folder, also of dead processes."""
    statuses = []
    for path in sorted(folder.glob("rank_?????")):
        status = read_status(path)
        if status is not None:
            statuses.append(status)
    return statuses


def _is_alive(status: RankStatus) -> bool:
    return not process_state(status.pid, status.started).has_ended


def _has_live_rank(folder: Path) -> bool:
    return any(_is_alive(status) for status in read_statuses(folder))


def leave_run_folder(folder: Path, rank: int) -> None:
    """Remove this rank's files, those of dead processes, and the folder after the last."""
    with contextlib.suppress(OSError):
        ended = {rank}
        for status in read_statuses(folder):
            if status.pid == os.getpid() or not _is_alive(status):
                ended.add(status.rank)
        for number in ended:
            for name in (f"rank_{number:05}", f"rank_{number:05}.stack", f"seen_{number:05}"):
                (folder / name).unlink(missing_ok=True)
        if not any(folder.glob("rank_*")):
            for path in folder.iterdir():
                if not path.name.startswith("rank_"):
                    path.unlink(missing_ok=True)
            folder.rmdir()  # fails if a rank has just entered it
