"""GPT training samples come from a token file through cached index arrays (`index_map`).

For --mock-data they are made up.

A sample is a pure function of (data, request, number): any process can read any of them, and a resumed run needs only
the number of samples consumed.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError, flag_of
from megatron.core.datasets.blending_indices_and_dataset import BlendedDataset
from megatron.core.datasets.build_datasets import (
    BuildContext,
    FileSplit,
    SampleKind,
    Say,
    build_datasets,
    plan_splits,
    size_problems,
)
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig
from megatron.core.datasets.index_map import (
    IndexRequest,
    Indices,
    build_indices,
    shape_problem,
    split_size,
    split_tokens,
)
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.note_files_without_eod import files_without_eod_note
from megatron.core.datasets.pad_token_is_text import FILLED, id_of, pad_is_text
from megatron.core.datasets.planned_data_usage import DataUsage, data_usage
from megatron.core.datasets.read_megatron_index_cache import MegatronCache, index_problem
from megatron.core.datasets.token_ids_without_embedding_row import concatenate_checked, ids_without_row, tokenizer_name

_NO_TOKEN = -2  # the eod_id of a tokenizer without one: an id that no file and no padded sample has
_EOD_SETTINGS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")  # they look for ends of documents


@dataclass(frozen=True)
class TokenRules:
    """The tokenizer's ids and the settings that decide loss mask, positions and document borders of a sample.

    pad_id: None without a padding token. pad_is_text: the pad also occurs in texts, as it does where it is `eod_id`;
    such a token is not masked. tokenizer: its name, for messages. without_row: its tokens that the model's embedding
    has no row for, by id.
    """

    vocab_size: int
    eod_id: int
    pad_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    inter_document_masking: bool = False
    tokenizer: str = "the tokenizer of this run"
    pad_is_text: bool = False
    without_row: Mapping[int, str] = field(default_factory=dict, hash=False)

    @property
    def finds_documents(self) -> bool:
        """Whether a setting depends on where documents end."""
        return self.inter_document_masking or any(getattr(self, name) for name in _EOD_SETTINGS)

    @property
    def padding(self) -> int | None:
        """The token that is padding wherever it occurs in a file; None if there is none."""
        if self.pad_is_text or self.pad_id == self.eod_id:
            return None
        return self.pad_id


def training_item(text: np.ndarray, rules: TokenRules, lengths: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Make the arrays of one sample from its s + 1 tokens `text`; labels are the inputs shifted by one.

    text: int64 [s + 1]. tokens, labels, position_ids: int64 [s]. loss_mask: float32 [s], 0 where the label is padding
    and, with eod_mask_loss, where the input ends a document. Padding is FILLED and `rules.padding`; it becomes token 0,
    which every vocabulary has.

    lengths: tokens of each document in `text`, which inter_document_masking goes by; without them, as in the other
    settings, a document ends with its eod token. With reset_position_ids the position after it is 0. With reset_attention_mask
    there is also document_ids, int64 [s]: which document of the sample each token belongs to. Example, eod E and s = 6:

        tokens         a b E c d E
        position_ids   0 1 2 0 1 2
        document_ids   0 0 0 1 1 1
    """
    tokens = text[:-1].copy()  # [s]
    labels = text[1:].copy()  # [s]
    loss_mask = np.ones(len(tokens), np.float32)
    position_ids = np.arange(len(tokens), dtype=np.int64)

    # the documents of the sample
    begins = np.append(False, tokens[:-1] == rules.eod_id)  # [s], the first token of each document but the first
    if rules.inter_document_masking and lengths is not None:
        starts = np.cumsum(lengths)  # [documents], of all but the first
        begins = np.zeros(len(tokens), bool)
        begins[starts[starts < len(tokens)]] = True
    document_ids = np.cumsum(begins)  # [s]
    if rules.reset_position_ids or rules.inter_document_masking:
        starts = np.append(0, np.flatnonzero(begins))  # [documents]
        position_ids -= starts[document_ids]
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod_id] = 0.0

    # padding: no loss, and a token that the embedding has
    padding = [FILLED] if rules.padding is None else [FILLED, rules.padding]
    loss_mask[np.isin(labels, padding)] = 0.0
    tokens[np.isin(tokens, padding)] = 0
    labels[np.isin(labels, padding)] = 0

    item = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if rules.reset_attention_mask or rules.inter_document_masking:
        item["document_ids"] = document_ids
    return item


