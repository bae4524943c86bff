"""End a failed run in order on every rank: one rank prints the error, the others name that rank.

    failing rank    claims the report in the job's store, prints its error, leaves its groups
    other ranks     their collectives fail, since a peer is gone; they read its rank from the store, print one line, leave

A killed process leaves nothing in the store: the others know its rank, host and process from their line to it
(`core/parallel/tcp_liveness.py`). Ctrl-C is a failure too; it usually reaches several ranks, and one of them reports it.
Messages also go to
torchrun's error file. torchrun shows the file of the rank that ended first, so the other ranks repeat the first error there.

Under NCCL a collective does not fail when a peer is gone: its kernel waits until the timeout. There each rank has a
thread that
watches the store (`Listener`), and the process exits without closing its groups, which would wait for collectives in flight.
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
from megatron.core.base import output_streams
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.error_reporting import write_error_file
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.offload.checksummed_file import OffloadError
from megatron.core.parallel.collectives import PeerError
from megatron.training.fault_tolerance import hang_watch, keyboard_interrupt
from megatron.training.memory.oom_advice import OutOfMemory
from megatron.training.rerun.base_check import WrongNumbersError
from megatron.training.step import NotFiniteError

_CLAIMS, _FAILED = "megatron/failure/claims", "megatron/failure/rank"  # keys of the job's store
_SAID, _LEFT = "megatron/failure/said", "megatron/failure/left"
_LONGEST_SAID = 20_000  # characters
WRONG_NUMBERS = 3  # exit code
_FAILS, _INTERRUPTED = "failed", "was interrupted"
_IS_WRONG = "has wrong numbers"
_SECONDS = 3.0  # within which a rank's failure is found in the store
_LISTENS_EVERY = 2.0  # seconds


def explains_itself(error: BaseException) -> bool:
    """Whether the error's message says what to change, so that a traceback would only hide it."""
    explained = ConfigError | NotFiniteError | WrongNumbersError | CheckpointError | OffloadError | OutOfMemory
    return isinstance(error, explained)


def report(error: BaseException, farewell: str | None = None) -> int:
    """Print this rank's part of the report of `error`; returns the exit code. Each failing rank of a multi-process job
    calls it,
    then `leave`. farewell: of an interrupted rank, printed instead of the error if the rank is the first."""
    rank, store = parallel_state.launched_rank(), parallel_state.job_store()
    code = code_of(error) if farewell is None else keyboard_interrupt.CODE
    at_first_hand = farewell is not None or not isinstance(error, PeerError)
    told = farewell or f"rank {rank} failed:{account_of(error)}"
    if at_first_hand and _claims(store):
        _tell(told)
        with contextlib.suppress(Exception):
            how = _INTERRUPTED if farewell else _IS_WRONG if code == WRONG_NUMBERS else _FAILS
            store.set(_SAID, told[:_LONGEST_SAID])
            store.set(_FAILED, f"rank {rank} {how}")
    elif farewell is not None:
        pass  # another rank has reported the interrupt
    elif failed := _rank_that_failed(store):
        _tell(f"rank {rank}: stopping, because {failed}", follows=True, more=lambda: _what_it_said(store))
        code = max(code, _code_after(failed))
    elif at_first_hand:
        _tell(f"rank {rank} failed as well:{account_of(error)}")
    else:
        why = f"another rank has ended without a message ({error})"
        _tell(f"rank {rank}: stopping, because {why}", follows=True)
    _let_go(error)
    return code


def code_of(error: BaseException) -> int:
    """The exit code of a run that ends with this error."""
    return WRONG_NUMBERS if isinstance(error, NotFiniteError | WrongNumbersError) else 1


def _code_after(failed: str) -> int:
    """The exit code of a rank that stops because another, in these words, failed."""
    if failed.endswith(_INTERRUPTED):
        return keyboard_interrupt.CODE
    return WRONG_NUMBERS if failed.endswith(_IS_WRONG) else 1


def account_of(error: BaseException) -> str:
    """The error's message alone if that says what to change, else with its traceback."""
    return f" {error}" if explains_itself(error) else f"\n{''.join(traceback.format_exception(error))}"


def leave(code: int) -> NoReturn:
    """Leave the job in order and exit with `code`.

    The rank that hosts the store closes its groups, by which the others notice the failure, and stays until they have
    read the
    store; after a rank's death it need not stay, as all ranks know.
    """
    if not parallel_state.notices_lost_ranks():
        _end_as_it_is(code)
    store, ranks = parallel_state.job_store(), parallel_state.launched_world_size()
    keeps_store = parallel_state.launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    keeps_store = keeps_store and parallel_state.lost_rank() is None
    parallel_state.stop_distributed()
    with contextlib.suppress(Exception):  # the store is gone if its host is
        if _keeper_lives():
            store.add(_LEFT, 1)
        deadline = time.monotonic() + _SECONDS
        while keeps_store and store.add(_LEFT, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
    sys.exit(code)


def _end_as_it_is(code: int) -> NoReturn:
    """Exit with `code` without closing anything. The rank that hosts the store first waits for the other ranks'
    listeners."""
    parallel_state.say_goodbye()
    hang_watch.stop_watching()
    output_streams.flush()
    if parallel_state.launched_rank() == 0:
        time.sleep(2 * _LISTENS_EVERY)
    os._exit(code)


class Listener:
    """A thread that ends this process when another rank has failed, where collectives would not notice."""

    def __init__(
        self, store: Any, rank: int, end: Callable[[int], None] = _end_as_it_is, every: float = _LISTENS_EVERY
    ):
        self._store, self._rank = store, rank
        self._end, self._every = end, every
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
                _tell(f"rank {self._rank}: stopping, because {failed}", follows=True)
                self._end(_code_after(failed))
                return


def listen() -> Listener | None:
    """Start a `Listener` if collectives would not notice the failure of a peer (NCCL), else None."""
    if not parallel_state.has_joined() or parallel_state.notices_lost_ranks():
        return None
    return Listener(parallel_state.job_store(), parallel_state.launched_rank())


def _claims(store: Any) -> bool:
    """Whether this rank is the first with an error of its own; True if the store is unreachable."""
    try:
        return store.add(_CLAIMS, 1) == 1
    except Exception:
        return True


def _rank_that_failed(store: Any) -> str | None:
    """ "rank 3 failed" for the first rank with an error, once that is printed; or the message of a rank's death."""
    has_store, deadline = store is not None and _keeper_lives(), time.monotonic() + _SECONDS
    while time.monotonic() < deadline and (has_store or parallel_state.has_liveness()):
        with contextlib.suppress(Exception):
            if has_store and store.check([_FAILED]):
                return store.get(_FAILED).decode()
        if lost := parallel_state.lost_rank(seconds=0.05):
            return lost
    return None


def _what_it_said(store: Any) -> str:
    with contextlib.suppress(Exception):
        if _keeper_lives() and store.check([_SAID]):
            return ":\n" + store.get(_SAID).decode()
    return ""


def _keeper_lives() -> bool:
    """Whether the store's host is alive. Checked first, because torch prints a stack trace if it is not."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=_SECONDS):
            return True
    except OSError:
        return False
    except KeyError:  # a script has joined the job without these variables
        return True


def _tell(text: str, *, follows: bool = False, more: Callable[[], str] = str) -> None:
    """Print `text`, then write it to torchrun's error file, with `more()` at its end. follows: another rank failed first."""
    output_streams.print_stderr(text.rstrip())
    write_error_file(text + more(), follows=follows)


def _let_go(error: BaseException | None) -> None:
    """Release the objects in the error's frames. Process groups among them have threads that would abort the process
    at exit."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
