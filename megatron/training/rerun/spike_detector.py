"""Values that are far larger than any before: spikes of the loss, and large gradients. Pure.

Megatron-LM's rule (`is_unexpectedly_large`): a value is unexpected if it is at least 10 times the largest of the first 100.
"""

import math
from typing import Any

FACTOR, SAMPLES = 10.0, 100


class LargeValues:
    """Looks at one kind of values. state: a dictionary that a checkpoint keeps, so that a resumed run judges as before."""

    def __init__(self, state: dict[str, Any]):
        self._state = state
        state.setdefault("seen", 0)
        state.setdefault("largest", 0.0)

    @property
    def largest(self) -> float:
        """The largest of the first values."""
        return self._state["largest"]

    @property
    def than(self) -> str:
        """What a value that is too large exceeds, in words."""
        return f"at least {FACTOR:g} times the largest of the first {SAMPLES} ({self.largest:.6g})"

    def is_too_large(self, value: float, samples: int = 1) -> bool:
        """Whether the value, the largest of `samples` values, is unexpected. The first ones are not, nor NaN or infinity."""
        value = abs(value)
        if not math.isfinite(value):
            return False
        if self._state["seen"] < SAMPLES:
            self._state["seen"] += samples
            self._state["largest"] = max(self.largest, value)
            return False
        return value >= FACTOR * self.largest
