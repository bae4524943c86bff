"""GPT data sets from token files: the index arrays of each file (`index_map`), built once into a cache, and their blends."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.core.datasets.blend import Blend
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_plan import Reading, lines, reading
from megatron.core.datasets.document_ends import note_without_ends
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
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.split_plan import Say, SplitPlan, plan_and_build, plan_splits


@dataclass(frozen=True)
class GPTPart:
    """One token file's share in one split."""

    indexed: IndexedDataset
    split: str
    request: IndexRequest
    cache: IndexCache

    @cached_property
    def num_samples(self) -> int:
        return number_of_samples(self.indexed.sequence_lengths, self.request)

    def build(self, found: FoundCaches, progress: Say, say: Say) -> None:
        if self.cache.is_complete(say):
            return
        lengths, request = self.indexed.sequence_lengths, self.request
        if there := found.indices(self.cache.folder, self.indexed.prefix, self.split, request, lengths):
            progress(f"taking the index of {self.indexed.prefix} from Megatron's cache {there[1]}")
            self.cache.write(there[0])
            return
        progress(f"building the index of {self.num_samples:,} samples of {self.indexed.prefix}")
        tokens, need = split_tokens(lengths, request), request.seq_length + request.extra_token
        if tokens < need:
            where = f"the {self.split} split of {self.indexed.prefix} has {tokens} tokens"
            say(f"{where} and a sample {need}: documents repeat within a sample; use more data or another --split")
        self.cache.write(build_indices(lengths, request))

    def indices(self) -> Indices:
        """What was built. Raises ValueError if that does not fit the file."""
        indices = Indices(*self.cache.load())
        if problem := shape_problem(indices, self.indexed.sequence_lengths, self.request):
            raise ValueError(
                f"index cache {self.cache.path('*')} is not that of {self.indexed.prefix}: {problem}; delete it"
            )
        return indices


def build_gpt_plans(
    config: DataConfig,
    blends: Iterable[Blend | None],
    vocab_size: int,
    eod_id: int,
    num_samples: list[int | None],
    seed: int,
    *,
    is_builder: bool,
    wait: Callable[[], None],
    say: Say,
    progress: Say,
) -> list[SplitPlan[GPTPart] | None]:
    """What train, valid and test are made of, with everything built. The arguments are those of `build_gpt_datasets`."""
    found = FoundCaches(say)

    def plan() -> list[SplitPlan[GPTPart] | None]:
        plans = _plan(config, blends, num_samples, seed, say, vocab_size)
        for split in filter(None, plans):
            for line in lines(split.split, _readings(split)):
                progress(line)
        if is_builder:  # the others need no token yet
            _note_missing_ends(filter(None, plans), eod_id, config, say, progress)
        return plans

    def build(split: SplitPlan[GPTPart]) -> None:
        for number, part in enumerate(split.parts, start=1):
            of_all = f" ({split.split}, {number} of {len(split.parts)})"
            part.build(found, lambda message, of_all=of_all: progress(message + of_all), say)
        split.build_order(
            progress, say, lambda cache: found.blend(cache.folder, split.split, cache.fields, len(split.parts))
        )

    return plan_and_build(plan, build, is_builder=is_builder, wait=wait)


def plan_reading(config: DataConfig, num_samples: list[int | None], seed: int = 0) -> list[list[Reading]]:
    """What `build_gpt_datasets` would have a run read, for train, valid and test; nothing is built. Raises as it does."""
    plans = _plan(config, config.blends(), num_samples, seed, lambda message: warnings.warn(message, stacklevel=2))
    return [_readings(split) if split else [] for split in plans]


def _readings(split: SplitPlan[GPTPart]) -> list[Reading]:
    return [reading(part.indexed, part.request, count) for part, count in zip(split.parts, split.samples_of_parts())]


def _plan(
    config: DataConfig,
    blends: Iterable[Blend | None],
    num_samples: list[int | None],
    seed: int,
    say: Say,
    vocab_size: int | None = None,
) -> list[SplitPlan[GPTPart] | None]:
    """vocab_size: for a note of files whose ids are too small for it; none when only planning."""
    look_at = (lambda indexed: None) if vocab_size is None else lambda file: _note_small_ids(file, vocab_size, say)
    files = DataFiles(config.mmap_bin_files, look_at)

    def plan_part(prefix: str, split: int, count: int | None) -> GPTPart | None:
        indexed, fingerprint = files.open(prefix)
        request = _split_request(config, indexed.sequence_lengths, split, count, seed, say)
        if request is None:
            return None
        folder = Path(config.data_cache_path or f"{prefix}/cache/GPTDataset_indices")
        fields, name = {**asdict(request), **fingerprint}, SPLIT_NAMES[split]
        return GPTPart(indexed, name, request, IndexCache(folder, "GPTDataset", name, fields, Indices._fields))

    return plan_splits(config, blends, num_samples, plan_part)


def _note_small_ids(indexed: IndexedDataset, vocab_size: int, say: Say) -> None:
    """A file of ids too small for the whole vocabulary: preprocessing with this tokenizer would have made larger ones."""
    if indexed.dtype.kind in "iu" and vocab_size - 1 > np.iinfo(indexed.dtype).max:
        say(
            f"{indexed.data_path} holds ids up to {np.iinfo(indexed.dtype).max} ({indexed.dtype}), the tokenizer's vocabulary has "
            f"{vocab_size}: were the data made with another tokenizer?"
        )


def _note_missing_ends(
    splits: Iterable[SplitPlan[GPTPart]], eod_id: int, config: DataConfig, say: Say, progress: Say
) -> None:
    """Said as strange where a flag looks for the ends of documents, else in passing."""
    note = note_without_ends(
        {part.indexed.prefix: part.indexed for split in splits for part in split.parts}.values(), eod_id
    )
    flags = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    if note and (given := [f"--{flag.replace('_', '-')}" for flag in flags if getattr(config, flag)]):
        say(f"{note}; there {' and '.join(given)} will find nothing to act on")
    elif note:
        progress(note)


def _split_request(
    config: DataConfig, lengths: np.ndarray, split: int, count: int | None, seed: int, say: Say
) -> IndexRequest | None:
    """What to build for a split that has a share of a file of sequences of these lengths; None if that has no document.

    Raises ValueError if it cannot fill one sample.
    """
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
        say(f"{where}: it is left out")
        return None
    request = IndexRequest(ids, count, config.seq_length, seed, epoch_stable=config.epoch_stable_order)
    check_enough_tokens(lengths, request)
    return request
