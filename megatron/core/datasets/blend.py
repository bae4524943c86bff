"""Blends: which data set gives sample i. Pure functions; every choice equals Megatron's.

Before each sample every data set has an error: weight x samples so far - its own samples so far. The data set with the
largest
error, furthest behind its share, gives the next sample:

    weights 0.5, 0.3, 0.2       data set      0  1  2  0  0  1  0  2  1  0 ...
                                its sample    0  0  0  1  2  1  3  1  2  4 ...

Sample k of a data set always comes before its sample k + 1, so each data set keeps its own shuffled order.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import missing_file

MAX_DATASETS = np.iinfo(np.int16).max - 1

# Constants of `weighted_indices`; they change its speed and no choice:
_LANES = 1 << 12  # at most so many, and
_LANE_ELEMENTS = 1 << 13  # numbers at a time, which stay in cache
_WARM_UP = 4  # rows per data set that a lane walks before its first
_RIVALS = 128  # data sets that a block of rows is first tried with
_BLOCK = 64  # rows


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
        """Problems with the weights; no file is read."""
        if len(self.prefixes) > MAX_DATASETS:
            return [f"{len(self.prefixes)} data sets; a blend holds at most {MAX_DATASETS}: merge some"]
        weighted = list(zip(self.prefixes, self.weights or ()))
        problems = [
            f"weight {weight} of {prefix} must be a positive number; leave the data set out or give it a share"
            for prefix, weight in weighted
            if not (weight > 0 and math.isfinite(weight))
        ]
        total = sum(weight for _, weight in weighted)
        return problems or [
            f"weight {weight} of {prefix} is no share of {total}, the sum of the weights; give numbers of like size"
            for prefix, weight in weighted
            if not weight / total > 0
        ]

    def missing_files(self) -> list[str]:
        """A line for each prefix that lacks a file, with prefixes that may be meant."""
        numbers = [prefix for prefix in self.prefixes if _number(prefix) is not None]
        hint = f"; is {numbers[0]} a weight? then every prefix needs one before it: 0.3 A 0.7 B" if numbers else ""
        found = [(prefix, missing_file(prefix)) for prefix in self.prefixes]
        return [f"--data-path {prefix}: {problem}{hint}" for prefix, problem in found if problem]


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
    """The next sample always from the data set that is furthest behind its share; of several, the first.

    Every choice depends on the choice before. After a wrong start the choices soon become right, since a sample that was
    taken
    too early is not taken again. So many lanes, each a range of rows, walk at once, one row of each at a time:

        lane 0      0------>           from the true counts, all 0
        lane 1          ..------>      from counts that are guessed, so many rows before its first
        lane 2                ..----->

    A lane is right if it began with the counts at which the right lane before it ended. Any other lane walks again from
    those
    counts. Thus every choice is made by the rule, in the same float64 steps.
    """
    if len(set(shares)) == 1:  # in turn; the walk below would tell a thousand ties apart at every row
        return BlendIndices((np.arange(size) % len(shares)).astype(np.int16), np.arange(size) // len(shares))
    weights, few = np.array(shares), min(len(shares), _RIVALS)
    lanes = max(1, min(_LANES, _LANE_ELEMENTS // few, size // (2 * _WARM_UP * len(shares))))
    rows = -(-size // lanes)
    firsts = np.arange(lanes) * rows
    begins = np.zeros((lanes, len(shares)))
    if lanes > 1:
        warm_up = _WARM_UP * len(shares)
        begins[1:] = _guessed_counts(weights, firsts[1:] - warm_up)
        _walk(weights, begins[1:], firsts[1:] - warm_up, warm_up)
    ends = begins.copy()
    chosen, numbers = _walk(weights, ends, firsts, rows)
    while (wrong := 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(axis=1))).size:
        begins[wrong] = counts = ends[wrong - 1]
        chosen[:, wrong], numbers[:, wrong] = _walk(weights, counts, firsts[wrong], rows)
        ends[wrong] = counts
    return BlendIndices(chosen.T.reshape(-1)[:size], numbers.T.reshape(-1)[:size])


def _guessed_counts(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """About the samples of each data set before each of `rows`: its share, rounded so that the sum is right. [lanes,
    sets]"""
    exact = weights * rows[:, None]
    counts = np.floor(exact)
    ranks = np.argsort(np.argsort(counts - exact, axis=1), axis=1)
    return counts + (ranks < (rows - counts.sum(axis=1))[:, None])


def _walk(weights: np.ndarray, counts: np.ndarray, firsts: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The choices of `rows` rows of each lane, and their numbers, [rows, lanes]; lane l goes from row firsts[l] on.

    counts: [lanes, data sets], the samples so far; those of the walk are added to it.
    """
    chosen, numbers = np.empty((rows, len(counts)), np.int16), np.empty((rows, len(counts)), np.int64)
    few = _RIVALS
    for done in range(0, rows, _BLOCK):
        past = min(done + _BLOCK, rows)
        few = _walk_block(weights, counts, firsts + done, few, chosen[done:past], numbers[done:past])
    return chosen, numbers


