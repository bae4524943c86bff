"""Megatron core's data sets: a config, a class of samples, and a builder that makes train, validation and test sets.

A class of a script's own derives from MegatronDataset, or from one of those here; the builder gives it a file and its share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from megatron.core.base.config_fields import problems_of_not_built
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.signatures import takes
from megatron.core.datasets import blend, gpt_samples, mmap_indexed_dataset
from megatron.core.datasets.bert_samples import build_bert_datasets
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.dataset_splits import samples_of_files
from megatron.core.datasets.index_map import build_indices, parse_split, split_ranges
from megatron.core.datasets.pad_token import pad_is_text
from megatron.core.datasets.token_masking import MaskedDataConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import current, model_parallel_is_initialized
from megatron.core.parallel_state import launched_rank

# A prefix, or weights and prefixes in turn (core 0.5); or (prefixes, weights or None) since.
Blend = Sequence[str] | tuple[Sequence[str], Sequence[float] | None] | None
Split = IntEnum("Split", ["train", "valid", "test"], start=0)
LowLevelDataset = Any
# Fields that are refused where they differ from the default, once data are built.
NOT_BUILT = (
    "hybrid_context_parallel",
    "drop_last_partial_validation_sequence",
    "add_extra_token_to_sequence",
    "masking_max_ngram",
    "masking_do_full_word",
    "masking_do_permutation",
    "masking_use_longer_ngrams",
    "masking_use_geometric_distribution",
)


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """What every kind of data set is told. `is_built_on_rank` and the fields of loading are without effect: every rank reads."""

    random_seed: int
    sequence_length: int
    blend: Blend = None
    blend_per_split: Sequence[Blend] | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = False
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    renormalize_blend_weights: bool = False
    is_built_on_rank: Callable[..., Any] | None = None

    @property
    def data(self) -> DataConfig:
        """The same as our settings. Raises ConfigError for what is not built."""
        if problems := problems_of_not_built(self, type(self), NOT_BUILT):
            raise ConfigError(problems)
        own = [words_of(blend) for blend in self.blend_per_split or (None,) * 3]
        names = ("train_data_path", "valid_data_path", "test_data_path")
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        flags += ("full_validation", "multiple_validation_sets")
        return DataConfig(
            data_path=words_of(self.blend),
            **dict(zip(names, own)),
            split=None if any(own) else self.split,
            seq_length=self.sequence_length,
            data_cache_path=self.path_to_cache,
            mid_level_dataset_surplus=self.mid_level_dataset_surplus,
            mmap_bin_files=self.mmap_bin_files,
            mock_data=self.mock,
            **{name: bool(getattr(self, name, False)) for name in flags},
        )


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Of samples of token files."""

    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    eod_mask_loss: bool | None = False
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict[str, int] | None = None
    context_parallel_size: int | None = None
    s3_cache_path: str | None = None
    vocab_size: int | None = None


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Of masked samples of files of sentences."""

    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = False
    classification_head: bool = True


def _check_pad(config: BlendedMegatronDatasetConfig) -> None:
    """Raises ConfigError where a config wants each pad masked, and the tokenizer's pad is also a token of texts."""
    if config.allow_ambiguous_pad_tokens and pad_is_text(config.tokenizer):
        kind = type(config).__name__
        raise ConfigError(
            f"{kind}: allow_ambiguous_pad_tokens=True masks the pad ({config.tokenizer.pad}) wherever it stands, and texts "
            "hold it too; leave it out: only what fills a sample up is masked"
        )


def compile_helpers() -> None:
    """Nothing to do: sample indices are built without compiled code."""


def words_of(blend: Blend) -> list[str] | None:
    """A blend as the words of --data-path. A weight of 0 leaves its data set out."""
    if not blend:
        return None
    if isinstance(blend[0], list | tuple):
        prefixes, weights = blend
        blend = prefixes if weights is None else [word for pair in zip(weights, prefixes) for word in pair]
    pairs = (blend[i : i + 2] for i in range(0, len(blend), 2))
    return [str(word) for pair in pairs if pair[0] not in (0, "0", "0.0") for word in pair]


