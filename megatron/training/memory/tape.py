"""The words in which a stage's activations are told: steps, in segments, on a tape. Pure."""

from typing import NamedTuple

Saved = tuple[int, int]  # a memory that autograd saves: its bytes, and those of an element


class Step(NamedTuple):
    """One operation of a stage, in bytes."""

    name: str
    keeps: int
    grad_out: int
    grad_in: int
    beside: int = 0  # in the backward
    waiting: int = 0  # gradient of the residual stream that waits for the branch
    deferred: int = 0  # factors that stay if the weight gradient is put off
    deferred_beside: int = 0  # room for that weight gradient
    saves: tuple[Saved, ...] = ()  # the memories of what it keeps
    reads: tuple[Saved, ...] = ()  # of what other steps keep
    at_once: int | None = None  # the most of these memories that one of its operations reads; None: all
    forward: int = 0  # all that it makes at the peak of its forward, where its backward needs less


class Away(NamedTuple):
    """What of a segment waits for its backward in a tier. The segments of one layer have one `group`; groups count from 0."""

    group: int
    least: int  # elements of a memory that leaves
    moved: int  # bytes of what is kept that leave
    source: int  # of the memory that they lie in, which stays until they have left
    pieces: tuple[int, ...]  # bytes of each in the tier


class Segment(NamedTuple):
    """Steps that are kept, or of which only `kept_input` bytes are and the rest is computed again."""

    steps: tuple[Step, ...]
    kept_input: int | None = None
    part: int = 0  # of it, that stays beside the whole while the backward runs
    inputs: tuple[Saved, ...] = ()  # the memories of `kept_input`
    reads: tuple[Saved, ...] | None = None  # those of `inputs` that computing again reads; None: all
    lent: tuple[Saved, ...] = ()  # what it reads beside, that other segments keep
    away: Away | None = None
    slot: int = 0  # bytes of it in the stage's buffer of slots

    @property
    def keeps(self) -> int:
        """On the device, between forward and backward, and not in a slot."""
        kept = sum(step.keeps for step in self.steps) if self.kept_input is None else self.kept_input
        return kept - (self.away.moved if self.away else 0)

    @property
    def saves(self) -> tuple[Saved, ...]:
        return self.inputs if self.kept_input is not None else tuple(one for step in self.steps for one in step.saves)


Tape = tuple[Segment, ...]
