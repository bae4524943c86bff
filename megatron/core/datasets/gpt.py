"""GPT training samples: from a token file through cached index arrays, or made up for --mock-data.

A sample is a pure function of (data, request, number): any process can read any of them, and a resumed run needs only
the number of samples consumed. The index arrays (`index_map`) are built once, by one process, into a cache folder:

    builder:  build, write ---- wait() ---- map the cache
    others:                     wait() ---- map the cache

The cache is keyed by content, not by path or date: moved data keeps its cache, changed data gets a new one.
"""

import contextlib
import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_map import (
    SPLIT_NAMES,
    IndexRequest,
    Indices,
    build_indices,
    check_enough_tokens,
    parse_split,
    split_ranges,
    split_tokens,
)
from megatron.core.datasets.indexed import IndexedDataset, atomic_file

_FORMAT = 1  # of the cache; raise it whenever the same request gives other arrays

# An index file up to this size goes into the cache key whole; of a larger one, blocks that add up to this size do.
_FINGERPRINT_BYTES = 1 << 26
_FINGERPRINT_BLOCK = 1 << 20


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class TokenRules:
    """What a sample needs to know about the tokenizer. pad_id None: the tokenizer has no padding token."""

    vocab_size: int
    eod_id: int
    pad_id: int | None = None
    eod_mask_loss: bool = False


def training_item(text: np.ndarray, rules: TokenRules) -> dict[str, np.ndarray]:
    """The arrays of one sample from its seq_length + 1 tokens, of which labels are the inputs shifted by one.

    tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s], 0 where the label is padding and, with
    eod_mask_loss, where the input ends a document. Padding reads as token 0, which every vocabulary has.
    """
    tokens, labels = text[:-1].copy(), text[1:].copy()
    loss_mask = np.ones(len(tokens), np.float32)
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod_id] = 0.0
    pad = _pad_id(rules)
    loss_mask[labels == pad] = 0.0
    tokens[tokens == pad] = 0
    labels[labels == pad] = 0
    positions = np.arange(len(tokens), dtype=np.int64)
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}


def _pad_id(rules: TokenRules) -> int:
    return -1 if rules.pad_id is None else rules.pad_id  # -1 is no token of any file


