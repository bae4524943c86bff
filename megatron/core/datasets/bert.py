"""BERT's training samples: from a file of sentences through a cached sample map, or made up for --mock-data."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron.core.config import ConfigError
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.known_ids import name_of
from megatron.core.datasets.masked import BertDataset, MaskedDataConfig, MaskingRules, SampleRequest, WordPieces
from megatron.core.datasets.masked_files import MaskedKind, build_masked_datasets

_SPECIAL = 3  # tokens of a sample that are not text: [CLS], and [SEP] after each part


def build_bert_datasets(
    config: DataConfig,
    masking: MaskedDataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    *,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: warnings.warn(message, stacklevel=3),
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[BertDataset | BlendedDataset | None, ...]:
    """(train, valid, test); None for a split that has no share, no documents, or no samples requested.

    tokenizer: one of the BertWordPiece types, or with mock data any. The other arguments, who calls, and what is raised are those
    of `build_gpt_datasets`.
    """
    problems = bert_problems(config, masking, tokenizer)
    if num_samples[0] is not None and num_samples[0] < 1:
        problems.append(f"{num_samples[0]} training samples requested; raise --train-iters (or --train-samples)")
    if problems:
        raise ConfigError(problems)
    pieces = _pieces_of(tokenizer, made_up=config.mock_data)
    rules, binary_head = MaskingRules(masking.mask_prob), masking.bert_binary_head
    if config.mock_data:
        return _mock_datasets(config, pieces, rules, binary_head, num_samples, seed)
    kind = MaskedKind(
        "BertDataset",
        lambda documents, count: SampleRequest(
            documents, count, config.seq_length - _SPECIAL, 1 + binary_head, masking.short_seq_prob, seed
        ),
        lambda indexed, rows: BertDataset(
            indexed, rows, config.seq_length, seed, pieces, rules, binary_head=binary_head
        ),
    )
    return build_masked_datasets(
        config, kind, num_samples, is_builder=is_builder, wait=wait, say=say, progress=progress
    )


# Flags that ask for what a sample of one document in an order of its own does not have.
_OF_GPT = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "epoch_stable_order")


def bert_problems(config: DataConfig, masking: MaskedDataConfig, tokenizer: Any | None) -> list[str]:
    """What is wrong with the settings, before a file is read. tokenizer: None where none could be built."""
    problems = [
        f"--{name.replace('_', '-')} has no meaning for BERT, whose samples are sentences of one document; leave it out"
        for name in _OF_GPT
        if getattr(config, name)
    ]
    length = config.seq_length
    if length is not None and length < _SPECIAL + 2:
        problems.append(
            f"--seq-length ({length}) must be at least {_SPECIAL + 2}: {_SPECIAL} tokens of a sample are not text"
        )
    elif length is not None and masking.mask_prob * (length - _SPECIAL) < 1:
        problems.append(
            f"--mask-prob ({masking.mask_prob}) of --seq-length ({length}) - {_SPECIAL} tokens is less than one word: "
            "none would ever be hidden; raise one of them"
        )
    if tokenizer is not None:
        try:
            _pieces_of(tokenizer, made_up=config.mock_data)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _pieces_of(tokenizer: Any, *, made_up: bool) -> WordPieces:
    return made_up_pieces(tokenizer) if made_up else word_pieces(tokenizer)


def word_pieces(tokenizer: Any) -> WordPieces:
    """What the data sets know of a tokenizer. Raises ValueError for one that was not made for masked words."""
    ids = [getattr(tokenizer, name, None) for name in ("cls", "sep", "mask", "pad")]
    if None in ids:
        raise ValueError(
            f"{getattr(tokenizer, 'name', 'the tokenizer')} has no [CLS], [SEP], [MASK] or [PAD]; BERT reads data made with "
            "--tokenizer-type BertWordPieceLowerCase or BertWordPieceCase"
        )
    words = tuple(tokenizer.inv_vocab.get(i, "") for i in range(tokenizer.vocab_size))
    return WordPieces(words, *ids, tokenizer=name_of(tokenizer))


# -------------------------------------------------------------------- made-up samples


def made_up_pieces(tokenizer: Any) -> WordPieces:
    """Any vocabulary as one of whole words; a tokenizer without special tokens lends its first four ids."""
    if tokenizer.vocab_size < 16:
        raise ValueError(f"a vocabulary of {tokenizer.vocab_size} is too small for made-up data; give at least 16")
    own = [getattr(tokenizer, name, None) for name in ("cls", "sep", "mask", "pad")]
    return WordPieces(("",) * tokenizer.vocab_size, *((1, 2, 3, 0) if None in own else own))


def _mock_datasets(
    config: DataConfig, pieces: WordPieces, rules: MaskingRules, binary_head: bool, num_samples: list, seed: int
) -> tuple:
    if None in num_samples:
        raise ValueError("mock data have no end, so one epoch cannot be requested; give a number of samples")
    return tuple(
        MockBertDataset(count, config.seq_length, (seed, split), pieces, rules, binary_head) if count else None
        for split, count in enumerate(num_samples)
    )


class MockBertDataset(BertDataset):
    """Made-up samples: two parts of a noisy rising line, so that a hidden word lies between its neighbours, and the part of
    lower words comes first unless the parts were swapped.

    Sample i depends on (seed, split, i) alone. Few words occur, each several times in a row, spread over the whole vocabulary.
    """

    WORDS = 32  # different ones
    NOISE = 0.05  # share of words replaced by random ones

    def __init__(
        self,
        num_samples: int,
        seq_length: int,
        seed: tuple[int, int],
        pieces: WordPieces,
        rules: MaskingRules,
        binary_head: bool,
    ):
        """seed: (of the run, of the split)."""
        super().__init__(None, range(num_samples), seq_length, seed, pieces, rules, binary_head=binary_head)
        special = (pieces.cls, pieces.sep, pieces.mask, pieces.pad)
        words = np.setdiff1d(np.arange(len(pieces.words)), special)
        count = min(len(words), self.WORDS)
        self.line = words[np.arange(count) * len(words) // count]

    def _sentences(self, i: int) -> tuple[list[list[int]], int, np.random.RandomState]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        target, height = self.seq_length - _SPECIAL, len(self.line)
        count = rng.randint(max(2, target // 2), target + 1)
        start, rise = rng.uniform(0, height / 2), rng.uniform(height / 4, height / 2)
        places = (start + rise * np.arange(count) / count).astype(np.int64)
        noisy = rng.random_sample(count) < self.NOISE
        words = self.line[np.where(noisy, rng.randint(height, size=count), places)].tolist()
        cut = rng.randint(1, count)
        return [words[:cut], words[cut:]], target, rng
