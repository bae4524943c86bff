"""Free memory of this machine and of this process is read from Linux' files. Without torch."""

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")


def free_on_machine(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that processes here can still allocate together; None if unknown.

    They are the system's, or the container's if it has less.
    """
    limits = [_line_bytes(proc / "meminfo", "MemAvailable:")]
    for folder, names in _groups_of_process(proc, cgroup):
        limits.append(_free_in_group(folder, names))
    return min((limit for limit in limits if limit is not None), default=None)


def free_below_rlimit_data(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes that `ulimit -d` leaves this process; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    used = _line_bytes(proc / "self" / "status", "VmData:")
    if limit == resource.RLIM_INFINITY or used is None:
        return None
    return max(limit - used, 0)


def _line_bytes(path: Path, name: str) -> int | None:
    """Return the number of kB on the line that starts with `name`, in bytes; None without such a line."""
    for line in _text(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


class _Names(NamedTuple):
    """The files of a control group, and the lines of memory.stat that count pages of files."""

    limit: str
    used: str
    pages: tuple[str, str]


_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _groups_of_process(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's control groups and of the groups around them, of either version."""
    # A container may see its own group as the root, whatever the file says.
    lines = ["0::/", "1:memory:/", *_text(proc / "self" / "cgroup").splitlines()]
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        is_v2 = not controllers
        if not (is_v1 or is_v2):
            continue
        root = cgroup / "memory" if is_v1 else cgroup
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            yield root / str(folder).lstrip("/"), _V1 if is_v1 else _V2


def _free_in_group(folder: Path, names: _Names) -> int | None:
    """Return the free bytes of a control group; None if it has no limit.

    The system drops cached pages of files for other allocations, so they count as free.
    """
    limit = _text(folder / names.limit)
    used = _text(folder / names.used)
    if not (limit.isdigit() and used.isdigit()):  # no such group, or "max"
        return None
    statistics = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    cached = sum(int(statistics.get(name, 0)) for name in names.pages)
    return max(int(limit) - int(used) + cached, 0)


def _text(path: Path) -> str:
    """Return the content of a file; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
