"""T5's training samples come from a file of sentences through a cached sample map, or are made up for --mock-data."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error
from megatron.core.datasets.bert_and_t5_samples import T5Dataset, TextSample
from megatron.core.datasets.bert_t5_dataset_builder_base import SentenceSamples, gpt_flag_problems
from megatron.core.datasets.blending_indices_and_dataset import BlendedDataset
from megatron.core.datasets.build_datasets import BuildContext, FileSplit, build_datasets, size_problems
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig, MaskingRules, WordPieces
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.pad_token_is_text import id_of, pad_is_text
from megatron.core.datasets.sentence_sample_map import SampleRequest
from megatron.core.datasets.token_ids_without_embedding_row import ids_without_row, tokenizer_name

_SPECIAL = 2  # tokens of --seq-length that Megatron reserves for special tokens
_LONGEST_SPAN = 10  # words
_NO_TOKEN = -1  # the id of a token that no sample has


@dataclass(eq=False)
class T5DatasetBuilder(SentenceSamples):
    """The kind of T5's samples: a text with hidden spans for the encoder, and the spans for the decoder."""

    name = "T5Dataset"

    config: DataConfig
    masking: MaskedDataConfig
    pieces: WordPieces
    seed: int

    def request(self, ids: tuple[int, int], num_samples: int | None) -> SampleRequest:
        return SampleRequest(
            ids_range=ids,
            num_samples=num_samples,
            max_length=self.config.seq_length - _SPECIAL,
            min_sentences=1,
            short_probability=self.masking.short_seq_prob,
            seed=self.seed,
        )

    def dataset(self, file_split: FileSplit, arrays: tuple[np.ndarray, ...]) -> T5Dataset:
        """Return the samples of the sample map in `arrays`, (uint32 or uint64 [samples, 3],)."""
        (sample_map,) = arrays
        return T5Dataset(
            file_split.indexed,
            sample_map,
            self.config.seq_length,
            self.seed,
            self.pieces,
            _masking_rules(self.masking),
            decoder_seq_length=self.config.decoder_seq_length,
        )


def _masking_rules(masking: MaskedDataConfig) -> MaskingRules:
    return MaskingRules(masking.mask_prob, max_ngram=_LONGEST_SPAN, geometric=True)


def build_t5_datasets(
    config: DataConfig,
    masking: MaskedDataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    **build_context: Any,
) -> tuple[T5Dataset | BlendedDataset | None, ...]:
    """Build (train, valid, test), as `build_datasets` does; mock data need no builder and no wait.

    tokenizer: one with sentinels (--vocab-extra-ids), or with mock data any. build_context: the fields of
    `BuildContext`.
    """
    problems = t5_problems(config, masking, tokenizer)
    problems += size_problems(num_samples, made_up=config.mock_data)
    if problems:
        raise ConfigError(problems)
    pieces = _word_pieces(tokenizer, config, masking)
    if not config.mock_data:
        kind = T5DatasetBuilder(config, masking, pieces, seed)
        return build_datasets(config, kind, num_samples, BuildContext(**build_context))
    datasets: list[T5Dataset | None] = []
    for split, count in enumerate(num_samples):
        if not count:
            datasets.append(None)
            continue
        datasets.append(
            MockT5Dataset(
                None,
                range(count),
                config.seq_length,
                (seed, split),
                pieces,
                _masking_rules(masking),
                decoder_seq_length=config.decoder_seq_length,
            )
        )
    return tuple(datasets)


def t5_problems(config: DataConfig, masking: MaskedDataConfig, tokenizer: Any | None) -> list[str]:
    """Return problems with the settings, before a file is read. tokenizer: None where none could be built."""
    problems = gpt_flag_problems(config, "a T5")
    length = config.seq_length
    decoder = config.decoder_seq_length
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
            _word_pieces(tokenizer, config, masking)
        except ValueError as error:
            if not is_user_error(error):
                raise
            problems.append(str(error))
    return problems


