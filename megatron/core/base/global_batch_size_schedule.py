"""The global batch size of each step is constant, ramped up, or given by a table. Pure numbers.

Every schedule of batch sizes is a table of rows (first sample, size). A step takes the last row that begins at or
before the samples consumed so far. The size depends on nothing else, so a resumed run continues exactly, in any layout.

    --rampup-batch-size 4 4 60 --global-batch-size 16       0:4  20:8  40:12  60:16
    steps                                                   4 4 4 4 4 | 8 8 8 | 12 12 | 16 16 ...
                                                            0         20      44      68
"""

import math
import re
from dataclasses import dataclass

from megatron.core.base.dataclass_flags import ConfigError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"\d+(?:\.\d+)?[KMBT]?"
_ENTRY = re.compile(f"({_NUMBER}):({_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes by samples consumed. `multiple`: each size is rounded down to a multiple of it."""

    rows: tuple[tuple[int, int], ...]
    multiple: int = 1

    def at(self, samples: int) -> int:
        """Return the size of the step that begins after `samples` samples."""
        return self._rounded([size for first, size in self.rows if first <= samples][-1])

    @property
    def last(self) -> int:
        """The final size, also used for validation."""
        return self._rounded(self.rows[-1][1])

    @property
    def sizes(self) -> list[int]:
        """All sizes, in the order of the rows."""
        return [self._rounded(size) for _, size in self.rows]

    def steps(self, first: int, past_last: int) -> int:
        """Return the number of whole steps from sample `first` that end at or before sample `past_last`."""
        steps = 0
        ends = [first_of_row for first_of_row, _ in self.rows[1:]] + [past_last]
        for (_, row_size), end in zip(self.rows, ends):
            size = self._rounded(row_size)
            # A step belongs to this row if it begins before the next row, and counts if it ends by `past_last`.
            begin_before_end = -(-(end - first) // size)  # rounded up
            end_by_last = (past_last - first) // size
            steps_of_row = max(0, min(begin_before_end, end_by_last))
            steps += steps_of_row
            first += steps_of_row * size
            if first < end:
                break  # another step of this size does not fit
        return steps

    def consumed_after(self, first: int, steps: int) -> int:
        """Return the samples consumed after `steps` more steps from sample `first`."""
        ends = [first_of_row for first_of_row, _ in self.rows[1:]] + [math.inf]
        for (_, row_size), end in zip(self.rows, ends):
            size = self._rounded(row_size)
            steps_of_row = steps
            if end != math.inf:
                begin_before_end = max(0, -(-(end - first) // size))  # rounded up
                steps_of_row = min(steps, begin_before_end)
            first += steps_of_row * size
            steps -= steps_of_row
        return first

    def _rounded(self, size: int) -> int:
        """Round a size down to a multiple of `multiple`."""
        return size - size % self.multiple


def constant_size(size: int) -> BatchSizes:
    return BatchSizes(((0, size),))


def ramp(start: int, increment: int, samples: int, size: int) -> BatchSizes:
    """Return Megatron's ramp of the batch size: from `start` to `size` by `increment`.

    Its stages have equal length and cover `samples` samples.

    A step takes the size of the stage in which it begins. Raises ConfigError if the numbers do not fit.
    """
    flag = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment, samples) < 1:
        raise ConfigError(f"{flag}: START, INCREMENT and SAMPLES must be at least 1")
    if start >= size:
        raise ConfigError(
            f"{flag}: START must be below --global-batch-size ({size}); leave out the flag for a constant batch size"
        )
    if (size - start) % increment:
        span = f"--global-batch-size ({size}) - START ({size - start})"
        raise ConfigError(f"{flag}: {span} must be a multiple of INCREMENT")
    stages = (size - start) // increment
    rows = [(_first_of_stage(k, samples / stages), start + k * increment) for k in range(stages)]
    return BatchSizes((*rows, (min(_first_of_stage(stages, samples / stages), samples + 1), size)))


def _first_of_stage(stage: int, length: float) -> int:
    """Return the least n with int(n / length) == stage. Megatron divides floats, which may round below the integer."""
    first = max(0, math.ceil(stage * length) - 1)
    while int(first / length) < stage:
        first += 1
    return first


def parse_sizes_by_tokens(text: str, seq_length: int) -> BatchSizes:
    """Parse "0:768 250B:1536 ...": TOKENS:SIZE, the size from so many consumed tokens on (K, M, B, T: 10^3 to 10^12).

    Tokens // seq_length gives samples, as in Megatron. Raises ConfigError for other text.
    """
    rows = []
    flag = f"--step-batch-size-schedule {text!r}"
    for entry in text.replace(",", " ").split():
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(f"{flag}: {entry!r} is not TOKENS:SIZE, such as 250B:1536 (suffixes K, M, B, T)")
        rows.append((_number(match[1]) // seq_length, _number(match[2])))
    rows.sort()
    firsts = [first for first, _ in rows]
    if not rows or firsts[0] != 0:
        raise ConfigError(f"{flag}: the list must begin with 0:SIZE")
    if len(set(firsts)) < len(firsts):
        raise ConfigError(f"{flag}: two sizes begin at the same sample (--seq-length {seq_length}); change one of them")
    if any(size < 1 for _, size in rows):
        raise ConfigError(f"{flag}: a size must be at least 1")
    return BatchSizes(tuple(rows))


def _number(text: str) -> int:
    """Read a number with a suffix: "250B" is 250 * 10^9."""
    value = text.rstrip("KMBTkmbt")
    suffix = text[len(value) :].upper()
    return int(float(value) * _SUFFIXES[suffix])
