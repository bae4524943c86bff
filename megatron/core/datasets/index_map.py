"""The tokens of sample i: Megatron's index algorithms, bit for bit, as pure functions over numpy arrays.

The documents of a split are laid end to end, shuffled, as often as the run needs; every `seq_length` tokens a sample
begins; the samples are shuffled once more. Three arrays say all of it:

    document_index   d0 d7 d3 d1 ...            the documents in the order in which they are laid out
    sample_index     (0, 0) (0, 5) (2, 1) ...   row k: position in document_index and token offset where sample k starts
    shuffle_index    4 0 3 ...                  item i of the dataset is sample shuffle_index[i]

    documents     |d0         |d7   |d3            |d1 ...
    samples       |s0        |s1        |s2        |         seq_length tokens apart, each overlapping the next by x

x is `extra_token`: 1, because a sample of seq_length inputs needs one more token as its last label.

Alphabet: E epochs, S `seq_length`, T tokens of one epoch, n requested samples, K samples there are.
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SPLIT_NAMES = ("train", "valid", "test")

# A last epoch that is used less than this is shuffled on its own, so that no document of it crowds out earlier epochs.
_SEPARATE_BELOW = 0.80
# Documents, and rows of the sample index, computed at a time: the temporaries then stay in cache.
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class IndexRequest:
    """All that the order of samples depends on besides the lengths of the documents.

    ids_range: first and one past the last sequence of the split. num_samples: None asks for exactly one epoch.
    drop_last: False keeps a last sample shorter than seq_length (validation only). epoch_stable: each epoch is shuffled by
    itself, so that the order of the first epochs does not depend on how many there are; Megatron's order does.
    """

    ids_range: tuple[int, int]
    num_samples: int | None
    seq_length: int
    seed: int
    extra_token: int = 1
    drop_last: bool = True
    epoch_stable: bool = False

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"{self.num_samples} samples requested; ask for at least 1 (or None for one epoch)")
        if self.seq_length < 1 or self.extra_token not in (0, 1):
            raise ValueError(
                f"seq_length ({self.seq_length}) must be positive, extra_token ({self.extra_token}) 0 or 1"
            )


class Indices(NamedTuple):
    """The three arrays of the drawing above."""

    document_index: np.ndarray  # [E * documents] int32
    sample_index: np.ndarray  # [K + 1, 2] int32, int64 where needed
    shuffle_index: np.ndarray  # [K] uint32, int64 where needed


def parse_split(text: str) -> list[float]:
    """Shares of train, validation and test, summing to 1. Raises ValueError on text that gives no such shares."""
    # Quotes around the whole are passed over, and spaces may stand for commas: scripts in the wild have both.
    numbers = [part for part in re.split(r"[,\s]+", text.strip("'\" \t")) if part]
    if strange := [number for number in numbers if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", number, re.ASCII)]:
        raise ValueError(f"--split {text}: {strange[0]!r} is not a number in plain digits; write it like 969,30,1")
    shares = np.array([float(number) for number in numbers])
    if (shares < 0).any() or len(shares) > len(SPLIT_NAMES) or not 0 < shares.sum() < math.inf:
        raise ValueError(f"--split {text} must be one to three shares, none negative, not all zero; like 969,30,1")
    padded = np.append(shares, np.zeros(len(SPLIT_NAMES) - len(shares)))
    return (padded / padded.sum()).tolist()


def split_ranges(shares: list[float], count: int) -> list[tuple[int, int] | None]:
    """The range [first, past last) of `count` elements that each split owns; None where its share is zero."""
    ends = list(itertools.accumulate([0.0, *shares]))
    return [
        (round(ends[i] * count), round(ends[i + 1] * count)) if share > 0 else None for i, share in enumerate(shares)
    ]


def requested_samples(
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    *,
    iteration: int = 0,
    consumed: int = 0,
) -> list[int]:
    """Samples that a run draws from [train, valid, test]: validation runs every `eval_interval` and once at the end.

    A run that goes on after `iteration` has consumed samples in batches of perhaps another size; they count too.
    """
    evaluations = (max(train_iters, iteration) // eval_interval if eval_interval else 0) + 1
    train = consumed + max(train_iters - iteration, 0) * global_batch_size
    return [train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size]


def num_epochs(tokens: int, request: IndexRequest) -> int:
    """E: the fewest passes over `tokens` (> 0) that hold the requested samples."""
    if request.num_samples is None:
        return 1
    needed = request.num_samples * request.seq_length + request.extra_token
    return max(1, -(-needed // tokens))  # rounded up


def samples_before_final_epoch(tokens: int, epochs: int, request: IndexRequest) -> int:
    """Samples that lie wholly within the first epochs - 1 passes."""
    return ((epochs - 1) * tokens - request.extra_token) // request.seq_length


def separate_final_epoch(tokens: int, epochs: int, request: IndexRequest) -> bool:
    """Whether the last epoch is shuffled apart from the others: so little of it is used that it would distort them."""
    if epochs == 1:
        return False
    needed = request.num_samples - samples_before_final_epoch(tokens, epochs, request)
    per_epoch = (tokens - request.extra_token) // request.seq_length
    assert 0 <= needed <= per_epoch + 1, f"{needed} samples of the last epoch, which has {per_epoch}"
    return needed < int(_SEPARATE_BELOW * per_epoch)


def samples_in(tokens: int, request: IndexRequest) -> int:
    """K: samples that `tokens` laid end to end hold.

    With drop_last off the count is rounded up in single precision, as the files in the wild have it: above 2**24 tokens
    it can fall short of the true count. Where it would exceed the true count there is nothing to read, so it is cut.
    """
    fresh = tokens - request.extra_token  # tokens that some sample has as input
    if request.drop_last:
        return fresh // request.seq_length
    return min(math.ceil(np.float32(fresh) / np.float32(request.seq_length)), -(-fresh // request.seq_length))


def build_document_index(ids: np.ndarray, epochs: int, separate: bool, rng: np.random.RandomState) -> np.ndarray:
    """`epochs` copies of `ids`, shuffled together, the last copy apart if `separate`. [epochs * len(ids)] int32."""
    documents = np.empty(epochs * len(ids), np.int64)
    documents.reshape(epochs, len(ids))[:] = ids
    return _shuffled_in_parts(documents, (epochs - 1) * len(ids) if separate else len(documents), rng, np.int32)


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, num_samples: int, seq_length: int, extra_token: int
) -> np.ndarray:
    """Where each sample starts: [num_samples + 1, 2] of (position in document_index, token offset in that document).

    Row k starts at token k * S of the documents laid end to end. Its document is the one in which the walk of sample
    k - 1 ended: the first whose end is at or past token k * S + x. So with x = 0 an offset may equal the length, and an
    empty document is passed over. Past the end of the tokens (drop-last off) the row is the last document's last token.

    lengths: tokens of every sequence of the file, by id. Cost: some passes over the documents and the rows, no Python loop
    over either, and no memory beyond the result that grows with them.
    """
    longest = max(len(document_index), int(lengths.max(initial=0)))
    rows = np.zeros((num_samples + 1, 2), dtype=np.int32 if longest <= np.iinfo(np.int32).max else np.int64)
    done, token = 0, 0  # rows after row 0 that are filled; tokens of the documents before
    for first in range(0, len(document_index), _AT_ONCE):
        some = lengths[document_index[first : first + _AT_ONCE]].astype(np.int64)
        starts = np.cumsum(some)
        token, starts = token + int(starts[-1]), starts + (token - some)
        # The last row that starts no later than in each of these documents: row k does if k * S + x <= its end.
        last_rows = np.minimum((starts + (some - extra_token)) // seq_length, num_samples)
        while done < last_rows[-1]:  # the rows of these documents, so many at a time
            past = min(done + _AT_ONCE, int(last_rows[-1]))
            counts = np.diff(np.clip(last_rows, done, past), prepend=done)
            at = np.repeat(np.arange(len(some)), counts)
            rows[done + 1 : past + 1, 0] = first + at
            rows[done + 1 : past + 1, 1] = np.arange(done + 1, past + 1) * seq_length - starts[at]
            done = past
    rows[done + 1 :] = len(document_index) - 1, lengths[document_index[-1]] - extra_token
    return rows


def build_shuffle_index(before: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """The numbers 0..total-1, shuffled below `before` and from `before` on; before == total shuffles them as one."""
    return _shuffled_in_parts(np.arange(total), before, rng, _shuffle_dtype(total))


def _shuffle_dtype(total: int) -> type:
    return np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64


def _shuffled_in_parts(array: np.ndarray, before: int, rng: np.random.RandomState, dtype: type) -> np.ndarray:
    """`array` (int64) shuffled, its elements below `before` first, then those from there on; as `dtype`, in its memory.

    Numpy takes a quarter less time to swap numbers of 8 bytes than of 4, and swaps the same ones.
    """
    rng.shuffle(array[:before])
    if before < len(array):
        rng.shuffle(array[before:])
    count, size = len(array), np.dtype(dtype).itemsize
    if size < array.itemsize:
        for first in range(0, count, _AT_ONCE):
            some = array[first : first + _AT_ONCE].astype(dtype)
            array.view(dtype)[first : first + len(some)] = some
        array.resize(-(-count * size // array.itemsize), refcheck=False)  # the rest goes back to the system
    return array.view(dtype)[:count]


class Passes(NamedTuple):
    """How often a split is read."""

    tokens: int  # T
    epochs: int  # E
    samples: int  # K


def split_tokens(lengths: np.ndarray, request: IndexRequest) -> int:
    """T: tokens of one epoch of the split."""
    return int(lengths[slice(*request.ids_range)].sum(dtype=np.int64))


def passes_over(lengths: np.ndarray, request: IndexRequest) -> Passes:
    """T, E and K of the indices that `build_indices` gives, without building them.

    Raises ValueError if the split cannot fill one sample, however often it is repeated.
    """
    tokens = split_tokens(lengths, request)
    if tokens == 0 or (request.num_samples is None and samples_in(tokens, request) < 1):
        need = request.seq_length + request.extra_token
        first, past = request.ids_range
        where = f"the split (sequences {first} to {past}) has {tokens} tokens, fewer than the {need} of one sample"
        raise ValueError(f"{where}; use more data, a larger share in --split or a smaller --seq-length")
    epochs = num_epochs(tokens, request)
    return Passes(tokens, epochs, samples_in(epochs * tokens, request))


def shape_problem(indices: Indices, lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Why these arrays do not have the shapes of `request`; None if they do. Their numbers are not read."""
    passes = passes_over(lengths, request)
    documents = passes.epochs * (request.ids_range[1] - request.ids_range[0])
    for (name, array), shape in zip(
        indices._asdict().items(), [(documents,), (passes.samples + 1, 2), (passes.samples,)]
    ):
        if array.dtype.kind not in "iu" or array.shape != shape:
            return f"its {name} is {array.dtype} {array.shape}, these data give whole numbers {shape}"
    return None


