"""Three index arrays decide which tokens make up sample i: Megatron's algorithms, bit for bit, over numpy arrays.

They are those of `GPTDataset._build_document_sample_shuffle_indices` and of `helpers.cpp: build_sample_idx` in
Megatron's core/datasets. Everything is drawn in three steps:

1. The documents of a split are shuffled and laid end to end, in as many copies (epochs) as the run needs.
2. This stream of tokens is cut into samples of S tokens.
3. The samples are shuffled.

One array holds the result of each step:

    document_index   d0 d7 d3 d1 ...            documents in the order in which they are laid out
    sample_index     (0, 0) (0, 5) (2, 1) ...   row k: position in document_index, and token offset in that document, at
                                                which sample k starts
    shuffle_index    4 0 3 ...                  item i of the data set is sample shuffle_index[i]

Example: S = 5, x = 1, and documents 0, 7, 3 and 1 of 6, 3, 7 and 5 tokens:

    token         0    5    10   15   20
    document      000000777333333311111
    s0            iiiiil                     5 inputs (i) and the last label (l); labels are inputs shifted by one
    s1                 iiiiil                the last token of s0 is the first of s1
    s2                      iiiiil
    s3                           iiiiil
    sample_index  (0, 0) (0, 5) (2, 1) (2, 6) (3, 4)      one row a sample; the last row says where the last sample ends

x is `extra_token`: 1, because a sample of S inputs needs one more token as its last label.

Alphabet: E epochs, S `seq_length`, T tokens of one epoch, n requested samples, K samples that there are.
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SPLIT_NAMES = ("train", "valid", "test")

# If the run uses less than this share of the last epoch, that epoch is shuffled by itself. Were it shuffled with the
# others, the samples that the run leaves out would come from all epochs, and not from the last one alone.
_SEPARATE_BELOW = 0.80
# Number of documents, and of rows of the sample index, that are computed at a time: the temporaries then stay in cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class IndexRequest:
    """The order of samples is determined by this request and the lengths of the documents.

    The names of the fields are part of the hash that names a cache file (`index_cache`): they cannot change.

    ids_range: first and one past the last sequence of the split. num_samples: None asks for exactly one epoch.
    drop_last: False keeps a last sample shorter than seq_length (validation only). epoch_stable: each epoch is shuffled
    by itself, so that the order of the first epochs does not depend on the number of epochs; Megatron's order does.
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
            raise ValueError(f"{self.num_samples} samples were requested; request at least 1 (or None for one epoch)")
        if self.seq_length < 1 or self.extra_token not in (0, 1):
            raise ValueError(
                f"seq_length ({self.seq_length}) must be positive, and extra_token ({self.extra_token}) 0 or 1"
            )


class Indices(NamedTuple):
    """The three arrays that the module's docstring draws."""

    document_index: np.ndarray  # [E * documents] int32
    sample_index: np.ndarray  # [K + 1, 2] int32, int64 where needed
    shuffle_index: np.ndarray  # [K] uint32, int64 where needed


def parse_split(text: str) -> list[float]:
    """Return the shares of train, validation and test, summing to 1.

    Raises ValueError on text that gives no such shares.
    """
    # Quotes around the text are ignored, and spaces may stand for commas: scripts in the wild have both.
    numbers = [word for word in re.split(r"[,\s]+", text.strip("'\" \t")) if word]
    for number in numbers:
        if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", number, re.ASCII):
            raise ValueError(f"--split {text}: {number!r} is not a number in plain digits; write it like 969,30,1")
    shares = np.array([float(number) for number in numbers])
    if (shares < 0).any() or len(shares) > len(SPLIT_NAMES) or not 0 < shares.sum() < math.inf:
        raise ValueError(
            f"--split {text} must be one to three shares, none of them negative and not all zero, such as 969,30,1"
        )
    padded = np.append(shares, np.zeros(len(SPLIT_NAMES) - len(shares)))
    return (padded / padded.sum()).tolist()


def split_ranges(shares: list[float], count: int) -> list[tuple[int, int] | None]:
    """Return the range [first, past last) of `count` elements that each split owns; None where its share is zero.

    Example: shares 0.9, 0.1, 0 of 10 elements are (0, 9), (9, 10), None.
    """
    borders = list(itertools.accumulate([0.0, *shares]))
    ranges: list[tuple[int, int] | None] = []
    for i, share in enumerate(shares):
        if share > 0:
            ranges.append((round(borders[i] * count), round(borders[i + 1] * count)))
        else:
            ranges.append(None)
    return ranges


