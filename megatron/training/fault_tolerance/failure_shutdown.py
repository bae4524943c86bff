"""A failed run ends in order on every rank: one rank prints the error, the others name that rank.

    failing rank  claims the report in the job's store, prints its error, leaves its groups
    other ranks   their collectives fail, since a peer is gone; they read its rank from the store, print one line, leave

A killed process leaves nothing in the store: the others know its rank, host and process from their connection to it
(`core/parallel/detect_lost_ranks_by_tcp.py`). Ctrl-C is a failure too; it usually reaches several ranks, and one of them
reports it. Messages also go to torchrun's error file. torchrun shows the file of the rank that ended first, so the other
ranks repeat the first error there.

Under NCCL a collective does not fail when a peer is gone: its kernel waits until the timeout. There each rank has a
thread that watches the store (`Listener`), and the process exits without closing its groups, which would wait for
collectives in flight.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.core import parallel_state
from megatron.core.base import tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.exit_callbacks_and_hard_exit import hard_exit
from megatron.core.base.user_error_and_torchrun_error_file import write_error_file
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.offload.checksummed_file import OffloadError
from megatron.core.parallel.collectives import PeerError
from megatron.training.fault_tolerance import exit_immediately_on_ctrl_c, hang_watch
from megatron.training.memory.oom_advice import OutOfMemory
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.step import NotFiniteError

# Keys of the job's store.
_CLAIMS = "megatron/failure/claims"
_FAILED = "megatron/failure/rank"
_MESSAGE = "megatron/failure/said"
_LEFT = "megatron/failure/left"
_LONGEST_MESSAGE = 20_000  # characters
WRONG_NUMBERS = 3  # exit code
# What a rank did, as the value of `_FAILED` ends.
_FAILS = "failed"
_INTERRUPTED = "was interrupted"
_IS_WRONG = "has wrong numbers"
_SECONDS = 3.0  # within which a rank's failure is found in the store
_LISTENS_EVERY = 2.0  # seconds


def explains_itself(error: BaseException) -> bool:
    """Whether the error's message says what to change, so that a traceback would only hide it."""
    explained = ConfigError | NotFiniteError | WrongNumbersError | CheckpointError | OffloadError | OutOfMemory
    return isinstance(error, explained)


def report(error: BaseException, farewell: str | None = None) -> int:
    """Print this rank's part of the report of `error`, and return the exit code.

    Each failing rank of a multi-process job calls it, then `leave_job_and_exit`. farewell: of an interrupted rank,
    printed instead of the error if the rank is the first.
    """
    rank = parallel_state.launched_rank()
    store = parallel_state.job_store()
    code = exit_code_of_failed_run(error) if farewell is None else exit_immediately_on_ctrl_c.CODE
    is_own_error = farewell is not None or not isinstance(error, PeerError)
    message = farewell or f"rank {rank} failed:{message_or_traceback(error)}"
    if is_own_error and _claim_report(store):
        # the first rank with an error of its own
        _print_and_record(message)
        with contextlib.suppress(Exception):
            if farewell:
                how = _INTERRUPTED
            elif code == WRONG_NUMBERS:
                how = _IS_WRONG
            else:
                how = _FAILS
            store.set(_MESSAGE, message[:_LONGEST_MESSAGE])
            store.set(_FAILED, f"rank {rank} {how}")
    elif farewell is not None:
        pass  # another rank has reported the interrupt
    elif failed := _wait_for_failed_rank(store):
        # another rank failed first
        text = f"rank {rank}: stopping, because {failed}"
        _print_and_record(text, follows=True, more=lambda: _first_message(store))
        code = max(code, _code_after(failed))
    elif is_own_error:
        _print_and_record(f"rank {rank} failed as well:{message_or_traceback(error)}")
    else:
        why = f"another rank has ended without a message ({error})"
        _print_and_record(f"rank {rank}: stopping, because {why}", follows=True)
    _free_frames(error)
    return code


def exit_code_of_failed_run(error: BaseException) -> int:
    """Return the exit code of a run that ends with this error."""
    return WRONG_NUMBERS if isinstance(error, NotFiniteError | WrongNumbersError) else 1


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with this error, which nobody handles; 0 without one."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    return exit_immediately_on_ctrl_c.CODE if isinstance(error, KeyboardInterrupt) else 1


