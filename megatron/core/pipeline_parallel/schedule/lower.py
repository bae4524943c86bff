"""Lowering adds transfers and gradient reductions to the compute actions of a schedule.

    generate       F0.0 B0.0
                   F1.0 B1.0
    add_transfers  F0.0 SEND_F0.0 POST_B0.0 RECV_B0.0 SENT_F0.0 B0.0
                   POST_F1.0 RECV_F1.0 F1.0 B1.0 SEND_B1.0 SENT_B1.0
    add_reduce     F0.0 SEND_F0.0 POST_B0.0 RECV_B0.0 SENT_F0.0 B0.0 REDUCE0
                   POST_F1.0 RECV_F1.0 F1.0 B1.0 SEND_B1.0 REDUCE1 SENT_B1.0

A transfer starts at both ends, with SEND and POST, which never wait. It overlaps with compute; SENT and RECV wait for
its end. Activations use one communicator, gradients another, and a communicator runs a rank's transfers strictly in the
order in which they start (NCCL does). So the ranks must start transfers in orders that agree: each direction has ONE
global order, and each rank's order is a projection of it.

Why it cannot deadlock: take compute and transfers in order of time, a transfer at the moment its producer ends. Its
SEND is right behind the producer, its POST no later than that moment. All transfers that start before it in its
direction precede it in the global order, so they are complete. SENT and RECV come later in the lists, so they wait for
a transfer that can run.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping

from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.schedule.actions import COMPUTE, Action, Op, Schedule, dependencies, stages_in
from megatron.core.pipeline_parallel.schedule.simulate import DEFAULT_COST, locate, run_in_order, simulate

_OPS_OF = {  # start and end of a transfer where it is sent, and where it is received
    "forward": (Op.SEND_F, Op.SENT_F, Op.POST_F, Op.RECV_F),
    "backward": (Op.SEND_B, Op.SENT_B, Op.POST_B, Op.RECV_B),
}
# The communicator of a compute action's result, or of a transfer.
DIRECTION_OF = dict.fromkeys((Op.F, *_OPS_OF["forward"]), "forward")
DIRECTION_OF |= dict.fromkeys((Op.B, Op.I, *_OPS_OF["backward"]), "backward")
_STEP_OF = {"forward": +1, "backward": -1}  # from the stage that sends to the stage that receives
_SENDING = frozenset({Op.SEND_F, Op.SENT_F, Op.SEND_B, Op.SENT_B})
_PARTNER_OF = {
    Op.SEND_F: Op.POST_F,
    Op.SENT_F: Op.RECV_F,
    Op.POST_F: Op.SEND_F,
    Op.RECV_F: Op.SENT_F,
    Op.SEND_B: Op.POST_B,
    Op.SENT_B: Op.RECV_B,
    Op.POST_B: Op.SEND_B,
    Op.RECV_B: Op.SENT_B,
}
BEGIN_OF = {Op.SENT_F: Op.SEND_F, Op.RECV_F: Op.POST_F, Op.SENT_B: Op.SEND_B, Op.RECV_B: Op.POST_B}
_WAIT_OF = {begin: wait for wait, begin in BEGIN_OF.items()}


def add_transfers(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST) -> Schedule:
    """Return the schedule with SEND and SENT for each result that another rank needs, and POST and RECV on that rank.

    Between two compute actions, actions that start transfers come before actions that wait:
      SEND  right behind the producer.
      POST  when the producer starts, so that the receive is posted before the data comes: before the action that the
            rank computes at that moment, in the global order of its direction. At most two receives per direction are
            posted ahead of their data (tested; beyond those, the schedule itself holds the data).
      SENT  where the rank starts its next send in that direction, at the latest before the backward that frees the
            output, or at the end: a rank holds at most two outgoing results per direction.
      RECV  right before the consumer.

    Transfers are ordered globally by the ends of their producers, simulated with `cost`. `cost` affects only
    that order, not the results, but all ranks must lower with the same `cost`. Neighbouring stages on one rank
    need no transfer.
    """
    ranks = stages_in(schedule).ranks
    time = simulate(schedule, cost)
    position = locate(schedule)  # action -> (rank, index)
    rows = [_Row(actions, [time.end[action] for action in actions]) for actions in schedule]
    for producer in sorted(time.end, key=time.end.get):  # the sort is stable: ties have the same order on all ranks
        if producer.op is Op.W:
            continue
        direction = DIRECTION_OF[producer.op]
        consumer = producer._replace(stage=producer.stage + _STEP_OF[direction])
        if 0 <= consumer.stage < len(ranks) and ranks[consumer.stage] != ranks[producer.stage]:
            rank, index = position[producer]
            rows[rank].send(producer, direction, index)
            rank, index = position[consumer]
            rows[rank].receive(consumer, direction, index, time.start[producer])
    return [row.merged() for row in rows]


class _Row:
    """One rank's list under construction. Gap i is before compute i; the last gap is the end of the list."""

    def __init__(self, actions: list[Action], ends: list[float]):
        self.actions = actions
        self.ends = ends
        self.begins: list[list[Action]] = [[] for _ in range(len(actions) + 1)]
        self.waits: list[list[Action]] = [[] for _ in range(len(actions) + 1)]
        self.gap_of_last_begin = {"forward": 0, "backward": 0}
        self.leaving: dict[str, Action] = {}  # by direction, the SENT that is not placed yet
        # (stage, microbatch) -> the index of the backward that frees the output
        self.freed_at = {action[1:]: index for index, action in enumerate(actions) if action.op in (Op.B, Op.I)}

    def send(self, producer: Action, direction: str, index: int) -> None:
        """Add the SEND of compute `index`, and the SENT of the previous send."""
        send, sent = _OPS_OF[direction][:2]
        self._begin(producer.with_op(send), direction, index + 1)
        self._place_sent(direction, index + 1)
        self.leaving[direction] = producer.with_op(sent)

    def receive(self, consumer: Action, direction: str, index: int, moment: float) -> None:
        """Add the RECV of compute `index`, and its POST before the action that the rank computes at `moment`."""
        post, recv = _OPS_OF[direction][2:]
        self._begin(consumer.with_op(post), direction, bisect_right(self.ends, moment))
        self.waits[index].append(consumer.with_op(recv))

    def merged(self) -> list[Action]:
        """Place the last SENT of each direction, and return the list.

        Each gap's starts and waits come before its compute action.
        """
        for direction in _OPS_OF:
            self._place_sent(direction, len(self.actions))
        merged = []
        for begins, waits, compute in zip(self.begins, self.waits, self.actions):
            merged += [*begins, *waits, compute]
        return merged + self.begins[-1] + self.waits[-1]

    def _begin(self, action: Action, direction: str, gap: int) -> None:
        gap = self.gap_of_last_begin[direction] = max(gap, self.gap_of_last_begin[direction])
        self.begins[gap].append(action)

    def _place_sent(self, direction: str, gap: int) -> None:
        if direction in self.leaving:
            sent = self.leaving.pop(direction)
            if direction == "forward":
                gap = min(gap, self.freed_at.get(sent[1:], gap))
            self.waits[gap].append(sent)


