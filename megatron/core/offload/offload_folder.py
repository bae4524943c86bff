"""The folder of one rank's offloaded state during a run. No torch.

    DIR/rank_00003/lock      locked while the owning process lives; the system releases it
    DIR/rank_00003/state     of no use after the run: checkpoints hold all lasting state

A folder whose lock is free was left by a killed process: the rank of that number takes it over, or the run removes it
if it has no such rank. A locked folder is refused, and so is a folder with any other file.
"""

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.storage.file_lock import locked

LOCK_FILE = "lock"
STATE_FILE = "state"


def folder_of(root: Path | str, rank: int) -> Path:
    """Return the folder of a rank below `root`."""
    return Path(root) / f"rank_{rank:05d}"


def offload_folder_conflicts(root: Path | str, rank: int) -> list[str]:
    """Return why a rank cannot use its folder below `root`. Creates nothing."""
    folder = folder_of(root, rank)
    if not folder.exists():
        return []
    if not folder.is_dir():
        return [f"--offload-dir {root}: {folder} is a file; choose another folder"]
    try:
        others = sorted({path.name for path in folder.iterdir()} - {LOCK_FILE, STATE_FILE})
        if others:
            shown = ", ".join(others[:5])
            return [f"--offload-dir {root}: {folder} has other files: {shown}; move them or choose another folder"]
        lock = folder / LOCK_FILE
        if not lock.exists():
            return []
        with open(lock, "r+") as file:
            return [] if locked(file) else [_in_use_problem(root, folder, lock)]
    except OSError as error:
        return [f"--offload-dir {root} cannot be used: {error.strerror}; choose your own folder on a local disk"]


class RankFolder:
    """A rank's folder, locked by this process until `remove`. Raises ConfigError if it cannot be used."""

    def __init__(self, root: Path | str, rank: int):
        self.path = folder_of(root, rank).absolute()  # a script may change the working directory
        problems = offload_folder_conflicts(root, rank)
        if problems:
            raise ConfigError(problems)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not locked(self._lock) or not self._lock_exists():
                os.close(self._lock)
                raise ConfigError(_in_use_problem(root, self.path, self.path / LOCK_FILE))
        except OSError as error:
            why = f"is not writable: {error.strerror}"
            raise ConfigError(f"--offload-dir {root} {why}; choose another folder") from error

        # write the owner into the lock, for the message to another run; start without an old state
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, owner.encode(), 0)
        with contextlib.suppress(FileNotFoundError):
            (self.path / STATE_FILE).unlink()

    def _lock_exists(self) -> bool:
        """Return whether the locked file is still in the folder: its previous owner may have removed it on exit."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_FILE))
        return False

    @property
    def free_bytes(self) -> int:
        """The bytes that are free on the folder's disk."""
        return shutil.disk_usage(self.path).free

    @property
    def disk(self) -> str:
        """A name for the file system, unique on this machine."""
        return f"{socket.gethostname()}:{os.stat(self.path).st_dev}"

    def remove(self) -> None:
        """Delete the folder and release the lock."""
        if self._lock < 0:
            return
        for name in (STATE_FILE, LOCK_FILE):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()
        os.close(self._lock)
        self._lock = -1
        with contextlib.suppress(OSError):  # somebody has put another file there
            self.path.rmdir()


def remove_surplus_rank_folders(root: Path | str, ranks: int) -> list[str]:
    """Remove folders of killed runs with more than `ranks` ranks, which no rank would take over; return their names."""
    removed = []
    for folder in sorted(Path(root).glob("rank_*")):
        number = folder.name.removeprefix("rank_")
        if number.isdecimal() and int(number) >= ranks and (folder / LOCK_FILE).exists():
            with contextlib.suppress(ConfigError):  # a running job owns it, or it has other files
                RankFolder(root, int(number)).remove()
                removed.append(folder.name)
    return removed


def _in_use_problem(root: Path | str, folder: Path, lock: Path) -> str:
    owner = "a running process"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(lock.read_text())
        owner = f"process {content['pid']} on {content['host']}"
    return f"--offload-dir {root}: {folder} belongs to {owner}; end that run or choose another folder"
