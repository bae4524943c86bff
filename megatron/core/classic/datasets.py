"""Megatron core's data sets: a config, a class that names the kind, and a builder that makes train, validation and test sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core import comm
from megatron.core.current_mesh import current, model_parallel_is_initialized
from megatron.core.datasets.bert import build_bert_datasets
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt import build_gpt_datasets
from megatron.core.datasets.masking import MaskedDataConfig
from megatron.core.parallel_state import launched_rank

# A prefix, or weights and prefixes in turn (core 0.5); or (prefixes, weights or None) since.
Blend = Sequence[str] | tuple[Sequence[str], Sequence[float] | None] | None


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """What every kind of data set is told. `is_built_on_rank` and the fields of loading are without effect: every rank reads."""

    random_seed: int
    sequence_length: int
    is_built_on_rank: Callable[[], bool] | None = None
    blend: Blend = None
    blend_per_split: Sequence[Blend] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    mock: bool = False
    tokenizer: Any = None
    mmap_bin_files: bool = True
    num_dataset_builder_threads: int = 1
    renormalize_blend_weights: bool = False
    mid_level_dataset_surplus: float = 0.005

    @property
    def data(self) -> DataConfig:
        """The same as our settings."""
        own = [words_of(blend) for blend in self.blend_per_split or (None,) * 3]
        names = ("train_data_path", "valid_data_path", "test_data_path")
        return DataConfig(
            data_path=words_of(self.blend),
            **dict(zip(names, own)),
            split=None if any(own) else self.split,
            seq_length=self.sequence_length,
            data_cache_path=self.path_to_cache,
            mid_level_dataset_surplus=self.mid_level_dataset_surplus,
            mmap_bin_files=self.mmap_bin_files,
            mock_data=self.mock,
        )


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    vocab_size: int | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    s3_cache_path: str | None = None
    object_storage_cache_path: str | None = None


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = False
    classification_head: bool = True


def compile_helpers() -> None:
    """Nothing to do: sample indices are built without compiled code."""


def words_of(blend: Blend) -> list[str] | None:
    """A blend as the words of --data-path."""
    if not blend:
        return None
    if isinstance(blend[0], str):
        return [str(word) for word in blend]
    prefixes, weights = blend
    if weights is None:
        return list(prefixes)
    return [str(word) for pair in zip(weights, prefixes) for word in pair]


class GPTDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: samples of token files."""

    @staticmethod
    def build(config: GPTDatasetConfig, sizes: list[int | None], **building: Any) -> list[Any]:
        about_ends = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        data = config.data.__class__(**vars(config.data) | {name: bool(getattr(config, name)) for name in about_ends})
        made = build_gpt_datasets(data, config.tokenizer, sizes, config.random_seed, **building)
        in_run = model_parallel_is_initialized() and current().run is not None  # whose batches need no mask of s x s
        masks = config.create_attention_mask and not in_run
        return [WithMask(one, config) if one is not None and masks else one for one in made]


class MockGPTDataset(GPTDataset):
    """Names the kind for `BlendedMegatronDatasetBuilder`: made-up samples, which need no files."""

    @staticmethod
    def build(config: GPTDatasetConfig, sizes: list[int | None], **building: Any) -> list[Any]:
        config.mock = True
        return GPTDataset.build(config, sizes, **building)


class BERTMaskedWordPieceDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: masked samples of files of sentences."""

    @staticmethod
    def build(config: BERTMaskedWordPieceDatasetConfig, sizes: list[int | None], **building: Any) -> list[Any]:
        fixed = (config.masking_max_ngram, config.masking_do_full_word, config.masking_do_permutation)
        ways = (config.masking_use_longer_ngrams, config.masking_use_geometric_distribution)
        if fixed != (3, True, False) or any(ways):
            raise NotImplementedError(
                "BERTMaskedWordPieceDataset: only spans of up to 3 whole words are built; leave the masking_ options out"
            )
        masking = MaskedDataConfig(
            config.masking_probability, config.short_sequence_probability, config.classification_head
        )
        return list(build_bert_datasets(config.data, masking, config.tokenizer, sizes, config.random_seed, **building))


@dataclass(eq=False)
class WithMask:
    """Samples with the mask that a loop of its own passes to the model: bool [1, s, s], True where attention is masked."""

    samples: Any
    config: GPTDatasetConfig

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        item = dict(self.samples[i])
        later = np.triu(np.ones((self.config.sequence_length,) * 2, bool), 1)
        documents = item.pop("document_ids", None)
        masked = later if documents is None else later | (documents[:, None] != documents[None, :])
        return item | {"attention_mask": masked[None]}


class BlendedMegatronDatasetBuilder:
    """build() -> [train, valid, test]. sizes: samples of each, None for one epoch, 0 for none.

    (cls, sizes, config) as in core 0.5, or (cls, sizes, is_built_on_rank, config) as since. Every rank must call `build`.
    """

    def __init__(self, cls: Any, sizes: list[int | None], *rest: Any, config: Any = None, is_built_on_rank: Any = None):
        self.cls, self.sizes = cls, sizes
        self.config = config if config is not None else rest[-1]

    def build(self) -> list[Any]:
        building: dict[str, Any] = {}
        if model_parallel_is_initialized():
            world, device = current().mesh["world"], current().device
            building = {"is_builder": world.is_first, "wait": lambda: comm.barrier(world, device)}
            building |= {"say": _say, "progress": _say}
        return self.cls.build(self.config, [0 if size is None else size for size in self.sizes], **building)


def _say(message: str) -> None:
    if launched_rank() == 0:
        print(message, flush=True)
