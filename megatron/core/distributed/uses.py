"""How many gradients a bucket gets in one backward: what tells that the backward is through with it. Pure.

A parameter that one layer uses once gets one gradient. A layer that is applied several times in a forward gets one or
several: autograd adds up the uses before it hands the sum on, a layer that writes into the buffer itself writes once a
use. So the number is found out: of a unit entered once it is at first taken to be what the model says (one a parameter,
or its `uses`), of a unit entered more often nothing is known unless the model says it, and it is kept until the end of
the first such backward. From then on it is the largest number that a backward of as many entries had, and no less than
was said: a bucket may wait longer than it must, never give up early.

A backward whose weight gradients are put off is in two: the first passes over all parameters, and is through with their
values; the second writes as many gradients as the first has put off.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Literal

_Bucket = Hashable
_Part = Literal["forward", "backward", "first half", "second half"]  # of a microbatch; halves of a split backward


class Uses:
    """Counts of one model chunk. said: the gradients of one backward, by bucket; guessed: the buckets whose number
    holds for units that are entered once."""

    def __init__(self, said: Mapping[_Bucket, int], guessed: Collection[_Bucket]):
        self._said, self._guessed = dict(said), set(guessed)
        self._known: dict[tuple[_Bucket, int], int] = {}  # by bucket and times entered
        self.forget()

    def forget(self) -> None:
        """Nothing is under way: before a step, also one after an error."""
        self._entered: dict[int, Counter[_Bucket]] = {}  # by microbatch, until its backward
        self._put_off: dict[int, Counter[_Bucket]] = {}  # gradients, by microbatch, until they are written
        self._microbatch: int | None = None
        self._part: _Part = "forward"
        self._passed: Counter[_Bucket] = Counter()
        self._written: Counter[_Bucket] = Counter()

    def begin(self, microbatch: int, *, backward: bool, puts_off: bool = False) -> None:
        """A part of this microbatch's work follows. `puts_off`: a backward that leaves weight gradients to a part of
        their own."""
        self.end()
        self._microbatch = microbatch
        if not backward:
            self._entered[microbatch] = Counter()
        elif puts_off:
            self._part = "first half"
        else:
            self._part = "second half" if microbatch in self._put_off else "backward"

    def end(self) -> None:
        """What was begun is complete."""
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
        """The backward has come past a parameter, whose gradient is written or put off. True if it is through with them
        all."""
        self._passed[bucket] += 1
        return self._part != "second half" and self._passed[bucket] == self._expected(bucket)

    def writes(self, bucket: _Bucket) -> bool:
        """A gradient was written. True if all of this microbatch are."""
        self._written[bucket] += 1
        if self._part == "second half":
            return self._written[bucket] == self._put_off[self._microbatch][bucket]
        is_complete = self._written[bucket] == self._expected(bucket)
        if is_complete and self._microbatch is None:  # nobody says where a backward ends
            del self._written[bucket], self._passed[bucket]
        return is_complete

    def _expected(self, bucket: _Bucket) -> int | None:
        entries = self._entered.get(self._microbatch, {}).get(bucket, 0)
        known = self._known.get((bucket, entries))
        if known is None and entries > 1 and bucket in self._guessed:
            return None
        return max(known or 0, self._said[bucket])  # less may be a branch that was not taken
