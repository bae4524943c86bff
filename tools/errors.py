"""Start and end of every tool: read its flags, print an error as one line, return an exit status."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.base import tolerate_broken_output
from megatron.core.base.dataclass_flags import (
    ConfigError,
    FlagParser,
    add_flags,
    build,
    flag_of,
    problems_of,
    read_flags,
)
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error


def run_tool(
    path: str,
    doc: str,
    configs: list[type],
    work: Callable[..., None],
    arguments: list[str] | None,
    interrupted: str = "nothing was written",
    read: Callable[[FlagParser, list[str] | None], dict[str, Any]] = read_flags,
) -> int:
    """Read the flags of the config classes, call `work` with one instance of each, and return the exit status.

    path: the tool's file. doc: its docstring, of which --help shows the first line. interrupted: see `exit_status`.
    read(parser, arguments): returns the values of the flags by name.
    """

    def read_and_work() -> None:
        values = read(tool_parser(doc, configs), arguments)
        settings = [build(config, values) for config in configs]
        for config in settings:
            for flag, reason in config.without_effect.items():
                tolerate_broken_output.print_stderr(f"{Path(path).stem}: no effect here: {flag}: {reason}")
        work(*settings)

    return exit_status(Path(path).stem, read_and_work, interrupted)


def tool_parser(doc: str, configs: list[type]) -> FlagParser:
    """Return the parser of a tool: the flags of the config classes, and the first line of its docstring."""
    parser = FlagParser(description=doc.splitlines()[0])
    for config in configs:
        add_flags(parser, config)
    return parser


def answer_help(make_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Print the help or the version of a tool and exit, if a word asks for it; else return.

    For tools that import torch, before they do: it takes seconds.
    """
    asked = {"-h", "--help", "--version"} & set(sys.argv[1:])
    if asked:
        make_parser().parse_args(sorted(asked)[:1])


def exit_status(tool: str, work: Callable[[], None], interrupted: str) -> int:
    """Call `work`, print its error as one line on stderr, and return the exit status.

    0: success. 2: an error in the flags. 1: another error that the user can correct. 130: Ctrl-C. 141: the reader of
    standard output has ended, as with `| head`, which is no error. A ValueError that Python or a library raises in our
    own code is a bug and propagates with its traceback. interrupted: says after Ctrl-C which output remains.
    """

    def status() -> int:
        try:
            work()
        except (ValueError, OSError, ImportError) as error:
            is_bug = isinstance(error, ValueError) and not is_user_error(error)
            if is_bug or tolerate_broken_output.answers_failed():
                raise
            message = "; ".join(line for text in _messages(error) for line in text.splitlines())
            tolerate_broken_output.print_stderr(f"{tool}: {message}")
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            tolerate_broken_output.print_stderr(f"{tool}: interrupted; {interrupted}")
            return 130
        return 0

    return tolerate_broken_output.until_reader_ends(status)


def missing(config: Any, *names: str) -> list[str]:
    """Return one validation error for each of the config fields `names` that has no value."""
    return [f"{flag_of(name)} is needed" for name in names if not getattr(config, name)]


@contextlib.contextmanager
def naming_flag(flag: str, path: str, advice: str) -> Iterator[None]:
    """Turn an OSError in the block into a ValueError that names the flag, the file, the reason and the advice."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {_reason(error)}; {advice}") from None


def _messages(error: Exception) -> list[str]:
    """Return the problems of an error; of an OSError its file and reason, without the errno."""
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {_reason(error)}"]
    return problems_of(error)


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)