@dataclass(eq=False)
class GPTDataset:
    """Samples of `seq_length` tokens that cross document borders, in the order that `indices` gives.

    It has more samples than were requested, up to the end of the last epoch. No attention mask is made, since the
    attention kernels are causal by themselves.
    """

    indexed: IndexedDataset
    indices: Indices
    seq_length: int
    rules: TokenRules
    fim: FillInTheMiddle | None = None

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return item i, as `training_item` makes it: arrays [s].

        Raises IndexError for a number outside the data set, ConfigError for a token outside the vocabulary.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        tokens, lengths = self._read_tokens(int(self.indices.shuffle_index[i]))  # [s + 1], fewer where the data end
        text = np.full(self.seq_length + 1, FILLED, np.int64)  # [s + 1]
        if self.fim is None:
            text[: len(tokens)] = tokens
            return training_item(text, self.rules, lengths)

        # fill in the middle; where the rearranged text is shorter, it is padded, and the padding gives no loss
        rearranged = self.fim.rearrange(tokens, i)
        text[: len(tokens)] = self.fim.pad_to(rearranged, len(tokens))
        item = training_item(text, self.rules)
        item["loss_mask"][max(len(rearranged) - 1, 0) :] = 0.0  # label j is token j + 1
        return item

    def _read_tokens(self, k: int) -> tuple[np.ndarray, list[int]]:
        """Read the seq_length + 1 tokens of sample k, fewer where the data end; also the tokens of each document."""
        first_position, first_offset = self.indices.sample_index[k].tolist()
        last_position, last_offset = self.indices.sample_index[k + 1].tolist()
        parts = []
        places = []  # (document, offset) of each part
        for position in range(first_position, last_position + 1):
            document = int(self.indices.document_index[position])
            offset = first_offset if position == first_position else 0
            length = None  # to the end of the document
            if position == last_position:
                length = (
                    last_offset + 1 - offset
                )  # + 1: the last label, which sample k + 1 reads again as its first input
            parts.append(self.indexed.get(document, offset, length))
            places.append((document, offset))
        rules = self.rules
        lengths = [len(part) for part in parts]
        tokens = concatenate_checked(parts, places, self.indexed, rules.vocab_size, rules.tokenizer, rules.without_row)
        return tokens, lengths


@dataclass(eq=False)
class MockGPTDataset:
    """Made-up samples: noisy arithmetic progressions, whose step a model can read off the tokens it has seen.

    Sample i depends on (seed, split, i) alone. At most 256 different tokens occur, spread over the whole vocabulary, so
    that the loss falls from ln(vocabulary) within a few dozen steps and every rank of a split embedding has work.
    """

    STEPS = (1, 2, 3, 5)
    NOISE = 0.05  # share of tokens replaced by random ones

    num_samples: int
    seq_length: int
    seed: tuple[int, int]  # of the run, of the split
    rules: TokenRules

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return item i, as `training_item` makes it: arrays [s]."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        count = self.seq_length + 1
        distinct = min(self.rules.vocab_size, 256)
        values = (rng.randint(distinct) + rng.choice(self.STEPS) * np.arange(count)) % distinct  # [s + 1]
        noisy = rng.random_sample(count) < self.NOISE  # [s + 1]
        values = np.where(noisy, rng.randint(distinct, size=count), values)
        tokens = values * self.rules.vocab_size // distinct  # spread over the vocabulary
        if self.rules.finds_documents and distinct < self.rules.vocab_size:
            tokens[values == 0] = self.rules.eod_id  # else it may be between two of the values, and never occur
        # Any id may occur, that of the pad too, so none is taken for padding.
        return training_item(tokens, replace(self.rules, pad_id=None))


@dataclass(eq=False)
class GPTSamples(SampleKind):
    """The kind of samples of `seq_length` tokens, from files whose sequences are documents.

    rules None: only to plan.
    """

    name = "GPTDataset"
    arrays = Indices._fields

    config: DataConfig
    seed: int
    rules: TokenRules | None = None
    fim: FillInTheMiddle | None = None

    def request(self, ids: tuple[int, int], num_samples: int | None) -> IndexRequest:
        return IndexRequest(
            ids, num_samples, self.config.seq_length, self.seed, epoch_stable=self.config.epoch_stable_order
        )

    def count_samples(self, indexed: IndexedDataset, request: IndexRequest) -> int:
        return split_size(indexed.sequence_lengths, request).samples

    def build(self, file_split: FileSplit, say: Say) -> Indices:
        """Build the three arrays of `Indices`, in their shapes. Raises ValueError as `build_indices` does."""
        request = file_split.request
        lengths = file_split.indexed.sequence_lengths
        tokens = split_tokens(lengths, request)
        need = request.seq_length + request.extra_token
        if tokens < need:
            say(
                f"the {file_split.split} split of {file_split.indexed.prefix} has {tokens} tokens and a sample {need}: "
                "documents repeat within a sample; use more data or another --split"
            )
        return build_indices(lengths, request)

    def dataset(self, file_split: FileSplit, arrays: tuple[np.ndarray, ...]) -> GPTDataset:
        """Return the samples in the order of `arrays`, the three of `Indices`."""
        indexed = file_split.indexed
        indices = Indices(*arrays)
        problem = shape_problem(indices, indexed.sequence_lengths, file_split.request)
        if problem is not None:
            raise ValueError(f"{file_split.cache.path('*')} does not match {indexed.prefix}: {problem}; delete it")
        return GPTDataset(indexed, indices, self.config.seq_length, self.rules, self.fim)

    def check_file(self, indexed: IndexedDataset, say: Say) -> None:
        """Warn about a dtype too small for the vocabulary.

        This tokenizer's preprocessing would have chosen a wider one.
        """
        vocab_size = 0 if self.rules is None else self.rules.vocab_size
        if indexed.dtype.kind in "iu" and vocab_size - 1 > np.iinfo(indexed.dtype).max:
            say(
                f"{indexed.data_path} holds ids up to {np.iinfo(indexed.dtype).max} ({indexed.dtype}), the tokenizer's "
                f"vocabulary has {vocab_size}: were the data made with another tokenizer?"
            )

    def check_files(self, files: list[IndexedDataset], build_context: BuildContext) -> None:
        """Report a pad that also occurs in texts, and documents that do not end with the eod token.

        The latter is a warning if a flag acts on the ends of documents, else a line of progress.
        """
        if self.rules.pad_id is not None and self.rules.padding is None:
            build_context.progress(
                f"the pad token ({self.rules.pad_id}) of {self.rules.tokenizer} is also a token of texts: it is text "
                "wherever it stands in the files"
            )
        if self.rules.eod_id == _NO_TOKEN:
            return  # no document can end with it, and no flag acts on the ends
        note = files_without_eod_note(files, self.rules.eod_id)
        if note is None:
            return
        flags = _eod_flags(self.config)
        if flags:
            build_context.say(f"{note}; there {' and '.join(flags)} will find nothing to act on")
        else:
            build_context.progress(note)

    def data_usage(self, file_split: FileSplit, samples: int) -> DataUsage:
        return data_usage(file_split.indexed, file_split.request, samples)

    def megatron_cache(self, file_split: FileSplit) -> MegatronCache | None:
        request = file_split.request
        indexed = file_split.indexed
        if request.epoch_stable:
            return None  # Megatron has no such order
        older_name = f"indexmap_{request.num_samples}ns_{request.seq_length}sl_{request.seed}s"
        return MegatronCache(
            folder=file_split.cache.folder,
            name=f"{self.name}-{file_split.split}",
            fields={
                "num_samples": request.num_samples,
                "sequence_length": request.seq_length,
                "random_seed": request.seed,
                "dataset_path": Path(indexed.prefix).name,
            },
            arrays=self.arrays,
            problem=functools.partial(index_problem, lengths=indexed.sequence_lengths, request=request),
            older=f"{indexed.prefix}_{file_split.split}_{older_name}",
        )


