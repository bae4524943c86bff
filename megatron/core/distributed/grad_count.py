"""The number of gradients that a bucket gets in one backward; it tells when the backward is done with the bucket. Pure.

A parameter that one layer uses once gets one gradient. A layer applied several times in a forward gets one or more:
autograd sums the uses first, while a layer that writes into the buffer itself writes once per use. So the number is
learned:

    unit entered once           at first the number the model declares: one per parameter, or its `uses`
    unit entered more often     unknown, unless declared: the bucket is kept until the first such backward ends
    afterwards                  the largest number seen in a backward with as many entries, and at least the declared one

A bucket may therefore be released later than necessary, but never too early.

A backward with deferred weight gradients has two halves. The first passes all parameters and no longer needs their
values. The second writes the gradients that the first has deferred.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Literal

_Bucket = Hashable
_Part = Literal["forward", "backward", "first half", "second half"]  # halves of a backward with deferred gradients


class Uses:
    """The counts of one model chunk. said: gradients in one backward, by bucket; guessed: buckets whose number holds
    only for units that are entered once."""

    def __init__(self, said: Mapping[_Bucket, int], guessed: Collection[_Bucket]):
        self._said, self._guessed = dict(said), set(guessed)
        self._known: dict[tuple[_Bucket, int], int] = {}  # by bucket and times entered
        self.forget()

    def forget(self) -> None:
        """Forget everything in flight: before a step, also after an error."""
        self._entered: dict[int, Counter[_Bucket]] = {}  # by microbatch, until its backward
        self._put_off: dict[int, Counter[_Bucket]] = {}  # deferred gradients, by microbatch
        self._microbatch: int | None = None
        self._part: _Part = "forward"
        self._passed: Counter[_Bucket] = Counter()
        self._written: Counter[_Bucket] = Counter()

    def begin(self, microbatch: int, *, backward: bool, puts_off: bool = False) -> None:
        """Begin a forward or backward of this microbatch. `puts_off`: the backward defers its weight gradients."""
        self.end()
        self._microbatch = microbatch
        if not backward:
            self._entered[microbatch] = Counter()
        elif puts_off:
            self._part = "first half"
        else:
            self._part = "second half" if microbatch in self._put_off else "backward"

    def end(self) -> None:
        """The current forward or backward is complete."""
        if self._part in ("backward", "first half"):
            entered = self._entered.pop(self._microbatch, {})
            for bucket, count in self._passed.items():
                key = bucket, entered.get(bucket, 0)
                self._known[key] = max(count, self._known.get(key, 0))
            if self._part == "first half":
                self._put_off[self._microbatch] = self._passed - self._written
        elif self._part == "second half":
            self._put_off.pop(self._microbatch, None)
        self._passed, self._written = Counter(), Counter()
        self._part = "forward"

    def enter(self, bucket: _Bucket) -> None:
        """A forward enters a unit that needs the bucket."""
        if self._microbatch is not None and self._part == "forward":
            self._entered[self._microbatch][bucket] += 1

    def passes(self, bucket: _Bucket) -> bool:
        """The backward has passed a parameter: its gradient is written or deferred. Returns True after the last
        parameter."""
        self._passed[bucket] += 1
        return self._part != "second half" and self._passed[bucket] == self._expected(bucket)

    def writes(self, bucket: _Bucket) -> bool:
        """A gradient was written. Returns True after the last one of this microbatch."""
        self._written[bucket] += 1
        if self._part == "second half":
            return self._written[bucket] == self._put_off[self._microbatch][bucket]
        is_complete = self._written[bucket] == self._expected(bucket)
        if is_complete and self._microbatch is None:  # a loop that never calls `begin` has no other end of a backward
            del self._written[bucket], self._passed[bucket]
        return is_complete

    def _expected(self, bucket: _Bucket) -> int | None:
        entries = self._entered.get(self._microbatch, {}).get(bucket, 0)
        known = self._known.get((bucket, entries))
        if known is None and entries > 1 and bucket in self._guessed:
            return None
        return max(known or 0, self._said[bucket])  # fewer gradients may be due to a branch not taken
