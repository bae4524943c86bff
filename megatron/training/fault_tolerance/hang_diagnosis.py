"""Which rank hangs, concluded from where all ranks are. Pure.

W waits for R      W is in call n of a group, and R, of the same group, has issued fewer; in a transfer, its peer
hangs              a rank that is stopped, or that cannot be heard; if there is none: a rank that is waited for and waits for
                   nobody; else ranks of other machines that are waited for; during the start-up, before any call: a rank
                   in the
                   earliest phase, but never one that meets the others: it waits for ranks that have not come
slow               such a rank in a phase whose length nobody knows (start-up, first steps, a save), as long as it computes,
                   reads or writes now and then; and on a crowded machine any rank that answers, as long as it has not stood
                   still for the allowed time without counting what the ranks waited for a core; both until the back end
                   gives up
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.base.rank_status import PHASES, Calls, RankStatus, ranks_of
from megatron.core.parallel.tcp_liveness import ranks_as_text
from megatron.training.fault_tolerance.process_stat import ProcessState

_FIRST_STEPS = 3  # of which nobody knows how long they take: they compile, and connect
_HURRIED = ("training", "validating")
_TRAINING = PHASES.index("training")
_TOGETHER = ("meeting the others", "connecting", "making groups")  # a rank waits for all others without a call
_MOST_ROWS, _MOST_LINES = 24, 40


@dataclass(frozen=True)
class Seen:
    """A rank as its machine sees it.

    stalled: seconds without progress. rested: seconds in which it neither computed, nor read, nor wrote.
    """

    place: RankStatus
    host: str
    state: ProcessState
    stalled: float
    rested: float = 0.0
    stack: str = ""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def answers(self) -> bool:
        return not (self.state.is_stopped or self.state.has_ended)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (on {self.host}, process {self.place.pid})"


@dataclass(frozen=True)
class Verdict:
    """hung: the ranks that hang, empty if the ranks wait for each other. slow: all of them may only be slow."""

    hung: tuple[int, ...]
    headline: str
    slow: bool = False


def is_hurried(place: RankStatus) -> bool:
    """Whether the rank's present work is of known length: a step like those before it."""
    return place.phase in _HURRIED and place.steps > _FIRST_STEPS


def judge(
    seen: Sequence[Seen], unheard: Iterable[int] = (), *, rest: float = 0.0, patience: float = 0.0, allowed: float = 0.0
) -> Verdict:
    """The verdict on ranks of which some have made no progress for longer than allowed.

    unheard: ranks that no machine reports. rest, patience: seconds that a rank may do nothing, and that others may wait
    for it,
    in a phase of unknown length. allowed: seconds that a rank may stand still in a step while it has a core.
    """
    by_rank = {one.rank: one for one in seen}
    gone = {one.rank for one in seen if not one.answers} | set(unheard)
    awaited = {rank: _awaited_by(one, by_rank, gone) for rank, one in by_rank.items() if one.answers}
    hung = sorted(gone) or _roots(awaited, by_rank)
    elsewhere = not gone and bool(hung) and hung[0] not in by_rank
    blamed = [one for one in seen if (one.place.waiting if elsewhere else one.rank in hung)]
    if elsewhere:  # what those do is not known here
        slow = not all(is_hurried(one.place) for one in blamed)
    else:
        slow = bool(hung) and not gone and all(_may_be_slow(one, rest) for one in blamed)
    slow = slow or (not gone and _are_starved(seen, blamed or seen, allowed))
    slow = slow and all(one.stalled < patience for one in seen if one.place.waiting)
    verb = "is slow" if slow else "has hung"
    return Verdict(tuple(hung), _headline(hung, verb, awaited, by_rank), slow)


def _may_be_slow(one: Seen, rest: float) -> bool:
    # R: it would compute, and other work has the core. D: the disk does not answer.
    return not is_hurried(one.place) and (one.rested < rest or one.state.state in ("R", "D"))


def _are_starved(seen: Sequence[Seen], blamed: Sequence[Seen], allowed: float) -> bool:
    """Whether the blamed might have gone on by now, had other work not had the cores. All may wait for any rank's thread."""
    return min(one.stalled for one in blamed) - max(one.place.starved for one in seen) < allowed


def _awaited_by(one: Seen, by_rank: dict[int, Seen], gone: set[int]) -> tuple[int, ...]:
    """The ranks for which this rank waits in its call."""
    call = one.place.waiting or one.place.last  # an accelerator's host does not wait in its call
    if call is None:
        return ()

    def may_be_behind(rank: int) -> bool:  # one of another machine is only if this one waits for it
        return one.place.waiting is not None or rank in by_rank or rank in gone

    if call.peer is not None:
        is_behind = may_be_behind(call.peer) and _count(by_rank.get(call.peer), call, one.rank) < call.count
        return (call.peer,) if call.peer in gone or is_behind else ()
    others = [rank for rank in ranks_of(call.group) if rank != one.rank]
    behind = tuple(rank for rank in others if may_be_behind(rank) and _count(by_rank.get(rank), call) < call.count)
    return behind or tuple(rank for rank in others if rank in gone and one.place.waiting)


