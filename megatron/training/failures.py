"""A run that fails ends on every rank, in order: one rank says what happened, the others whose message to read.

    failing rank    claims the word in the job's store, prints its error, leaves its groups
    others          see their calls end, since a peer is gone; find its rank in the store, say one line, leave

Of a process that was killed there is no word in the store: the others say that contact was lost, which is all they know.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from megatron.core import parallel_state
from megatron.core.checkpoint.format import CheckpointError
from megatron.core.comm import PeerError
from megatron.core.config import ConfigError
from megatron.core.offload.block_file import OffloadError
from megatron.training.train_step import NotFiniteError

_CLAIMS, _FAILED, _LEFT = (f"megatron/failure/{name}" for name in ("claims", "rank", "left"))
_SECONDS = 3.0  # in which ranks find the word of one that failed


def explains_itself(error: BaseException) -> bool:
    """Whether the message says what to change, so that the calls which led there would only hide it."""
    return isinstance(error, ConfigError | NotFiniteError | CheckpointError | OffloadError)


def report(error: BaseException) -> None:
    """Say of `error` what this rank has to say. Every rank that fails in a job of several calls it, and then `leave`."""
    rank, store = parallel_state.launched_rank(), parallel_state.job_store()
    at_first_hand = not isinstance(error, PeerError)
    told = f" {error}" if explains_itself(error) else f"\n{''.join(traceback.format_exception(error))}"
    if at_first_hand and _claims(store):
        _say(f"rank {rank} failed:{told}")
        with contextlib.suppress(Exception):
            store.set(_FAILED, str(rank))
    elif failed := _rank_that_failed(store):
        _say(f"rank {rank}: stopping, because rank {failed} failed")
    elif at_first_hand:
        _say(f"rank {rank} failed as well:{told}")
    else:
        _say(f"rank {rank}: stopping, because a rank has ended without a word ({error})")
    _let_go(error)


def leave() -> NoReturn:
    """Leave the job in order and end the process with code 1.

    The rank that keeps the store stays until the others have read it, its groups closed: that is how they notice.
    """
    store, ranks = parallel_state.job_store(), parallel_state.launched_world_size()
    keeps_store = parallel_state.launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    parallel_state.stop_distributed()
    with contextlib.suppress(Exception):  # the store may have gone with its keeper
        if _keeper_lives():
            store.add(_LEFT, 1)
        deadline = time.monotonic() + _SECONDS
        while keeps_store and store.add(_LEFT, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
    sys.exit(1)


def _claims(store: Any) -> bool:
    """Whether this rank is the first to have an error of its own; True where nobody can be asked."""
    try:
        return store.add(_CLAIMS, 1) == 1
    except Exception:
        return True


def _rank_that_failed(store: Any) -> str | None:
    """The rank whose error is the first, once it has been printed."""
    if not _keeper_lives():
        return None
    deadline = time.monotonic() + _SECONDS
    with contextlib.suppress(Exception):
        while time.monotonic() < deadline:
            if store.check([_FAILED]):
                return store.get(_FAILED).decode()
            time.sleep(0.05)
    return None


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
