"""Megatron's `BlendedMegatronDatasetBuilder` builds train, validation and test sets from a config."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import blending_indices_and_dataset, gpt_dataset_and_builder
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import Blend, _check_pad, data_path_words
from megatron.core.datasets.build_datasets import samples_of_files
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.fill_in_the_middle import FimConfig
from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.index_map import parse_split, split_ranges
from megatron.core.datasets.megatron_dataset import TokensAsText, WithAttentionMask
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
    WithCrossAttentionMask,
)
from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.core.datasets.utils import Split
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state, model_parallel_is_initialized
from megatron.core.parallel_state import launched_rank


def _build_gpt(
    config: GPTDatasetConfig, sizes: list[int | None], build_context: dict[str, Any], fim: FimConfig | None = None
) -> list[Any]:
    _check_pad(config)
    datasets = gpt_dataset_and_builder.build_gpt_datasets(
        config.data, config.tokenizer, sizes, config.random_seed, fim=fim, **build_context
    )
    # a run's own batches need no mask of s x s; a script's loop expects Megatron's
    if model_parallel_is_initialized() and get_global_state().run is not None:
        return list(datasets)

    def with_mask(dataset: Any) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, list):  # the sets of --multiple-validation-sets
            return [with_mask(one_set) for one_set in dataset]
        return WithAttentionMask(dataset, config)

    return [with_mask(dataset) for dataset in datasets]


def _build_fim(config: GPTFIMDatasetConfig, sizes: list[int | None], build_context: dict[str, Any]) -> list[Any]:
    return _build_gpt(config, sizes, build_context, config.fim)


def _build_mock_gpt(config: GPTDatasetConfig, sizes: list[int | None], build_context: dict[str, Any]) -> list[Any]:
    return _build_gpt(replace(config, mock=True), [size or 0 for size in sizes], build_context)


def _build_bert(
    config: BERTMaskedWordPieceDatasetConfig, sizes: list[int | None], build_context: dict[str, Any]
) -> list[Any]:
    _check_pad(config)
    masking = MaskedDataConfig(
        mask_prob=config.masking_probability,
        short_seq_prob=config.short_sequence_probability,
        bert_binary_head=config.classification_head,
    )
    return list(build_bert_datasets(config.data, masking, config.tokenizer, sizes, config.random_seed, **build_context))


def _build_t5(
    config: T5MaskedWordPieceDatasetConfig, sizes: list[int | None], build_context: dict[str, Any]
) -> list[Any]:
    _check_pad(config)
    masking = MaskedDataConfig(mask_prob=config.masking_probability, short_seq_prob=config.short_sequence_probability)
    datasets = build_t5_datasets(config.data, masking, config.tokenizer, sizes, config.random_seed, **build_context)
    return [None if dataset is None else WithCrossAttentionMask(dataset) for dataset in datasets]


_BUILDERS: dict[type, Callable[..., list[Any]]] = {
    GPTDataset: _build_gpt,
    GPTFIMDataset: _build_fim,
    MockGPTDataset: _build_mock_gpt,
    BERTMaskedWordPieceDataset: _build_bert,
    T5MaskedWordPieceDataset: _build_t5,
}


class BlendedMegatronDatasetBuilder:
    """Megatron's builder: `build()` returns [train, valid, test].

    sizes: samples of each split; None for one epoch (of made-up data, for none), 0 for none. The arguments are
    (cls, sizes, config), or (cls, sizes, is_built_on_rank, config). Every rank must call `build`.
    """

    def __init__(self, cls: Any, sizes: list[int | None], *rest: Any, config: Any = None, is_built_on_rank: Any = None):
        self.cls = cls
        self.sizes = sizes
        if len(rest) + (config is not None) + (is_built_on_rank is not None) not in (1, 2):
            raise TypeError(
                "BlendedMegatronDatasetBuilder must be called with (cls, sizes, config) or (cls, sizes, "
                "is_built_on_rank, config)"
            )
        self.config = config if config is not None else rest[-1]

    def build(self) -> list[Any]:
        if self.cls not in _BUILDERS:
            return self._build_own_class()

        # a config without a tokenizer has the run's; scripts that give none read a GPT's samples as one text
        config = self.config
        in_run = model_parallel_is_initialized() and get_global_state().run is not None
        reads_text = in_run and config.tokenizer is None and self.cls in (GPTDataset, MockGPTDataset)
        if in_run and config.tokenizer is None:
            config = replace(config, tokenizer=get_global_state().run.tokenizer)
        build_context: dict[str, Any] = {}
        if model_parallel_is_initialized():
            world = get_global_state().mesh["world"]
            device = get_global_state().device
            build_context = {
                "is_builder": world.is_first,
                "wait": lambda: collectives.barrier(world, device),
                "say": _say,
                "progress": _say,
            }
        datasets = _BUILDERS[self.cls](config, self.sizes, build_context)
        if reads_text:
            return [None if dataset is None else TokensAsText(dataset) for dataset in datasets]
        return datasets

    def _build_own_class(self) -> list[Any]:
        """Build data sets of a script's own class, which every rank builds by itself."""
        if not isinstance(self.cls, type):
            self.cls()  # a class of Megatron's that is not built here, such as MockSFTDataset, says what to do instead
        data = self.config.data
        if data.has_own_splits:
            blends = self.config.blend_per_split
            shares = (1.0, 1.0, 1.0)
        else:
            blends = [self.config.blend] * 3
            shares = parse_split(data.split_shares)
        datasets = []
        for split, split_blend, size, share in zip(Split, blends, self.sizes, shares):
            if split_blend and share > 0 and size != 0:
                datasets.append(self._build_split(data, split, split_blend, size))
            else:
                datasets.append(None)
        return datasets

    def _build_split(self, data: DataConfig, split: Any, split_blend: Blend, size: int | None) -> Any:
        files = blending_indices_and_dataset.parse_blend(data_path_words(split_blend))
        if split == Split.valid and data.multiple_validation_sets and len(files.prefixes) > 1:
            return [self._build_split(data, split, [prefix], size) for prefix in files.prefixes]

        # one data set for each file
        is_single = len(files.prefixes) == 1 and (files.weights is None or data.has_own_splits)
        counts = [size] if is_single else samples_of_files(files, size, data.mid_level_dataset_surplus)
        datasets = []
        for prefix, count in zip(files.prefixes, counts):
            low_level = self.cls.build_low_level_dataset(prefix, self.config)
            numel = self.cls.numel_low_level_dataset(low_level)
            split_shares = parse_split(data.split_shares)
            ids = (0, numel) if data.has_own_splits else split_ranges(split_shares, numel)[split]
            indices = np.arange(*ids, dtype=np.int32)
            datasets.append(self.cls(low_level, prefix, indices, count, split, self.config))

        # their blend
        if is_single:
            return datasets[0]
        if files.weights is None:
            sizes = [len(dataset) for dataset in datasets]
            if size is not None:
                size = min(size, sum(sizes))
            return BlendedDataset(datasets, sizes, size, self.config)
        shares = blending_indices_and_dataset.normalized(files.weights)
        return BlendedDataset(
            datasets, shares, sum(blending_indices_and_dataset.samples_of_each(size, shares)), self.config
        )


def _say(message: str) -> None:
    if launched_rank() == 0:
        print(message, flush=True)


__getattr__ = names_of_megatron(__name__)
