"""GPT training samples: from a token file through cached index arrays, or made up for --mock-data.

A sample is a pure function of (data, request, number): any process can read any of them, and a resumed run needs only
the number of samples consumed. The index arrays (`index_map`, and `blend` for several files) are built once, by one process, into a cache
folder (`index_cache`):

    builder:  build, write ---- wait() ---- map the cache
    others:                     wait() ---- map the cache
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron.core.config import ConfigError
from megatron.core.datasets.blend import (
    Blend,
    BlendedDataset,
    BlendIndices,
    exhaustive_indices,
    normalized,
    samples_of_each,
    weighted_indices,
)
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_plan import Reading, lines, reading
from megatron.core.datasets.fim import FillInTheMiddle, FimConfig
from megatron.core.datasets.found_cache import FoundCaches, shape_problem
from megatron.core.datasets.index_cache import DataFiles, IndexCache
from megatron.core.datasets.index_map import (
    SPLIT_NAMES,
    IndexRequest,
    Indices,
    build_indices,
    check_enough_tokens,
    number_of_samples,
    parse_split,
    split_ranges,
    split_tokens,
)
from megatron.core.datasets.indexed import IndexedDataset, remove_abandoned


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class TokenRules:
    """What a sample needs to know about the tokenizer. pad_id None: the tokenizer has no padding token."""

    vocab_size: int
    eod_id: int
    pad_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


def training_item(text: np.ndarray, rules: TokenRules) -> dict[str, np.ndarray]:
    """The arrays of one sample from its seq_length + 1 tokens, of which labels are the inputs shifted by one.

    tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s], 0 where the label is padding and, with
    eod_mask_loss, where the input ends a document. Padding reads as token 0, which every vocabulary has. A document ends
    with its eod token: with reset_position_ids the position after it is 0, and with reset_attention_mask there is
    document_ids: int64 [s], which document of the sample each token belongs to.
    """
    tokens, labels = text[:-1].copy(), text[1:].copy()
    loss_mask = np.ones(len(tokens), np.float32)
    positions = np.arange(len(tokens), dtype=np.int64)
    begins = np.append(False, tokens[:-1] == rules.eod_id)  # the first token of a sample's second or later document
    documents = np.cumsum(begins)
    if rules.reset_position_ids:
        positions -= np.append(0, np.flatnonzero(begins))[documents]
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod_id] = 0.0
    pad = _pad_id(rules)
    loss_mask[labels == pad] = 0.0
    tokens[tokens == pad] = 0
    labels[labels == pad] = 0
    item = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
    return item | ({"document_ids": documents} if rules.reset_attention_mask else {})


def _pad_id(rules: TokenRules) -> int:
    return -1 if rules.pad_id is None else rules.pad_id  # -1 is no token of any file


class GPTDataset:
    """Samples of `seq_length` tokens that cross document borders, in the order that `indices` says.

    It has more samples than were requested, up to the end of the last epoch. No attention mask is made: causality is
    the kernel's business.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        indices: Indices,
        seq_length: int,
        rules: TokenRules,
        fim: FillInTheMiddle | None = None,
    ):
        self.indexed = indexed
        self.indices = indices
        self.seq_length = seq_length
        self.rules = rules
        self.fim = fim

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        tokens = self._tokens(int(self.indices.shuffle_index[i]))
        if self.fim is not None:
            tokens = self.fim(tokens, i)
        text = np.full(self.seq_length + 1, _pad_id(self.rules), np.int64)
        text[: len(tokens)] = tokens
        item = training_item(text, self.rules)
        if self.fim is not None:
            item["loss_mask"][text[1:] == self.fim.pad] = 0.0
        return item

    def _tokens(self, k: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample k, fewer where the data end."""
        (first, start), (last, stop) = self.indices.sample_index[k].tolist(), self.indices.sample_index[k + 1].tolist()
        parts, places = [], []
        for position in range(first, last + 1):
            document = int(self.indices.document_index[position])
            offset = start if position == first else 0
            length = stop + 1 - offset if position == last else None  # the last token is read again by sample k + 1
            parts.append(self.indexed.get(document, offset, length))
            places.append((document, offset))
        tokens = np.concatenate(parts)
        smallest = 0 if tokens.dtype.kind == "u" else tokens.min(initial=0)
        if smallest < 0 or tokens.max(initial=0) >= self.rules.vocab_size:
            self._refuse(parts, places)
        return tokens

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
        raise ConfigError(f"{self.indexed.data_path} holds token {token} ({where}), {reason}")


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
    progress: Callable[[str], None] = lambda message: None,
    fim: FimConfig | None = None,
) -> tuple[GPTDataset | BlendedDataset | MockGPTDataset | None, ...]:
    """(train, valid, test); None for a split that has no share, no documents, or no samples requested.

    tokenizer: any object with `vocab_size`, `eod` and, if it has one, `pad`. num_samples: for each split; None is one
    epoch. Every process calls; one on each file system that holds the cache is the builder. `wait` returns when all
    have called it, and all call it exactly once, also a process that fails; mock data need no builder and no wait. `say`
    hears of what is strange but can be; every process says it, so let one of them print. `progress` hears what each split
    reads of each data set and, from the builder, what it does. fim: fill in the middle, where its `fim_data` says so.
    Raises ValueError on every process for data or settings that cannot work; if the cache cannot be written, with the
    reason on the builder and with a pointer to it on the others.
    """
    if config.seq_length is None:
        raise ValueError("no sequence length; set --seq-length")
    if num_samples[0] is not None and num_samples[0] < 1:
        raise ValueError(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    rules = TokenRules(
        tokenizer.vocab_size,
        tokenizer.eod,
        getattr(tokenizer, "pad", None),
        config.eod_mask_loss,
        config.reset_position_ids,
        config.reset_attention_mask,
    )
    if config.mock_data:
        return _mock_datasets(config, rules, num_samples, seed)
    if not any(blends := config.blends()):
        raise ValueError("no data: set --data-path PREFIX, or --mock-data to try things out")
    try:
        plans = _plan_splits(_Files(config, rules, say), blends, num_samples, seed)
        for plan in filter(None, plans):
            for line in lines(plan.parts[0].split, plan.readings()):
                progress(line)
        if is_builder:
            found = FoundCaches(say)
            for folder in {cache.folder for plan in filter(None, plans) for cache in plan.caches()}:
                remove_abandoned(folder)
            for plan in filter(None, plans):
                plan.build(found, progress, say)
    finally:
        wait()  # also after an error: nobody may wait for a process that is gone
    rearrange = FillInTheMiddle(fim, tokenizer, seed) if fim is not None and fim.fim_data else None
    return tuple(plan and plan.load(rules, rearrange) for plan in plans)


def plan_reading(config: DataConfig, num_samples: list[int | None], seed: int = 0) -> list[list[Reading]]:
    """What `build_gpt_datasets` would have a run read, for train, valid and test; nothing is built. Raises as it does."""
    plans = _plan_splits(_Files(config, None, _warn), config.blends(), num_samples, seed)
    return [plan.readings() if plan else [] for plan in plans]


def _mock_datasets(config: DataConfig, rules: TokenRules, num_samples: list[int | None], seed: int) -> tuple:
    if None in num_samples:
        raise ValueError("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return tuple(
        MockGPTDataset(count, config.seq_length, (seed, split), rules) if count else None
        for split, count in enumerate(num_samples)
    )


def _note_small_ids(indexed: IndexedDataset, rules: TokenRules, say: Callable[[str], None]) -> None:
    """A file of ids too small for the whole vocabulary: preprocessing with this tokenizer would have made larger ones."""
    if indexed.dtype.kind in "iu" and rules.vocab_size - 1 > np.iinfo(indexed.dtype).max:
        say(
            f"{indexed.data_path} holds ids up to {np.iinfo(indexed.dtype).max} ({indexed.dtype}), the tokenizer's vocabulary has "
            f"{rules.vocab_size}: were the data made with another tokenizer?"
        )


class _Files(DataFiles):
    """With the settings by which they are read. rules: for a note of ids too small for them; none when only planning."""

    def __init__(self, config: DataConfig, rules: TokenRules | None, say: Callable[[str], None]):
        note = (lambda indexed: None) if rules is None else lambda indexed: _note_small_ids(indexed, rules, say)
        super().__init__(config.mmap_bin_files, note)
        self.config, self.say = config, say


@dataclass(frozen=True)
class _Part:
    """One token file's share in one split."""

    indexed: IndexedDataset
    split: str
    request: IndexRequest
    cache: IndexCache

    def build(self, found: FoundCaches, progress: Callable[[str], None], say: Callable[[str], None]) -> None:
        if self.cache.is_complete(say):
            return
        lengths, request = self.indexed.sequence_lengths, self.request
        if there := found.indices(self.cache.folder, self.indexed.prefix, self.split, request, lengths):
            progress(f"taking the index of {self.indexed.prefix} from Megatron's cache {there[1]}")
            self.cache.write(there[0])
            return
        progress(f"building the index of {number_of_samples(lengths, request):,} samples of {self.indexed.prefix}")
        tokens, need = split_tokens(lengths, request), request.seq_length + request.extra_token
        if tokens < need:
            message = f"a split has {tokens} tokens and a sample {need}: documents repeat within a sample"
            say(f"{message}; use more data or another --split")
        self.cache.write(build_indices(lengths, request))

    def load(self, rules: TokenRules, fim: FillInTheMiddle | None) -> GPTDataset:
        indices = Indices(*self.cache.load())
        if problem := shape_problem(indices, self.indexed.sequence_lengths, self.request):
            raise ValueError(
                f"index cache {self.cache.path('*')} is not that of {self.indexed.prefix}: {problem}; delete it"
            )
        return GPTDataset(self.indexed, indices, self.request.seq_length, rules, fim)


@dataclass(frozen=True)
class _SplitPlan:
    """What train, valid or test is made of. samples: that are read of each; blend_cache None: of one file, without blending."""

    parts: list[_Part]
    samples: list[int]
    blend_cache: IndexCache | None = None

    def build(self, found: FoundCaches, progress: Callable[[str], None], say: Callable[[str], None]) -> None:
        for number, part in enumerate(self.parts, start=1):
            of_all = f" ({self.parts[0].split}, {number} of {len(self.parts)})"
            part.build(found, lambda message, of_all=of_all: progress(message + of_all), say)
        if self.blend_cache is None or self.blend_cache.is_complete(say):
            return
        order = self.blend_cache.fields
        if there := found.blend(self.blend_cache.folder, self.parts[0].split, order, len(self.parts)):
            progress(f"taking the order of a blend from Megatron's cache {there[1]}")
            self.blend_cache.write(there[0])
            return
        progress(f"building the order of a blend of {len(self.parts)} data sets")
        indices = exhaustive_indices(order["sizes"]) if order["size"] is None else None
        self.blend_cache.write(indices or weighted_indices(order["shares"], order["size"]))

    def caches(self) -> list[IndexCache]:
        return [*(part.cache for part in self.parts), *filter(None, [self.blend_cache])]

    def readings(self) -> list[Reading]:
        return [reading(part.indexed, part.request, count) for part, count in zip(self.parts, self.samples)]

    def load(self, rules: TokenRules, fim: FillInTheMiddle | None) -> GPTDataset | BlendedDataset:
        datasets = [part.load(rules, fim) for part in self.parts]
        if self.blend_cache is None:
            return datasets[0]
        names = [part.indexed.prefix for part in self.parts]
        return BlendedDataset(datasets, BlendIndices(*self.blend_cache.load()), names)


def _plan_splits(
    files: _Files, blends: Iterable[Blend | None], num_samples: list[int | None], seed: int
) -> list[_SplitPlan | None]:
    return [
        _plan_split(files, blend, split, count, seed) for split, (blend, count) in enumerate(zip(blends, num_samples))
    ]


def _plan_split(files: _Files, blend: Blend | None, split: int, count: int | None, seed: int) -> _SplitPlan | None:
    """What to build for one split; None if it is left out. Raises ValueError if it cannot give its samples."""
    config = files.config
    has_share = config.has_own_splits or parse_split(config.split_shares)[split] > 0
    if blend is None or count == 0 or not has_share:
        return None
    # Files of a split's own are not blended when there is one, whatever its weight.
    if blend.is_single or (config.has_own_splits and len(blend.prefixes) == 1):
        part = _plan_part(files, blend.prefixes[0], split, count, seed)
        if part is None:
            return None
        return _SplitPlan(
            [part], [number_of_samples(part.indexed.sequence_lengths, part.request) if count is None else count]
        )
    shares, counts = None, [None] * len(blend.prefixes)
    if blend.weights is not None:
        if count is None:
            raise ValueError(
                "a blend with weights has no end, so one epoch cannot be requested; give a number of samples"
            )
        shares = normalized(blend.weights)
        counts = samples_of_each(count, shares, config.mid_level_dataset_surplus)
    parts = [_plan_part(files, prefix, split, c, seed) for prefix, c in zip(blend.prefixes, counts)]
    if None in parts:
        missing = blend.prefixes[parts.index(None)]
        raise ValueError(
            f"{missing} has no document for the {SPLIT_NAMES[split]} split; change --split or leave it out"
        )
    sizes = [number_of_samples(part.indexed.sequence_lengths, part.request) for part in parts]
    if shares is None:
        shares, size = normalized(sizes), None if count is None else min(count, sum(sizes))
        read = sizes if size is None else samples_of_each(size, shares)
    else:  # normalized a second time, as the files in the wild are: it may change the last bit
        read = samples_of_each(count, shares)
        shares, size = normalized(shares), sum(read)
    fields = {"shares": shares, "size": size, "sizes": sizes if size is None else None}
    folder = Path(config.data_cache_path or f"{blend.prefixes[0]}/cache/BlendedDataset_indices")
    return _SplitPlan(
        parts, read, IndexCache(folder, "BlendedDataset", SPLIT_NAMES[split], fields, BlendIndices._fields)
    )


def _plan_part(files: _Files, prefix: str, split: int, count: int | None, seed: int) -> _Part | None:
    indexed, fingerprint = files.open(prefix)
    request = _split_request(files, indexed.sequence_lengths, split, count, seed)
    if request is None:
        return None
    folder = Path(files.config.data_cache_path or f"{prefix}/cache/GPTDataset_indices")
    fields, name = {**asdict(request), **fingerprint}, SPLIT_NAMES[split]
    return _Part(indexed, name, request, IndexCache(folder, "GPTDataset", name, fields, Indices._fields))


def _split_request(files: _Files, lengths: np.ndarray, split: int, count: int | None, seed: int) -> IndexRequest | None:
    """What to build for a split that has a share of a file of sequences of these lengths; None if that has no document.

    Raises ValueError if it cannot fill one sample.
    """
    config = files.config
    if config.has_own_splits:
        ids, share = (0, len(lengths)), "the file"
    else:
        ids, share = (
            split_ranges(parse_split(config.split_shares), len(lengths))[split],
            f"--split {config.split_shares}",
        )
    if ids[0] == ids[1]:
        name = SPLIT_NAMES[split]
        where = f"{share} leaves no document of {len(lengths)} to the {name} split"
        if name == "train":
            raise ValueError(f"{where}; use more data or a larger share")
        files.say(f"{where}: it is left out")
        return None
    request = IndexRequest(ids, count, config.seq_length, seed, epoch_stable=config.epoch_stable_order)
    check_enough_tokens(lengths, request)
    return request
