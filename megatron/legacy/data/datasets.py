"""Build the data sets of Megatron 2.5 and 23.04: `build_train_valid_test_datasets` of GPT and of BERT."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_samples import build_gpt_datasets
from megatron.core.datasets.mask_selection import MaskedDataConfig
from megatron.training.global_vars import get_args, get_runtime, get_tokenizer

Paths = Sequence[str] | None  # a prefix, or weights and prefixes in turn, as --data-path has them


def data_config(paths: Paths, split: str | None, seq_length: int, split_paths: Sequence[Paths] = ()) -> DataConfig:
    """Return the run's data settings with these files.

    split_paths: files of training, validation and test, which replace `paths` and `split`.
    """
    by_split = dict(zip(("train_data_path", "valid_data_path", "test_data_path"), map(_as_flag, split_paths)))
    if any(by_split.values()):
        paths = None
        split = None
    return replace(
        get_runtime().config.data,
        data_path=_as_flag(paths),
        split=split,
        seq_length=seq_length,
        data_args_path=None,
        per_split_data_args_path=None,
        **by_split,
    )


def _as_flag(paths: Paths) -> list[str] | None:
    """Return the arguments of --data-path: weights and prefixes in turn."""
    return [str(argument) for argument in paths] if paths else None


@dataclass(eq=False)
class Text:
    """Samples in the form of Megatron 2 and 3: {"text": int64 [s + 1]}, whose labels are the inputs shifted by one."""

    samples: Any  # a data set of {"tokens": [s], "labels": [s], ...}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample i: {"text": int64 [s + 1]}."""
        item = self.samples[i]
        return {"text": np.append(item["tokens"], item["labels"][-1:])}  # [s + 1]


def build_gpt(
    data_prefix: Paths,
    data_impl: str,
    splits_string: str,
    train_valid_test_num_samples: list[int],
    seq_length: int,
    seed: int,
    skip_warmup: bool,
    train_data_prefix: Paths = None,
    valid_data_prefix: Paths = None,
    test_data_prefix: Paths = None,
    return_doc_ids: bool = False,
) -> tuple[Text | None, ...]:
    """Return (train, valid, test) data sets for a GPT. Every rank must call: the first builds the indices.

    data_impl, skip_warmup: without effect, since files are always memory-mapped. seq_length: tokens.
    """
    del data_impl, skip_warmup
    if return_doc_ids:
        raise NotImplementedError("return_doc_ids is not built: samples do not carry the numbers of their documents")
    config = data_config(
        data_prefix, splits_string, seq_length, (train_data_prefix, valid_data_prefix, test_data_prefix)
    )
    datasets = build_gpt_datasets(config, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building)
    return tuple(None if dataset is None else Text(dataset) for dataset in datasets)


def build_bert(
    data_prefix: Paths,
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
    """Return (train, valid, test) data sets for a BERT, as `build_gpt` does for a GPT.

    masked_lm_prob, short_seq_prob: default: those of the flags.
    """
    del data_impl, skip_warmup
    if dataset_type != "standard_bert" or max_seq_length_dec is not None:
        raise NotImplementedError(f"dataset_type is {dataset_type}; only standard_bert is built")
    args = get_args()
    if masked_lm_prob is None:
        masked_lm_prob = args.mask_prob
    if short_seq_prob is None:
        short_seq_prob = args.short_seq_prob
    masking = MaskedDataConfig(masked_lm_prob, short_seq_prob, binary_head)
    config = data_config(data_prefix, splits_string, max_seq_length)
    return build_bert_datasets(
        config, masking, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building
    )
