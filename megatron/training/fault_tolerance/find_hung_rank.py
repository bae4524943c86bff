"""The rank that hangs is concluded from where all ranks are. Pure.

W waits for R   W is in call n of a group, and R, of the same group, has issued fewer; in a transfer, R is the peer.
hangs           A rank that is stopped or has ended. If there is none: a rank that is waited for and waits for nobody;
                else ranks of other machines that are waited for. During the start-up, before any call: the ranks in
                the earliest phase, but no rank that joins the others, because it waits for ranks that are not there.
slow            A rank that seems to hang is only slow in two cases. It is in a phase of unknown length (start-up,
                first steps, a save), and computes, reads or writes now and then. Or the machine is crowded: it answers,
                and without the time that ranks waited for a core it has stood still for less than the allowed time.
                In both cases only until the back end gives up.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.base.rank_status import PHASES, Calls, RankStatus, ranks_of
from megatron.core.parallel.detect_lost_ranks_by_tcp import ranks_as_text
from megatron.training.fault_tolerance.process_stat import ProcessState

_FIRST_STEPS = 3  # steps of unknown length: they compile, and connect
_PHASES_OF_STEPS = ("training", "validating")
_TRAINING = PHASES.index("training")
_PHASES_OF_JOINING = ("meeting the others", "connecting", "making groups")  # a rank waits for all others without a call
_MOST_ROWS = 24
_MOST_LINES = 40


@dataclass(frozen=True)
class RankSnapshot:
    """A rank as it is seen from outside, on its machine."""

    status: RankStatus
    host: str
    state: ProcessState
    stalled: float  # seconds without progress
    idle: float = 0.0  # seconds in which it neither computed, nor read, nor wrote
    stack: str = ""

    @property
    def rank(self) -> int:
        return self.status.rank

    @property
    def answers(self) -> bool:
        return not (self.state.is_stopped or self.state.has_ended)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (on {self.host}, process {self.status.pid})"


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that hang, and a headline that says so."""

    hung: tuple[int, ...]  # empty if the ranks wait for each other
    headline: str
    slow: bool = False  # all ranks of `hung` may only be slow


def has_known_duration(status: RankStatus) -> bool:
    """Whether the rank's present work is of known length: a step like those before it."""
    return status.phase in _PHASES_OF_STEPS and status.steps > _FIRST_STEPS


def diagnose(
    ranks: Sequence[RankSnapshot],
    missing: Iterable[int] = (),
    *,
    max_idle: float = 0.0,
    max_wait: float = 0.0,
    allowed: float = 0.0,
) -> Diagnosis:
    """Return which ranks hang, among ranks of which some have made no progress for longer than allowed.

    missing: ranks that no machine reports.
    max_idle: seconds that a rank may do nothing in a phase of unknown length.
    max_wait: seconds that other ranks may wait for a slow rank.
    allowed: seconds that a rank may stand still in a step while it has a core.
    """
    by_rank = {rank.rank: rank for rank in ranks}
    dead = set(missing)
    for rank in ranks:
        if not rank.answers:
            dead.add(rank.rank)

    # who waits for whom, and who is waited for
    awaited = {number: _awaited_by(rank, by_rank, dead) for number, rank in by_rank.items() if rank.answers}
    hung = sorted(dead) or _roots(awaited, by_rank)

    # the ranks whose state decides between hung and slow: of another machine only the ranks that wait for it are known
    is_elsewhere = not dead and bool(hung) and hung[0] not in by_rank
    if is_elsewhere:
        suspects = [rank for rank in ranks if rank.status.waiting]
        slow = not all(has_known_duration(rank.status) for rank in suspects)
    else:
        suspects = [rank for rank in ranks if rank.rank in hung]
        slow = bool(hung) and not dead and all(_may_be_slow(rank, max_idle) for rank in suspects)
    if not dead and _are_starved(ranks, suspects or ranks, allowed):
        slow = True
    if not all(rank.stalled < max_wait for rank in ranks if rank.status.waiting):
        slow = False

    headline = _headline(hung, "is slow" if slow else "has hung", awaited, by_rank)
    return Diagnosis(tuple(hung), headline, slow)


def _may_be_slow(rank: RankSnapshot, max_idle: float) -> bool:
    """Whether a rank is in a phase of unknown length, and does something or cannot."""
    if has_known_duration(rank.status):
        return False
    # R: it would compute, and other work has the core. D: the disk does not answer.
    return rank.idle < max_idle or rank.state.state in ("R", "D")


def _are_starved(ranks: Sequence[RankSnapshot], suspects: Sequence[RankSnapshot], allowed: float) -> bool:
    """Whether the suspects might have made progress by now, had other work not had the cores.

    The most starved of all ranks counts, because each may wait for any other rank's thread.
    """
    stalled = min(rank.stalled for rank in suspects)
    starved = max(rank.status.starved for rank in ranks)
    return stalled - starved < allowed


def _awaited_by(rank: RankSnapshot, by_rank: dict[int, RankSnapshot], dead: set[int]) -> tuple[int, ...]:
    """Return the ranks for which this rank waits in its call."""
    call = rank.status.waiting or rank.status.last  # an accelerator's host does not wait in its call
    if call is None:
        return ()

    def may_be_behind(number: int) -> bool:
        # Nothing is known of a rank of another machine, unless this rank waits in its call.
        return rank.status.waiting is not None or number in by_rank or number in dead

    # a transfer: its peer
    if call.peer is not None:
        is_behind = may_be_behind(call.peer) and _count(by_rank.get(call.peer), call, rank.rank) < call.count
        return (call.peer,) if call.peer in dead or is_behind else ()

    # a collective: the ranks that have issued fewer calls, else those that are dead
    others = [number for number in ranks_of(call.group) if number != rank.rank]
    behind = [number for number in others if may_be_behind(number) and _count(by_rank.get(number), call) < call.count]
    if behind:
        return tuple(behind)
    if not rank.status.waiting:
        return ()
    return tuple(number for number in others if number in dead)


