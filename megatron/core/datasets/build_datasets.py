"""Data sets from token files: what each split reads, with index arrays that one process builds and all read from a cache.

    builder:  plan, build the arrays of each file, then the order of a blend ---- wait() ---- load
    others:   plan                                                           ---- wait() ---- load

A `SampleKind` says how samples are made from one file: GPT, BERT and a fork's own data set are one each. All that is built
goes into the caches of `index_cache`, so that a later run with the same data and settings builds nothing.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
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
from megatron.core.datasets.data_usage_report import Reading, lines
from megatron.core.datasets.index_cache import IndexCache, content_fingerprint
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split, split_ranges
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.read_megatron_index_cache import Described, Wanted, descriptions, order_problem
from megatron.core.storage.atomic_file import remove_abandoned

Say = Callable[[str], None]


@dataclass(frozen=True)
class Building:
    """How the processes of a run build their data sets together.

    is_builder: this process builds; exactly one process of each file system that holds the cache does. wait() returns
    when all
    processes have called it; each calls it once, also after an error. `say` takes warnings; every process gives the same, so
    print them on one. `progress` takes a line for each split and data set and, on the builder, a line for each step.
    """

    is_builder: bool = True
    wait: Callable[[], None] = lambda: None
    say: Say = lambda message: warnings.warn(message, stacklevel=4)
    progress: Say = lambda message: None


class SampleKind:
    """How samples of one kind are made from a token file. `build_datasets` takes an instance; a fork may write its own."""

    name: str  # of their files in the cache
    arrays: tuple[str, ...]  # the names of the index arrays

    def elements(self, indexed: IndexedDataset) -> int:
        """How many elements --split divides: the sequences, unless a subclass counts documents."""
        return len(indexed)

    def request(self, ids: tuple[int, int], num_samples: int | None) -> Any:
        """A dataclass of JSON values: all that the arrays depend on besides the file.

        ids: the elements [first, past) of the split. num_samples: at least so many; None asks for one epoch.
        """
        raise NotImplementedError

    def build(self, part: "Part", say: Say) -> tuple[np.ndarray, ...]:
        """The index arrays of `part.request`. Raises ValueError for a file that cannot give them."""
        raise NotImplementedError

    def dataset(self, part: "Part", arrays: tuple[np.ndarray, ...]) -> Any:
        """The samples, as `batches` reads them. arrays: what `build` made, memory-mapped."""
        raise NotImplementedError

    def count_samples(self, indexed: IndexedDataset, request: Any) -> int | None:
        """The number of samples; None if only the built arrays tell: then it is the length of the last one."""
        return None

    def look_at(self, indexed: IndexedDataset, say: Say) -> None:
        """Warn through `say` about a file that has been opened."""

    def look_at_all(self, files: list[IndexedDataset], building: Building) -> None:
        """Warn about all files of the run together; only the builder calls."""

    def reading(self, part: "Part", samples: int) -> Reading | None:
        """What a run reads of `part` when it takes this many samples; None leaves the line at its start out."""
        return None

    def wanted(self, part: "Part") -> Wanted | None:
        """The cache in which Megatron-LM would have left the arrays of `part`."""
        return None


@dataclass(frozen=True)
class Part:
    """One token file's share in one split. known_samples: None if only the built arrays tell."""

    kind: SampleKind
    indexed: IndexedDataset
    split: str
    request: Any
    cache: IndexCache
    known_samples: int | None

    @cached_property
    def num_samples(self) -> int:
        return len(self.cache.load()[-1]) if self.known_samples is None else self.known_samples

    def build(self, where: str, building: Building, described: Described) -> None:
        if self.cache.is_complete(building.say):
            return
        samples = "" if self.known_samples is None else f"{self.known_samples:,} samples of "
        wanted, what = self.kind.wanted(self), f"the index of {samples}{self.indexed.prefix} ({where})"
        self.cache.write(_found(wanted, what, building, described) or self.kind.build(self, building.say))


def _found(wanted: Wanted | None, what: str, building: Building, described: Described) -> tuple[np.ndarray, ...] | None:
    """The arrays that Megatron-LM left, if they fit; `progress` hears whether they are taken or built."""
    found = wanted and wanted.find(described, building.say)
    building.progress(f"taking {what} from Megatron's cache {found[0]}" if found else f"building {what}")
    return found and found[1]


