"""BERT's training samples: from a file of sentences through a cached sample map, or made up for --mock-data."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.error_reporting import is_user_error
from megatron.core.datasets.ambiguous_pad_token import id_of, pad_is_text
from megatron.core.datasets.bert_and_t5_samples import BertDataset, TextSample
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.build_datasets import Building, Part, build_datasets, size_problems
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.mask_selection import MaskedDataConfig, MaskingRules, WordPieces
from megatron.core.datasets.sentence_dataset import SentenceSamples, problems_of_flags_of_gpt
from megatron.core.datasets.sentence_sample_map import SampleRequest
from megatron.core.datasets.vocab_check import beyond_of, tokenizer_name

_SPECIAL = 3  # tokens of a sample that are not text: [CLS], and [SEP] after each part


@dataclass(eq=False)
class BertSamples(SentenceSamples):
    name = "BertDataset"

    seq_length: int
    masking: MaskedDataConfig
    pieces: WordPieces
    seed: int

    def request(self, ids: tuple[int, int], num_samples: int | None) -> SampleRequest:
        short, sentences = self.masking.short_seq_prob, 1 + self.masking.bert_binary_head
        return SampleRequest(ids, num_samples, self.seq_length - _SPECIAL, sentences, short, self.seed)

    def dataset(self, part: Part, arrays: tuple[np.ndarray, ...]) -> BertDataset:
        rules, binary_head = MaskingRules(self.masking.mask_prob), self.masking.bert_binary_head
        reading = (self.seq_length, self.seed, self.pieces, rules)
        return BertDataset(part.indexed, *arrays, *reading, binary_head=binary_head)


def build_bert_datasets(
    config: DataConfig,
    masking: MaskedDataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    **building: Any,
) -> tuple[BertDataset | BlendedDataset | None, ...]:
    """(train, valid, test), as `build_datasets` says; mock data need no builder and no wait.

    tokenizer: one of the BertWordPiece types, or with mock data any. building: the fields of `Building`.
    """
    problems = bert_problems(config, masking, tokenizer) + size_problems(num_samples, made_up=config.mock_data)
    if problems:
        raise ConfigError(problems)
    pieces = _pieces_of(tokenizer, made_up=config.mock_data)
    if not config.mock_data:
        return build_datasets(
            config, BertSamples(config.seq_length, masking, pieces, seed), num_samples, Building(**building)
        )
    given = (pieces, MaskingRules(masking.mask_prob), masking.bert_binary_head)
    return tuple(
        MockBertDataset(None, range(count), config.seq_length, (seed, split), *given) if count else None
        for split, count in enumerate(num_samples)
    )


def bert_problems(config: DataConfig, masking: MaskedDataConfig, tokenizer: Any | None) -> list[str]:
    """What is wrong with the settings, before a file is read. tokenizer: None where none could be built."""
    problems = problems_of_flags_of_gpt(config, "BERT")
    if config.full_validation and masking.bert_binary_head:
        problems.append(
            "--full-validation fills up the last microbatch with rows that mask no word, and the loss of the "
            "order of sentences "
            "would count them; leave it out, or give --bert-no-binary-head"
        )
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
            if not is_user_error(error):
                raise
            problems.append(str(error))
    return problems


def _pieces_of(tokenizer: Any, *, made_up: bool) -> WordPieces:
    """What the data sets know of a tokenizer. Raises ValueError for one that was not made for masked words.

    Made-up data take any vocabulary as one of whole words; a tokenizer without special tokens lends its first four ids.
    """
    ids = [id_of(tokenizer, name) for name in ("cls", "sep", "mask", "pad")]
    if made_up and tokenizer.vocab_size < 16:
        raise ValueError(f"a vocabulary of {tokenizer.vocab_size} is too small for made-up data; give at least 16")
    if made_up:
        return WordPieces(("",) * tokenizer.vocab_size, *((1, 2, 3, 0) if None in ids else ids))
    if None in ids:
        raise ValueError(
            f"{getattr(tokenizer, 'name', 'the tokenizer')} has no [CLS], [SEP], [MASK] or [PAD]; BERT reads data made with "
            "--tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, or with a BERT's tokenizer.json "
            "(HuggingFaceTokenizer)"
        )
    words = tuple(tokenizer.inv_vocab.get(i, "") for i in range(tokenizer.vocab_size))
    about = {"tokenizer": tokenizer_name(tokenizer), "pad_is_text": pad_is_text(tokenizer)}
    return WordPieces(words, *ids, **about, beyond=beyond_of(tokenizer))


class MockBertDataset(BertDataset):
    """Made-up samples: two parts of a noisy rising line, so that a hidden word lies between its neighbours, and the part of
    lower words comes first unless the parts were swapped.

    Sample i depends on (seed, split, i) alone. Few words occur, each several times in a row, spread over the whole
    vocabulary.
    """

    WORDS = 32  # different ones
    NOISE = 0.05  # share of words replaced by random ones

    @cached_property
    def line(self) -> np.ndarray:
        """The words from the lowest to the highest."""
        special = (self.pieces.cls, self.pieces.sep, self.pieces.mask, self.pieces.pad)
        words = np.setdiff1d(np.arange(len(self.pieces.words)), special)
        count = min(len(words), self.WORDS)
        return words[np.arange(count) * len(words) // count]

    def _text(self, i: int) -> TextSample:
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
        return TextSample([words[:cut], words[cut:]], target, rng)
