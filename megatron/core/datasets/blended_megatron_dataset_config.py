"""Megatron's `BlendedMegatronDatasetConfig`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.from_megatron_config import problems_of_not_built
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.ambiguous_pad_token import pad_is_text
from megatron.core.datasets.data_config import DataConfig

# A prefix, or weights and prefixes in turn (core 0.5); or (prefixes, weights or None) since.
Blend = Sequence[str] | tuple[Sequence[str], Sequence[float] | None] | None


# Fields that are refused where they differ from the default, once data are built.
NOT_BUILT = {
    "hybrid_context_parallel": False,
    "drop_last_partial_validation_sequence": True,
    "add_extra_token_to_sequence": True,
    "masking_max_ngram": 3,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """What every kind of data set is told. `is_built_on_rank` and the fields of loading are without effect: every
    rank reads."""

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
        if problems := problems_of_not_built(self, NOT_BUILT):
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


def _check_pad(config: BlendedMegatronDatasetConfig) -> None:
    """Raises ConfigError where a config wants each pad masked, and the tokenizer's pad is also a token of texts."""
    if config.allow_ambiguous_pad_tokens and pad_is_text(config.tokenizer):
        kind = type(config).__name__
        raise ConfigError(
            f"{kind}: allow_ambiguous_pad_tokens=True masks the pad ({config.tokenizer.pad}) wherever it stands, and texts "
            "hold it too; leave it out: only what fills a sample up is masked"
        )


def words_of(blend: Blend) -> list[str] | None:
    """A blend as the words of --data-path. A weight of 0 leaves its data set out."""
    if not blend:
        return None
    if isinstance(blend[0], list | tuple):
        prefixes, weights = blend
        blend = prefixes if weights is None else [word for pair in zip(weights, prefixes) for word in pair]
    pairs = (blend[i : i + 2] for i in range(0, len(blend), 2))
    return [str(word) for pair in pairs if pair[0] not in (0, "0", "0.0") for word in pair]


__getattr__ = names_of_megatron(__name__)
