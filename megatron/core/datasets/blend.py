"""Several data sets as one: which of them gives sample i, Megatron's choices to the last one, as pure functions.

Before every sample each data set has an error, how far it is behind its share: weight x samples so far - its own samples so
far. The one that is furthest behind gives the next sample:

    weights 0.5, 0.3, 0.2       data set      0  1  2  0  0  1  0  2  1  0 ...
                                its sample    0  0  0  1  2  1  3  1  2  4 ...

Sample k of a data set always comes before its sample k + 1, so each data set keeps its own shuffled order.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_DATASETS = np.iinfo(np.int16).max - 1
_FEW = 12  # data sets up to which a loop in Python is faster than numpy over all of them


@dataclass(frozen=True)
class Blend:
    """The prefixes of a data path, and the weight of each; no weights: each data set once, as long as it is.

    is_single: one data set without a weight, which needs no blending.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def is_single(self) -> bool:
        return len(self.prefixes) == 1 and self.weights is None

    def problems(self) -> list[str]:
        """What is wrong with the weights, in words; nothing is read."""
        if len(self.prefixes) > MAX_DATASETS:
            return [f"{len(self.prefixes)} data sets; a blend holds at most {MAX_DATASETS}: merge some"]
        return [
            f"weight {weight} of {prefix} must be a positive number; leave the data set out or give it a share"
            for prefix, weight in zip(self.prefixes, self.weights or ())
            if not (weight > 0 and math.isfinite(weight))
        ]

    def missing_files(self) -> list[str]:
        """A line for each prefix that lacks a file, and what may be meant."""
        numbers = [prefix for prefix in self.prefixes if _number(prefix) is not None]
        hint = f"; is {numbers[0]} a weight? then every prefix needs one before it: 0.3 A 0.7 B" if numbers else ""
        lines = []
        for prefix in self.prefixes:
            missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not Path(path).is_file()]
            if missing:
                lines.append(
                    f"--data-path {prefix}: {missing[0]} does not exist; give the prefix of PREFIX.bin and PREFIX.idx, "
                    f"without the ending{hint}"
                )
        return lines


def parse_blend(words: list[str]) -> Blend:
    """`0.3 a 0.7 b` with weights, `a b c` without; a list whose every other word is no number is one without."""
    weights = [_number(word) for word in words[::2]]
    if words and len(words) % 2 == 0 and None not in weights:
        return Blend(tuple(words[1::2]), tuple(weights))  # type: ignore[arg-type]
    return Blend(tuple(words))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: tuple[float, ...] | list[float] | list[int]) -> list[float]:
    """The weights with the sum 1, as float64."""
    array = np.asarray(weights, np.float64)
    return (array / array.sum()).tolist()


def samples_of_each(size: int, shares: list[float], surplus: float = 0.0) -> list[int]:
    """How many of `size` samples each data set is asked for: rounded up, and up once more with the surplus."""
    return [math.ceil(math.ceil(size * share) * (1 + surplus)) for share in shares]


class BlendIndices(NamedTuple):
    """Sample i is sample dataset_sample_index[i] of data set dataset_index[i]."""

    dataset_index: np.ndarray  # [size] int16
    dataset_sample_index: np.ndarray  # [size] int64


def weighted_indices(shares: list[float], size: int) -> BlendIndices:
    """The next sample always from the data set that is furthest behind its share; of several, the first."""
    choose = _choose_of_few if len(shares) <= _FEW else _choose_of_many
    return _numbered(choose(shares, size), len(shares))


def exhaustive_indices(sizes: list[int]) -> BlendIndices:
    """All samples of all data sets: shares as the sizes are, without those that have no samples left."""
    shares = np.array([size / sum(sizes) for size in sizes])
    left, counts = np.array(sizes), np.zeros(len(sizes))
    chosen = np.empty(sum(sizes), np.int16)
    errors = np.empty(len(sizes))
    spent = left == 0
    for i in range(len(chosen)):
        np.multiply(shares, max(i, 1), out=errors)
        errors -= counts
        errors[spent] = -np.inf
        d = int(errors.argmax())
        chosen[i] = d
        counts[d] += 1
        spent[d] = counts[d] == left[d]
    return _numbered(chosen, len(sizes))


def _choose_of_few(shares: list[float], size: int) -> np.ndarray:
    chosen = np.empty(size, np.int16)
    rivals = [[d, share, 0] for d, share in enumerate(shares)]  # number, share, samples so far
    for i in range(size):
        step = float(max(i, 1))
        best, most = rivals[0], shares[0] * step - rivals[0][2]
        for rival in rivals[1:]:
            error = rival[1] * step - rival[2]
            if error > most:
                best, most = rival, error
        best[2] += 1
        chosen[i] = best[0]
    return chosen


def _choose_of_many(shares: list[float], size: int) -> np.ndarray:
    chosen = np.empty(size, np.int16)
    weights, counts, errors = np.array(shares), np.zeros(len(shares)), np.empty(len(shares))
    for i in range(size):
        np.multiply(weights, max(i, 1), out=errors)
        np.subtract(errors, counts, out=errors)
        d = errors.argmax()
        counts[d] += 1.0
        chosen[i] = d
    return chosen


def _numbered(chosen: np.ndarray, count: int) -> BlendIndices:
    return BlendIndices(chosen, number_within(chosen, count))


def number_within(chosen: np.ndarray, count: int) -> np.ndarray:
    """The number that each sample has within its data set, of `count` data sets: int64."""
    order = np.argsort(chosen, kind="stable")  # a radix sort
    ends = np.cumsum(np.bincount(chosen, minlength=count))
    numbers = np.empty(len(chosen), np.int64)
    for d in range(count):
        first = int(ends[d - 1]) if d else 0
        numbers[order[first : ends[d]]] = np.arange(ends[d] - first)
    return numbers


class BlendedDataset:
    """Samples of several data sets in the order of `indices`. Raises ValueError if one is asked for more than it has."""

    def __init__(self, datasets: list, indices: BlendIndices, names: list[str]):
        self.datasets, self.indices = datasets, indices
        asked = np.bincount(indices.dataset_index, minlength=len(datasets))
        for name, dataset, count in zip(names, datasets, asked.tolist()):
            if count > len(dataset):
                raise ValueError(
                    f"the blend takes {count} samples of {name}, which has {len(dataset)}; raise "
                    "--mid-level-dataset-surplus, or give it a smaller weight"
                )

    def __len__(self) -> int:
        return len(self.indices.dataset_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return self.datasets[self.indices.dataset_index[i]][int(self.indices.dataset_sample_index[i])]