def add_reduce(schedule: Schedule) -> Schedule:
    """Return the schedule with a REDUCE for each stage. Call it last.

    REDUCE comes after the stage's last gradient is computed and its SEND_B has started. The SEND_B goes first because
    the previous stage waits for it. If one rank has the first and the last stage, the first reduces after the last,
    since they may share a table.
    """
    lowered = []
    last_stage = stages_in(schedule).last
    for actions in schedule:
        # stage -> the index of its last gradient or SEND_B
        complete_at = {a.stage: index for index, a in enumerate(actions) if a.op in (Op.B, Op.W, Op.SEND_B)}
        if 0 in complete_at and last_stage in complete_at:
            complete_at[0] = max(complete_at[0], complete_at[last_stage])
        row = []
        for index, action in enumerate(actions):
            row.append(action)
            row += [Action(Op.REDUCE, stage) for stage in complete_at if complete_at[stage] == index]
        lowered.append(row)
    return lowered


def check_rendezvous(schedule: Schedule) -> None:
    """Check lowered lists against the strictest transport.

    There a transfer runs when it is first in the queues of both its ends. Raises ValueError, with the waiting actions
    and the schedule around them, if an action comes before its inputs, ranks wait in a cycle, or a transfer has no
    partner or no wait.
    """
    position = locate(schedule)  # action -> (rank, index)
    stages = stages_in(schedule)
    wires = {"forward": _Wire(stages), "backward": _Wire(stages)}
    done: set[Action] = set()

    def attempt(rank: int, heads: list[int]) -> list[Action]:
        action = schedule[rank][heads[rank]]
        needs = _needs_on_rank(action, schedule[rank], position, stages)
        missing = [need for need in needs if need not in done]
        if action.op in BEGIN_OF and not missing:
            missing = wires[DIRECTION_OF[action.op]].held_up_by(action.with_op(BEGIN_OF[action.op]))
        if not missing:
            done.add(action)
            if action.op in _WAIT_OF:
                wires[DIRECTION_OF[action.op]].begin(action)
        return missing

    run_in_order(schedule, attempt)
    problems = []
    for action in position:
        if action.op in _WAIT_OF:
            for other in (partner(action), action.with_op(_WAIT_OF[action.op])):
                if other not in position:
                    problems.append(f"{action} starts a transfer, but {other} is in no list")
    if problems:
        raise ValueError("\n".join(f"schedule: {problem}" for problem in problems))


