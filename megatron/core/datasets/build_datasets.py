"""Build the data sets of a run from token files: one process builds the index arrays, and all load them from a cache.

    builder:  plan, build the arrays of each file, then the order of a blend ---- wait() ---- load
    others:   plan                                                           ---- wait() ---- load

A plan has three levels: a run has splits (train, valid, test), a split has one or several files, and each of those is a
`FileSplit`: the part of one file that one split reads, with its cache.

A `SampleKind` says how samples are made from one file: GPT, BERT and a fork's own data set are one each. The arrays go
into the caches of `index_cache`, so that a later run with the same data and settings builds nothing.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.blending_indices_and_dataset import (
    Blend,
    BlendedDataset,
    BlendIndices,
    exhaustive_indices,
    normalized,
    samples_of_each,
    weighted_indices,
)
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_cache import IndexCache, content_fingerprint
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split, split_ranges
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.planned_data_usage import DataUsage, usage_lines
from megatron.core.datasets.read_megatron_index_cache import (
    Described,
    MegatronCache,
    blend_order_problem,
    caches_with_descriptions,
)
from megatron.core.storage.atomic_file import remove_abandoned

Say = Callable[[str], None]


@dataclass(frozen=True)
class BuildContext:
    """Coordinate the processes of a run that build their data sets together.

    is_builder: this process builds; exactly one process of each file system that holds the cache does. wait() returns
    when all processes have called it; each calls it once, also after an error. `say` takes warnings; every process
    gives the same, so print them on one. `progress` takes a line for each split and data set and, on the builder, a
    line for each step.
    """

    is_builder: bool = True
    wait: Callable[[], None] = lambda: None
    say: Say = lambda message: warnings.warn(message, stacklevel=4)
    progress: Say = lambda message: None


class SampleKind:
    """Describe how samples of one kind are made from a token file.

    `build_datasets` takes an instance; a fork may write its own. A subclass must have `request`, `build` and `dataset`.
    """

    name: str  # part of the names of its cache files
    arrays: tuple[str, ...]  # the names of the index arrays

    def elements(self, indexed: IndexedDataset) -> int:
        """Return how many elements --split divides: the sequences, unless a subclass counts documents."""
        return len(indexed)

    def request(self, ids: tuple[int, int], num_samples: int | None) -> Any:
        """Return a dataclass of JSON values: all that the arrays depend on besides the file.

        ids: the elements [first, past) of the split. num_samples: at least so many; None asks for one epoch.
        """
        raise NotImplementedError

    def build(self, file_split: "FileSplit", say: Say) -> tuple[np.ndarray, ...]:
        """Build the index arrays of `file_split.request`, of shapes that the kind chooses.

        Raises ValueError for a file that cannot give them.
        """
        raise NotImplementedError

    def dataset(self, file_split: "FileSplit", arrays: tuple[np.ndarray, ...]) -> Any:
        """Return the samples, as `data_loader.batches` reads them.

        arrays: those that `build` made, in the same shapes, memory-mapped.
        """
        raise NotImplementedError

    def count_samples(self, indexed: IndexedDataset, request: Any) -> int | None:
        """Return the number of samples.

        None if only the built arrays tell it: it then is the length of the last one.
        """
        return None

    def check_file(self, indexed: IndexedDataset, say: Say) -> None:
        """Warn through `say` about a file that has been opened."""

    def check_files(self, files: list[IndexedDataset], build_context: BuildContext) -> None:
        """Warn about all files of the run together; only the builder calls."""

    def data_usage(self, file_split: "FileSplit", samples: int) -> DataUsage | None:
        """Return what a run reads of `file_split` when it takes this many samples; None: nothing is logged about it."""
        return None

    def megatron_cache(self, file_split: "FileSplit") -> MegatronCache | None:
        """Return the cache in which Megatron-LM would have left the arrays of `file_split`.

        None if it has no such arrays.
        """
        return None


@contextmanager
def naming_split(prefix: str, split: str) -> Iterator[None]:
    """Make a ValueError of the block name the file and the split, unless it does so."""
    try:
        yield
    except ValueError as error:
        if prefix in str(error):
            raise
        raise ValueError(f"{prefix}, {split} split: {error}") from error


@dataclass(frozen=True)
class FileSplit:
    """The part of one token file that one split reads. known_samples: None if only the built arrays tell."""

    kind: SampleKind
    indexed: IndexedDataset
    split: str
    request: Any
    cache: IndexCache
    known_samples: int | None

    @cached_property
    def num_samples(self) -> int:
        if self.known_samples is not None:
            return self.known_samples
        return len(self.cache.load()[-1])

    def build(self, position: str, build_context: BuildContext, described: Described) -> None:
        """Write the index arrays into the cache, unless they are there.

        position: in which split, and which of its files.
        """
        if self.cache.is_complete(build_context.say):
            return
        samples = "" if self.known_samples is None else f"{self.known_samples:,} samples of "
        description = f"the index of {samples}{self.indexed.prefix} ({position})"
        megatron_cache = self.kind.megatron_cache(self)
        arrays = _load_megatron_cache(megatron_cache, description, build_context, described)
        if arrays is None:
            with naming_split(self.indexed.prefix, self.split):
                arrays = self.kind.build(self, build_context.say)
        self.cache.write(arrays)


def _load_megatron_cache(
    megatron_cache: MegatronCache | None, description: str, build_context: BuildContext, described: Described
) -> tuple[np.ndarray, ...] | None:
    """Return the arrays that Megatron-LM left, if they fit.

    Report through `progress` whether they are taken or built.
    """
    match = None if megatron_cache is None else megatron_cache.find(described, build_context.say)
    if match is None:
        build_context.progress(f"building {description}")
        return None
    path, arrays = match
    build_context.progress(f"taking {description} from Megatron's cache {path}")
    return arrays


@dataclass(frozen=True)
class SplitPlan:
    """The files of train, valid or test. count: samples, None for one epoch; blend: None for a single file."""

    split: str
    file_splits: list[FileSplit]
    count: int | None
    blend: Blend | None
    order_folder: Path  # of the blend's cache

    def data_usages(self) -> list[DataUsage]:
        """Return what the run reads of each file; empty for a kind that does not tell."""
        if any(file_split.known_samples is None for file_split in self.file_splits):
            return []
        if self.blend is not None:
            _, samples_taken = self._order()
        elif self.count is not None:
            samples_taken = [self.count]
        else:
            samples_taken = [self.file_splits[0].num_samples]
        usages = []
        for file_split, samples in zip(self.file_splits, samples_taken):
            usage = file_split.kind.data_usage(file_split, samples)
            if usage is not None:
                usages.append(usage)
        return usages

    def order_cache(self) -> IndexCache:
        """Return the cache of the blend's order."""
        fields, _ = self._order()
        return IndexCache(self.order_folder, "BlendedDataset", self.split, fields, BlendIndices._fields)

    def _order(self) -> tuple[dict[str, Any], list[int]]:
        """Return the fields that determine the order of the blend, and the samples that it takes of each file.

        The names of the fields are part of the hash that names the cache.
        """
        sizes = [file_split.num_samples for file_split in self.file_splits]
        if self.blend.weights is None:
            shares = normalized(sizes)
            if self.count is None:
                size = None
                samples_taken = sizes
            else:
                size = min(self.count, sum(sizes))
                samples_taken = samples_of_each(size, shares)
        else:
            once = normalized(self.blend.weights)
            samples_taken = samples_of_each(self.count, once)
            shares = normalized(once)  # a second time, as in Megatron: it may change the last bit
            size = sum(samples_taken)
        return {"shares": shares, "size": size, "sizes": sizes if size is None else None}, samples_taken

    def build(self, build_context: BuildContext, described: Described) -> None:
        """Write the arrays of each file into its cache, then the order of the blend."""
        for number, file_split in enumerate(self.file_splits, start=1):
            file_split.build(f"{self.split}, {number} of {len(self.file_splits)}", build_context, described)

        # the order of the blend
        if self.blend is None:
            return
        order = self.order_cache()
        if order.is_complete(build_context.say):
            return
        size = order.fields["size"]
        sizes = order.fields["sizes"]
        shares = order.fields["shares"]

        @cache  # a Megatron cache is compared with it, so that it may be needed twice
        def indices() -> BlendIndices:
            return exhaustive_indices(sizes) if size is None else weighted_indices(shares, size)

        megatron_cache = MegatronCache(
            folder=order.folder,
            name=f"BlendedDataset-{self.split}",
            fields={"weights": sizes if size is None else shares, "size": size},
            arrays=order.array_names,
            problem=lambda arrays: blend_order_problem(arrays, indices()),
        )
        description = f"the order of a blend of {len(self.file_splits)} data sets"
        arrays = _load_megatron_cache(megatron_cache, description, build_context, described)
        order.write(indices() if arrays is None else arrays)

    def load(self) -> Any:
        """Load the data set of the one file, or the blend of all."""
        datasets = [file_split.kind.dataset(file_split, file_split.cache.load()) for file_split in self.file_splits]
        if self.blend is None:
            return datasets[0]
        indices = BlendIndices(*self.order_cache().load())
        names = [f"{file_split.indexed.prefix} ({self.split} split)" for file_split in self.file_splits]
        requested = None
        if self.blend.weights is not None:
            _, requested = self._order()
        return BlendedDataset(datasets, indices, names, requested)


