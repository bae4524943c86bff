"""A run that fails ends on every rank, in order: one rank says what happened, the others whose message to read.

    failing rank    claims the word in the job's store, prints its error, leaves its groups
    others          see their calls end, since a peer is gone; find its rank in the store, say one line, leave

Of a process that was killed there is no word in the store: the others have its number, host and process from the lines
that they keep (`core/job/lines.py`). Ctrl-C is such a failure, and reaches several ranks as a rule: one of them says so.
What a rank says is left for torchrun too, whose last block shows that of the rank that ended first: so the others
repeat it there.

Where devices are connected and not hosts (NCCL), no call ends when a peer is gone: its kernel waits, and so would whoever reads a
result, until the time limit of calls is over. There each rank has a thread that looks into the store (`Listener`). And
groups are not closed, which waits for the calls that are under way: the process ends as it is.
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
from megatron.core.checkpoint.format import CheckpointError
from megatron.core.comm import PeerError
from megatron.core.config import ConfigError
from megatron.core.errors import write_error_file
from megatron.core.tiers.block_file import OffloadError
from megatron.training.ending import interrupt
from megatron.training.memory.shortage import OutOfMemory
from megatron.training.train_step import NotFiniteError

_CLAIMS, _FAILED = "megatron/failure/claims", "megatron/failure/rank"  # keys of the job's store
_SAID, _LEFT = "megatron/failure/said", "megatron/failure/left"
_LONGEST_SAID = 20_000  # characters
_FAILS, _INTERRUPTED = "failed", "was interrupted"
_SECONDS = 3.0  # in which ranks find the word of one that failed
_LISTENS_EVERY = 2.0  # seconds


def explains_itself(error: BaseException) -> bool:
    """Whether the message says what to change, so that the calls which led there would only hide it."""
    return isinstance(error, ConfigError | NotFiniteError | CheckpointError | OffloadError | OutOfMemory)


def report(error: BaseException, farewell: str | None = None) -> int:
    """Say of `error` what this rank has to say; the code to end with. Every rank that fails in a job of several calls
    it, and then `leave`. farewell: what a rank that was interrupted says instead, if it is the first."""
    rank, store = parallel_state.launched_rank(), parallel_state.job_store()
    code = 1 if farewell is None else interrupt.CODE
    at_first_hand = farewell is not None or not isinstance(error, PeerError)
    told = farewell or f"rank {rank} failed:{account_of(error)}"
    if at_first_hand and _claims(store):
        _say(told)
        write_error_file(told)
        with contextlib.suppress(Exception):
            how = _FAILS if farewell is None else _INTERRUPTED
            store.set(_SAID, told[:_LONGEST_SAID])
            store.set(_FAILED, f"rank {rank} {how}")
    elif farewell is not None:
        pass  # which another rank has said, or why this one is alone
    elif failed := _rank_that_failed(store):
        _say(f"rank {rank}: stopping, because {failed}")
        write_error_file(f"rank {rank}: stopping, because {failed}{_what_it_said(store)}", follows=True)
        code = interrupt.CODE if failed.endswith(_INTERRUPTED) else code
    elif at_first_hand:
        told = f"rank {rank} failed as well:{account_of(error)}"
        _say(told)
        write_error_file(told)
    else:
        told = f"rank {rank}: stopping, because a rank has ended without a word ({error})"
        _say(told)
        write_error_file(told, follows=True)
    _let_go(error)
    return code


def account_of(error: BaseException) -> str:
    """What is said of an error: its message, where that tells what to change, else with the calls that led to it."""
    return f" {error}" if explains_itself(error) else f"\n{''.join(traceback.format_exception(error))}"


def leave(code: int) -> NoReturn:
    """Leave the job in order and end the process with `code`.

    The rank that keeps the store stays until the others have read it, its groups closed: that is how they notice. Of a death they
    know already.
    """
    if not parallel_state.notices_lost_ranks():
        _end_as_it_is(code)
    store, ranks = parallel_state.job_store(), parallel_state.launched_world_size()
    keeps_store = parallel_state.launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    keeps_store = keeps_store and parallel_state.lost_rank() is None
    parallel_state.stop_distributed()
    with contextlib.suppress(Exception):  # the store may have gone with its keeper
        if _keeper_lives():
            store.add(_LEFT, 1)
        deadline = time.monotonic() + _SECONDS
        while keeps_store and store.add(_LEFT, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
    sys.exit(code)


def _end_as_it_is(code: int) -> NoReturn:
    """End the process with `code`, without closing anything. The rank that keeps the store stays while others may look
    into it."""
    parallel_state.say_goodbye()
    sys.stdout.flush()
    sys.stderr.flush()
    if parallel_state.launched_rank() == 0:
        time.sleep(2 * _LISTENS_EVERY)
    os._exit(code)


class Listener:
    """A thread that ends this process when another rank has failed and this one does not hear of it by itself."""

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
            except Exception:  # its keeper has gone: nobody will say more
                return
            is_other = failed is not None and not failed.startswith(f"rank {self._rank} ")
            if is_other and not self._stopped.wait(self._every):
                _say(f"rank {self._rank}: stopping, because {failed}")
                write_error_file(f"rank {self._rank}: stopping, because {failed}", follows=True)
                self._end(interrupt.CODE if failed.endswith(_INTERRUPTED) else 1)
                return


def listen() -> Listener | None:
    """Listen for failures of other ranks, where they would not be noticed otherwise."""
    if not parallel_state.has_joined() or parallel_state.notices_lost_ranks():
        return None
    return Listener(parallel_state.job_store(), parallel_state.launched_rank())


def _claims(store: Any) -> bool:
    """Whether this rank is the first to have an error of its own; True where nobody can be asked."""
    try:
        return store.add(_CLAIMS, 1) == 1
    except Exception:
        return True


def _rank_that_failed(store: Any) -> str | None:
    """ "rank 3 failed" of the rank whose error is the first, once it has been printed; or which rank has died."""
    has_store, deadline = store is not None and _keeper_lives(), time.monotonic() + _SECONDS
    while time.monotonic() < deadline and (has_store or parallel_state.has_line()):
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
    """Whether the process that keeps the store is there. Asked first, because torch prints a stack of calls where it is not."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=_SECONDS):
            return True
    except OSError:
        return False
    except KeyError:  # the caller has joined in another way
        return True


def _say(text: str) -> None:
    print(text.rstrip(), file=sys.stderr, flush=True)


def _let_go(error: BaseException | None) -> None:
    """Free what the error's frames hold: groups among it, whose threads would abort the process at its end."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
