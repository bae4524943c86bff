"""The folder of a running job on one machine: a few kilobytes in memory, which its processes share and the last of them
removes.

    rank_00003          where the rank is (`core/base/rank_status.py`)
    rank_00003.stack    its stacks, when somebody asks by SIGUSR2
    alarm               "rank pid started" of the rank that examines the others
    verdict             what it found, in JSON
    seen_00003          the rank has read the verdict
    slow                when it was last said that a rank is only slow
    go                  all have, or there is no more time: end

It is named after the job as the launcher describes it, so that all ranks find it without talking. Of runs that were
killed whole,
the next run of this user on the machine removes it. Pure.
"""

import contextlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

from megatron.core.base.rank_status import RankStatus, read_status
from megatron.training.fault_tolerance.process_stat import look_at

_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *(
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
        "SLURM_NODEID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
    ),
)
_OLD = 10.0  # seconds: a younger folder may belong to a job that begins


def folder_of_job(environment: Mapping[str, str], *, alone: bool) -> Path:
    """The folder's path. alone: of a job of one process, which shares it with nobody."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    words = [str(os.getpid())] if alone else [f"{name}={environment.get(name, '')}" for name in _JOB]
    return base / f"megatron-{os.getuid()}-{zlib.crc32(' '.join(words).encode()):08x}"


def make_run_folder(folder: Path) -> None:
    """Make the folder, for this user alone, and remove those of runs that were killed. Raises OSError."""
    for other in folder.parent.glob(f"megatron-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _OLD and not any(_lives(place) for place in places_in(other)):
                shutil.rmtree(other)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if not any(_lives(place) for place in places_in(folder)):  # left by a run of the same name
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink(missing_ok=True)


def places_in(folder: Path) -> list[RankStatus]:
    """The places of the ranks that have one, also of dead processes."""
    found = (read_status(path) for path in sorted(folder.glob("rank_?????")))
    return [place for place in found if place is not None]


def _lives(place: RankStatus) -> bool:
    return not look_at(place.pid, place.started).has_ended


def leave_run_folder(folder: Path, rank: int) -> None:
    """Remove this rank's files, those of dead processes, and the folder after the last."""
    with contextlib.suppress(OSError):
        dead = [place.rank for place in places_in(folder) if place.pid == os.getpid() or not _lives(place)]
        for gone in {rank, *dead}:
            for name in (f"rank_{gone:05}", f"rank_{gone:05}.stack", f"seen_{gone:05}"):
                (folder / name).unlink(missing_ok=True)
        if not any(folder.glob("rank_*")):
            shutil.rmtree(folder)
