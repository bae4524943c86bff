"""How a tool starts and ends: reads its flags, prints an error as one line, returns an exit status."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.base import output_streams
from megatron.core.base.dataclass_flags import ConfigError, FlagParser, add_flags, build, flag_of, read_flags
from megatron.core.base.error_reporting import is_user_error


def run_tool(
    path: str,
    doc: str,
    configs: list[type],
    work: Callable[..., None],
    arguments: list[str] | None,
    interrupted: str = "nothing was written",
) -> int:
    """Read the flags of `configs` and do `work(*configs)`; returns `exit_status`. path: the tool's file; doc: its docstring."""

    def read_and_work() -> None:
        parser = FlagParser(description=doc.splitlines()[0])
        for config in configs:
            add_flags(parser, config)
        given = read_flags(parser, arguments)
        built = [build(config, given) for config in configs]
        for config in built:
            for flag, reason in config.without_effect.items():
                output_streams.print_stderr(f"{Path(path).stem}: no effect here: {flag}: {reason}")
        work(*built)

    return exit_status(Path(path).stem, read_and_work, interrupted)


def exit_status(tool: str, work: Callable[[], None], interrupted: str) -> int:
    """Do `work` and return the exit status: 0 success, 2 an error in the flags, 1 any other error of the user, 130 Ctrl-C.

    An error is one line on stderr. interrupted: printed at Ctrl-C, says which output remains. 141: the reader of standard output
    has ended, as with `| head`, which is no error. A ValueError that Python or a library raises in our own code is none of the
    user's, and comes with its traceback.
    """

    def status() -> int:
        try:
            work()
        except (ValueError, OSError, ImportError) as error:
            if output_streams.answers_failed() or (isinstance(error, ValueError) and not is_user_error(error)):
                raise
            output_streams.print_stderr(f"{tool}: {'; '.join(_said(error).splitlines())}")
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            output_streams.print_stderr(f"{tool}: interrupted; {interrupted}")
            return 130
        return 0

    return output_streams.until_reader_ends(status)


def missing(config: Any, *names: str) -> list[str]:
    """A problem for each of the options `names` that is not given."""
    return [f"{flag_of(name)} is needed" for name in names if not getattr(config, name)]


@contextlib.contextmanager
def naming_flag(flag: str, path: str, advice: str) -> Iterator[None]:
    """Turn an OSError in the block into a ValueError that names the flag, the file, the reason and the advice."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path}: {_reason(error)}; {advice}") from None


def _said(error: Exception) -> str:
    """The message of an error; of an OSError its file and reason, without the errno."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {_reason(error)}"
    return str(error)


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)
