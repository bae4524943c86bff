"""How much more memory this machine, and this process, may take. No torch in this file."""

import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_on_machine(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes here can still take together: what the system has, or the rest of a container's limit if that is less.
    None where neither is said."""
    known = [_line_bytes(proc / "meminfo", "MemAvailable"), _left_in_container(cgroup)]
    return min((n for n in known if n is not None), default=None)


def free_to_process(proc: Path = Path("/proc")) -> int | None:
    """Bytes that `ulimit -d` leaves this process; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    used = _line_bytes(proc / "self" / "status", "VmData")
    return None if limit == resource.RLIM_INFINITY or used is None else max(limit - used, 0)


def _line_bytes(path: Path, name: str) -> int | None:
    """The number of kB behind a name, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _left_in_container(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)
