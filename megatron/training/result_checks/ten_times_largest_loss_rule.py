"""Values far larger than any before are detected: spikes of the loss, and large gradients. Pure.

Megatron-LM's rule (`is_unexpectedly_large`): a value is unexpected if it is at least 10 times the largest of the first
100.
"""

import math
from typing import Any

FACTOR = 10.0
SAMPLES = 100  # the first values, which are only learned from


class SpikeDetector:
    """Watch one kind of values.

    state: a dictionary that the checkpoint keeps, so that a resumed run decides as an uninterrupted one.
    """

    def __init__(self, state: dict[str, Any]):
        self._state = state
        state.setdefault("seen", 0)
        state.setdefault("largest", 0.0)

    @property
    def largest(self) -> float:
        """The largest of the first values."""
        return self._state["largest"]

    @property
    def threshold_text(self) -> str:
        """The limit that a value has exceeded, in words."""
        return f"at least {FACTOR:g} times the largest of the first {SAMPLES} ({self.largest:.6g})"

    def is_too_large(self, value: float, samples: int = 1) -> bool:
        """Whether a value, the largest of `samples` values, is unexpected.

        The first ones are not, nor NaN or infinity.
        """
        value = abs(value)
        if not math.isfinite(value):
            return False
        if self._state["seen"] < SAMPLES:
            self._state["seen"] += samples
            self._state["largest"] = max(self.largest, value)
            return False
        return value >= FACTOR * self.largest