@dataclass(frozen=True)
class SplitPlan:
    """The files of train, valid or test. count: samples, None for one epoch; blend: None for a single file."""

    split: str
    parts: list[Part]
    count: int | None
    blend: Blend | None
    order_folder: Path  # of the blend's cache

    def readings(self) -> list[Reading]:
        """What the run reads of each part; empty for a kind that does not tell."""
        if any(part.known_samples is None for part in self.parts):
            return []
        alone = [self.parts[0].num_samples if self.count is None else self.count]
        taken = alone if self.blend is None else self._order()[1]
        readings = (part.kind.reading(part, count) for part, count in zip(self.parts, taken))
        return [reading for reading in readings if reading is not None]

    def order_cache(self) -> IndexCache:
        """The cache of the blend's order."""
        return IndexCache(self.order_folder, "BlendedDataset", self.split, self._order()[0], BlendIndices._fields)

    def _order(self) -> tuple[dict[str, Any], list[int]]:
        """The fields that determine the order of the blend, and the samples that it takes of each part."""
        sizes = [part.num_samples for part in self.parts]
        if self.blend.weights is None:
            shares, size = normalized(sizes), None if self.count is None else min(self.count, sum(sizes))
            taken = sizes if size is None else samples_of_each(size, shares)
        else:  # normalized twice as in Megatron, which may change the last bit
            once = normalized(self.blend.weights)
            taken = samples_of_each(self.count, once)
            shares, size = normalized(once), sum(taken)
        return {"shares": shares, "size": size, "sizes": sizes if size is None else None}, taken

    def build(self, building: Building, described: Described) -> None:
        """Write the arrays of each part into its cache, then the order of the blend."""
        for number, part in enumerate(self.parts, start=1):
            part.build(f"{self.split}, {number} of {len(self.parts)}", building, described)
        if self.blend is None or (order := self.order_cache()).is_complete(building.say):
            return
        size, sizes = order.fields["size"], order.fields["sizes"]
        shares = order.fields["shares"]
        right = cache(lambda: exhaustive_indices(sizes) if size is None else weighted_indices(shares, size))
        fields = {"weights": sizes if size is None else shares, "size": size}
        place = (order.folder, f"BlendedDataset-{self.split}")
        wanted = Wanted(*place, fields, order.parts, lambda arrays: order_problem(arrays, right()))
        what = f"the order of a blend of {len(self.parts)} data sets"
        order.write(_found(wanted, what, building, described) or right())

    def load(self) -> Any:
        """The data set of its one part, or the blend of all."""
        datasets = [part.kind.dataset(part, part.cache.load()) for part in self.parts]
        if self.blend is None:
            return datasets[0]
        indices = BlendIndices(*self.order_cache().load())
        return BlendedDataset(datasets, indices, [part.indexed.prefix for part in self.parts])


@dataclass(frozen=True)
class SeveralSets:
    """Plans of one split whose data sets stay apart, as the sets of --multiple-validation-sets; in the place of a
    `SplitPlan`."""

    plans: list[SplitPlan]

    @property
    def split(self) -> str:
        return self.plans[0].split

    @property
    def parts(self) -> list[Part]:
        return [part for plan in self.plans for part in plan.parts]

    @property
    def order_folder(self) -> Path:
        return self.plans[0].order_folder

    def readings(self) -> list[Reading]:
        return [reading for plan in self.plans for reading in plan.readings()]

    def build(self, building: Building, described: Described) -> None:
        for plan in self.plans:
            plan.build(building, described)

    def load(self) -> list[Any]:
        """A data set for each."""
        return [plan.load() for plan in self.plans]


def build_datasets(config: DataConfig, kind: SampleKind, num_samples: list[int | None], building: Building) -> tuple:
    """(train, valid, test) of the files that `config` names; None for a split without a share, documents, or samples
    asked for.
    With --multiple-validation-sets and several prefixes, valid is a list of data sets.

    num_samples: of each split, None for one epoch. Every process calls. Raises ValueError on every process for data or
    settings
    that cannot work; if the cache cannot be written, with the reason on the builder and a pointer to it on the others.
    """
    try:
        plans = plan_splits(config, kind, num_samples, building.say)
        for split in filter(None, plans):
            for line in lines(split.split, split.readings()):
                building.progress(line)
        if building.is_builder:
            _build(list(filter(None, plans)), kind, building)
    finally:
        building.wait()  # also after an error, or the other processes would wait forever
    return tuple(plan and plan.load() for plan in plans)


