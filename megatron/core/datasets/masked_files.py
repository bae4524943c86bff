"""Masked data sets from token files: the sample map of each file, built once into a cache, and their blends.

How many samples a file gives is known when its map is there. Splits are shares of documents, not of sentences.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_cache import DataFiles, IndexCache
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split, split_ranges
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.masked import SampleRequest, build_sample_map
from megatron.core.datasets.split_plan import Say, SplitPlan, plan_and_build, plan_splits


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

    def plan() -> list[SplitPlan[MaskedPart] | None]:
        return _plan(config, kind, num_samples, say)

    def build(split: SplitPlan[MaskedPart]) -> None:
        for part in split.parts:
            part.build(progress, say)
        split.build_order(progress, say)

    plans = plan_and_build(plan, build, is_builder=is_builder, wait=wait)
    return tuple(plan and plan.load(lambda part: kind.dataset(part.indexed, part.sample_map())) for plan in plans)


@dataclass(frozen=True)
class MaskedPart:
    """One token file's share in one split."""

    indexed: IndexedDataset
    split: str
    request: SampleRequest
    cache: IndexCache

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
        """What was built."""
        (rows,) = self.cache.load()
        return rows

    @property
    def num_samples(self) -> int:
        return len(self.sample_map())


def _plan(
    config: DataConfig, kind: MaskedKind, num_samples: list[int | None], say: Say
) -> list[SplitPlan[MaskedPart] | None]:
    files = DataFiles(config.mmap_bin_files)

    def plan_part(prefix: str, split: int, count: int | None) -> MaskedPart | None:
        indexed, fingerprint = files.open(prefix)
        name, ids = SPLIT_NAMES[split], (0, indexed.document_count)
        if not config.has_own_splits:
            ids = split_ranges(parse_split(config.split_shares), indexed.document_count)[split]
        if ids[0] == ids[1]:
            where = f"{prefix} has no document for the {name} split"
            if name == "train":
                raise ValueError(f"{where}; change --split or leave it out")
            say(f"{where}: it is left out")
            return None
        request = kind.request(ids, count)
        folder = Path(config.data_cache_path or f"{prefix}/cache/{kind.name}_indices")
        cache = IndexCache(folder, kind.name, name, {**asdict(request), **fingerprint}, ("sample_index",))
        return MaskedPart(indexed, name, request, cache)

    return plan_splits(config, config.blends(), num_samples, plan_part)
