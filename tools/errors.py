"""How a tool ends when it cannot do what was asked."""

import sys

from megatron.core.config import ConfigError


def say_what_is_wrong(tool: str, error: Exception) -> int:
    """Print the error in a line; the exit status, 2 for a mistake in the flags and 1 for anything else the user can mend."""
    print(f"{tool}: {'; '.join(str(error).splitlines())}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def say_interrupted(tool: str, left: str) -> int:
    """Say on stderr, in one line, that Ctrl-C has ended a tool, and what is left; the exit code."""
    print(f"{tool}: interrupted; {left}", file=sys.stderr)
    return 130
