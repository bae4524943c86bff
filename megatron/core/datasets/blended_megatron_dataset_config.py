"""Megatron's `BlendedMegatronDatasetConfig`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.from_megatron_config import problems_of_not_built
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.pad_token_is_text import pad_is_text

# One prefix, or weights and prefixes in turn, or (prefixes, weights or None).
Blend = Sequence[str] | tuple[Sequence[str], Sequence[float] | None] | None

# Settings that are not built, with Megatron's defaults: another value is refused when data are built.
NOT_BUILT = {
    "hybrid_context_parallel": False,
    "inter_document_masking": False,
    "return_document_ids": False,
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
    """Megatron's settings of every kind of data set.

    `is_built_on_rank` and the fields of loading have no effect: every rank reads.
    """

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

    # of a subclass: fields of NOT_BUILT -> the only value that this kind of data accepts
    only_values: ClassVar[Mapping[str, Any]] = {}

    @property
    def decoder_length(self) -> int | None:
        """Tokens of the decoder's text; None for data without one."""
        return None

    @property
    def data(self) -> DataConfig:
        """The same settings as a `DataConfig`. Raises ConfigError for settings that are not built."""
        if problems := problems_of_not_built(self, {**NOT_BUILT, **self.only_values}):
            raise ConfigError(problems)
        train, valid, test = [data_path_words(blend) for blend in self.blend_per_split or (None, None, None)]
        has_own_splits = any((train, valid, test))

        def flag(name: str) -> bool:  # some are fields of subclasses alone
            return bool(getattr(self, name, False))

        return DataConfig(
            data_path=data_path_words(self.blend),
            train_data_path=train,
            valid_data_path=valid,
            test_data_path=test,
            split=None if has_own_splits else self.split,
            seq_length=self.sequence_length,
            decoder_seq_length=self.decoder_length,
            data_cache_path=self.path_to_cache,
            mid_level_dataset_surplus=self.mid_level_dataset_surplus,
            mmap_bin_files=self.mmap_bin_files,
            mock_data=self.mock,
            reset_position_ids=flag("reset_position_ids"),
            reset_attention_mask=flag("reset_attention_mask"),
            eod_mask_loss=flag("eod_mask_loss"),
            full_validation=flag("full_validation"),
            multiple_validation_sets=flag("multiple_validation_sets"),
        )


def _check_pad(config: BlendedMegatronDatasetConfig) -> None:
    """Raise ConfigError where a config wants each pad masked, and the tokenizer's pad is also a token of texts."""
    if config.allow_ambiguous_pad_tokens and pad_is_text(config.tokenizer):
        kind = type(config).__name__
        raise ConfigError(
            f"{kind}: allow_ambiguous_pad_tokens=True masks the pad token ({config.tokenizer.pad}) everywhere, also "
            "in texts that contain it; leave it out: then only the padding at the end of a sample is masked"
        )


def data_path_words(blend: Blend) -> list[str] | None:
    """Return a blend as the words of --data-path. A weight of 0 leaves its data set out."""
    if not blend:
        return None

    # (prefixes, weights or None) to a flat list
    if isinstance(blend[0], list | tuple):
        prefixes, weights = blend
        blend = prefixes
        if weights is not None:
            blend = [word for pair in zip(weights, prefixes) for word in pair]

    # two words at a time: in a list of prefixes alone none is a zero
    words = []
    for i in range(0, len(blend), 2):
        pair = blend[i : i + 2]
        if pair[0] not in (0, "0", "0.0"):
            words += [str(word) for word in pair]
    return words


__getattr__ = names_of_megatron(__name__)
