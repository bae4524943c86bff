"""How a tool begins and ends: its flags, and one line that says what it could not do."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.config import ConfigError, FlagParser, add_flags, build, flag_of, read_flags


def run_tool(
    path: str,
    doc: str,
    configs: list[type],
    work: Callable[..., None],
    arguments: list[str] | None,
    interrupted: str = "nothing was written",
) -> int:
    """Read the flags of `configs` and do `work(*configs)`.

    The exit status: 0 is success, 2 a mistake in the flags, 1 anything else the user can mend, 130 Ctrl-C. path: the tool's file.
    """
    name = Path(path).stem
    parser = FlagParser(description=doc.splitlines()[0])
    for config in configs:
        add_flags(parser, config)
    try:
        given = read_flags(parser, arguments)
        work(*(build(config, given) for config in configs))
    except (ValueError, OSError, ImportError) as error:
        return say_what_is_wrong(name, error)
    except KeyboardInterrupt:
        return say_interrupted(name, interrupted)
    return 0


def missing(config: Any, *names: str) -> list[str]:
    """A line for each of the knobs `names` that is not given."""
    return [f"{flag_of(name)} is needed" for name in names if not getattr(config, name)]


def say_what_is_wrong(tool: str, error: Exception) -> int:
    """Print the error in a line; the exit status, 2 for a mistake in the flags and 1 for anything else the user can mend."""
    print(f"{tool}: {'; '.join(_said(error).splitlines())}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


@contextlib.contextmanager
def naming_flag(flag: str, path: str, advice: str) -> Iterator[None]:
    """What the system refuses within is a ValueError that names the flag, the file, the reason and what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {_reason(error)}; {advice}") from None


def _said(error: Exception) -> str:
    """The system's own errors with their file and without their number, all others as they are."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {_reason(error)}"
    return str(error)


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)


def say_interrupted(tool: str, left: str) -> int:
    """Say on stderr, in one line, that Ctrl-C has ended a tool, and what is left; the exit code."""
    print(f"{tool}: interrupted; {left}", file=sys.stderr)
    return 130