def _walk_block(
    weights: np.ndarray, counts: np.ndarray, firsts: np.ndarray, few: int, chosen: np.ndarray, numbers: np.ndarray
) -> int:
    """As `_walk`, for a few rows, into `chosen` and `numbers`, [rows, lanes].

    Only the `few` data sets with the largest errors after the last row are looked at. An error that is not chosen only
    grows, so they are enough if every choice beats the largest last error of the others. Lanes where one does not walk again
    with all. The next block's `few` is returned.
    """
    if few >= len(weights):
        _walk_rows(weights, counts, firsts, chosen, numbers)
        return few
    last = weights * np.maximum(firsts + len(chosen) - 1, 1)[:, None] - counts
    order = np.argpartition(last, -few - 1, axis=1)
    best_other = np.take_along_axis(last, order[:, -few - 1 : -few], axis=1)[:, 0]
    rivals = np.sort(order[:, -few:], axis=1)  # of equal errors the first is chosen
    some = np.take_along_axis(counts, rivals, axis=1)
    least = _walk_rows(weights[rivals], some, firsts, chosen, numbers)
    chosen[:] = rivals[np.arange(len(counts)), chosen]
    unsure = np.flatnonzero(least <= best_other)
    again = counts[unsure]
    np.put_along_axis(counts, rivals, some, axis=1)
    if not unsure.size:
        return few
    anew = chosen[:, unsure], numbers[:, unsure]
    _walk_rows(weights, again, firsts[unsure], *anew)
    counts[unsure] = again
    chosen[:, unsure], numbers[:, unsure] = anew
    return 2 * few if 2 * len(unsure) > len(counts) else few


def _walk_rows(
    weights: np.ndarray, counts: np.ndarray, firsts: np.ndarray, chosen: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """As `_walk_block`, with all data sets. The least error that was chosen in each lane, [lanes].

    weights: [data sets], or [lanes, data sets] where each lane has its own.
    """
    weights = np.broadcast_to(weights, counts.shape).copy()  # numpy is twice as fast where nothing is broadcast
    samples, errors = np.empty(counts.shape), np.empty(counts.shape)
    least = np.full(len(counts), np.inf)
    starts = np.arange(len(counts)) * counts.shape[1]
    flat_counts, flat_errors = counts.reshape(-1), errors.reshape(-1)
    for row in range(len(chosen)):
        if row < 2:
            samples[:] = np.maximum(firsts + row, 1)[:, None]
        else:
            samples += 1
        np.multiply(weights, samples, out=errors)
        np.subtract(errors, counts, out=errors)
        best = errors.argmax(axis=1)
        chosen[row] = best
        best += starts
        np.minimum(least, flat_errors[best], out=least)
        numbers[row] = before = flat_counts[best]
        flat_counts[best] = before + 1
    return least


def exhaustive_indices(sizes: list[int]) -> BlendIndices:
    """The order of all samples of all data sets: shares follow the sizes, and a data set without samples left is passed
    over.

    No data set runs out before the last few rows, so all rows before them are those of `weighted_indices`.
    """
    shares, left = normalized(sizes), np.array(sizes)
    begun = weighted_indices(shares, max(0, sum(sizes) - 4 * len(sizes))).dataset_index
    counts = np.bincount(begun, minlength=len(sizes))
    if (counts > left).any():  # a data set ran out earlier: walk all rows one by one
        begun, counts = begun[:0], np.zeros_like(counts)
    chosen = np.append(begun, np.empty(sum(sizes) - len(begun), np.int16))
    weights = np.array(shares)
    for i in range(len(begun), len(chosen)):
        chosen[i] = d = np.where(counts < left, weights * max(i, 1) - counts, -np.inf).argmax()
        counts[d] += 1
    return BlendIndices(chosen, _number_within(chosen, len(sizes)))


def _number_within(chosen: np.ndarray, count: int) -> np.ndarray:
    """The number of each sample within its data set, of `count` data sets: int64 [samples]."""
    order = np.argsort(chosen, kind="stable")  # a radix sort
    counts = np.bincount(chosen, minlength=count)
    numbers = np.empty(len(chosen), np.int64)
    numbers[order] = np.arange(len(chosen)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers


class BlendedDataset:
    """Samples of several data sets in the order of `indices`. Raises ValueError if a data set has fewer than the
    order takes."""

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