def _build(plans: list[SplitPlan | SeveralSets], kind: SampleKind, building: Building) -> None:
    files = {part.indexed.prefix: part.indexed for plan in plans for part in plan.parts}
    kind.look_at_all(list(files.values()), building)
    for folder in {folder for plan in plans for folder in (plan.order_folder, *(p.cache.folder for p in plan.parts))}:
        remove_abandoned(folder)
    described = cache(descriptions)
    for plan in plans:
        plan.build(building, described)


def plan_splits(
    config: DataConfig, kind: SampleKind, num_samples: list[int | None], say: Say
) -> list[SplitPlan | SeveralSets | None]:
    """The plans of train, valid and test; None for one that is left out. Raises ValueError where samples cannot be given."""

    @cache
    def opened(prefix: str) -> tuple[IndexedDataset, dict[str, Any]]:
        indexed = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        kind.look_at(indexed, say)
        return indexed, content_fingerprint(indexed)

    def plan_part(prefix: str, name: str, count: int | None) -> Part | str:
        """The share of one file; a string that says why it has none."""
        indexed, fingerprint = opened(prefix)
        total, share = kind.elements(indexed), "the file"
        ids = (0, total)
        if not config.has_own_splits:
            share = f"--split {config.split_shares}"
            ids = split_ranges(parse_split(config.split_shares), total)[SPLIT_NAMES.index(name)]
        if ids[0] == ids[1]:
            return f"{prefix}: {share} leaves no document of {total} to the {name} split"
        request = kind.request(ids, count)
        folder = Path(config.data_cache_path or f"{prefix}/cache/{kind.name}_indices")
        cache = IndexCache(folder, kind.name, name, {**asdict(request), **fingerprint}, kind.arrays)
        return Part(kind, indexed, name, request, cache, kind.count_samples(indexed, request))

    def plan_set(name: str, prefix: str, count: int | None) -> SplitPlan:
        """One of several sets, of one file."""
        plan = plan_split(name, Blend((prefix,)), count)
        if plan is None:
            raise ValueError(f"{prefix} has no document, so it is no validation set; leave it out of --valid-data-path")
        return plan

    def plan_split(name: str, blend: Blend, count: int | None) -> SplitPlan | SeveralSets | None:
        if name == "valid" and config.multiple_validation_sets and len(blend.prefixes) > 1:
            return SeveralSets([plan_set(name, prefix, count) for prefix in blend.prefixes])
        # Files of a split's own are not blended when there is one, whatever its weight.
        alone = blend.is_single or (config.has_own_splits and len(blend.prefixes) == 1)
        counts = [count] if alone else samples_of_files(blend, count, config.mid_level_dataset_surplus)
        parts = [plan_part(prefix, name, of_file) for prefix, of_file in zip(blend.prefixes, counts)]
        missing = [part for part in parts if isinstance(part, str)]
        if missing and (name == "train" or not alone):
            raise ValueError(f"{missing[0]}; use more data or a larger share")
        if missing:
            say(f"{missing[0]}: it is left out")
            return None
        folder = Path(config.data_cache_path or f"{blend.prefixes[0]}/cache/BlendedDataset_indices")
        return SplitPlan(name, parts, count, None if alone else blend, folder)

    blends = config.blends()
    if not any(blends):
        raise ValueError("no data: set --data-path PREFIX, or --mock-data to try things out")
    shares = (1.0, 1.0, 1.0) if config.has_own_splits else parse_split(config.split_shares)
    asked = zip(SPLIT_NAMES, blends, num_samples, shares)
    return [plan_split(name, blend, n) if blend and n != 0 and share > 0 else None for name, blend, n, share in asked]


def samples_of_files(blend: Blend, count: int | None, surplus: float) -> list[int | None]:
    """Samples to build of each file; None: one epoch."""
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    if count is None:
        raise ValueError("a blend with weights has no end, so one epoch cannot be requested; give a number of samples")
    return samples_of_each(count, normalized(blend.weights), surplus)


def size_problems(num_samples: list[int | None], *, made_up: bool) -> list[str]:
    """Problems with the requested number of samples of each split."""
    problems = []
    if num_samples[0] is not None and num_samples[0] < 1:
        problems.append(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    if made_up and None in num_samples:
        problems.append("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return problems