class _Wire:
    """The communicator of one direction: a queue per rank of the transfers it has started."""

    def __init__(self, stages: StageMap):
        self.ranks = dict(enumerate(stages.ranks))  # a partner may be in no list
        self.queues: dict[int, deque[Action]] = defaultdict(deque)
        self.happened: set[Action] = set()

    def begin(self, action: Action) -> None:
        """Queue a SEND or POST, and run every transfer that is now first at both its ends."""
        ranks = [self.ranks[action.stage]]  # whose queues have a new first transfer
        self.queues[ranks[0]].append(action)
        while ranks:
            rank = ranks.pop()
            queue = self.queues[rank]
            if not queue:
                continue
            other = partner(queue[0])
            peer = self.ranks.get(other.stage)
            if self._first(peer) == other:
                self.happened |= {queue.popleft(), self.queues[peer].popleft()}
                ranks += [rank, peer]  # the next transfers are first now

    def held_up_by(self, action: Action) -> list[Action]:
        """Return [] if the transfer of this SEND or POST has run, else the action that it waits for."""
        if action in self.happened:
            return []
        other = partner(action)
        for end in (action, other):
            rank = self.ranks[end.stage]
            first = self._first(rank)
            if first != end:
                return [first if end in self.queues[rank] else end]
        raise AssertionError(
            f"{action} and {other} are both next in their queues, so the transfer should have run, but it has not"
        )

    def _first(self, rank: int) -> Action | None:
        return self.queues[rank][0] if self.queues[rank] else None


def partner(action: Action) -> Action:
    """Return the counterpart of a transfer's action at the other end.

    SEND_F3.1 and POST_F4.1, SENT_F3.1 and RECV_F4.1, SEND_B4.1 and POST_B3.1, SENT_B4.1 and RECV_B3.1 are partners.
    `partner(action).stage` is on the rank at the other end.
    """
    step = _STEP_OF[DIRECTION_OF[action.op]]
    if action.op not in _SENDING:
        step = -step
    return Action(_PARTNER_OF[action.op], action.stage + step, action.microbatch)


def _needs_on_rank(
    action: Action, actions: list[Action], position: Mapping[Action, tuple[int, int]], stages: StageMap
) -> list[Action]:
    """Return the actions that must precede `action` in `actions`, its own rank's list."""
    if action.op is Op.SEND_F:
        return [action.with_op(Op.F)]
    if action.op is Op.SEND_B:
        half = action.with_op(Op.I)
        return [half if half in position else action.with_op(Op.B)]
    if action.op in BEGIN_OF:
        return [action.with_op(BEGIN_OF[action.op])]
    if action.op is Op.REDUCE:
        return [other for other in actions if other.op in (Op.B, Op.W) and other.stage == action.stage]
    if action.op not in COMPUTE:
        return []  # a POST
    ranks = stages.ranks
    needs = []
    for need in dependencies(action, len(ranks)):
        if ranks[need.stage] == ranks[action.stage]:
            needs.append(need)
        else:
            recv = _OPS_OF[DIRECTION_OF[need.op]][3]
            needs.append(action.with_op(recv))
    return needs