@dataclass(frozen=True)
class SeveralSets:
    """The plans of one split whose data sets stay apart: those of --multiple-validation-sets.

    Used like a `SplitPlan`.
    """

    plans: list[SplitPlan]

    @property
    def split(self) -> str:
        return self.plans[0].split

    @property
    def file_splits(self) -> list[FileSplit]:
        return [file_split for plan in self.plans for file_split in plan.file_splits]

    @property
    def order_folder(self) -> Path:
        return self.plans[0].order_folder

    def data_usages(self) -> list[DataUsage]:
        return [usage for plan in self.plans for usage in plan.data_usages()]

    def build(self, build_context: BuildContext, described: Described) -> None:
        for plan in self.plans:
            plan.build(build_context, described)

    def load(self) -> list[Any]:
        """Load one data set for each plan."""
        return [plan.load() for plan in self.plans]


def build_datasets(
    config: DataConfig, kind: SampleKind, num_samples: list[int | None], build_context: BuildContext
) -> tuple:
    """Build (train, valid, test) from the files that `config` names.

    A split without a share, without documents, or of which no samples are requested is None. With
    --multiple-validation-sets and several prefixes, valid is a list of data sets.

    num_samples: of each split, None for one epoch. Every process calls. Raises ValueError on every process for
    data or settings that cannot work; if the cache cannot be written, with the reason on the builder and a pointer
    to it on the others.
    """
    try:
        plans = plan_splits(config, kind, num_samples, build_context.say)
        present = [plan for plan in plans if plan is not None]
        for plan in present:
            for line in usage_lines(plan.split, plan.data_usages()):
                build_context.progress(line)
        if build_context.is_builder:
            _build(present, kind, build_context)
    finally:
        build_context.wait()  # also after an error, or the other processes would wait forever
    return tuple(None if plan is None else plan.load() for plan in plans)