def _code_after(failed: str) -> int:
    """Return the exit code of a rank that stops because another failed. failed: the value of `_FAILED`."""
    if failed.endswith(_INTERRUPTED):
        return exit_immediately_on_ctrl_c.CODE
    return WRONG_NUMBERS if failed.endswith(_IS_WRONG) else 1


def message_or_traceback(error: BaseException) -> str:
    """Return the error's message alone if that says what to change, else with its traceback."""
    if explains_itself(error):
        return f" {error}"
    return f"\n{''.join(traceback.format_exception(error))}"


def leave_job_and_exit(code: int) -> NoReturn:
    """Leave the job in order and exit with `code`.

    The rank that hosts the store closes its groups, by which the others notice the failure, and stays until they have
    read the store. After a rank's death it does not stay, because all ranks know.
    """
    if not parallel_state.notices_lost_ranks():
        _end_without_closing(code)
    store = parallel_state.job_store()
    ranks = parallel_state.launched_world_size()
    hosts_store = parallel_state.launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stays = hosts_store and parallel_state.lost_rank() is None
    parallel_state.stop_distributed()
    with contextlib.suppress(Exception):  # the store is gone if its host is
        if _store_is_reachable():
            store.add(_LEFT, 1)
        deadline = time.monotonic() + _SECONDS
        while stays and store.add(_LEFT, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
    sys.exit(code)


def _end_without_closing(code: int) -> NoReturn:
    """Exit with `code` without closing the groups.

    The rank that hosts the store first waits until the other ranks' listeners have read it.
    """
    parallel_state.say_goodbye()
    hang_watch.stop_watching()
    tolerate_broken_output.flush()
    if parallel_state.launched_rank() == 0:
        time.sleep(2 * _LISTENS_EVERY)
    hard_exit(code)


class Listener:
    """A thread that ends this process when another rank has failed, where collectives would not notice."""

    def __init__(
        self, store: Any, rank: int, end: Callable[[int], None] = _end_without_closing, every: float = _LISTENS_EVERY
    ):
        self._store = store
        self._rank = rank
        self._end = end
        self._every = every  # seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="hears of failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _listen(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                failed = self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None
            except Exception:  # the store is gone with its host: no more messages will come
                return
            is_other = failed is not None and not failed.startswith(f"rank {self._rank} ")
            if is_other and not self._stopped.wait(self._every):
                _print_and_record(f"rank {self._rank}: stopping, because {failed}", follows=True)
                self._end(_code_after(failed))
                return


def start_failure_listener() -> Listener | None:
    """Start a `Listener` if collectives would not notice the failure of a peer (NCCL), else None."""
    if not parallel_state.has_joined() or parallel_state.notices_lost_ranks():
        return None
    return Listener(parallel_state.job_store(), parallel_state.launched_rank())


def _claim_report(store: Any) -> bool:
    """Whether this rank is the first with an error of its own; True if the store is unreachable."""
    try:
        return store.add(_CLAIMS, 1) == 1
    except Exception:
        return True


def _wait_for_failed_rank(store: Any) -> str | None:
    """Return "rank 3 failed" for the first rank with an error, once that is printed; or the message of a rank's death.

    None if there is neither within some seconds.
    """
    has_store = store is not None and _store_is_reachable()
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and (has_store or parallel_state.has_liveness()):
        with contextlib.suppress(Exception):
            if has_store and store.check([_FAILED]):
                return store.get(_FAILED).decode()
        lost = parallel_state.lost_rank(seconds=0.05)
        if lost:
            return lost
    return None


def _first_message(store: Any) -> str:
    """Return the message of the rank that failed first; "" if it cannot be read."""
    with contextlib.suppress(Exception):
        if _store_is_reachable() and store.check([_MESSAGE]):
            return ":\n" + store.get(_MESSAGE).decode()
    return ""


def _store_is_reachable() -> bool:
    """Whether the store's host is alive. Checked first, because torch prints a stack trace if it is not."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=_SECONDS):
            return True
    except OSError:
        return False
    except KeyError:  # a script has joined the job without these variables
        return True


def _print_and_record(text: str, *, follows: bool = False, more: Callable[[], str] = str) -> None:
    """Print `text`, then write it to torchrun's error file, with `more()` at its end.

    follows: another rank failed first.
    """
    tolerate_broken_output.print_stderr(text.rstrip())
    write_error_file(text + more(), follows=follows)


def _free_frames(error: BaseException | None) -> None:
    """Free the objects in the error's frames. Process groups among them have threads that would abort the exit."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