def _eod_flags(config: DataConfig) -> list[str]:
    """Return the flags, among those that are set, that look for ends of documents."""
    if config.sft:
        return []  # its examples are documents, whatever ends them
    return [flag_of(name) for name in _EOD_SETTINGS if getattr(config, name)]


def token_rules(config: DataConfig, tokenizer: Any) -> TokenRules:
    """Return the rules of a tokenizer. Raises ConfigError for settings that need an eod token, where it has none."""
    if problems := end_problems(config, tokenizer):
        raise ConfigError(problems)
    return TokenRules(
        vocab_size=tokenizer.vocab_size,
        eod_id=_NO_TOKEN if tokenizer.eod is None else tokenizer.eod,
        pad_id=id_of(tokenizer, "pad"),
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        inter_document_masking=config.dataloader_inter_document_masking,
        tokenizer=tokenizer_name(tokenizer),
        pad_is_text=pad_is_text(tokenizer),
        without_row=ids_without_row(tokenizer),
    )


def end_problems(config: DataConfig, tokenizer: Any) -> list[str]:
    """Return a line for each setting that looks for ends of documents, if the tokenizer has no token for them."""
    if tokenizer.eod is not None:
        return []
    return [
        f"{flag} looks for the token that ends a document, and {tokenizer_name(tokenizer)} has none; leave the flag out, or use "
        "a tokenizer that has one"
        for flag in _eod_flags(config)
    ]


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    *,
    fim: FimConfig | None = None,
    **build_context: Any,
) -> tuple[GPTDataset | BlendedDataset | MockGPTDataset | None, ...]:
    """Build (train, valid, test), as `build_datasets` does; mock data need no builder and no wait.

    tokenizer: any object with `vocab_size`, `eod` and, if it has one, `pad`. fim: fill in the middle, used if its
    `fim_data` is set. build_context: the fields of `BuildContext`.
    """
    problems = [] if config.seq_length else ["no sequence length; set --seq-length"]
    problems += size_problems(num_samples, made_up=config.mock_data)
    if problems:
        raise ConfigError(problems)
    rules = token_rules(config, tokenizer)
    if config.mock_data:
        return tuple(
            MockGPTDataset(count, config.seq_length, (seed, split), rules) if count else None
            for split, count in enumerate(num_samples)
        )
    fill_in = None
    if fim is not None and fim.fim_data:
        fill_in = FillInTheMiddle(fim, tokenizer, seed)
    return build_datasets(config, GPTSamples(config, seed, rules, fill_in), num_samples, BuildContext(**build_context))


def plan_data_usage(config: DataConfig, num_samples: list[int | None], seed: int = 0) -> list[list[DataUsage]]:
    """Return what a run with `build_gpt_datasets` would read, for train, valid and test; nothing is built.

    Raises as `build_gpt_datasets` does.
    """
    plans = plan_splits(config, GPTSamples(config, seed), num_samples, BuildContext().say)
    return [[] if plan is None else plan.data_usages() for plan in plans]