def _build(plans: list[SplitPlan | SeveralSets], kind: SampleKind, build_context: BuildContext) -> None:
    """Write all arrays of all plans into their caches."""
    # check the files, each once: several splits read the same ones
    files = {file_split.indexed.prefix: file_split.indexed for plan in plans for file_split in plan.file_splits}
    kind.check_files(list(files.values()), build_context)

    # remove the temporary files of builders that were killed
    folders = set()
    for plan in plans:
        folders.add(plan.order_folder)
        folders.update(file_split.cache.folder for file_split in plan.file_splits)
    for folder in folders:
        remove_abandoned(folder)

    described = cache(caches_with_descriptions)
    for plan in plans:
        plan.build(build_context, described)


def plan_splits(
    config: DataConfig, kind: SampleKind, num_samples: list[int | None], say: Say
) -> list[SplitPlan | SeveralSets | None]:
    """Plan train, valid and test; None for one that is left out. Raises ValueError where samples cannot be given."""

    @cache  # several splits read the same file
    def open_file(prefix: str) -> tuple[IndexedDataset, dict[str, Any]]:
        indexed = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        kind.check_file(indexed, say)
        return indexed, content_fingerprint(indexed)

    def plan_file(prefix: str, split: str, count: int | None) -> FileSplit | str:
        """Plan the part of one file; a string says why the split has none of it."""
        indexed, fingerprint = open_file(prefix)
        total = kind.elements(indexed)
        if config.has_own_splits:
            ids = (0, total)
            share = "the file"
        else:
            ids = split_ranges(parse_split(config.split_shares), total)[SPLIT_NAMES.index(split)]
            share = f"--split {config.split_shares}"
        if ids[0] == ids[1]:
            return f"{prefix}: {share} leaves no document of {total} to the {split} split"
        with naming_split(prefix, split):
            request = kind.request(ids, count)
            samples = kind.count_samples(indexed, request)
        folder = Path(config.data_cache_path or f"{prefix}/cache/{kind.name}_indices")
        index_cache = IndexCache(folder, kind.name, split, {**asdict(request), **fingerprint}, kind.arrays)
        return FileSplit(kind, indexed, split, request, index_cache, samples)

    def plan_validation_set(prefix: str, count: int | None) -> SplitPlan:
        """Plan one of several validation sets, of one file."""
        plan = plan_split("valid", Blend((prefix,)), count)
        if plan is None:
            raise ValueError(
                f"{prefix} has no documents, so it cannot be a validation set; leave it out of --valid-data-path"
            )
        return plan

    def plan_split(split: str, blend: Blend, count: int | None) -> SplitPlan | SeveralSets | None:
        if split == "valid" and config.multiple_validation_sets and len(blend.prefixes) > 1:
            return SeveralSets([plan_validation_set(prefix, count) for prefix in blend.prefixes])

        # A split with files of its own and a single one of them is not blended, whatever the file's weight.
        is_single = blend.is_single or (config.has_own_splits and len(blend.prefixes) == 1)
        counts = [count] if is_single else samples_of_files(blend, count, config.mid_level_dataset_surplus)
        planned = [plan_file(prefix, split, file_count) for prefix, file_count in zip(blend.prefixes, counts)]

        # a file without documents for the split: an error in training and in a blend, else the split is left out
        missing = [reason for reason in planned if isinstance(reason, str)]
        if missing:
            if split == "train" or not is_single:
                raise ValueError(f"{missing[0]}; use more data or a larger share")
            say(f"{missing[0]}: it is left out")
            return None
        order_folder = Path(config.data_cache_path or f"{blend.prefixes[0]}/cache/BlendedDataset_indices")
        return SplitPlan(split, planned, count, None if is_single else blend, order_folder)

    blends = config.blends()
    if not any(blends):
        raise ValueError("no data was given; set --data-path PREFIX, or --mock-data to try a run without data")
    shares = (1.0, 1.0, 1.0) if config.has_own_splits else parse_split(config.split_shares)
    plans: list[SplitPlan | SeveralSets | None] = []
    for split, blend, count, share in zip(SPLIT_NAMES, blends, num_samples, shares):
        is_needed = blend is not None and count != 0 and share > 0
        plans.append(plan_split(split, blend, count) if is_needed else None)
    return plans


def samples_of_files(blend: Blend, count: int | None, surplus: float) -> list[int | None]:
    """Return the samples to build of each file of a blend; None: one epoch."""
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    if count is None:
        raise ValueError(
            "a blend with weights repeats its data without end, so one epoch cannot be requested; give a number "
            "of samples"
        )
    return samples_of_each(count, normalized(blend.weights), surplus)


def size_problems(num_samples: list[int | None], *, made_up: bool) -> list[str]:
    """Return problems with the requested number of samples of each split; 0: none are built. made_up: for --mock-data."""
    problems = []
    if num_samples[0] is not None and num_samples[0] < 0:
        problems.append(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    if made_up and None in num_samples:
        problems.append("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return problems
