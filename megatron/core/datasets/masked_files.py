"""Masked data sets from token files: the sample map of each file, built once into a cache, and their blends.

    builder:  build the maps, then the blends' orders, write ---- wait() ---- map the cache
    others:                                                       wait() ---- map the cache

How many samples a file gives is known when its map is there, so the order of a blend comes after the maps of its files. Splits
are shares of documents, not of sentences.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
from megatron.core.datasets.index_cache import DataFiles, IndexCache
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split, split_ranges
from megatron.core.datasets.indexed import IndexedDataset, remove_abandoned
from megatron.core.datasets.masked import SampleRequest, build_sample_map

Say = Callable[[str], None]


@dataclass(frozen=True)
class MaskedKind:
    """What BERT and T5 differ in. name: of their files in the cache."""

    name: str
    request: Callable[
        [tuple[int, int], int | None], SampleRequest
    ]  # (documents of the split, samples) -> what to build
    dataset: Callable[[IndexedDataset, np.ndarray], Any]  # (file, its sample map) -> the data set


def build_masked_datasets(
    config: DataConfig,
    kind: MaskedKind,
    num_samples: list[int | None],
    *,
    is_builder: bool,
    wait: Callable[[], None],
    say: Say,
    progress: Say,
) -> tuple[Any, Any, Any]:
    """(train, valid, test), read from files; None for a split that has no share, no documents, or no samples requested.

    The arguments, who calls, and what is raised are those of `build_gpt_datasets`.
    """
    try:
        files = DataFiles(config.mmap_bin_files)
        plans = [
            _plan_split(config, kind, files, blend, split, count, say)
            for split, (blend, count) in enumerate(zip(config.blends(), num_samples))
        ]
        if is_builder:
            for folder in {folder for plan in filter(None, plans) for folder in plan.folders()}:
                remove_abandoned(folder)
            for plan in filter(None, plans):
                plan.build(progress, say)
    finally:
        wait()  # also after an error: nobody may wait for a process that is gone
    return tuple(plan and plan.load() for plan in plans)


@dataclass(frozen=True)
class _Part:
    """One token file's share in one split."""

    indexed: IndexedDataset
    request: SampleRequest
    cache: IndexCache
    kind: MaskedKind
    split: str

    def build(self, progress: Say, say: Say) -> None:
        if self.cache.is_complete(say):
            return
        asked = "one pass" if self.request.num_samples is None else f"{self.request.num_samples:,}"
        progress(f"building the sample map of {self.indexed.prefix} for the {self.split} split ({asked} requested)")
        began = time.monotonic()
        try:
            rows = build_sample_map(self.indexed.sequence_lengths, self.indexed.document_indices, self.request)
        except ValueError as error:
            raise ValueError(f"{self.indexed.prefix}, {self.split} split: {error}") from None
        self.cache.write((rows,))
        progress(f"built {len(rows):,} samples in {time.monotonic() - began:.1f} s")

    def sample_map(self) -> np.ndarray:
        (rows,) = self.cache.load()
        return rows

    def load(self) -> Any:
        return self.kind.dataset(self.indexed, self.sample_map())


@dataclass(frozen=True)
class _SplitPlan:
    """What train, valid or test is made of: one file, or several with the weights and the folder of a blend."""

    parts: list[_Part]
    split: str
    count: int | None
    weights: tuple[float, ...] | None = None
    folder: Path | None = None

    def folders(self) -> list[Path]:
        """Those of its caches."""
        return [*(part.cache.folder for part in self.parts), *filter(None, [self.folder])]

    def build(self, progress: Say, say: Say) -> None:
        for part in self.parts:
            part.build(progress, say)
        if self.folder is None:
            return
        cache = self._blend_cache([len(part.sample_map()) for part in self.parts])
        if not cache.is_complete(say):
            progress(f"building the order of a blend of {len(self.parts)} data sets")
            order = cache.fields
            indices = exhaustive_indices(order["sizes"]) if order["size"] is None else None
            cache.write(indices or weighted_indices(order["shares"], order["size"]))

    def load(self) -> Any:
        datasets = [part.load() for part in self.parts]
        if self.folder is None:
            return datasets[0]
        indices = BlendIndices(*self._blend_cache([len(dataset) for dataset in datasets]).load())
        return BlendedDataset(datasets, indices, [part.indexed.prefix for part in self.parts])

    def _blend_cache(self, sizes: list[int]) -> IndexCache:
        """Where the order is kept. sizes: samples of each file; without weights they are the shares."""
        if self.weights is None:
            shares, size = normalized(sizes), None if self.count is None else min(self.count, sum(sizes))
        else:  # normalized twice, as the files in the wild are: it may change the last bit
            once = normalized(self.weights)
            shares, size = normalized(once), sum(samples_of_each(self.count, once))
        fields = {"shares": shares, "size": size, "sizes": sizes if size is None else None}
        return IndexCache(self.folder, "BlendedDataset", self.split, fields, BlendIndices._fields)


def _plan_split(
    config: DataConfig, kind: MaskedKind, files: DataFiles, blend: Blend | None, split: int, count: int | None, say: Say
) -> _SplitPlan | None:
    """What to build for one split; None if it is left out. Raises ValueError if it cannot give its samples."""
    name = SPLIT_NAMES[split]
    has_share = config.has_own_splits or parse_split(config.split_shares)[split] > 0
    if blend is None or count == 0 or not has_share:
        return None
    # Files of a split's own are not blended when there is one, whatever its weight.
    is_single = blend.is_single or (config.has_own_splits and len(blend.prefixes) == 1)
    counts: list[int | None] = [count] if is_single else [None] * len(blend.prefixes)
    if blend.weights is not None and not is_single:
        if count is None:
            raise ValueError(
                "a blend with weights has no end, so one epoch cannot be requested; give a number of samples"
            )
        counts = samples_of_each(count, normalized(blend.weights), config.mid_level_dataset_surplus)
    parts = [_plan_part(config, kind, files, prefix, split, c) for prefix, c in zip(blend.prefixes, counts)]
    if None in parts:
        prefix = blend.prefixes[parts.index(None)]
        where = f"{prefix} has no document for the {name} split"
        if name == "train" or not is_single:
            raise ValueError(f"{where}; change --split or leave it out")
        say(f"{where}: it is left out")
        return None
    if is_single:
        return _SplitPlan(parts, name, count)
    folder = Path(config.data_cache_path or f"{blend.prefixes[0]}/cache/BlendedDataset_indices")
    return _SplitPlan(parts, name, count, blend.weights, folder)


def _plan_part(
    config: DataConfig, kind: MaskedKind, files: DataFiles, prefix: str, split: int, count: int | None
) -> _Part | None:
    """A file's share in a split; None if it has no document there."""
    indexed, fingerprint = files.open(prefix)
    ids = (0, indexed.document_count)
    if not config.has_own_splits:
        ids = split_ranges(parse_split(config.split_shares), indexed.document_count)[split]
    if ids[0] == ids[1]:
        return None
    request = kind.request(ids, count)
    folder = Path(config.data_cache_path or f"{prefix}/cache/{kind.name}_indices")
    cache = IndexCache(folder, kind.name, SPLIT_NAMES[split], {**asdict(request), **fingerprint}, ("sample_index",))
    return _Part(indexed, request, cache, kind, SPLIT_NAMES[split])
