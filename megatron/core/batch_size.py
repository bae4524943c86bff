"""How many samples each step has: always as many, ramped up, or by a table. Pure numbers.

Every schedule of batch sizes is a table of rows (first sample, size): a step that begins after `samples` samples has the size of
the last row whose first sample is not above. What a step has follows from the samples consumed alone, so a resumed run goes on
as the stopped one would have, in any layout.

    --rampup-batch-size 4 4 60 --global-batch-size 16       0:4  20:8  40:12  60:16
    steps                                                   4 4 4 4 4 | 8 8 8 | 12 12 | 16 16 ...
                                                            0         20      44      68
"""

import math
import re
from dataclasses import dataclass

from megatron.core.config import ConfigError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"\d+(?:\.\d+)?[KMBT]?"
_ENTRY = re.compile(f"({_NUMBER}):({_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizes:
    """Sizes by the samples consumed. `multiple`: what each is rounded down to a multiple of, if it has to run so."""

    rows: tuple[tuple[int, int], ...]
    multiple: int = 1

    def at(self, samples: int) -> int:
        """The size of the step that begins after `samples` samples."""
        return self._runs([size for first, size in self.rows if first <= samples][-1])

    @property
    def last(self) -> int:
        """The size at the end, which is also that of validation."""
        return self._runs(self.rows[-1][1])

    @property
    def sizes(self) -> list[int]:
        """All sizes that can occur, in the order of the rows."""
        return [self._runs(size) for _, size in self.rows]

    def steps(self, first: int, past_last: int) -> int:
        """How many whole steps begin after `first` samples and end within `past_last`; an incomplete one is left out."""
        count, ends = 0, [row[0] for row in self.rows[1:]] + [past_last]
        for (_, wanted), end in zip(self.rows, ends):
            size = self._runs(wanted)
            # Steps that begin before the next row, and of those the ones that end in time.
            here = max(0, min(-(-(end - first) // size), (past_last - first) // size))
            count, first = count + here, first + here * size
            if first < end:
                break  # the next step has this size too, and does not fit
        return count

    def consumed_after(self, first: int, steps: int) -> int:
        """The samples consumed once `steps` more steps are made after `first` samples."""
        for (_, wanted), end in zip(self.rows, [row[0] for row in self.rows[1:]] + [math.inf]):
            size = self._runs(wanted)
            here = steps if end == math.inf else min(steps, max(0, -(-(end - first) // size)))
            first, steps = first + here * size, steps - here
        return first

    def _runs(self, size: int) -> int:
        return size - size % self.multiple


def constant_size(size: int) -> BatchSizes:
    return BatchSizes(((0, size),))


def ramp(start: int, increment: int, samples: int, size: int) -> BatchSizes:
    """From `start` to `size` by `increment`, in stages of equally many samples that add up to `samples`, as Megatron's.

    A step takes the size of the stage in which it begins. Raises ConfigError for a ramp that cannot be.
    """
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment, samples) < 1:
        raise ConfigError(f"{given}: START, INCREMENT and SAMPLES must be at least 1")
    if start >= size:
        raise ConfigError(
            f"{given}: START must be below --global-batch-size ({size}); without a ramp leave the flag out"
        )
    if (size - start) % increment:
        raise ConfigError(
            f"{given}: --global-batch-size ({size}) - START ({size - start}) must be a multiple of INCREMENT; change one"
        )
    stages = (size - start) // increment
    rows = [(_first_of_stage(k, samples / stages), start + k * increment) for k in range(stages)]
    return BatchSizes((*rows, (min(_first_of_stage(stages, samples / stages), samples + 1), size)))


def _first_of_stage(stage: int, length: float) -> int:
    """The least n with int(n / length) == stage in floating point, where Megatron's division may fall short of the integer."""
    first = max(0, math.ceil(stage * length) - 1)
    while int(first / length) < stage:
        first += 1
    return first


def size_table(text: str, seq_length: int) -> BatchSizes:
    """From "0:768 250B:1536 ...": the size once so many tokens (K, M, B, T: 10^3 to 10^12) are consumed.

    Tokens become samples by whole division, as in Megatron. Raises ConfigError for text that is no such table.
    """
    rows, given = [], f"--step-batch-size-schedule {text!r}"
    for entry in text.replace(",", " ").split():
        if (found := _ENTRY.fullmatch(entry)) is None:
            raise ConfigError(f"{given}: {entry!r} is not TOKENS:SIZE, such as 250B:1536 (suffixes K, M, B, T)")
        rows.append((_number(found[1]) // seq_length, _number(found[2])))
    rows.sort()
    firsts = [first for first, _ in rows]
    if not rows or firsts[0] != 0:
        raise ConfigError(f"{given}: it must say the size from token 0 on, as 0:SIZE")
    if len(set(firsts)) < len(firsts):
        raise ConfigError(
            f"{given}: two sizes begin at the same sample (of --seq-length {seq_length} tokens); change one"
        )
    if any(size < 1 for _, size in rows):
        raise ConfigError(f"{given}: a size must be at least 1")
    return BatchSizes(tuple(rows))


def _number(text: str) -> int:
    value = text.rstrip("KMBTkmbt")
    return int(float(value) * _SUFFIXES[text[len(value) :].upper()])
