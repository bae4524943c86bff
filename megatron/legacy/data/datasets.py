"""The data sets of Megatron 2.5 and 23.04: `build_train_valid_test_datasets` of GPT and of BERT."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_samples import build_gpt_datasets
from megatron.core.datasets.mask_selection import MaskedDataConfig
from megatron.training.global_vars import get_args, get_runtime, get_tokenizer

Words = Sequence[str] | None  # a prefix, or weights and prefixes in turn


def data_config(paths: Words, split: str | None, seq_length: int, of_splits: Sequence[Words] = ()) -> DataConfig:
    """The run's data settings with these files. of_splits: files of each split's own, in place of `paths`."""
    own = dict(zip(("train_data_path", "valid_data_path", "test_data_path"), map(_words, of_splits)))
    has_own = any(own.values())
    return replace(
        get_runtime().config.data,
        **{"data_path": None if has_own else _words(paths), "split": None if has_own else split} | own,
        seq_length=seq_length,
        data_args_path=None,
        per_split_data_args_path=None,
    )


def _words(paths: Words) -> list[str] | None:
    """The words of a flag; a list of (prefixes, weights) has them in turn, as the flag does."""
    return [str(word) for word in paths] if paths else None


@dataclass(eq=False)
class Text:
    """Samples as Megatron 2 and 3 have them: {"text": int64 [s + 1]}, whose labels are the inputs shifted by one."""

    samples: Any  # of tokens and labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        item = self.samples[i]
        return {"text": np.append(item["tokens"], item["labels"][-1:])}


def build_gpt(
    data_prefix: Words,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: list[int],
    seq_length: int,
    seed: int,
    skip_warmup: bool,
    train_data_prefix: Words = None,
    valid_data_prefix: Words = None,
    test_data_prefix: Words = None,
    return_doc_ids: bool = False,
) -> tuple[Text | None, ...]:
    """(train, valid, test) for a GPT. Files are always memory-mapped, whatever `data_impl` and `skip_warmup` say.

    Every rank must call: the first builds the indices.
    """
    del data_impl, skip_warmup
    if return_doc_ids:
        raise NotImplementedError(
            "return_doc_ids: samples do not carry the numbers of their documents; retrieval is not built"
        )
    config = data_config(
        data_prefix, splits_string, seq_length, (train_data_prefix, valid_data_prefix, test_data_prefix)
    )
    made = build_gpt_datasets(config, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building)
    return tuple(None if one is None else Text(one) for one in made)


def build_bert(
    data_prefix: Words,
    *,
    splits_string: str,
    train_valid_test_num_samples: list[int],
    max_seq_length: int,
    seed: int,
    data_impl: str | None = None,
    skip_warmup: bool = True,
    masked_lm_prob: float | None = None,
    short_seq_prob: float | None = None,
    binary_head: bool = False,
    max_seq_length_dec: int | None = None,
    dataset_type: str = "standard_bert",
) -> tuple[Any, ...]:
    """(train, valid, test) for a BERT, as `build_gpt` for a GPT. Probabilities: None for those of the flags."""
    del data_impl, skip_warmup
    if dataset_type != "standard_bert" or max_seq_length_dec is not None:
        raise NotImplementedError(f"dataset_type {dataset_type}: only standard_bert is built")
    of_flags = get_args()
    masked = of_flags.mask_prob if masked_lm_prob is None else masked_lm_prob
    short = of_flags.short_seq_prob if short_seq_prob is None else short_seq_prob
    masking = MaskedDataConfig(masked, short, binary_head)
    config = data_config(data_prefix, splits_string, max_seq_length)
    return build_bert_datasets(
        config, masking, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building
    )
