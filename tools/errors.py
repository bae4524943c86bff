"""How a tool ends when it cannot do what was asked."""

import contextlib
import sys
from collections.abc import Iterator

from megatron.core.config import ConfigError


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
