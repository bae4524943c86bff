"""Lowering: from who computes what to the full list of a rank, with transfers and gradient reductions.

    generate            F0.0 B0.0                             F1.0 B1.0
    add_transfers       F0.0 SEND_F0.0 RECV_B0.0 B0.0         RECV_F1.0 F1.0 B1.0 SEND_B1.0
    add_reduce          F0.0 SEND_F0.0 RECV_B0.0 B0.0 REDUCE0 RECV_F1.0 F1.0 B1.0 SEND_B1.0 REDUCE1

Every rank's list is a projection of one global order. Run that order from its head: the first event not yet done stands
at the head of every list it is in, so it can run. Hence no deadlock, even if each send blocks until its receive.
"""

from collections.abc import Mapping

from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule, count_stages, dependencies
from megatron.core.pipeline_parallel.simulate import DEFAULT_COST, locate, run_in_order, show, simulate
from megatron.core.pipeline_parallel.stage import Placement

_SEND_OF = {Op.F: Op.SEND_F, Op.B: Op.SEND_B}
_RECV_OF = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}
_PRODUCER_OF = {Op.SEND_F: Op.F, Op.SEND_B: Op.B}
_PARTNER_OF = {  # the op that meets it, and how many stages further up
    Op.SEND_F: (Op.RECV_F, +1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, +1),
}


def add_transfers(schedule: Schedule, placement: Placement, cost: Mapping[Op, float] = DEFAULT_COST) -> Schedule:
    """The schedule with a SEND after each producer and a RECV before each consumer that lives on another rank.

    In the global order a transfer stands at the moment its producer ends, as simulated with `cost`. So a RECV waits for
    no compute that the rank could have done meanwhile, and only other transfers stand between a producer and its SEND.
    `cost` changes that order, never what is computed. All ranks must lower with the same `cost`: not with what each one
    measured. A stage's neighbour on the same rank needs no transfer.
    """
    _check_placement(schedule, placement)
    start, end = simulate(schedule, cost)
    num_stages = count_stages(schedule)
    transfer_first, compute_next = 0, 1  # of one moment: what ends then is sent before the next action starts
    events = [(start[action], compute_next, [action]) for action in start]
    for action in end:
        send = Action(_SEND_OF[action.op], action.stage, action.microbatch)
        recv = partner(send)
        if 0 <= recv.stage < num_stages and placement(recv.stage) != placement(send.stage):
            events.append((end[action], transfer_first, [send, recv]))

    lowered = [[] for _ in schedule]
    for _, _, actions in sorted(events, key=lambda event: event[:2]):
        for action in actions:
            lowered[placement(action.stage)].append(action)
    return lowered


def add_reduce(schedule: Schedule) -> Schedule:
    """The schedule with a REDUCE once a stage's last gradient is computed, and sent where it has to be sent.

    The SEND_B goes first because the stage below waits for it and nothing waits for the REDUCE. Apply it last, after
    `add_transfers`.
    """
    lowered = []
    for actions in schedule:
        last = {action.stage: index for index, action in enumerate(actions) if action.op in (Op.B, Op.SEND_B)}
        row = []
        for index, action in enumerate(actions):
            row.append(action)
            if last.get(action.stage) == index:
                row.append(Action(Op.REDUCE, action.stage))
        lowered.append(row)
    return lowered


def check_rendezvous(schedule: Schedule, placement: Placement) -> None:
    """Run the lowered lists on paper with sends that block until their receive: the strictest transport there is.

    Raises ValueError, naming the waiting actions and the grid around them, if a transfer is never met, an action stands
    before what it needs, or the ranks wait for each other in a circle.
    """
    _check_placement(schedule, placement)
    home, num_stages = locate(schedule), count_stages(schedule)
    done, met = set(), set()

    def attempt(rank: int, heads: list[int]) -> list[Action]:
        action = schedule[rank][heads[rank]]
        missing = [need for need in _needs_on_rank(action, schedule[rank], placement, num_stages) if need not in done]
        if action.op in _PRODUCER_OF and not missing:  # a send: it meets its receive if that is at its list's head
            recv = partner(action)
            recv_rank, recv_index = home.get(recv, (rank, None))
            if heads[recv_rank] == recv_index:
                met.add(recv)
            else:
                missing = [recv]
        elif action.op in _PARTNER_OF and action not in met:
            missing.append(partner(action))
        if not missing:
            done.add(action)
        return missing

    run_in_order(schedule, attempt)


def partner(action: Action) -> Action:
    """The transfer that meets this one: SEND_F3.1 and RECV_F4.1, SEND_B4.1 and RECV_B3.1 are partners.

    `placement(partner(action).stage)` is the rank at the other end.
    """
    op, step = _PARTNER_OF[action.op]
    return Action(op, action.stage + step, action.microbatch)


def _needs_on_rank(action: Action, actions: list[Action], placement: Placement, num_stages: int) -> list[Action]:
    """What must stand before `action` in its own rank's list, which is `actions`."""
    if action.op in _PRODUCER_OF:
        return [action._replace(op=_PRODUCER_OF[action.op])]
    if action.op is Op.REDUCE:
        return [other for other in actions if other.op is Op.B and other.stage == action.stage]
    if action.op not in _SEND_OF:
        return []  # a receive
    return [
        need if placement(need.stage) == placement(action.stage) else action._replace(op=_RECV_OF[need.op])
        for need in dependencies(action, num_stages)
    ]


def _check_placement(schedule: Schedule, placement: Placement) -> None:
    for action, (rank, index) in locate(schedule).items():
        if placement(action.stage) != rank:
            raise ValueError(
                f"schedule: {action} is in the list of rank {rank}, but the placement puts stage {action.stage} on "
                f"rank {placement(action.stage)}; pass the placement the schedule was made for\n"
                f"{show(schedule, rank, index)}"
            )
