"""Parameters and gradients that are whole for a while: ZeRO stages 2 and 3 on paper, write by write. Pure.

What `distributed/bucket.py`, `fetch.py` and `distributed_data_parallel.py` do with memory, and nothing else of it:

    a unit's parameters    fetched before its forward and its backward, given up after the last of its gradients
    a bucket's gradients   opened by the first that is written, summed and given up with the last; one at a time is under way
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.distributed.plan import BucketPlan
from megatron.core.pipeline_parallel.schedule import Op
from megatron.training.memory.parameters import HEAD, ORDER, OUTPUT, WORD_BIAS, WORDS, items_of_stage, plans_of_stage
from megatron.training.memory.sizes import RunSizes


class SumBytes(NamedTuple):
    """What the sum of a bucket takes beside its gradients."""

    under_way: int
    at_its_end: int


def sum_of_bucket(run: RunSizes, numel: int) -> SumBytes:
    """This rank's part, and a copy where what travels is rounded; or all that the others send, and then their sum."""
    copy = numel * run.sent_bytes if run.rounds else 0
    if run.shards == 1 or run.zero_stage == 0:
        return SumBytes(copy, copy)
    part = numel // run.shards
    if run.sums_wide:
        received = numel * run.sent_bytes
        return SumBytes(copy + received, received + part * run.layer.grad_bytes)
    return SumBytes(copy + part * run.sent_bytes, part * run.sent_bytes)


