"""Build the data sets of Megatron 2.5 and 23.04: `build_train_valid_test_datasets` of GPT and of BERT."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.core.datasets.bert_and_t5_samples import batched_attention_masks
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_dataset_and_builder import build_gpt_datasets
from megatron.core.datasets.megatron_dataset import TokensAsText
from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
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
) -> tuple[TokensAsText | None, ...]:
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
    return tuple(None if dataset is None else TokensAsText(dataset) for dataset in datasets)


@dataclass(eq=False)
class WithPairMasks:
    """T5's samples with a mask for each pair of tokens, int64, 1 where a query may see a key.

    enc_mask [s, s], dec_mask [t, t] and enc_dec_mask [t, s].
    """

    samples: Any  # a data set of {"enc_mask": [s], "dec_mask": [t], ...}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        item = dict(self.samples[i])
        masks = batched_attention_masks(item["enc_mask"][None], item["dec_mask"][None])
        for name, mask in zip(("enc_mask", "dec_mask", "enc_dec_mask"), masks):
            item[name] = (~mask[0, 0]).astype(np.int64)
        return item


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
    """Return (train, valid, test) data sets for a BERT, or with dataset_type "t5" for a T5, as `build_gpt` does.

    max_seq_length, max_seq_length_dec: tokens of a BERT's or of the encoder's text, and of the decoder's.
    masked_lm_prob, short_seq_prob: default: those of the flags.
    """
    del data_impl, skip_warmup
    if dataset_type not in ("standard_bert", "t5"):
        raise NotImplementedError(f"dataset_type is {dataset_type}; standard_bert and t5 are built")
    args = get_args()
    if masked_lm_prob is None:
        masked_lm_prob = args.mask_prob
    if short_seq_prob is None:
        short_seq_prob = args.short_seq_prob
    masking = MaskedDataConfig(masked_lm_prob, short_seq_prob, binary_head)
    config = data_config(data_prefix, splits_string, max_seq_length)
    if dataset_type == "t5":
        if max_seq_length_dec is not None:
            config = replace(config, decoder_seq_length=max_seq_length_dec)
        datasets = build_t5_datasets(
            config, masking, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building
        )
        return tuple(None if dataset is None else WithPairMasks(dataset) for dataset in datasets)
    return build_bert_datasets(
        config, masking, get_tokenizer(), train_valid_test_num_samples, seed, **get_runtime().building
    )
