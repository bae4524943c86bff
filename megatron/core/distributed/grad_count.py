"""The number of gradients that a bucket gets in one backward; it tells when the backward is done with the bucket. Pure.

A parameter that one layer uses once gets one gradient. A layer applied several times in a forward gets one or
more: autograd sums the uses first, while a layer that writes into the buffer itself writes once per use. The
number is learned:

    unit entered once           at first the number the model declares: one per parameter, or `num_grads_per_backward`
    unit entered more often     unknown, unless declared: the bucket is kept until the first such backward ends
    afterwards                  the largest number seen in a backward with as many entries, at least the declared one

A bucket may therefore be released later than necessary, but never too early.

A backward with deferred weight gradients has two halves. The first is done with all parameters and no longer needs
their values. The second writes the gradients that the first has deferred.

    microbatch with two entries of a bucket, three gradients, the first written at once and two deferred

    begin(forward)      enter enter
    begin(first half)   param_done grad_done   param_done   param_done -> True: release the parameters
    begin(second half)  param_done grad_done   param_done grad_done -> True: reduce the gradients
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Literal

_Bucket = Hashable
_Part = Literal["forward", "backward", "first half", "second half"]  # halves of a backward with deferred gradients


class GradCounter:
    """Counts the gradients of one model chunk.

    declared: gradients in one backward, by bucket. inferred: buckets for which the model declares nothing, whose number
    holds only for units that are entered once.
    """

    def __init__(self, declared: Mapping[_Bucket, int], inferred: Collection[_Bucket]):
        self._declared = dict(declared)
        self._inferred = set(inferred)
        self._learned: dict[tuple[_Bucket, int], int] = {}  # gradients, by bucket and times entered
        self.forget()

    def forget(self) -> None:
        """Forget everything in flight: before a step, also after an error."""
        self._entries: dict[int, Counter[_Bucket]] = {}  # by microbatch, until its backward
        self._deferred: dict[int, Counter[_Bucket]] = {}  # deferred gradients, by microbatch
        # the current forward or backward
        self._microbatch: int | None = None
        self._part: _Part = "forward"
        self._params_done: Counter[_Bucket] = Counter()
        self._grads_done: Counter[_Bucket] = Counter()

    def begin(self, microbatch: int, *, backward: bool, defers_wgrads: bool = False) -> None:
        """Begin a forward or backward of this microbatch. `defers_wgrads`: the backward defers its weight gradients."""
        self.end()
        self._microbatch = microbatch
        if not backward:
            self._entries[microbatch] = Counter()
        elif defers_wgrads:
            self._part = "first half"
        elif microbatch in self._deferred:
            self._part = "second half"
        else:
            self._part = "backward"

    def end(self) -> None:
        """End the current forward or backward, and learn from it."""
        if self._part in ("backward", "first half"):
            entries = self._entries.pop(self._microbatch, {})
            for bucket, count in self._params_done.items():
                key = (bucket, entries.get(bucket, 0))
                self._learned[key] = max(count, self._learned.get(key, 0))
            if self._part == "first half":
                self._deferred[self._microbatch] = self._params_done - self._grads_done
        elif self._part == "second half":
            self._deferred.pop(self._microbatch, None)
        self._params_done = Counter()
        self._grads_done = Counter()
        self._part = "forward"

    def enter(self, bucket: _Bucket) -> None:
        """Count that a forward enters a unit that needs the bucket."""
        if self._microbatch is not None and self._part == "forward":
            self._entries[self._microbatch][bucket] += 1

    def param_done(self, bucket: _Bucket) -> bool:
        """Count that the backward is done with a parameter: its gradient is written or deferred. Returns True after the
        last one, when the bucket's values may be released."""
        self._params_done[bucket] += 1
        return self._part != "second half" and self._params_done[bucket] == self._expected(bucket)

    def grad_done(self, bucket: _Bucket) -> bool:
        """Count a written gradient. Returns True after the microbatch's last one, when the bucket may be reduced."""
        self._grads_done[bucket] += 1
        if self._part == "second half":
            return self._grads_done[bucket] == self._deferred[self._microbatch][bucket]
        is_complete = self._grads_done[bucket] == self._expected(bucket)
        if is_complete and self._microbatch is None:  # a loop that never calls `begin` has no other end of a backward
            del self._grads_done[bucket]
            del self._params_done[bucket]
        return is_complete

    def _expected(self, bucket: _Bucket) -> int | None:
        """Return the number of gradients of the current backward; None: unknown."""
        entries = self._entries.get(self._microbatch, {}).get(bucket, 0)
        learned = self._learned.get((bucket, entries))
        if learned is None and entries > 1 and bucket in self._inferred:
            return None
        # not fewer than declared: fewer gradients may be due to a branch not taken
        return max(learned or 0, self._declared[bucket])
