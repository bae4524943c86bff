"""The folder that one rank keeps offloaded state in while it runs. No torch in this file.

    DIR/rank_00003/lock      locked while its process lives, whoever that is: the system gives the lock back with the process
    DIR/rank_00003/state     nobody else's, and nothing after the run: checkpoints hold what is to last

So a folder whose lock is free was left by a process that was killed, and is taken over, or removed where the new run has no such
rank; one that is locked is refused, and so is one that holds anything else.
"""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

from megatron.core.config import ConfigError
from megatron.core.storage.locks import locked

LOCK_FILE, STATE_FILE = "lock", "state"


def folder_of(root: Path | str, rank: int) -> Path:
    return Path(root) / f"rank_{rank:05d}"


def folder_problems(root: Path | str, rank: int) -> list[str]:
    """Why a rank may not use its folder below `root`. Makes nothing."""
    folder = folder_of(root, rank)
    if not folder.exists():
        return []
    if not folder.is_dir():
        return [f"--offload-dir {root}: {folder} is a file; choose another folder"]
    try:
        if strange := sorted({path.name for path in folder.iterdir()} - {LOCK_FILE, STATE_FILE}):
            return [
                f"--offload-dir {root}: {folder} holds {', '.join(strange[:5])}, which no run of ours wrote there; move that "
                "away or choose another folder"
            ]
        lock = folder / LOCK_FILE
        if not lock.exists():
            return []
        with open(lock, "r+") as file:
            return [] if locked(file) else [_living(root, folder, lock)]
    except OSError as error:
        return [
            f"--offload-dir {root} cannot be used: {error.strerror}; choose a folder on a local disk of this user's own"
        ]


class RankFolder:
    """A rank's folder, this process's own until `remove`. Raises ConfigError where it cannot be."""

    def __init__(self, root: Path | str, rank: int):
        self.path = folder_of(root, rank).absolute()  # a script may go elsewhere
        if problems := folder_problems(root, rank):
            raise ConfigError(problems)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not locked(self._lock) or not self._is_there():
                os.close(self._lock)
                raise ConfigError(_living(root, self.path, self.path / LOCK_FILE))
        except OSError as error:
            raise ConfigError(
                f"--offload-dir {root} cannot be written: {error.strerror}; choose another folder"
            ) from error
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        with contextlib.suppress(FileNotFoundError):
            (self.path / STATE_FILE).unlink()

    def _is_there(self) -> bool:
        """Whether the file that we locked is the one in the folder: a process that ended in between may have removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_FILE))
        return False

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    @property
    def disk(self) -> str:
        """A name of the file system, as this machine knows it."""
        return f"{socket.gethostname()}:{os.stat(self.path).st_dev}"

    def remove(self) -> None:
        """Give it back."""
        if self._lock < 0:
            return
        for name in (STATE_FILE, LOCK_FILE):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):  # somebody has put something else there
            self.path.rmdir()


def remove_left_behind(root: Path | str, ranks: int) -> list[str]:
    """Remove what killed runs of more than `ranks` ranks have left, whose room nobody would take over; the names of the
    folders."""
    removed = []
    for folder in sorted(Path(root).glob("rank_*")):
        number = folder.name.removeprefix("rank_")
        if number.isdecimal() and int(number) >= ranks and (folder / LOCK_FILE).exists():
            with contextlib.suppress(ConfigError):  # it belongs to a run that lives, or to somebody else
                RankFolder(root, int(number)).remove()
                removed.append(folder.name)
    return removed


def _living(root: Path | str, folder: Path, lock: Path) -> str:
    owner = "a process that runs"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(lock.read_text())
        owner = f"process {said['pid']} on {said['host']}, which runs"
    return f"--offload-dir {root}: {folder} belongs to {owner}; end that run or choose another folder"