def build_indices(lengths: np.ndarray, request: IndexRequest) -> Indices:
    """All three arrays. lengths: tokens of every sequence of the file, by id. Raises as `passes_over` does."""
    passes = passes_over(lengths, request)
    build = _epoch_stable_order if request.epoch_stable else _megatron_order
    documents, order = build(request, passes)
    samples = build_sample_index(lengths, documents, passes.samples, request.seq_length, request.extra_token)
    return Indices(documents, samples, order)


def _megatron_order(request: IndexRequest, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """(document_index, shuffle_index)"""
    separate = separate_final_epoch(passes.tokens, passes.epochs, request)
    rng = np.random.RandomState(request.seed)  # its stream is frozen by numpy; used in this order
    documents = build_document_index(np.arange(*request.ids_range, dtype=np.int32), passes.epochs, separate, rng)
    return documents, build_shuffle_index(shuffled_first(request, passes)[1], passes.samples, rng)


def shuffled_first(request: IndexRequest, passes: Passes) -> tuple[int, int]:
    """How many documents and samples Megatron shuffles together: all, or those before a last epoch that stands apart."""
    tokens, epochs = passes.tokens, passes.epochs
    count = request.ids_range[1] - request.ids_range[0]
    if separate_final_epoch(tokens, epochs, request):
        return (epochs - 1) * count, samples_before_final_epoch(tokens, epochs, request)
    return epochs * count, passes.samples


def _epoch_stable_order(request: IndexRequest, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """As `_megatron_order`, but the documents of epoch e, and the samples that end in it, are shuffled by (seed, e) alone.

    documents   |--- epoch 0 ---|--- epoch 1 ---|
    samples     |s0  |s1  |s2  |s3  |s4  |s5  |          s3 begins in epoch 0, ends in epoch 1, and is shuffled with s4, ...
    """
    documents = np.tile(np.arange(*request.ids_range, dtype=np.int32), passes.epochs)
    order = np.arange(passes.samples, dtype=_shuffle_dtype(passes.samples))
    # Samples that end before each epoch does; the last one may be short of its end.
    ends = [(epoch * passes.tokens - request.extra_token) // request.seq_length for epoch in range(passes.epochs)]
    borders = [0, *ends[1:], passes.samples]
    for epoch, of_epoch in enumerate(documents.reshape(passes.epochs, -1)):
        rng = np.random.RandomState([request.seed, epoch])
        rng.shuffle(of_epoch)
        rng.shuffle(order[borders[epoch] : borders[epoch + 1]])
    return documents, order