def most_hidden(seq_length: int, masking: MaskedDataConfig) -> int:
    """Return the most tokens of a sample that spans can hide: the budget of `choose_spans`."""
    return max(1, int(masking.mask_prob * (seq_length - _SPECIAL)))


def _word_pieces(tokenizer: Any, config: DataConfig, masking: MaskedDataConfig) -> WordPieces:
    """Return the tokens that the data sets need. Raises ValueError for a tokenizer without the tokens that a T5 needs.

    With --mock-data any vocabulary serves as one of whole words: its first ids are special tokens, its last ones
    sentinels.
    """
    size = tokenizer.vocab_size
    spans = most_hidden(config.seq_length, masking)
    if config.mock_data:
        if size < spans + 16:
            raise ValueError(
                f"a vocabulary of {size} is too small for --mock-data with {spans} sentinels; give at least "
                f"{spans + 16}"
            )
        sentinels = tuple(range(size - 1, size - 1 - spans, -1))
        return WordPieces(("",) * size, cls=1, sep=2, mask=3, pad=0, bos=4, eos=5, sentinels=sentinels)

    cls = id_of(tokenizer, "cls")
    sep = id_of(tokenizer, "sep")
    pad = id_of(tokenizer, "pad")
    eos = id_of(tokenizer, "eos")
    bos = id_of(tokenizer, "bos")
    if bos is None:
        bos = pad  # the decoder's text of a published T5 begins with padding
    sentinels = getattr(tokenizer, "additional_special_tokens_ids", None)
    if None in (pad, eos) or sentinels is None:
        raise ValueError(
            f"{getattr(tokenizer, 'name', 'the tokenizer')} has no sentinels, no padding, or no token that ends a "
            "text; a T5 needs data made with --tokenizer-type BertWordPieceLowerCase, BertWordPieceCase, "
            "SentencePieceTokenizer, or HuggingFaceTokenizer with the tokenizer.json of a T5"
        )
    if not sentinels:
        raise ValueError(
            "a T5 replaces each masked span by a sentinel, and the tokenizer has none; give --vocab-extra-ids N, or "
            "a tokenizer.json with <extra_id_0>; the published models have 100 sentinels, and --seq-length "
            f"{config.seq_length} needs at most {spans}"
        )
    return WordPieces(
        words=tuple(tokenizer.inv_vocab.get(i, "") for i in range(size)),
        cls=_NO_TOKEN if cls is None else cls,  # a published T5 has neither [CLS] nor [SEP]
        sep=_NO_TOKEN if sep is None else sep,
        mask=_NO_TOKEN,  # a sentinel takes the place of what is hidden
        pad=pad,
        bos=bos,
        eos=eos,
        sentinels=tuple(sentinels),
        tokenizer=tokenizer_name(tokenizer),
        pad_is_text=pad_is_text(tokenizer),
        without_row=ids_without_row(tokenizer),
    )


class MockT5Dataset(T5Dataset):
    """Made-up samples, which a model can learn.

    The words of a sample rise slowly, so a hidden span is close to its neighbours.

    Sample i depends on (seed, split, i) alone. Few words occur, each several times in a row, spread over the
    whole vocabulary.
    """

    WORDS = 32  # different ones

    @cached_property
    def line(self) -> np.ndarray:
        """The ids of the words, from the lowest to the highest, without special tokens and sentinels: [words]."""
        words = np.arange(6, len(self.pieces.words) - len(self.pieces.sentinels))
        count = min(len(words), self.WORDS)
        return words[np.arange(count) * len(words) // count]

    def _text(self, i: int) -> TextSample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        rng = np.random.RandomState([*self.seed, i])
        target = self.seq_length - _SPECIAL
        height = len(self.line)
        count = rng.randint(max(2, target // 2), target + 1)  # words of the sample
        start = rng.uniform(0, height / 2)
        rise = rng.uniform(height / 4, height / 2)
        positions = (start + rise * np.arange(count) / count).astype(np.int64)  # [count], in the line
        return TextSample([self.line[positions].tolist()], target, rng)