class IndexedDataset(mmap_indexed_dataset.IndexedDataset):
    """The sequences of PREFIX.bin and PREFIX.idx."""

    @takes(
        object_storage_config=None, s3_config=None, fast_cache_load=False, sequences_per_dataset=None, dtype_code=None
    )
    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True):
        super().__init__(path_prefix, multimodal=multimodal, mmap=mmap)


MMapIndexedDataset = IndexedDataset


@dataclass(eq=False)
class MegatronDataset(torch.utils.data.Dataset):
    """Samples of one file in one split. A subclass makes what it needs in `_finalize`, and has `__len__` and `__getitem__`.

    indices: the elements of the file, as `numel_low_level_dataset` counts them, that the split has. num_samples: at least so
    many; None: one epoch.
    """

    dataset: LowLevelDataset
    dataset_path: str | None
    indices: np.ndarray
    num_samples: int | None
    index_split: Any
    config: Any

    def __post_init__(self) -> None:
        self._finalize()

    def _finalize(self) -> None:
        """Called once, when the fields are there."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> LowLevelDataset:
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)


class GPTDataset(MegatronDataset):
    """Samples of a token file, as `megatron.core.datasets.gpt_samples` makes them, of tensors. The builder caches their indices."""

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    def _finalize(self) -> None:
        _check_pad(self.config)
        data = self.config.data
        rules = gpt_samples.rules_of(data, self.config.tokenizer)
        ids = int(self.indices[0]), int(self.indices[-1]) + 1
        if ids[1] - ids[0] != len(self.indices):
            raise NotImplementedError("GPTDataset: indices with gaps are not built; give a range")
        request = gpt_samples.GPTSamples(data, self.config.random_seed, rules).request(ids, self.num_samples)
        indices = build_indices(self.dataset.sequence_lengths, request)
        self.samples = WithMask(gpt_samples.GPTDataset(self.dataset, indices, data.seq_length, rules), self.config)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return self.samples[idx]


class MockGPTDataset(MegatronDataset):
    """Made-up samples, which need no file."""

    def _finalize(self) -> None:
        rules = gpt_samples.rules_of(self.config.data, self.config.tokenizer)
        seed = self.config.random_seed, self.index_split.value
        made = gpt_samples.MockGPTDataset(self.num_samples, self.config.sequence_length, seed, rules)
        self.samples = WithMask(made, self.config)

    __len__, __getitem__ = GPTDataset.__len__, GPTDataset.__getitem__


class BERTMaskedWordPieceDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: masked samples of files of sentences."""


@dataclass(eq=False)
class WithMask:
    """Samples as tensors, with the mask that a loop of its own passes to the model, unless its config says otherwise.

    The mask: bool [1, s, s], True where attention is masked.
    """

    samples: Any
    config: GPTDatasetConfig

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        item = dict(self.samples[i])
        documents = item.pop("document_ids", None)
        if self.config.create_attention_mask:
            later = np.triu(np.ones((self.config.sequence_length,) * 2, bool), 1)
            masked = later if documents is None else later | (documents[:, None] != documents[None, :])
            item["attention_mask"] = masked[None]
        return {name: torch.from_numpy(array) for name, array in item.items()}


class BlendedDataset(blend.BlendedDataset):
    """Samples of several data sets by their weights: `size` of them, or each once, if that is None."""

    def __init__(self, datasets: list[Any], weights: Sequence[float], size: int | None, config: Any):
        sizes = [int(weight) for weight in weights]
        shares = blend.normalized(list(weights))
        order = blend.exhaustive_indices(sizes) if size is None else blend.weighted_indices(shares, size)
        super().__init__(datasets, order, [str(getattr(one, "dataset_path", one)) for one in datasets])
        self.config = config


def _gpt(config: GPTDatasetConfig, sizes: list[int | None], building: dict[str, Any]) -> list[Any]:
    _check_pad(config)
    made = gpt_samples.build_gpt_datasets(config.data, config.tokenizer, sizes, config.random_seed, **building)
    if model_parallel_is_initialized() and current().run is not None:  # a run's batches need no mask of s x s
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
            world, device = current().mesh["world"], current().device
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