class GPTDataset:
    """Samples of `seq_length` tokens that cross document borders, in the order that `indices` says.

    It has more samples than were requested, up to the end of the last epoch. No attention mask is made: causality is
    the kernel's business.
    """

    def __init__(self, indexed: IndexedDataset, indices: Indices, seq_length: int, rules: TokenRules):
        self.indexed = indexed
        self.indices = indices
        self.seq_length = seq_length
        self.rules = rules

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return training_item(self._text(int(self.indices.shuffle_index[i])), self.rules)

    def _text(self, k: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample k, padded on the right where the data end: int64 [s + 1]."""
        (first, start), (last, stop) = self.indices.sample_index[k].tolist(), self.indices.sample_index[k + 1].tolist()
        parts, places = [], []
        for position in range(first, last + 1):
            document = int(self.indices.document_index[position])
            offset = start if position == first else 0
            length = stop + 1 - offset if position == last else None  # the last token is read again by sample k + 1
            parts.append(self.indexed.get(document, offset, length))
            places.append((document, offset))
        text = np.full(self.seq_length + 1, _pad_id(self.rules), np.int64)
        tokens = np.concatenate(parts)
        smallest = 0 if tokens.dtype.kind == "u" else tokens.min(initial=0)
        if smallest < 0 or tokens.max(initial=0) >= self.rules.vocab_size:
            self._refuse(parts, places)
        text[: len(tokens)] = tokens
        return text

    def _refuse(self, parts: list[np.ndarray], places: list[tuple[int, int]]) -> NoReturn:
        """Name the first id that the vocabulary does not have, and where in the file it is."""
        tokens = np.concatenate(parts)
        first = int(np.argmax((tokens < 0) | (tokens >= self.rules.vocab_size)))
        ends = np.cumsum([len(part) for part in parts])
        k = int(np.searchsorted(ends, first, side="right"))  # the part it is in; empty ones are passed over
        (document, offset), token = places[k], tokens[first]
        offset += first - int(ends[k]) + len(parts[k])
        reason = (
            "and no id is negative: the file is damaged, or no tokenizer made it; preprocess again"
            if token < 0
            else f"but the tokenizer's vocabulary has {self.rules.vocab_size}: the data were made with another tokenizer; use that "
            "one or preprocess again"
        )
        where = f"sequence {document}, offset {offset}"
        raise ValueError(f"{self.indexed.data_path} holds token {token} ({where}), {reason}")


class MockGPTDataset:
    """Made-up samples: noisy arithmetic progressions, whose step a model can read off the tokens it has seen.

    Sample i depends on (seed, split, i) alone. At most 256 different tokens occur, spread over the whole vocabulary, so
    that the loss falls from ln(vocabulary) within a few dozen steps and every rank of a split embedding has work.
    """

    STEPS = (1, 2, 3, 5)
    NOISE = 0.05  # share of tokens replaced by random ones

    def __init__(self, num_samples: int, seq_length: int, seed: tuple[int, int], rules: TokenRules):
        """seed: (of the run, of the split)."""
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.rules = rules
        self.distinct = min(rules.vocab_size, 256)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        count = self.seq_length + 1
        values = (rng.randint(self.distinct) + rng.choice(self.STEPS) * np.arange(count)) % self.distinct
        noisy = rng.random_sample(count) < self.NOISE
        values = np.where(noisy, rng.randint(self.distinct, size=count), values)
        return training_item(values * self.rules.vocab_size // self.distinct, self.rules)


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    *,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = _warn,
) -> tuple[GPTDataset | MockGPTDataset | None, ...]:
    """(train, valid, test); None for a split that has no share, no documents, or no samples requested.

    tokenizer: any object with `vocab_size`, `eod` and, if it has one, `pad`. num_samples: for each split; None is one
    epoch. Every process calls; one on each file system that holds the cache is the builder. `wait` returns when all
    have called it, and all call it exactly once, also a process that fails; mock data need no builder and no wait. `say`
    hears of what is strange but can be; every process says it, so let one of them print.
    Raises ValueError on every process for data or settings that cannot work; if the cache cannot be written, with the
    reason on the builder and with a pointer to it on the others.
    """
    if config.seq_length is None:
        raise ValueError("no sequence length; set --seq-length")
    if num_samples[0] is not None and num_samples[0] < 1:
        raise ValueError(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    rules = TokenRules(tokenizer.vocab_size, tokenizer.eod, getattr(tokenizer, "pad", None), config.eod_mask_loss)
    if config.mock_data:
        return _mock_datasets(config, rules, num_samples, seed)
    if config.data_path is None:
        raise ValueError("no data: set --data-path PREFIX, or --mock-data to try things out")
    return _file_datasets(config, rules, num_samples, seed, is_builder, wait, say)


def _mock_datasets(config: DataConfig, rules: TokenRules, num_samples: list[int | None], seed: int) -> tuple:
    if None in num_samples:
        raise ValueError("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return tuple(
        MockGPTDataset(count, config.seq_length, (seed, split), rules) if count else None
        for split, count in enumerate(num_samples)
    )


def _file_datasets(
    config: DataConfig,
    rules: TokenRules,
    num_samples: list[int | None],
    seed: int,
    is_builder: bool,
    wait: Callable[[], None],
    say: Callable[[str], None],
) -> tuple:
    try:
        indexed = IndexedDataset(config.data_path[0])
        _note_small_ids(indexed, rules, say)
        requests = split_requests(config, indexed.sequence_lengths, num_samples, seed, say)
        folder = Path(config.data_cache_path or f"{indexed.prefix}/cache/GPTDataset_indices")
        fingerprint = content_fingerprint(indexed)
        caches = [
            None if request is None else IndexCache(folder, name, request, fingerprint, say)
            for name, request in zip(SPLIT_NAMES, requests)
        ]
        if is_builder:
            for cache in filter(None, caches):
                if not cache.is_complete():
                    cache.build(indexed.sequence_lengths)
    finally:
        wait()  # also after an error: nobody may wait for a process that is gone
    return tuple(cache and GPTDataset(indexed, cache.load(), config.seq_length, rules) for cache in caches)


def _note_small_ids(indexed: IndexedDataset, rules: TokenRules, say: Callable[[str], None]) -> None:
    """A file of ids too small for the whole vocabulary: preprocessing with this tokenizer would have made larger ones."""
    if indexed.dtype.kind in "iu" and rules.vocab_size - 1 > np.iinfo(indexed.dtype).max:
        say(
            f"{indexed.data_path} holds ids up to {np.iinfo(indexed.dtype).max} ({indexed.dtype}), the tokenizer's vocabulary has "
            f"{rules.vocab_size}: were the data made with another tokenizer?"
        )


def split_requests(
    config: DataConfig,
    lengths: np.ndarray,
    num_samples: list[int | None],
    seed: int,
    say: Callable[[str], None] = _warn,
) -> list[IndexRequest | None]:
    """What to build for train, valid and test of a file of sequences of these lengths; None for a split left out.

    Raises ValueError if a split cannot fill one sample.
    """
    requests: list[IndexRequest | None] = []
    ranges = split_ranges(parse_split(config.split_shares), len(lengths))
    for name, ids, count in zip(SPLIT_NAMES, ranges, num_samples):
        if ids is None or count == 0:
            requests.append(None)
        elif ids[0] == ids[1]:
            where = f"--split {config.split_shares} leaves no document of {len(lengths)} to the {name} split"
            if name == "train":
                raise ValueError(f"{where}; use more data or a larger share")
            say(f"{where}: it is left out")
            requests.append(None)
        else:
            requests.append(IndexRequest(ids, count, config.seq_length, seed))
            check_enough_tokens(lengths, requests[-1])
    return requests


def content_fingerprint(indexed: IndexedDataset) -> dict[str, Any]:
    """What tells one token file from another: its size, and a hash of the index.

    The arrays follow from the lengths alone, so the tokens are not read. Of an index past 64 MB (3 million documents)
    the hash takes 64 blocks spread evenly from its first byte to its last.
    """
    size = os.path.getsize(indexed.index_path)
    blocks = _FINGERPRINT_BYTES // _FINGERPRINT_BLOCK
    digest = hashlib.blake2b(digest_size=16)
    with open(indexed.index_path, "rb") as file:
        if size <= _FINGERPRINT_BYTES:
            digest.update(file.read())
        else:
            for i in range(blocks):
                file.seek((size - _FINGERPRINT_BLOCK) * i // (blocks - 1))
                digest.update(file.read(_FINGERPRINT_BLOCK))
    return {"idx": digest.hexdigest(), "idx_bytes": size, "bin_bytes": os.path.getsize(indexed.data_path)}


class IndexCache:
    """The files in which the index arrays of one split are kept.

    They are written whole or not at all. The description, with a checksum of each array, comes last, so that an
    interrupted build is seen as unfinished and a damaged file as damaged.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        request: IndexRequest,
        fingerprint: dict[str, Any],
        say: Callable[[str], None] = _warn,
    ):
        self.folder, self.say = folder, say
        self.request = request
        self.fields = {"format": _FORMAT, "class": "GPTDataset", "split": split, **asdict(request), **fingerprint}
        key = hashlib.blake2b(json.dumps(self.fields).encode(), digest_size=16).hexdigest()
        self.stem = f"{key}-GPTDataset-{split}"

    def path(self, part: str) -> Path:
        return self.folder / f"{self.stem}-{part}"

    def build(self, lengths: np.ndarray) -> None:
        """Make the arrays from the `lengths` of all sequences and write them. Raises ValueError if that fails."""
        indices = build_indices(lengths, self.request)
        tokens, need = split_tokens(lengths, self.request), self.request.seq_length + self.request.extra_token
        if tokens < need:
            message = f"a split has {tokens} tokens and a sample {need}: documents repeat within a sample"
            self.say(f"{message}; use more data or another --split")
        with self._named_when_unwritable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)
            for part, array in indices._asdict().items():
                with atomic_file(self.path(f"{part}.npy")) as file:
                    np.save(file, array, allow_pickle=False)
            with atomic_file(self.path("description.txt")) as file:
                file.write(self._description())

    def is_complete(self) -> bool:
        """Whether every file is there as it was written; warns of damaged ones. Reads them once, at about 1 GB/s."""
        described = self.path("description.txt")
        if not described.exists():
            return False
        try:
            whole = described.read_bytes() == self._description()
        except OSError:
            whole = False
        if not whole:
            self.say(f"index cache {self.path('*')} is damaged and is built again")
        return whole

    def load(self) -> Indices:
        """The arrays, memory-mapped. Raises ValueError for files that cannot be read or are no arrays."""
        arrays = []
        for part in Indices._fields:
            path = self.path(f"{part}.npy")
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except OSError as error:
                raise ValueError(
                    f"{path} cannot be read ({error.strerror}): the process that builds the index cache failed (see "
                    "its message), or its folder is not shared by all hosts; set --data-cache-path to a folder that "
                    "they share"
                ) from None
            except (ValueError, EOFError) as error:
                raise ValueError(f"{path} is damaged ({error}); delete it") from None
        return Indices(*arrays)

    def _description(self) -> bytes:
        """What was asked for, and what the files that hold it look like now."""
        checksums = {part: _checksum(self.path(f"{part}.npy")) for part in Indices._fields}
        return json.dumps({**self.fields, "crc32": checksums}, indent=4).encode()

    @contextlib.contextmanager
    def _named_when_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write the index cache in {self.folder}: {error.strerror}; set --data-cache-path to a folder "
                "that can be written"
            ) from error


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while some := file.read(1 << 24):
            checksum = zlib.crc32(some, checksum)
    return checksum