def _count(other: RankSnapshot | None, call: Calls, peer: int | None = None) -> int:
    """Return how many calls of this kind the other rank has issued.

    peer: of a transfer, whose other direction counts; else the calls of the group count.
    """
    if other is None:
        return 0
    for other_call in other.status.calls:
        is_same = (other_call.axis, other_call.group, other_call.peer) == (call.axis, call.group, peer)
        if is_same and (peer is None or other_call.op != call.op):
            return other_call.count
    return 0


def _roots(awaited: dict[int, tuple[int, ...]], by_rank: dict[int, RankSnapshot]) -> list[int]:
    """Return the ranks that hang, if all ranks answer. Empty if they wait for each other."""
    # ranks that are waited for and wait for nobody
    wanted = {number for numbers in awaited.values() for number in numbers}
    roots = sorted(number for number in wanted if number in by_rank and not awaited.get(number))
    if roots:
        return roots

    # ranks of other machines that are waited for
    elsewhere = sorted(wanted - by_rank.keys())
    if elsewhere:
        return elsewhere

    # during the start-up, the ranks in the earliest phase
    phase_of = {number: PHASES.index(rank.status.phase) for number, rank in by_rank.items()}
    earliest = min(phase_of.values())
    behind = sorted(number for number, phase in phase_of.items() if phase == earliest)
    if earliest < _TRAINING and len(behind) < len(by_rank):
        return behind

    # ranks that join the others wait for ranks that are not there yet
    for rank in by_rank.values():
        if rank.status.phase in _PHASES_OF_JOINING and rank.status.ranks > len(by_rank):
            return []

    # ranks that are in no call, while others are
    idle = sorted(number for number, rank in by_rank.items() if rank.status.waiting is None)
    if len(by_rank) == 1:
        return idle or list(by_rank)
    return idle if len(idle) < len(by_rank) else []


# ---------------------------------------------------------------- in words


def _headline(
    hung: Sequence[int], verb: str, awaited: dict[int, tuple[int, ...]], by_rank: dict[int, RankSnapshot]
) -> str:
    """Return one line: who hangs, who waits for it in which call, and when."""
    # who
    names = [by_rank[number].name for number in hung if number in by_rank]
    elsewhere = [number for number in hung if number not in by_rank]
    if elsewhere:
        names.append(f"{ranks_as_text(elsewhere)} (on another machine)")
    if not names:
        return "the ranks wait for each other, each in a call that the others have not issued"
    if len(hung) > 1:
        verb = verb.replace("is ", "are ").replace("has ", "have ")

    # nobody waits for it
    waiting = sorted(number for number, numbers in awaited.items() if set(numbers) & set(hung))
    if not waiting:
        rank = by_rank[hung[0]] if hung[0] in by_rank else next(iter(by_rank.values()))
        return f"{', '.join(names)} {verb}, {_when(rank.status)}"

    # the first rank that waits for it
    first = by_rank[waiting[0]]
    call = first.status.waiting or first.status.last
    others = f"; {ranks_as_text(waiting[1:])} too" if waiting[1:] else ""
    return (
        f"{', '.join(names)} {verb}: rank {first.rank} waits in {call}, over {ranks_as_text(ranks_of(call.group))}, "
        f"and {ranks_as_text(hung)} did not come{others}; {_when(first.status)}"
    )


def _when(status: RankStatus) -> str:
    return f"{status.phase}, iteration {status.iteration}" if status.steps else f"while {status.phase}"


def hang_report(diagnosis: Diagnosis, ranks: Sequence[RankSnapshot]) -> str:
    """Return the full report: the headline, a row for each rank, and the stacks, equal ones once."""
    # rows, first those of the ranks that hang
    rows = sorted(ranks, key=lambda rank: (rank.rank not in diagnosis.hung, rank.rank))
    lines = [diagnosis.headline, *(_row(rank) for rank in rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"  ... and {len(rows) - _MOST_ROWS} ranks more")

    # stacks
    ranks_by_stack: dict[str, list[int]] = {}
    for rank in rows:
        if rank.stack:
            ranks_by_stack.setdefault(main_stack(rank.stack), []).append(rank.rank)
    for stack, numbers in ranks_by_stack.items():
        lines += [f"{ranks_as_text(numbers)}, most recent call first:", stack]
    without_stack = [rank.rank for rank in rows if not rank.stack]
    if without_stack:
        lines.append(f"no stack of {ranks_as_text(without_stack)}")
    return "\n".join(lines)


def _row(rank: RankSnapshot) -> str:
    status = rank.status
    if status.last is None:
        call = "has issued no call"
    elif status.waiting:
        call = f"waits in {status.waiting}"
    else:
        call = f"last call {status.last}"
    starved = ""
    if status.starved > 0.1 * rank.stalled:
        starved = f" ({status.starved:.1f} s of it ready to run, without a core)"
    return (
        f"  {rank.name}: {_when(status)}; {call}; no progress for {rank.stalled:.1f} s{starved}; process {rank.state}"
    )


def main_stack(text: str) -> str:
    """Return the main thread's frames in faulthandler's text: the last block, which it writes last."""
    blocks = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)
    lines = [line for line in blocks[-1].splitlines() if line.startswith("  ")]
    return "\n".join(lines[:_MOST_LINES])
