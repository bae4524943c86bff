"""GPT training samples: from a token file through cached index arrays (`gpt_files`), or made up for --mock-data.

A sample is a pure function of (data, request, number): any process can read any of them, and a resumed run needs only
the number of samples consumed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.fim import FillInTheMiddle, FimConfig
from megatron.core.datasets.gpt_files import build_gpt_plans
from megatron.core.datasets.index_map import Indices
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.datasets.known_ids import joined, name_of


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class TokenRules:
    """What a sample needs to know about the tokenizer. pad_id None: it has no padding token; tokenizer: its name, for messages."""

    vocab_size: int
    eod_id: int
    pad_id: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    tokenizer: str = "the tokenizer of this run"


def training_item(text: np.ndarray, rules: TokenRules) -> dict[str, np.ndarray]:
    """The arrays of one sample from its seq_length + 1 tokens, of which labels are the inputs shifted by one.

    tokens, labels, position_ids: int64 [s]; loss_mask: float32 [s], 0 where the label is padding and, with
    eod_mask_loss, where the input ends a document. Padding reads as token 0, which every vocabulary has. A document ends
    with its eod token: with reset_position_ids the position after it is 0, and with reset_attention_mask there is
    document_ids: int64 [s], which document of the sample each token belongs to.
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
    pad = _pad_id(rules)
    loss_mask[labels == pad] = 0.0
    tokens[tokens == pad] = 0
    labels[labels == pad] = 0
    item = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
    return item | ({"document_ids": documents} if rules.reset_attention_mask else {})


def _pad_id(rules: TokenRules) -> int:
    return -1 if rules.pad_id is None else rules.pad_id  # -1 is no token of any file


class GPTDataset:
    """Samples of `seq_length` tokens that cross document borders, in the order that `indices` says.

    It has more samples than were requested, up to the end of the last epoch. No attention mask is made: causality is
    the kernel's business.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        indices: Indices,
        seq_length: int,
        rules: TokenRules,
        fim: FillInTheMiddle | None = None,
    ):
        self.indexed = indexed
        self.indices = indices
        self.seq_length = seq_length
        self.rules = rules
        self.fim = fim

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        tokens = self._tokens(int(self.indices.shuffle_index[i]))
        if self.fim is not None:
            tokens = self.fim(tokens, i)
        text = np.full(self.seq_length + 1, _pad_id(self.rules), np.int64)
        text[: len(tokens)] = tokens
        item = training_item(text, self.rules)
        if self.fim is not None:
            item["loss_mask"][text[1:] == self.fim.pad] = 0.0
        return item

    def _tokens(self, k: int) -> np.ndarray:
        """The seq_length + 1 tokens of sample k, fewer where the data end."""
        (first, start), (last, stop) = self.indices.sample_index[k].tolist(), self.indices.sample_index[k + 1].tolist()
        parts, places = [], []
        for position in range(first, last + 1):
            document = int(self.indices.document_index[position])
            offset = start if position == first else 0
            length = stop + 1 - offset if position == last else None  # the last token is read again by sample k + 1
            parts.append(self.indexed.get(document, offset, length))
            places.append((document, offset))
        return joined(parts, places, self.indexed, self.rules.vocab_size, self.rules.tokenizer)


class MockGPTDataset:
    """Made-up samples: noisy arithmetic progressions, whose step a model can read off the tokens it has seen.

    Sample i depends on (seed, split, i) alone. At most 256 different tokens occur, spread over the whole vocabulary, so
    that the loss falls from ln(vocabulary) within a few dozen steps and every rank of a split embedding has work.
    """

    STEPS = (1, 2, 3, 5)
    NOISE = 0.05  # share of tokens replaced by random ones

    def __init__(self, num_samples: int, seq_length: int, seed: tuple[int, int], rules: TokenRules):
        """seed: (of the run, of the split)."""
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.rules = rules
        self.distinct = min(rules.vocab_size, 256)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Item i, as `training_item` lays it out."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        count = self.seq_length + 1
        values = (rng.randint(self.distinct) + rng.choice(self.STEPS) * np.arange(count)) % self.distinct
        noisy = rng.random_sample(count) < self.NOISE
        values = np.where(noisy, rng.randint(self.distinct, size=count), values)
        return training_item(values * self.rules.vocab_size // self.distinct, self.rules)


def build_gpt_datasets(
    config: DataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    *,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = _warn,
    progress: Callable[[str], None] = lambda message: None,
    fim: FimConfig | None = None,
) -> tuple[GPTDataset | BlendedDataset | MockGPTDataset | None, ...]:
    """(train, valid, test); None for a split that has no share, no documents, or no samples requested.

    tokenizer: any object with `vocab_size`, `eod` and, if it has one, `pad`. num_samples: for each split; None is one
    epoch. Every process calls; one on each file system that holds the cache is the builder. `wait` returns when all
    have called it, and all call it exactly once, also a process that fails; mock data need no builder and no wait. `say`
    hears of what is strange but can be; every process says it, so let one of them print. `progress` hears what each split
    reads of each data set and, from the builder, what it does. fim: fill in the middle, where its `fim_data` says so.
    Raises ValueError on every process for data or settings that cannot work; if the cache cannot be written, with the
    reason on the builder and with a pointer to it on the others.
    """
    if config.seq_length is None:
        raise ValueError("no sequence length; set --seq-length")
    if num_samples[0] is not None and num_samples[0] < 1:
        raise ValueError(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    rules = TokenRules(
        tokenizer.vocab_size,
        tokenizer.eod,
        getattr(tokenizer, "pad", None),
        config.eod_mask_loss,
        config.reset_position_ids,
        config.reset_attention_mask,
        name_of(tokenizer),
    )
    if config.mock_data:
        return _mock_datasets(config, rules, num_samples, seed)
    if not any(blends := config.blends()):
        raise ValueError("no data: set --data-path PREFIX, or --mock-data to try things out")
    plans = build_gpt_plans(
        config,
        blends,
        tokenizer.vocab_size,
        tokenizer.eod,
        num_samples,
        seed,
        is_builder=is_builder,
        wait=wait,
        say=say,
        progress=progress,
    )
    rearrange = FillInTheMiddle(fim, tokenizer, seed) if fim is not None and fim.fim_data else None
    return tuple(
        plan and plan.load(lambda part: GPTDataset(part.indexed, part.indices(), config.seq_length, rules, rearrange))
        for plan in plans
    )


def _mock_datasets(config: DataConfig, rules: TokenRules, num_samples: list[int | None], seed: int) -> tuple:
    if None in num_samples:
        raise ValueError("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return tuple(
        MockGPTDataset(count, config.seq_length, (seed, split), rules) if count else None
        for split, count in enumerate(num_samples)
    )
