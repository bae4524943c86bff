"""What a split of a run reads: one token file, or several in the order of a blend. The same for every kind of samples.

    builder:  plan, build the parts' arrays, then the order of their blend ---- wait() ---- load
    others:   plan                                                              wait() ---- load

All that is built goes into the caches of `index_cache`, so that a later run with the same data and settings builds nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

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
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.index_map import SPLIT_NAMES, parse_split
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.storage.atomic import remove_abandoned

Say = Callable[[str], None]


class Part(Protocol):
    """One token file's share in one split."""

    indexed: IndexedDataset
    cache: IndexCache

    @property
    def num_samples(self) -> int:
        """That it has; some kinds know it when their arrays are built."""


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class SplitPlan(Generic[P]):
    """What train, valid or test is made of. count: its samples, None for one epoch; blend None: of one file, without blending."""

    split: str
    parts: list[P]
    count: int | None
    blend: Blend | None = None
    order_folder: Path | None = None  # of the blend's cache

    @property
    def folders(self) -> list[Path]:
        """Those of its caches."""
        return [*(part.cache.folder for part in self.parts), *filter(None, [self.order_folder])]

    def samples_of_parts(self) -> list[int]:
        """How many samples of each part the run reads."""
        if self.blend is None:
            return [self.parts[0].num_samples if self.count is None else self.count]
        return self._order()[1]

    def order_cache(self) -> IndexCache:
        """Where the order of the blend is kept."""
        return IndexCache(self.order_folder, "BlendedDataset", self.split, self._order()[0], BlendIndices._fields)

    def _order(self) -> tuple[dict[str, Any], list[int]]:
        """What the order of the blend follows from, and how many samples it takes of each part."""
        sizes = [part.num_samples for part in self.parts]
        if self.blend.weights is None:
            shares, size = normalized(sizes), None if self.count is None else min(self.count, sum(sizes))
            taken = sizes if size is None else samples_of_each(size, shares)
        else:  # normalized twice, as the files in the wild are: it may change the last bit
            once = normalized(self.blend.weights)
            taken = samples_of_each(self.count, once)
            shares, size = normalized(once), sum(taken)
        return {"shares": shares, "size": size, "sizes": sizes if size is None else None}, taken

    def build_order(
        self,
        progress: Say,
        say: Say,
        find: Callable[[IndexCache], tuple[BlendIndices, str] | None] = lambda cache: None,
    ) -> None:
        """Write the order of the blend into its cache, once the parts are built. find(cache) -> an order that is there, and where."""
        if self.blend is None or (cache := self.order_cache()).is_complete(say):
            return
        if there := find(cache):
            progress(f"taking the order of a blend from Megatron's cache {there[1]}")
            cache.write(there[0])
            return
        progress(f"building the order of a blend of {len(self.parts)} data sets")
        order = cache.fields
        indices = exhaustive_indices(order["sizes"]) if order["size"] is None else None
        cache.write(indices or weighted_indices(order["shares"], order["size"]))

    def load(self, make_dataset: Callable[[P], Any]) -> Any:
        """The data set of its one part, or the blend of all."""
        datasets = [make_dataset(part) for part in self.parts]
        if self.blend is None:
            return datasets[0]
        indices = BlendIndices(*self.order_cache().load())
        return BlendedDataset(datasets, indices, [part.indexed.prefix for part in self.parts])


PlanPart = Callable[[str, int, int | None], P | None]


def plan_splits(
    config: DataConfig, blends: Iterable[Blend | None], num_samples: list[int | None], plan_part: PlanPart
) -> list[SplitPlan | None]:
    """What to build for train, valid and test; None for one that is left out.

    plan_part(prefix, number of the split, samples asked for or None) -> the share of one file; None where it has no document of the
    split, which is then left out. Raises ValueError for a split that cannot give its samples.
    """
    return [
        _plan_split(config, blend, split, count, plan_part)
        for split, (blend, count) in enumerate(zip(blends, num_samples))
    ]


def _plan_split(
    config: DataConfig, blend: Blend | None, split: int, count: int | None, plan_part: PlanPart
) -> SplitPlan | None:
    name = SPLIT_NAMES[split]
    has_share = config.has_own_splits or parse_split(config.split_shares)[split] > 0
    if blend is None or count == 0 or not has_share:
        return None
    # Files of a split's own are not blended when there is one, whatever its weight.
    if blend.is_single or (config.has_own_splits and len(blend.prefixes) == 1):
        part = plan_part(blend.prefixes[0], split, count)
        return part and SplitPlan(name, [part], count)
    counts = _samples_of_files(blend, count, config.mid_level_dataset_surplus)
    parts = [plan_part(prefix, split, of_file) for prefix, of_file in zip(blend.prefixes, counts)]
    if None in parts:
        missing = blend.prefixes[parts.index(None)]
        raise ValueError(f"{missing} has no document for the {name} split; change --split or leave it out")
    folder = Path(config.data_cache_path or f"{blend.prefixes[0]}/cache/BlendedDataset_indices")
    return SplitPlan(name, parts, count, blend, folder)


def _samples_of_files(blend: Blend, count: int | None, surplus: float) -> list[int | None]:
    """How many samples each file is asked for; None: one epoch."""
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    if count is None:
        raise ValueError("a blend with weights has no end, so one epoch cannot be requested; give a number of samples")
    return samples_of_each(count, normalized(blend.weights), surplus)


def plan_and_build(
    plan: Callable[[], list[SplitPlan | None]],
    build: Callable[[SplitPlan], None],
    *,
    is_builder: bool,
    wait: Callable[[], None],
) -> list[SplitPlan | None]:
    """The plans of the splits, with their caches built by the one process that is the builder. All processes call, and `wait`."""
    try:
        plans = plan()
        if is_builder:
            for folder in {folder for plan in filter(None, plans) for folder in plan.folders}:
                remove_abandoned(folder)
            for split in filter(None, plans):
                build(split)
    finally:
        wait()  # also after an error: nobody may wait for a process that is gone
    return plans
