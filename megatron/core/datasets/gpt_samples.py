"""GPT training samples: from a token file through cached index arrays (`index_map`), or made up for --mock-data.

A sample is a pure function of (data, request, number): any process can read any of them, and a resumed run needs only
the number of samples consumed.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError, flag_of
from megatron.core.datasets.ambiguous_pad_token import FILLED, id_of, pad_is_text
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.build_datasets import (
    Building,
    Part,
    SampleKind,
    Say,
    build_datasets,
    plan_splits,
    size_problems,
)
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_usage_report import Reading, reading
from megatron.core.datasets.eod_check import note_without_ends
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig
from megatron.core.datasets.index_map import (
    IndexRequest,
    Indices,
    build_indices,
    passes_over,
    shape_problem,
    split_tokens,
)
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.read_megatron_index_cache import Wanted, index_problem
from megatron.core.datasets.vocab_check import beyond_of, joined, tokenizer_name

_NO_TOKEN = -2  # is no token of any file, nor what a sample is filled with
_OF_ENDS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")  # settings that look for ends of documents


@dataclass(frozen=True)
class TokenRules:
    """What a sample needs of the tokenizer. tokenizer: its name, for messages.

    pad_id: None without a padding token. pad_is_text: texts hold it too, as they do where it is `eod_id`; then it pads
    nothing.
    """

    vocab_size: int
    eod_id: int
    pad_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    tokenizer: str = "the tokenizer of this run"
    pad_is_text: bool = False
    beyond: Mapping[int, str] = field(default_factory=dict, hash=False)  # its tokens that the model has no row for

    @property
    def padding(self) -> int | None:
        """The token that is padding wherever it stands in a file."""
        return None if self.pad_is_text or self.pad_id == self.eod_id else self.pad_id


def training_item(text: np.ndarray, rules: TokenRules) -> dict[str, np.ndarray]:
    """The arrays of one sample from its seq_length + 1 tokens, of which labels are the inputs shifted by one.

    tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s], 0 where the label is padding and, with
    eod_mask_loss, where the input ends a document. Padding is FILLED and `rules.padding`, and reads as token 0, which every
    vocabulary has. A document ends with its eod token: with reset_position_ids the position after it is 0, and with
    reset_attention_mask there is document_ids: int64 [s], which document of the sample each token belongs to.
    """
    tokens, labels = text[:-1].copy(), text[1:].copy()
    loss_mask = np.ones(len(tokens), np.float32)
    positions = np.arange(len(tokens), dtype=np.int64)
    begins = np.append(False, tokens[:-1] == rules.eod_id)  # the first token of a sample's second or later document
    documents = np.cumsum(begins)
    if rules.reset_position_ids:
        positions -= np.append(0, np.flatnonzero(begins))[documents]
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod_id] = 0.0
    padding = [FILLED] if rules.padding is None else [FILLED, rules.padding]
    loss_mask[np.isin(labels, padding)] = 0.0
    tokens[np.isin(tokens, padding)] = 0
    labels[np.isin(labels, padding)] = 0
    item = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
    return item | ({"document_ids": documents} if rules.reset_attention_mask else {})


@dataclass(eq=False)
class GPTDataset:
    """Samples of `seq_length` tokens that cross document borders, in the order that `indices` says.

    It has more samples than were requested, up to the end of the last epoch. No attention mask is made: causality is
    the kernel's business.
    """

    indexed: IndexedDataset
    indices: Indices
    seq_length: int
    rules: TokenRules
    fim: FillInTheMiddle | None = None

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        tokens = self._tokens(int(self.indices.shuffle_index[i]))
        text = np.full(self.seq_length + 1, FILLED, np.int64)
        if self.fim is None:
            text[: len(tokens)] = tokens
            return training_item(text, self.rules)
        moved = self.fim.moved(tokens, i)
        text[: len(tokens)] = self.fim.filled(moved, len(tokens))
        item = training_item(text, self.rules)
        item["loss_mask"][max(len(moved) - 1, 0) :] = 0.0  # label j is the token j + 1
        return item

    def _tokens(self, k: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample k, fewer where the data end."""
        first, start = self.indices.sample_index[k].tolist()
        last, stop = self.indices.sample_index[k + 1].tolist()
        parts, places = [], []
        for position in range(first, last + 1):
            document = int(self.indices.document_index[position])
            offset = start if position == first else 0
            length = stop + 1 - offset if position == last else None  # the last token is read again by sample k + 1
            parts.append(self.indexed.get(document, offset, length))
            places.append((document, offset))
        return joined(parts, places, self.indexed, self.rules.vocab_size, self.rules.tokenizer, self.rules.beyond)


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
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        count, distinct = self.seq_length + 1, min(self.rules.vocab_size, 256)
        values = (rng.randint(distinct) + rng.choice(self.STEPS) * np.arange(count)) % distinct
        noisy = rng.random_sample(count) < self.NOISE
        values = np.where(noisy, rng.randint(distinct, size=count), values)
        # Any id may occur, that of the pad too.
        return training_item(values * self.rules.vocab_size // distinct, replace(self.rules, pad_id=None))


@dataclass(eq=False)
class GPTSamples(SampleKind):
    """Samples of `seq_length` tokens, from files whose sequences are documents. rules None: only to plan."""

    name, arrays = "GPTDataset", Indices._fields

    config: DataConfig
    seed: int
    rules: TokenRules | None = None
    fim: FillInTheMiddle | None = None

    def request(self, ids: tuple[int, int], num_samples: int | None) -> IndexRequest:
        stable = self.config.epoch_stable_order
        return IndexRequest(ids, num_samples, self.config.seq_length, self.seed, epoch_stable=stable)

    def count_samples(self, indexed: IndexedDataset, request: IndexRequest) -> int:
        return passes_over(indexed.sequence_lengths, request).samples

    def build(self, part: Part, say: Say) -> Indices:
        lengths, request = part.indexed.sequence_lengths, part.request
        tokens, need = split_tokens(lengths, request), request.seq_length + request.extra_token
        if tokens < need:
            where = f"the {part.split} split of {part.indexed.prefix} has {tokens} tokens"
            say(f"{where} and a sample {need}: documents repeat within a sample; use more data or another --split")
        return build_indices(lengths, request)

    def dataset(self, part: Part, arrays: tuple[np.ndarray, ...]) -> GPTDataset:
        indices, indexed = Indices(*arrays), part.indexed
        if problem := shape_problem(indices, indexed.sequence_lengths, part.request):
            raise ValueError(f"{part.cache.path('*')} does not fit {indexed.prefix}: {problem}; delete it")
        return GPTDataset(indexed, indices, self.config.seq_length, self.rules, self.fim)

    def look_at(self, indexed: IndexedDataset, say: Say) -> None:
        """Warn about a dtype too small for the vocabulary: preprocessing with this tokenizer would have chosen a
        wider one."""
        vocab_size = 0 if self.rules is None else self.rules.vocab_size
        if indexed.dtype.kind in "iu" and vocab_size - 1 > np.iinfo(indexed.dtype).max:
            say(
                f"{indexed.data_path} holds ids up to {np.iinfo(indexed.dtype).max} ({indexed.dtype}), the tokenizer's "
                f"vocabulary has {vocab_size}: were the data made with another tokenizer?"
            )

    def look_at_all(self, files: list[IndexedDataset], building: Building) -> None:
        """Note a pad that is text, and documents without an end: a warning if a flag acts on them, else a line of
        progress."""
        if self.rules.pad_id is not None and self.rules.padding is None:
            building.progress(
                f"the pad token ({self.rules.pad_id}) of {self.rules.tokenizer} is also a token of texts: it is text "
                "wherever it stands in the files"
            )
        if self.rules.eod_id == _NO_TOKEN:
            return  # no document can end with it, and no flag acts on the ends
        note = note_without_ends(files, self.rules.eod_id)
        if note and (given := [flag_of(name) for name in _OF_ENDS if getattr(self.config, name)]):
            building.say(f"{note}; there {' and '.join(given)} will find nothing to act on")
        elif note:
            building.progress(note)

    def reading(self, part: Part, samples: int) -> Reading:
        return reading(part.indexed, part.request, samples)

    def wanted(self, part: Part) -> Wanted | None:
        request, indexed = part.request, part.indexed
        if request.epoch_stable:
            return None  # Megatron has no such order
        asked = (request.num_samples, request.seq_length, request.seed)
        fields = dict(zip(("num_samples", "sequence_length", "random_seed"), asked))
        fields["dataset_path"] = Path(indexed.prefix).name
        place = (part.cache.folder, f"{self.name}-{part.split}")
        older = "{}_{}_indexmap_{}ns_{}sl_{}s".format(indexed.prefix, part.split, *asked)
        problem = functools.partial(index_problem, lengths=indexed.sequence_lengths, request=request)
        return Wanted(*place, fields, self.arrays, problem, older)


def rules_of(config: DataConfig, tokenizer: Any) -> TokenRules:
    about_ends = {name: getattr(config, name) for name in _OF_ENDS}
    if problems := end_problems(config, tokenizer):
        raise ConfigError(problems)
    eod = _NO_TOKEN if tokenizer.eod is None else tokenizer.eod
    ids = (tokenizer.vocab_size, eod, id_of(tokenizer, "pad"))
    about = {"tokenizer": tokenizer_name(tokenizer), "pad_is_text": pad_is_text(tokenizer)}
    return TokenRules(*ids, **about_ends, **about, beyond=beyond_of(tokenizer))


def end_problems(config: DataConfig, tokenizer: Any) -> list[str]:
    """Settings that look for ends of documents, with a tokenizer that has no token for them."""
    if tokenizer.eod is not None:
        return []
    given = [flag_of(name) for name in _OF_ENDS if getattr(config, name)]
    return [
        f"{flag} looks for the token that ends a document, and {tokenizer_name(tokenizer)} has none; leave the flag out, or use "
        "a tokenizer that has one"
        for flag in given
    ]


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    *,
    fim: FimConfig | None = None,
    **building: Any,
) -> tuple[GPTDataset | BlendedDataset | MockGPTDataset | None, ...]:
    """(train, valid, test), as `build_datasets` says; mock data need no builder and no wait.

    tokenizer: any object with `vocab_size`, `eod` and, if it has one, `pad`. fim: fill in the middle, where its
    `fim_data` says
    so. building: the fields of `Building`.
    """
    problems = [] if config.seq_length else ["no sequence length; set --seq-length"]
    if problems := problems + size_problems(num_samples, made_up=config.mock_data):
        raise ConfigError(problems)
    rules = rules_of(config, tokenizer)
    if config.mock_data:
        return tuple(
            MockGPTDataset(count, config.seq_length, (seed, split), rules) if count else None
            for split, count in enumerate(num_samples)
        )
    rearrange = FillInTheMiddle(fim, tokenizer, seed) if fim is not None and fim.fim_data else None
    return build_datasets(config, GPTSamples(config, seed, rules, rearrange), num_samples, Building(**building))


def plan_reading(config: DataConfig, num_samples: list[int | None], seed: int = 0) -> list[list[Reading]]:
    """What `build_gpt_datasets` would have a run read, for train, valid and test; nothing is built. Raises as it does."""
    plans = plan_splits(config, GPTSamples(config, seed), num_samples, Building().say)
    return [plan.readings() if plan else [] for plan in plans]
