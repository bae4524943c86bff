"""Free memory of this machine and of this process. Without torch."""

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")


def free_on_machine(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes here can still allocate together: the system's, or the container's if it has less. None:
    unknown."""
    known = [_line_bytes(proc / "meminfo", "MemAvailable:")]
    known += [_left_in(folder, names) for folder, names in _groups_of_process(proc, cgroup)]
    return min((n for n in known if n is not None), default=None)


def free_to_process(proc: Path = Path("/proc")) -> int | None:
    """Bytes that `ulimit -d` leaves this process; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    used = _line_bytes(proc / "self" / "status", "VmData:")
    return None if limit == resource.RLIM_INFINITY or used is None else max(limit - used, 0)


def _line_bytes(path: Path, name: str) -> int | None:
    """The kB after a name, in bytes."""
    lines = _text(path).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


class _Names(NamedTuple):
    """The files of a control group, and the lines of memory.stat that count pages of files."""

    limit: str
    used: str
    pages: tuple[str, str]


_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _groups_of_process(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    """The control groups of this process and those around them, of either version. A container may see its own as the
    root."""
    lines = ["0::/", "1:memory:/", *_text(proc / "self" / "cgroup").splitlines()]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        is_v1 = "memory" in controllers.split(",")
        if is_v1 or not controllers:
            root, inside = cgroup / "memory" if is_v1 else cgroup, PurePosixPath(path)
            for group in (inside, *inside.parents):
                yield root / str(group).lstrip("/"), _V1 if is_v1 else _V2


def _left_in(folder: Path, names: _Names) -> int | None:
    """Bytes below the limit. The system drops cached pages of files for other allocations, so they count as free."""
    limit, used = _text(folder / names.limit), _text(folder / names.used)
    if not (limit.isdigit() and used.isdigit()):  # no such group, or "max"
        return None
    pages = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return max(int(limit) - int(used) + sum(int(pages.get(name, 0)) for name in names.pages), 0)


def _text(path: Path) -> str:
    """The content of a file; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