class PassingBytes:
    """One stage on one rank through the actions of a step. `act` returns the most bytes in one of them; `held`: those now."""

    def __init__(self, run: RunSizes, stage: int):
        self.run = run
        buckets: list[BucketPlan] = [bucket for plan in plans_of_stage(run, stage) for bucket in plan.buckets]
        self._bucket_of = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        numels = [bucket.stop - bucket.start for bucket in buckets]
        self._params = [numel * run.layer.param_bytes if run.zero_stage == 3 else 0 for numel in numels]
        self._grads = [numel * run.layer.main_grad_bytes for numel in numels]
        self._sums = [sum_of_bucket(run, numel) for numel in numels]
        self._lends_table = stage == len(run.layers) - 1 and run.layer.tied  # to the output layer
        self._uses = self._order_of_uses(stage)
        self._together = self._recomputed_together(stage)
        self._open_params: set[int] = set()
        self._open_grads: set[int] = set()
        self._travelling: int | None = None
        self._peak = 0
        self._known: dict[tuple, tuple] = {}

    def _order_of_uses(self, stage: int) -> list[str]:
        """The parameters as a forward uses them. A tied output layer takes the table that the embedding holds; a BERT tells the order
        of its sentences first."""
        of_unit: dict[str, list[str]] = {}
        for item in items_of_stage(self.run, stage):
            of_unit.setdefault(item.unit, []).append(item.name)
        units = list(of_unit)
        if stage == len(self.run.layers) - 1:
            ends = [*ORDER, *HEAD, WORDS if self._lends_table else OUTPUT, WORD_BIAS]
            before = [unit for unit in units if unit not in ends or (unit == WORDS and stage == 0)]
            units = before + [unit for unit in ends if unit in of_unit]
        return [name for unit in units for name in of_unit[unit]]

    def _recomputed_together(self, stage: int) -> dict[int, set[int]]:
        """The buckets that are fetched before a bucket's backward, where a group of layers is computed again first."""
        sizes, layers = self.run.layer, self.run.layers[stage]
        if sizes.recompute != "uniform" or self.run.zero_stage < 3:
            return {}
        of_layer = [self._bucket_of[f"decoder.layers.{layer}.input_layernorm.weight"] for layer in layers]
        size = sizes.recompute_layers
        groups = [set(of_layer[i : i + size]) for i in range(0, len(of_layer), size)]
        return {bucket: group for group in groups for bucket in group}

    @property
    def held(self) -> int:
        if self.run.poison:
            return sum(self._params) + sum(self._grads) + self._under_way
        params = sum(self._params[i] for i in self._open_params)
        return params + sum(self._grads[i] for i in self._open_grads) + self._under_way

    @property
    def _under_way(self) -> int:
        return 0 if self._travelling is None else self._sums[self._travelling].under_way

    # ---------------------------------------------------------------- actions

    def act(self, op: Op) -> int:
        """Do the action; what it comes to is looked up where it began from the same before."""
        self._begin()
        before = op, self._travelling, frozenset(self._open_grads)
        if before not in self._known:
            peak = _ACTION_OF[op](self)
            self._known[before] = peak, set(self._open_params), set(self._open_grads), self._travelling
        peak, params, grads, self._travelling = self._known[before]
        self._open_params, self._open_grads = set(params), set(grads)
        return peak

    def forward(self) -> int:
        if self.run.poison:
            return self.held
        before, order = self.held, _without_repeats([self._bucket_of[name] for name in self._uses])
        ahead = [*order[1:], None] if self.run.overlap_gather else [None] * len(order)
        return before + max(
            (self._params[i] + (0 if j is None else self._params[j]) for i, j in zip(order, ahead)), default=0
        )

    def backward(self) -> int:
        return self._run(list(reversed(self._uses)))

    def input_backward(self) -> int:
        """A backward whose gradients wait, but for those of tables that are looked up in; the parameters go as in any backward."""
        order = list(reversed(self._uses))
        return self._run(order, written=[not self._waits(name) for name in order])

    def weights(self) -> int:
        """The gradients that were put off."""
        order = list(reversed(self._uses))
        return self._run([name for name in order if self._waits(name)], fetches=False)

    def _waits(self, name: str) -> bool:
        """Whether the gradient of this parameter is put off where a schedule asks for that. That of a table is where
        its stage multiplies by it and does not look up in it."""
        return not name.startswith("embedding.") or (
            self._lends_table and name.startswith(WORDS) and self._uses.count(name) == 1
        )

    def _begin(self) -> None:
        self._open_params.clear()
        self._peak = 0

    def _run(self, order: list[str], written: Sequence[bool] | None = None, *, fetches: bool = True) -> int:
        """A backward through the parameters `order`, of which those not `written` wait. Without `fetches`, the second half of one."""
        buckets = [self._bucket_of[name] for name in order]
        uses, passed, writes = Counter(buckets), Counter(), Counter()
        following = _next_other(buckets)
        for at, i in enumerate(buckets):
            if fetches and (at == 0 or buckets[at - 1] != i):
                first_of_group = at == 0 or buckets[at - 1] not in self._together.get(i, ())
                self._open_params |= {i} | (self._together.get(i, set()) if first_of_group else set())
                if self.run.overlap_gather and following[at] is not None:
                    self._open_params.add(following[at])
                self._note()
            is_written = written is None or written[at]
            if is_written:
                self._open(i)
            passed[i] += 1
            writes[i] += is_written
            if passed[i] == uses[i]:
                self._open_params.discard(i)
            if is_written and writes[i] == uses[i]:
                self._sum(i)
        self._note()
        return self._peak

    def _open(self, bucket: int) -> None:
        """Room for a gradient."""
        if self._travelling == bucket:
            self._finish()  # its own last sum is waited for
        self._open_grads.add(bucket)
        self._note()

    def _sum(self, bucket: int) -> None:
        """The last gradient of a microbatch is there, and the parameters are gone."""
        self._finish()
        self._travelling = bucket
        self._note()
        if not self.run.overlap_reduce:
            self._finish()

    def _finish(self) -> None:
        if self._travelling is not None:
            more = self._sums[self._travelling]
            self._peak = max(self._peak, self.held + more.at_its_end - more.under_way)
        self._open_grads.discard(self._travelling)
        self._travelling = None

    def _note(self) -> None:
        self._peak = max(self._peak, self.held)


def _without_repeats(numbers: Sequence[int]) -> list[int]:
    """Neighbours that are equal once."""
    return [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n]


def _next_other(numbers: Sequence[int]) -> list[int | None]:
    """Of each number the next one that differs from it."""
    result: list[int | None] = [None] * len(numbers)
    for i in range(len(numbers) - 2, -1, -1):
        result[i] = numbers[i + 1] if numbers[i + 1] != numbers[i] else result[i + 1]
    return result


_ACTION_OF = {
    Op.F: PassingBytes.forward,
    Op.B: PassingBytes.backward,
    Op.I: PassingBytes.input_backward,
    Op.W: PassingBytes.weights,
}
