"""How much more memory this machine, and this process, may take. No torch in this file."""

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP = Path("/sys/fs/cgroup")


def free_on_machine(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes here can still take together: what the system has, or the rest of a container's limit if that is less.
    None where neither is said."""
    known = [_line_bytes(proc / "meminfo", "MemAvailable"), _left_in_container(proc, cgroup)]
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


def _left_in_container(proc: Path, cgroup: Path) -> int | None:
    """What the tightest limit above this process leaves: its own control group's or one around it, of either version.

    Pages of files that the system keeps count as used there, and are given up for whoever asks: they are left over.
    """
    found = [_left_in(folder, names) for folder, names in _groups_of_process(proc, cgroup)]
    return min((left for left in found if left is not None), default=None)


_Names = tuple[
    str, str, tuple[str, str]
]  # files of the limit and of what is used, lines of memory.stat about pages of files
_V2: _Names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1: _Names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _groups_of_process(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    """Folders of the groups that this process is in, the innermost first. In a container they may not be seen by
    these names: the root
    is its own."""
    lines = ["0::/", "1:memory:/", *_text(proc / "self" / "cgroup").splitlines()]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        is_v1 = "memory" in controllers.split(",")
        if is_v1 or not controllers:
            root, inside = cgroup / "memory" if is_v1 else cgroup, PurePosixPath(path)
            for group in (inside, *inside.parents):
                yield root / str(group).lstrip("/"), _V1 if is_v1 else _V2


def _left_in(folder: Path, names: _Names) -> int | None:
    limit, used = (_text(folder / name) for name in names[:2])
    of_files, stat = names[2], _text(folder / "memory.stat")
    if not (limit.isdigit() and used.isdigit()):  # no such group, or "max"
        return None
    pages = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return max(int(limit) - int(used) + sum(int(pages.get(name, 0)) for name in of_files), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