def _count(other: Seen | None, call: Calls, peer: int | None = None) -> int:
    """How many calls of this kind the other rank has issued: of the group, or of the other direction of a transfer."""
    if other is None:
        return 0
    for its in other.place.calls:
        same = (its.axis, its.group, its.peer) == (call.axis, call.group, peer)
        if same and (peer is None or its.op != call.op):
            return its.count
    return 0


def _roots(awaited: dict[int, tuple[int, ...]], by_rank: dict[int, Seen]) -> list[int]:
    """Ranks that are waited for and are in no call themselves; without any, those that are behind in another way."""
    wanted = {rank for ranks in awaited.values() for rank in ranks}
    if found := sorted(rank for rank in wanted if rank in by_rank and not awaited.get(rank)):
        return found
    if elsewhere := sorted(wanted - by_rank.keys()):
        return elsewhere
    first = min(PHASES.index(one.place.phase) for one in by_rank.values())
    early = sorted(rank for rank, one in by_rank.items() if PHASES.index(one.place.phase) == first)
    if first < _TRAINING and len(early) < len(by_rank):
        return early
    if any(one.place.phase in _TOGETHER and one.place.ranks > len(by_rank) for one in by_rank.values()):
        return []
    idle = sorted(rank for rank, one in by_rank.items() if one.place.waiting is None)
    if 0 < len(idle) < len(by_rank) or len(by_rank) == 1:
        return idle or list(by_rank)
    return []


# ---------------------------------------------------------------- in words


def _headline(hung: Sequence[int], verb: str, awaited: dict[int, tuple[int, ...]], by_rank: dict[int, Seen]) -> str:
    names = [by_rank[rank].name for rank in hung if rank in by_rank]
    unheard = [rank for rank in hung if rank not in by_rank]
    names += [f"{ranks_as_text(unheard)} (on another machine)"] if unheard else []
    if not names:
        return "the ranks wait for each other, each in a call that the others have not issued"
    if len(hung) > 1:
        verb = verb.replace("is ", "are ").replace("has ", "have ")
    waiting = sorted(rank for rank, ranks in awaited.items() if set(ranks) & set(hung))
    if waiting:
        one = by_rank[waiting[0]]
        call = one.place.waiting or one.place.last
        others = f"; {ranks_as_text(waiting[1:])} too" if waiting[1:] else ""
        return (
            f"{', '.join(names)} {verb}: rank {one.rank} waits in {call}, over {ranks_as_text(ranks_of(call.group))}, "
            f"and {ranks_as_text(hung)} did not come{others}; {_when(one.place)}"
        )
    place = by_rank[hung[0]].place if hung[0] in by_rank else next(iter(by_rank.values())).place
    return f"{', '.join(names)} {verb}, {_when(place)}"


def _when(place: RankStatus) -> str:
    return f"{place.phase}, iteration {place.iteration}" if place.steps else f"while {place.phase}"


def hang_report(verdict: Verdict, seen: Sequence[Seen]) -> str:
    """The whole account: the headline, a row for each rank, and the stacks of those that gave one, equal ones once."""
    rows = sorted(seen, key=lambda one: (one.rank not in verdict.hung, one.rank))
    lines = [verdict.headline, *(_row(one) for one in rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"  ... and {len(rows) - _MOST_ROWS} ranks more")
    stacks: dict[str, list[int]] = {}
    for one in rows:
        if one.stack:
            stacks.setdefault(main_stack(one.stack), []).append(one.rank)
    for stack, ranks in stacks.items():
        lines += [f"{ranks_as_text(ranks)}, most recent call first:", stack]
    if silent := [one.rank for one in rows if not one.stack]:
        lines.append(f"no stack of {ranks_as_text(silent)}")
    return "\n".join(lines)


def _row(one: Seen) -> str:
    place = one.place
    call = "has issued no call"
    if place.last is not None:
        call = f"waits in {place.waiting}" if place.waiting else f"last call {place.last}"
    starved = (
        f" ({place.starved:.1f} s of it ready to run, without a core)" if place.starved > 0.1 * one.stalled else ""
    )
    return f"  {one.name}: {_when(place)}; {call}; no progress for {one.stalled:.1f} s{starved}; process {one.state}"


def main_stack(text: str) -> str:
    """The main thread's frames in what faulthandler wrote: the last block, which it writes last."""
    blocks = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)
    lines = [line for line in blocks[-1].splitlines() if line.startswith("  ")]
    return "\n".join(lines[:_MOST_LINES])
