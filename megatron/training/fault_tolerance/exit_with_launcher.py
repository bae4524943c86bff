"""A rank ends when its launcher has ended: nobody would stop it or restart it, and the next job may save to its folder.

torchrun starts each rank in a session of its own, so the system tells a rank nothing when the agent is killed. A thread
waits for the end of the agent's process, on a descriptor of it (Linux 5.3 or later; elsewhere there is no such thread).
It costs nothing until then. Slurm, MPI and DeepSpeed's launcher end their ranks themselves, or are ended with them. A
rank whose agent is killed before this module is imported finds that the launcher's store is gone
(`core/parallel/init_and_destroy_distributed.py`).
"""

import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.base import tolerate_broken_output
from megatron.core.base.exit_callbacks_and_hard_exit import hard_exit
from megatron.core.base.user_error_and_torchrun_error_file import write_error_file
from megatron.training.fault_tolerance import hang_watch

_RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK")  # the same in a wrapper that started this rank


def agent_of(environment: Mapping[str, str]) -> int | None:
    """Return the process of torchrun's agent: the nearest parent that is not part of this rank.

    None without torchrun.
    """
    if not environment.get("TORCHELASTIC_RUN_ID"):
        return None
    rank_variables = {f"{name}={environment.get(name, '')}".encode() for name in _RANK_VARIABLES}
    parent = os.getppid()
    while parent > 1 and rank_variables <= _environment_of(parent):
        parent = _parent_of(parent)
    return parent or None  # 0: it is in another namespace


def _environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _end_process(why: str) -> None:
    tolerate_broken_output.print_stderr(why)  # the reader of stderr may have ended too
    write_error_file(why)
    hang_watch.stop_watching()
    hard_exit(1)


_thread: threading.Thread | None = None


def end_with_launcher(rank: int, end: Callable[[str], None] = _end_process) -> None:
    """End this process when torchrun's agent ends. Does nothing without torchrun."""
    global _thread
    agent = agent_of(os.environ)
    if agent is None or _thread is not None or not hasattr(os, "pidfd_open"):
        return
    try:
        process = os.pidfd_open(agent)
    except ProcessLookupError:
        process = None
    except OSError:  # the system has no such descriptors, or forbids them
        return

    def wait() -> None:
        if process is not None:
            select.select([process], [], [])
        end(f"rank {rank}: stopping, because its launcher (process {agent}) has ended")

    _thread = threading.Thread(target=wait, name="waits for the launcher's end", daemon=True)
    _thread.start()
