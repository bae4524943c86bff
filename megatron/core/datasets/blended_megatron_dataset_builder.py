"""Megatron's `BlendedMegatronDatasetBuilder`: train, validation and test sets from a config."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import blend, gpt_samples
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import Blend, _check_pad, words_of
from megatron.core.datasets.build_datasets import samples_of_files
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.index_map import parse_split, split_ranges
from megatron.core.datasets.mask_selection import MaskedDataConfig
from megatron.core.datasets.megatron_dataset import WithMask
from megatron.core.datasets.utils import Split
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state, model_parallel_is_initialized
from megatron.core.parallel_state import launched_rank


def _gpt(config: GPTDatasetConfig, sizes: list[int | None], building: dict[str, Any]) -> list[Any]:
    _check_pad(config)
    made = gpt_samples.build_gpt_datasets(config.data, config.tokenizer, sizes, config.random_seed, **building)
    if model_parallel_is_initialized() and get_global_state().run is not None:  # a run's batches need no mask of s x s
        return list(made)
    masked = lambda one: None if one is None else WithMask(one, config)  # noqa: E731
    return [[masked(part) for part in one] if isinstance(one, list) else masked(one) for one in made]


def _bert(config: BERTMaskedWordPieceDatasetConfig, sizes: list[int | None], building: dict[str, Any]) -> list[Any]:
    _check_pad(config)
    chances = config.masking_probability, config.short_sequence_probability
    masking = MaskedDataConfig(*chances, config.classification_head)
    return list(build_bert_datasets(config.data, masking, config.tokenizer, sizes, config.random_seed, **building))


_KINDS: dict[type, Callable[..., list[Any]]] = {
    GPTDataset: _gpt,
    MockGPTDataset: lambda config, sizes, building: _gpt(
        replace(config, mock=True), [size or 0 for size in sizes], building
    ),
    BERTMaskedWordPieceDataset: _bert,
}


class BlendedMegatronDatasetBuilder:
    """build() -> [train, valid, test]. sizes: samples of each, None for one epoch (for none of made-up data), 0 for none.

    (cls, sizes, config) as in core 0.5, or (cls, sizes, is_built_on_rank, config) as since. Every rank must call `build`.
    """

    def __init__(self, cls: Any, sizes: list[int | None], *rest: Any, config: Any = None, is_built_on_rank: Any = None):
        self.cls, self.sizes = cls, sizes
        if len(rest) + (config is not None) + (is_built_on_rank is not None) not in (1, 2):
            raise TypeError("BlendedMegatronDatasetBuilder takes (cls, sizes[, is_built_on_rank], config)")
        self.config = config if config is not None else rest[-1]

    def build(self) -> list[Any]:
        if self.cls not in _KINDS:
            return self._of_a_class()
        building: dict[str, Any] = {}
        if model_parallel_is_initialized():
            world, device = get_global_state().mesh["world"], get_global_state().device
            building = {"is_builder": world.is_first, "wait": lambda: collectives.barrier(world, device)}
            building |= {"say": _say, "progress": _say}
        return _KINDS[self.cls](self.config, self.sizes, building)

    def _of_a_class(self) -> list[Any]:
        """The data sets of a script's own class, which every rank builds by itself."""
        data = self.config.data
        words = self.config.blend_per_split if data.has_own_splits else [self.config.blend] * 3
        shares = (1.0, 1.0, 1.0) if data.has_own_splits else parse_split(data.split_shares)
        made = []
        for split, files, size, share in zip(Split, words, self.sizes, shares):
            made.append(self._split(data, split, files, size) if files and share > 0 and size != 0 else None)
        return made

    def _split(self, data: DataConfig, split: Any, words: Blend, size: int | None) -> Any:
        files = blend.parse_blend(words_of(words))
        if split == Split.valid and data.multiple_validation_sets and len(files.prefixes) > 1:
            return [self._split(data, split, [prefix], size) for prefix in files.prefixes]
        alone = len(files.prefixes) == 1 and (files.weights is None or data.has_own_splits)
        counts = [size] if alone else samples_of_files(files, size, data.mid_level_dataset_surplus)
        made = []
        for prefix, count in zip(files.prefixes, counts):
            low = self.cls.build_low_level_dataset(prefix, self.config)
            numel = self.cls.numel_low_level_dataset(low)
            cut = parse_split(data.split_shares)
            ids = (0, numel) if data.has_own_splits else split_ranges(cut, numel)[split]
            made.append(self.cls(low, prefix, np.arange(*ids, dtype=np.int32), count, split, self.config))
        if alone:
            return made[0]
        if files.weights is None:
            sizes = [len(one) for one in made]
            return BlendedDataset(made, sizes, size and min(size, sum(sizes)), self.config)
        shares = blend.normalized(files.weights)
        return BlendedDataset(made, shares, sum(blend.samples_of_each(size, shares)), self.config)


def _say(message: str) -> None:
    if launched_rank() == 0:
        print(message, flush=True)


__getattr__ = names_of_megatron(__name__)
