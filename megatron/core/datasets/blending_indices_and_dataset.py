"""Blends decide which data set gives sample i; every choice equals Megatron's (`helpers.cpp` in its core/datasets).

Before each sample every data set has an error: its weight x samples so far - its own samples so far. The data
set with the largest error is furthest behind its share, and gives the next sample; of equal errors the first
counts. As one loop:

    counts = [0] * len(weights)
    for i in range(size):
        errors = [weight * max(i, 1) - count for weight, count in zip(weights, counts)]
        d = argmax(errors)
        dataset_index[i] = d
        dataset_sample_index[i] = counts[d]
        counts[d] += 1

    weights 0.5, 0.3, 0.2       dataset_index          0  1  2  0  1  0  2  0  1  0 ...
                                dataset_sample_index   0  0  0  1  1  2  1  3  2  4 ...

Sample k of a data set always comes before its sample k + 1, so each data set keeps its own shuffled order.

`weighted_indices` makes these choices with numpy, many samples at a time: a Python loop takes microseconds a sample,
which is minutes for a long run; Megatron compiles it from C++, and this package has no compiled code.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import missing_file_problem

MAX_DATASETS = np.iinfo(np.int16).max - 1

# Constants of `weighted_indices`. They change its speed and no choice.
_MAX_LANES = 1 << 12
_LANE_ELEMENTS = 1 << 13  # lanes x candidates: so many float64 numbers stay in cache
_WARM_UP = 4  # rows per data set that a lane walks before its first row
_CANDIDATES = 128  # data sets that a block of rows is first tried with
_BLOCK = 64  # rows


@dataclass(frozen=True)
class Blend:
    """The prefixes of a data path, and the weight of each.

    Without weights every data set is read once, whatever its length.

    is_single: one data set without a weight, which needs no blending.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def is_single(self) -> bool:
        return len(self.prefixes) == 1 and self.weights is None

    def problems(self) -> list[str]:
        """Return problems with the weights; no file is read."""
        if len(self.prefixes) > MAX_DATASETS:
            return [f"{len(self.prefixes)} data sets; a blend holds at most {MAX_DATASETS}: merge some"]
        weighted = list(zip(self.prefixes, self.weights or ()))
        problems = []
        for prefix, weight in weighted:
            if not (weight > 0 and math.isfinite(weight)):
                problems.append(
                    f"weight {weight} of {prefix} must be a positive number; leave the data set out or give it a share"
                )
        if problems:
            return problems
        # positive weights may still be infinite in sum, or so unlike that a share is 0 in float64
        total = sum(weight for _, weight in weighted)
        for prefix, weight in weighted:
            if not weight / total > 0:
                problems.append(
                    f"weight {weight} of {prefix} is not a share of {total}, the sum of the weights; give numbers of "
                    "similar size"
                )
        return problems

    def missing_files(self) -> list[str]:
        """Return a line for each prefix that lacks a file, with prefixes that may be meant."""
        numbers = [prefix for prefix in self.prefixes if _as_number(prefix) is not None]
        hint = f"; is {numbers[0]} a weight? then every prefix needs one before it: 0.3 A 0.7 B" if numbers else ""
        problems = []
        for prefix in self.prefixes:
            problem = missing_file_problem(prefix)
            if problem is not None:
                problems.append(f"--data-path {prefix}: {problem}{hint}")
        return problems


def parse_blend(words: list[str]) -> Blend:
    """Read `0.3 a 0.7 b` as a blend with weights, and `a b c` as one without.

    Only a list whose every other word is a number has weights.
    """
    weights = [_as_number(word) for word in words[::2]]
    if words and len(words) % 2 == 0 and None not in weights:
        return Blend(tuple(words[1::2]), tuple(weights))  # type: ignore[arg-type]
    return Blend(tuple(words))


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: tuple[float, ...] | list[float] | list[int]) -> list[float]:
    """Return the weights divided by their sum, in float64."""
    array = np.asarray(weights, np.float64)
    return (array / array.sum()).tolist()


def samples_of_each(size: int, shares: list[float], surplus: float = 0.0) -> list[int]:
    """Return how many of `size` samples each data set is asked for: rounded up, and up once more with the surplus."""
    return [math.ceil(math.ceil(size * share) * (1 + surplus)) for share in shares]