def requested_samples(
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    global_batch_size: int,
    *,
    eval_batch_size: int | None = None,
    iteration: int = 0,
    consumed: int = 0,
    start_eval_at_iter: int | None = None,
) -> list[int]:
    """Return the samples that a run draws from [train, valid, test].

    eval_batch_size: global batch size of validation and test; default: that of training. Validation runs every
    `eval_interval` iterations and once at the end. A run resumed at `iteration` has `consumed` samples behind it, in
    batches of perhaps another size; they count too. start_eval_at_iter: no validation before this iteration; Megatron
    counts it as one of those that are left out, if it is a multiple of the interval.
    """
    evaluations = 1
    if eval_interval:
        evaluations += max(train_iters, iteration) // eval_interval
        evaluations = max(1, evaluations - (start_eval_at_iter or 0) // eval_interval)
    train = consumed + max(train_iters - iteration, 0) * global_batch_size
    test = eval_iters * (eval_batch_size or global_batch_size)
    return [train, evaluations * test, test]


def num_epochs(tokens: int, request: IndexRequest) -> int:
    """Return E, the fewest epochs of `tokens` (> 0) tokens that hold the requested samples."""
    if request.num_samples is None:
        return 1
    needed = request.num_samples * request.seq_length + request.extra_token
    return max(1, -(-needed // tokens))  # rounded up


def samples_before_final_epoch(tokens: int, epochs: int, request: IndexRequest) -> int:
    """Return the number of samples that end within the first epochs - 1 epochs."""
    return ((epochs - 1) * tokens - request.extra_token) // request.seq_length


def separate_final_epoch(tokens: int, epochs: int, request: IndexRequest) -> bool:
    """Return whether the last epoch is shuffled by itself, since less than 80 % of it is used (see _SEPARATE_BELOW)."""
    if epochs == 1:
        return False
    needed = request.num_samples - samples_before_final_epoch(tokens, epochs, request)
    per_epoch = (tokens - request.extra_token) // request.seq_length
    assert 0 <= needed <= per_epoch + 1, f"{needed} samples of the last epoch, which has {per_epoch}"
    return needed < int(_SEPARATE_BELOW * per_epoch)


def samples_in(tokens: int, request: IndexRequest) -> int:
    """Return K, the number of samples in `tokens` tokens laid end to end.

    With drop_last off the count is rounded up in single precision, because Megatron's caches were counted so:
    above 2**24 tokens it can be smaller than the true count. Where it would be larger there is nothing to read,
    and the true one holds.
    """
    input_tokens = tokens - request.extra_token  # tokens that some sample has as input
    if request.drop_last:
        return input_tokens // request.seq_length
    count_in_float32 = math.ceil(np.float32(input_tokens) / np.float32(request.seq_length))
    true_count = -(-input_tokens // request.seq_length)  # rounded up
    return min(count_in_float32, true_count)


def build_document_index(ids: np.ndarray, epochs: int, separate: bool, rng: np.random.RandomState) -> np.ndarray:
    """Return `epochs` copies of `ids` shuffled together: int32 [epochs * len(ids)].

    ids: int32 [documents]. separate: the last copy is shuffled by itself. The generator is advanced.
    """
    documents = np.empty(epochs * len(ids), np.int64)
    documents.reshape(epochs, len(ids))[:] = ids
    num_shuffled_together = (epochs - 1) * len(ids) if separate else len(documents)
    return _shuffle_in_two_parts(documents, num_shuffled_together, rng, np.int32)


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, num_samples: int, seq_length: int, extra_token: int
) -> np.ndarray:
    """Return where each sample starts: [num_samples + 1, 2], int32, int64 where needed.

    A row is (position in document_index, token offset in that document).

    Row k starts at token k * S of the documents laid end to end. Its document is the one in which sample k - 1
    ended: the first whose end is at or past token k * S + x. So with x = 0 an offset may equal the length of its
    document, and an empty document is passed over. Rows past the end of the tokens (drop_last off) are the last
    document's last token.

    Megatron walks over documents and samples one by one, in C++. Here a whole chunk of documents is treated at a time:
    their ends say how many rows have started by each of them, and so which document each row belongs to.

    lengths: [sequences], tokens of every sequence of the file, by id. document_index: int32 [E * documents]. Cost: a
    few passes over the documents and the rows, no Python loop over either, and no memory beyond the result that grows
    with them. Source: `build_sample_idx` of helpers.cpp.
    """
    longest = max(len(document_index), int(lengths.max(initial=0)))
    rows = np.zeros((num_samples + 1, 2), dtype=np.int32 if longest <= np.iinfo(np.int32).max else np.int64)
    num_filled = 0  # rows after row 0 that are filled
    num_tokens = 0  # tokens of the documents of earlier chunks

    for first in range(0, len(document_index), _CHUNK):
        # where each document of the chunk begins in the stream of tokens
        chunk_lengths = lengths[document_index[first : first + _CHUNK]].astype(np.int64)  # [documents]
        ends_in_chunk = np.cumsum(chunk_lengths)
        starts = ends_in_chunk + (num_tokens - chunk_lengths)  # [documents]
        num_tokens += int(ends_in_chunk[-1])

        # the last row that starts no later than in each document: row k does if k * S + x <= the document's end
        last_rows = (starts + (chunk_lengths - extra_token)) // seq_length
        last_rows = np.minimum(last_rows, num_samples)  # [documents]

        # the rows that start in these documents, a chunk of rows at a time, since a long document holds many
        while num_filled < last_rows[-1]:
            past = min(num_filled + _CHUNK, int(last_rows[-1]))
            rows_of_document = np.diff(np.clip(last_rows, num_filled, past), prepend=num_filled)  # [documents]
            document_of_row = np.repeat(np.arange(len(chunk_lengths)), rows_of_document)  # [rows]
            row_numbers = np.arange(num_filled + 1, past + 1)
            rows[num_filled + 1 : past + 1, 0] = first + document_of_row
            rows[num_filled + 1 : past + 1, 1] = row_numbers * seq_length - starts[document_of_row]
            num_filled = past

    rows[num_filled + 1 :] = len(document_index) - 1, lengths[document_index[-1]] - extra_token
    return rows


def build_shuffle_index(before: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Return the numbers 0..total-1, those below `before` shuffled first and the others after them.

    uint32 [total], int64 where needed. before == total shuffles all of them together.
    """
    return _shuffle_in_two_parts(np.arange(total), before, rng, _shuffle_dtype(total))


def _shuffle_dtype(total: int) -> type:
    return np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64


def _shuffle_in_two_parts(array: np.ndarray, before: int, rng: np.random.RandomState, dtype: type) -> np.ndarray:
    """Shuffle array[:before], then array[before:], and return the array as `dtype`.

    It is in the memory of `array` (int64).

    It is shuffled as int64 and narrowed afterwards: numpy swaps numbers of 8 bytes in a quarter less time than numbers
    of 4, and swaps the same ones.
    """
    rng.shuffle(array[:before])
    if before < len(array):
        rng.shuffle(array[before:])

    # narrow in place: a chunk is written over numbers that have already been read
    count = len(array)
    itemsize = np.dtype(dtype).itemsize
    if itemsize < array.itemsize:
        for first in range(0, count, _CHUNK):
            chunk = array[first : first + _CHUNK].astype(dtype)
            array.view(dtype)[first : first + len(chunk)] = chunk
        array.resize(-(-count * itemsize // array.itemsize), refcheck=False)  # gives the rest back to the system
    return array.view(dtype)[:count]


class SplitSize(NamedTuple):
    """The tokens of a split, and how often a run reads them."""

    tokens: int  # T
    epochs: int  # E
    samples: int  # K


def split_tokens(lengths: np.ndarray, request: IndexRequest) -> int:
    """Return T, the tokens of one epoch of the split.

    lengths: [sequences], tokens of every sequence of the file, by id.
    """
    return int(lengths[slice(*request.ids_range)].sum(dtype=np.int64))


def split_size(lengths: np.ndarray, request: IndexRequest) -> SplitSize:
    """Return T, E and K of the indices that `build_indices` gives, without building them.

    lengths: [sequences], tokens of every sequence of the file, by id. Raises ValueError if the split cannot fill one
    sample, however often it is repeated.
    """
    tokens = split_tokens(lengths, request)
    has_too_few = tokens == 0
    if request.num_samples is None:  # one epoch, which is not repeated
        has_too_few = has_too_few or samples_in(tokens, request) < 1
    if has_too_few:
        need = request.seq_length + request.extra_token
        first, past = request.ids_range
        raise ValueError(
            f"the split (sequences {first} to {past}) has {tokens} tokens, but one sample needs {need}; use more "
            "data, a larger share in --split, or a smaller --seq-length"
        )
    epochs = num_epochs(tokens, request)
    return SplitSize(tokens, epochs, samples_in(epochs * tokens, request))


def shape_problem(indices: Indices, lengths: np.ndarray, request: IndexRequest) -> str | None:
    """Say why these arrays do not have the shapes of `request`; None if they do.

    The arrays are as of `Indices`; their numbers are not read. lengths: [sequences], tokens of every sequence of
    the file, by id.
    """
    size = split_size(lengths, request)
    documents = size.epochs * (request.ids_range[1] - request.ids_range[0])
    shapes = {"document_index": (documents,), "sample_index": (size.samples + 1, 2), "shuffle_index": (size.samples,)}
    for name, array in indices._asdict().items():
        if array.dtype.kind not in "iu" or array.shape != shapes[name]:
            return f"its {name} is {array.dtype} {array.shape}, these data give whole numbers {shapes[name]}"
    return None


def build_indices(lengths: np.ndarray, request: IndexRequest) -> Indices:
    """Build the three arrays of `Indices`.

    lengths: [sequences], tokens of every sequence of the file, by id. Raises ValueError as `split_size` does.
    """
    size = split_size(lengths, request)
    if request.epoch_stable:
        document_index, shuffle_index = _epoch_stable_order(request, size)
    else:
        document_index, shuffle_index = _megatron_order(request, size)
    sample_index = build_sample_index(lengths, document_index, size.samples, request.seq_length, request.extra_token)
    return Indices(document_index, sample_index, shuffle_index)


def _megatron_order(request: IndexRequest, size: SplitSize) -> tuple[np.ndarray, np.ndarray]:
    """Return (document_index, shuffle_index) in Megatron's order.

    One generator draws both, the documents first. RandomState, since numpy never changes the stream of its draws.
    """
    separate = separate_final_epoch(size.tokens, size.epochs, request)
    rng = np.random.RandomState(request.seed)
    ids = np.arange(*request.ids_range, dtype=np.int32)
    document_index = build_document_index(ids, size.epochs, separate, rng)
    _, num_samples_together = shuffled_docs_and_samples(request, size)
    return document_index, build_shuffle_index(num_samples_together, size.samples, rng)


def shuffled_docs_and_samples(request: IndexRequest, size: SplitSize) -> tuple[int, int]:
    """Return the numbers of documents and of samples that Megatron shuffles together.

    Those are all, or the ones before the last epoch where that is shuffled by itself:

        epochs      |--- 0 ---|--- 1 ---|--- 2 ---|        3 epochs, of the last one less than 80 % is used
        documents   |  shuffled together|  alone  |
        samples     |s0  |s1  |s2  |s3  |s4  |s5  |        samples that end before the last epoch, then the others
                    |shuffled together  |  alone  |
    """
    count = request.ids_range[1] - request.ids_range[0]
    if separate_final_epoch(size.tokens, size.epochs, request):
        return (size.epochs - 1) * count, samples_before_final_epoch(size.tokens, size.epochs, request)
    return size.epochs * count, size.samples


def _epoch_stable_order(request: IndexRequest, size: SplitSize) -> tuple[np.ndarray, np.ndarray]:
    """Return (document_index, shuffle_index) in an order that does not depend on the number of epochs.

    The documents of epoch e, and the samples that end in epoch e, are shuffled by (seed, e) alone:

        documents  |--- epoch 0 ---|--- epoch 1 ---|
        samples    |s0  |s1  |s2  |s3  |s4  |s5  |    s3 begins in epoch 0, ends in epoch 1, and is shuffled with s4, s5
    """
    document_index = np.tile(np.arange(*request.ids_range, dtype=np.int32), size.epochs)
    shuffle_index = np.arange(size.samples, dtype=_shuffle_dtype(size.samples))
    # Borders between the samples of one epoch and the next. The last sample may be short of the end of the last epoch.
    inner_borders = [
        (epoch * size.tokens - request.extra_token) // request.seq_length for epoch in range(1, size.epochs)
    ]
    borders = [0, *inner_borders, size.samples]
    for epoch, documents_of_epoch in enumerate(document_index.reshape(size.epochs, -1)):
        rng = np.random.RandomState([request.seed, epoch])
        rng.shuffle(documents_of_epoch)  # a view: shuffles that part of document_index
        rng.shuffle(shuffle_index[borders[epoch] : borders[epoch + 1]])
    return document_index, shuffle_index
