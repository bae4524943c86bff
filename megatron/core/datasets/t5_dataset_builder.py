"""T5's training samples: from a file of sentences through a cached sample map, or made up for --mock-data."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.error_reporting import is_user_error
from megatron.core.datasets.ambiguous_pad_token import id_of, pad_is_text
from megatron.core.datasets.bert_and_t5_samples import T5Dataset, TextSample
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.build_datasets import Building, Part, build_datasets, size_problems
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.mask_selection import MaskedDataConfig, MaskingRules, WordPieces
from megatron.core.datasets.sentence_dataset import SentenceSamples, problems_of_flags_of_gpt
from megatron.core.datasets.sentence_sample_map import SampleRequest
from megatron.core.datasets.vocab_check import beyond_of, tokenizer_name

_SPECIAL = 2  # tokens of --seq-length that Megatron leaves to special ones
_LONGEST_SPAN = 10  # words
_NO_TOKEN = -1


@dataclass(eq=False)
class T5Samples(SentenceSamples):
    name = "T5Dataset"

    config: DataConfig
    masking: MaskedDataConfig
    pieces: WordPieces
    seed: int

    def request(self, ids: tuple[int, int], num_samples: int | None) -> SampleRequest:
        length, short = self.config.seq_length - _SPECIAL, self.masking.short_seq_prob
        return SampleRequest(ids, num_samples, length, 1, short, self.seed)

    def dataset(self, part: Part, arrays: tuple[np.ndarray, ...]) -> T5Dataset:
        reading = self.config.seq_length, self.seed, self.pieces, _rules(self.masking)
        return T5Dataset(part.indexed, *arrays, *reading, decoder_seq_length=self.config.decoder_seq_length)


def _rules(masking: MaskedDataConfig) -> MaskingRules:
    return MaskingRules(masking.mask_prob, max_ngram=_LONGEST_SPAN, geometric=True)


def build_t5_datasets(
    config: DataConfig,
    masking: MaskedDataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    **building: Any,
) -> tuple[T5Dataset | BlendedDataset | None, ...]:
    """(train, valid, test), as `build_datasets` says; mock data need no builder and no wait.

    tokenizer: one with sentinels (--vocab-extra-ids), or with mock data any. building: the fields of `Building`.
    """
    problems = t5_problems(config, masking, tokenizer) + size_problems(num_samples, made_up=config.mock_data)
    if problems:
        raise ConfigError(problems)
    pieces = _pieces_of(tokenizer, config, masking)
    if not config.mock_data:
        return build_datasets(config, T5Samples(config, masking, pieces, seed), num_samples, Building(**building))
    lengths = {"decoder_seq_length": config.decoder_seq_length}
    return tuple(
        MockT5Dataset(None, range(count), config.seq_length, (seed, split), pieces, _rules(masking), **lengths)
        if count
        else None
        for split, count in enumerate(num_samples)
    )


def t5_problems(config: DataConfig, masking: MaskedDataConfig, tokenizer: Any | None) -> list[str]:
    """What is wrong with the settings, before a file is read. tokenizer: None where none could be built."""
    problems = problems_of_flags_of_gpt(config, "a T5")
    length, decoder = config.seq_length, config.decoder_seq_length
    if decoder is None:
        problems.append(
            "--decoder-seq-length is required: the tokens of the left out spans, their sentinels, and one more"
        )
    if length is not None and length < _SPECIAL + 2:
        problems.append(f"--seq-length ({length}) must be at least {_SPECIAL + 2}: {_SPECIAL} tokens are not text")
    elif length is not None and decoder is not None and 0 < masking.mask_prob < 1:
        hidden = most_hidden(length, masking)
        if decoder < hidden + 2:
            problems.append(
                f"--decoder-seq-length ({decoder}) is too short for --mask-prob {masking.mask_prob} of --seq-length {length}: "
                f"{hidden} tokens, one sentinel or more, and the end; give {2 * hidden + 1}, which always suffices"
            )
    if tokenizer is not None and decoder is not None and length is not None:
        try:
            _pieces_of(tokenizer, config, masking)
        except ValueError as error:
            if not is_user_error(error):
                raise
            problems.append(str(error))
    return problems


def most_hidden(seq_length: int, masking: MaskedDataConfig) -> int:
    """The most tokens of a sample that spans leave out, as `choose_spans` bounds them."""
    return max(1, int(masking.mask_prob * (seq_length - _SPECIAL)))


def _pieces_of(tokenizer: Any, config: DataConfig, masking: MaskedDataConfig) -> WordPieces:
    """What the data sets know of a tokenizer. Raises ValueError for one without the tokens that a T5 needs.

    Made-up data take any vocabulary as one of whole words, its first ids as special tokens and its last as sentinels.
    """
    size, spans = tokenizer.vocab_size, most_hidden(config.seq_length, masking)
    if config.mock_data:
        if size < spans + 16:
            raise ValueError(
                f"a vocabulary of {size} is too small for made-up data with {spans} sentinels; give at least {spans + 16}"
            )
        sentinels = tuple(range(size - 1, size - 1 - spans, -1))
        return WordPieces(("",) * size, 1, 2, 3, 0, 4, 5, sentinels)
    cls, sep, pad, eos, bos = (id_of(tokenizer, name) for name in ("cls", "sep", "pad", "eos", "bos"))
    bos = pad if bos is None else bos  # the decoder's text of a published T5 begins with padding
    sentinels = getattr(tokenizer, "additional_special_tokens_ids", None)
    if None in (pad, eos) or sentinels is None:
        raise ValueError(
            f"{getattr(tokenizer, 'name', 'the tokenizer')} has no sentinels, no padding, or no token that ends a text; T5 reads "
            "data made with --tokenizer-type BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer, or "
            "HuggingFaceTokenizer with the tokenizer.json of a T5"
        )
    if not sentinels:
        raise ValueError(
            "a T5 puts a sentinel in the place of each span: give --vocab-extra-ids N, or a tokenizer.json with "
            "<extra_id_0>; "
            f"the published models have 100, and --seq-length {config.seq_length} has at most {spans} spans"
        )
    words = tuple(tokenizer.inv_vocab.get(i, "") for i in range(size))
    # A sentinel stands in the place of what is hidden, so no mask is needed; a published T5 has neither [CLS] nor [SEP].
    unused = (_NO_TOKEN if i is None else i for i in (cls, sep, None))
    about = {"tokenizer": tokenizer_name(tokenizer), "pad_is_text": pad_is_text(tokenizer)}
    return WordPieces(words, *unused, pad, bos, eos, tuple(sentinels), **about, beyond=beyond_of(tokenizer))


class MockT5Dataset(T5Dataset):
    """Made-up samples: a slowly rising line of words, so that a left out span lies between its neighbours.

    Sample i depends on (seed, split, i) alone. Few words occur, each several times in a row, spread over the whole
    vocabulary.
    """

    WORDS = 32  # different ones

    @cached_property
    def line(self) -> np.ndarray:
        """The words from the lowest to the highest."""
        words = np.arange(6, len(self.pieces.words) - len(self.pieces.sentinels))
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
        return TextSample([self.line[places].tolist()], target, rng)