class BlendIndices(NamedTuple):
    """Sample i is sample dataset_sample_index[i] of data set dataset_index[i]. Both arrays are [samples]."""

    dataset_index: np.ndarray  # [size] int16
    dataset_sample_index: np.ndarray  # [size] int64


def weighted_indices(shares: list[float], size: int) -> BlendIndices:
    """Take each next sample from the data set that is furthest behind its share: the loop of the module's docstring.

    Returns dataset_index int16 [size] and dataset_sample_index int64 [size].

    Every choice depends on the choices before it, so the rows (one a sample) cannot simply be computed side by
    side. But the rule corrects itself: a sample that was taken too early is not taken again, so that after wrong
    counts the choices soon are the right ones. Therefore many ranges of rows, called lanes, are computed at once,
    and then checked:

        lane 0      0------>           begins with the true counts, all 0
        lane 1          ..------>      begins with guessed counts some rows (..) before its first row
        lane 2                ..----->

    A lane is right if it began with the counts with which a right lane before it ended. The other lanes are computed
    again from those counts, until all are right. So every choice follows from true counts by the same float64
    operations as in the loop, and a wrong guess costs nothing but time.
    """
    if len(set(shares)) == 1:  # data sets take turns; below, every row might be a tie of thousands of data sets
        return BlendIndices((np.arange(size) % len(shares)).astype(np.int16), np.arange(size) // len(shares))

    # divide the rows among lanes: not so many that the warm-up is more than half of the work
    weights = np.array(shares)
    warm_up = _WARM_UP * len(shares)
    lanes = max(1, min(_MAX_LANES, _LANE_ELEMENTS // min(len(shares), _CANDIDATES), size // (2 * warm_up)))
    rows = -(-size // lanes)  # of each lane, rounded up
    first_rows = np.arange(lanes) * rows

    # guess the counts with which each lane begins: its share of the samples before, corrected by the warm-up
    counts_at_begin = np.zeros((lanes, len(shares)))  # [lanes, data sets]
    if lanes > 1:
        warm_up_rows = first_rows[1:] - warm_up
        counts_at_begin[1:] = _guess_counts(weights, warm_up_rows)
        _choose(weights, counts_at_begin[1:], warm_up_rows, warm_up)

    # compute all lanes
    counts_at_end = counts_at_begin.copy()
    dataset_index, sample_index = _choose(weights, counts_at_end, first_rows, rows)  # [rows, lanes]

    # compute the lanes again that did not begin with the counts of the end of the lane before
    while True:
        is_wrong = (counts_at_begin[1:] != counts_at_end[:-1]).any(axis=1)
        wrong = 1 + np.flatnonzero(is_wrong)
        if not wrong.size:
            break
        counts = counts_at_end[wrong - 1]  # a copy, which _choose advances
        counts_at_begin[wrong] = counts
        dataset_index[:, wrong], sample_index[:, wrong] = _choose(weights, counts, first_rows[wrong], rows)
        counts_at_end[wrong] = counts

    # lay the lanes end to end
    return BlendIndices(dataset_index.T.reshape(-1)[:size], sample_index.T.reshape(-1)[:size])


def _guess_counts(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return about how many samples each data set has given before each of `rows`: [lanes, data sets].

    That is its share, rounded down; the data sets that lose most by rounding get one more, so that the sum is right.
    """
    exact = weights * rows[:, None]  # [lanes, data sets]
    counts = np.floor(exact)
    missing = rows - counts.sum(axis=1)  # [lanes]
    rank_by_loss = np.argsort(np.argsort(counts - exact, axis=1), axis=1)
    return counts + (rank_by_loss < missing[:, None])


def _choose(
    weights: np.ndarray, counts: np.ndarray, first_rows: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose `rows` rows of each lane; lane l begins at row first_rows[l].

    counts: [lanes, data sets], the samples given so far; the chosen ones are added to it in place. Returns the data set
    and its sample of each row, [rows, lanes] int16 and int64.
    """
    dataset_index = np.empty((rows, len(counts)), np.int16)
    sample_index = np.empty((rows, len(counts)), np.int64)
    num_candidates = _CANDIDATES
    for first in range(0, rows, _BLOCK):
        past = min(first + _BLOCK, rows)
        block = dataset_index[first:past], sample_index[first:past]
        num_candidates = _choose_block(weights, counts, first_rows + first, num_candidates, *block)
    return dataset_index, sample_index


def _choose_block(
    weights: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    num_candidates: int,
    dataset_index: np.ndarray,
    sample_index: np.ndarray,
) -> int:
    """Choose a block of rows of each lane, looking at few data sets; returns `num_candidates` for the next block.

    counts: [lanes, data sets], advanced in place. dataset_index, sample_index: [rows, lanes], filled in place.

    Of thousands of data sets only a few can be chosen within a block: those with the largest errors. An error grows
    from row to row until its data set is chosen. So the candidates are the data sets with the largest errors *after*
    the block, if none were chosen, and they suffice if each choice has a larger error than any other data set will have
    by then. Lanes where that does not hold are chosen again among all data sets.
    """
    if num_candidates >= len(weights):
        _choose_rows(weights, counts, first_rows, dataset_index, sample_index)
        return num_candidates

    # the candidates: the data sets with the largest errors at the last row
    last_samples = np.maximum(first_rows + len(dataset_index) - 1, 1)
    last_errors = weights * last_samples[:, None] - counts  # [lanes, data sets]
    order = np.argpartition(last_errors, -num_candidates - 1, axis=1)
    best_other = order[:, -num_candidates - 1 : -num_candidates]  # [lanes, 1], the best data set that is no candidate
    best_other_error = np.take_along_axis(last_errors, best_other, axis=1)[:, 0]  # [lanes]
    candidates = order[:, -num_candidates:]
    candidates = np.sort(candidates, axis=1)  # [lanes, candidates], in order, since of equal errors the first counts

    # choose among them
    candidate_counts = np.take_along_axis(counts, candidates, axis=1)  # [lanes, candidates]
    candidate_weights = weights[candidates]  # [lanes, candidates]
    smallest_chosen_error = _choose_rows(candidate_weights, candidate_counts, first_rows, dataset_index, sample_index)
    dataset_index[:] = candidates[np.arange(len(counts)), dataset_index]  # position among candidates -> data set

    # choose again among all where another data set might have been ahead of a choice
    unsure = np.flatnonzero(smallest_chosen_error <= best_other_error)
    counts_of_unsure = counts[unsure]  # a copy, from before the block
    np.put_along_axis(counts, candidates, candidate_counts, axis=1)
    if not unsure.size:
        return num_candidates
    dataset_index_of_unsure = dataset_index[:, unsure]
    sample_index_of_unsure = sample_index[:, unsure]
    _choose_rows(weights, counts_of_unsure, first_rows[unsure], dataset_index_of_unsure, sample_index_of_unsure)
    counts[unsure] = counts_of_unsure
    dataset_index[:, unsure] = dataset_index_of_unsure
    sample_index[:, unsure] = sample_index_of_unsure
    # where most lanes were unsure, the next block looks at twice as many
    return 2 * num_candidates if 2 * len(unsure) > len(counts) else num_candidates


def _choose_rows(
    weights: np.ndarray, counts: np.ndarray, first_rows: np.ndarray, dataset_index: np.ndarray, sample_index: np.ndarray
) -> np.ndarray:
    """Choose rows among all data sets given, one row of every lane at a time: the loop of the module's docstring.

    weights: [data sets], or [lanes, data sets] where each lane has its own. counts: [lanes, data sets], advanced in
    place. dataset_index, sample_index: [rows, lanes], filled in place. Returns the smallest error that was chosen in
    each lane, [lanes].
    """
    weights = np.broadcast_to(weights, counts.shape).copy()  # numpy is twice as fast where nothing is broadcast
    num_samples = np.empty(counts.shape)  # max(row, 1) of each lane, repeated for every data set
    errors = np.empty(counts.shape)
    smallest_chosen_error = np.full(len(counts), np.inf)
    # flat views and positions, since flat indexing is faster than indexing by two arrays
    lane_offsets = np.arange(len(counts)) * counts.shape[1]
    flat_counts = counts.reshape(-1)
    flat_errors = errors.reshape(-1)
    for row in range(len(dataset_index)):
        if row < 2:  # the loop counts from max(i, 1), so rows 0 and 1 of the run have the same number
            num_samples[:] = np.maximum(first_rows + row, 1)[:, None]
        else:
            num_samples += 1
        np.multiply(weights, num_samples, out=errors)
        np.subtract(errors, counts, out=errors)
        best = errors.argmax(axis=1)  # [lanes]
        dataset_index[row] = best
        best += lane_offsets
        np.minimum(smallest_chosen_error, flat_errors[best], out=smallest_chosen_error)
        counts_before = flat_counts[best]
        sample_index[row] = counts_before
        flat_counts[best] = counts_before + 1
    return smallest_chosen_error


def exhaustive_indices(sizes: list[int]) -> BlendIndices:
    """Take every sample of every data set once: shares follow the sizes.

    A data set without samples left is skipped. Returns dataset_index int16 and dataset_sample_index int64,
    [sum of sizes] each.

    As one loop, this is `weighted_indices` with an error of minus infinity for a data set that has run out. None runs
    out before the last few rows, so all rows before them are those of `weighted_indices`, and only the last ones are
    walked. Source: `build_exhaustive_blending_indices` of Megatron's helpers.cpp.
    """
    shares = normalized(sizes)
    limits = np.array(sizes)
    total = sum(sizes)

    # all but the last rows
    first_part = weighted_indices(shares, max(0, total - 4 * len(sizes))).dataset_index
    counts = np.bincount(first_part, minlength=len(sizes))
    if (counts > limits).any():  # a data set ran out earlier: walk all rows one by one
        first_part = first_part[:0]
        counts = np.zeros_like(counts)

    # the last rows, one by one
    dataset_index = np.append(first_part, np.empty(total - len(first_part), np.int16))
    weights = np.array(shares)
    for i in range(len(first_part), total):
        d = np.where(counts < limits, weights * max(i, 1) - counts, -np.inf).argmax()
        dataset_index[i] = d
        counts[d] += 1
    return BlendIndices(dataset_index, _number_within_dataset(dataset_index, len(sizes)))


def _number_within_dataset(dataset_index: np.ndarray, num_datasets: int) -> np.ndarray:
    """Return how many earlier samples each sample has in its data set: int64 [samples].

    Example: data sets 0 1 0 0 1 give 0 0 1 2 1.
    """
    order = np.argsort(dataset_index, kind="stable")  # a radix sort: samples by data set, and within one in their order
    counts = np.bincount(dataset_index, minlength=num_datasets)
    first_of_dataset = np.cumsum(counts) - counts  # [data sets], positions in `order`
    numbers = np.empty(len(dataset_index), np.int64)
    numbers[order] = np.arange(len(dataset_index)) - np.repeat(first_of_dataset, counts)
    return numbers


def sufficient_surplus(taken: list[int], requested: list[int]) -> float:
    """Return the smallest surplus, in thousandths, with which `samples_of_each` asks for all samples that are taken.

    taken: samples that the order takes of each data set. requested: what is asked of each without a surplus.
    """
    thousandths = 0
    for count, base in zip(taken, requested):
        while math.ceil(base * (1 + thousandths / 1000)) < count:
            nearly_enough = math.floor(1000 * ((count - 1) / base - 1))
            thousandths = max(thousandths + 1, nearly_enough)
    return thousandths / 1000


class BlendedDataset:
    """Samples of several data sets in the order of `indices`.

    names: of the data sets, for errors. requested: of each data set, the samples that are asked for without
    --mid-level-dataset-surplus; None if they are not known. Raises ValueError if a data set has fewer samples than
    the order takes.
    """

    def __init__(self, datasets: list, indices: BlendIndices, names: list[str], requested: list[int] | None = None):
        self.datasets = datasets
        self.indices = indices
        num_taken = np.bincount(indices.dataset_index, minlength=len(datasets)).tolist()
        for name, dataset, count in zip(names, datasets, num_taken):
            if count > len(dataset):
                surplus = "raise --mid-level-dataset-surplus"
                if requested is not None:
                    surplus = (
                        f"--mid-level-dataset-surplus {sufficient_surplus(num_taken, requested):g} is enough for all"
                    )
                raise ValueError(
                    f"the blend needs {count} samples of {name}, which has {len(dataset)}: {surplus}; or give the data set "
                    "a smaller weight"
                )

    def __len__(self) -> int:
        return len(self.indices.dataset_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample i: an item of the data set that gives it, with its keys and shapes, such as tokens [s]."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        dataset = self.datasets[self.indices.dataset_index[i]]
        return dataset[int(self.indices.dataset_sample_index[i])]
