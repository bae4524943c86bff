"""BERT's training samples come from a file of sentences through a cached sample map, or are made up for --mock-data."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error
from megatron.core.datasets.bert_and_t5_samples import BertDataset, TextSample
from megatron.core.datasets.bert_t5_dataset_builder_base import SentenceSamples, gpt_flag_problems
from megatron.core.datasets.blending_indices_and_dataset import BlendedDataset
from megatron.core.datasets.build_datasets import BuildContext, FileSplit, build_datasets, size_problems
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig, MaskingRules, WordPieces
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.pad_token_is_text import id_of, pad_is_text
from megatron.core.datasets.sentence_sample_map import SampleRequest
from megatron.core.datasets.token_ids_without_embedding_row import ids_without_row, tokenizer_name

_SPECIAL = 3  # tokens of a sample that are not text: [CLS], and [SEP] after each part


@dataclass(eq=False)
class BertDatasetBuilder(SentenceSamples):
    """The kind of BERT's samples: two parts of a document with masked words, or one without the binary head."""

    name = "BertDataset"

    seq_length: int
    masking: MaskedDataConfig
    pieces: WordPieces
    seed: int

    def request(self, ids: tuple[int, int], num_samples: int | None) -> SampleRequest:
        return SampleRequest(
            ids_range=ids,
            num_samples=num_samples,
            max_length=self.seq_length - _SPECIAL,
            min_sentences=2 if self.masking.bert_binary_head else 1,
            short_probability=self.masking.short_seq_prob,
            seed=self.seed,
        )

    def dataset(self, file_split: FileSplit, arrays: tuple[np.ndarray, ...]) -> BertDataset:
        """Return the samples of the sample map in `arrays`, (uint32 or uint64 [samples, 3],)."""
        (sample_map,) = arrays
        return BertDataset(
            file_split.indexed,
            sample_map,
            self.seq_length,
            self.seed,
            self.pieces,
            MaskingRules(self.masking.mask_prob),
            binary_head=self.masking.bert_binary_head,
        )


def build_bert_datasets(
    config: DataConfig,
    masking: MaskedDataConfig,
    tokenizer: Any,
    num_samples: list[int | None],
    seed: int,
    **build_context: Any,
) -> tuple[BertDataset | BlendedDataset | None, ...]:
    """Build (train, valid, test), as `build_datasets` does; mock data need no builder and no wait.

    tokenizer: one of the BertWordPiece types, or with mock data any. build_context: the fields of `BuildContext`.
    """
    problems = bert_problems(config, masking, tokenizer)
    problems += size_problems(num_samples, made_up=config.mock_data)
    if problems:
        raise ConfigError(problems)
    pieces = _word_pieces(tokenizer, made_up=config.mock_data)
    if not config.mock_data:
        kind = BertDatasetBuilder(config.seq_length, masking, pieces, seed)
        return build_datasets(config, kind, num_samples, BuildContext(**build_context))
    datasets: list[BertDataset | None] = []
    for split, count in enumerate(num_samples):
        if not count:
            datasets.append(None)
            continue
        datasets.append(
            MockBertDataset(
                None,
                range(count),
                config.seq_length,
                (seed, split),
                pieces,
                MaskingRules(masking.mask_prob),
                masking.bert_binary_head,
            )
        )
    return tuple(datasets)


def bert_problems(config: DataConfig, masking: MaskedDataConfig, tokenizer: Any | None) -> list[str]:
    """Return problems with the settings, before a file is read. tokenizer: None where none could be built."""
    problems = gpt_flag_problems(config, "BERT")
    if config.full_validation and masking.bert_binary_head:
        problems.append(
            "--full-validation fills up the last microbatch with rows that mask no word, and the loss of the order of "
            "sentences would count them; leave it out, or give --bert-no-binary-head"
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
            _word_pieces(tokenizer, made_up=config.mock_data)
        except ValueError as error:
            if not is_user_error(error):
                raise
            problems.append(str(error))
    return problems


def _word_pieces(tokenizer: Any, *, made_up: bool) -> WordPieces:
    """Return the tokens that the data sets need. Raises ValueError for a tokenizer that was not made for masked words.

    made_up: for --mock-data, where any vocabulary serves as one of whole words; if a special token is missing, the
    first four ids take the places of all.
    """
    special_ids = [id_of(tokenizer, name) for name in ("cls", "sep", "mask", "pad")]
    is_missing = None in special_ids
    if made_up:
        if tokenizer.vocab_size < 16:
            raise ValueError(f"a vocabulary of {tokenizer.vocab_size} is too small for --mock-data; give at least 16")
        return WordPieces(("",) * tokenizer.vocab_size, *((1, 2, 3, 0) if is_missing else special_ids))
    if is_missing:
        raise ValueError(
            f"{getattr(tokenizer, 'name', 'the tokenizer')} has no [CLS], [SEP], [MASK] or [PAD]; a BERT needs data "
            "made with --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, or with a BERT's tokenizer.json "
            "(HuggingFaceTokenizer)"
        )
    cls, sep, mask, pad = special_ids
    return WordPieces(
        words=tuple(tokenizer.inv_vocab.get(i, "") for i in range(tokenizer.vocab_size)),
        cls=cls,
        sep=sep,
        mask=mask,
        pad=pad,
        tokenizer=tokenizer_name(tokenizer),
        pad_is_text=pad_is_text(tokenizer),
        without_row=ids_without_row(tokenizer),
    )


class MockBertDataset(BertDataset):
    """Made-up samples, which a model can learn: the words of a sample rise slowly, with some noise.

    So a hidden word is close to its neighbours, and the part with the lower words comes first unless the parts were
    swapped. Sample i depends on (seed, split, i) alone. Few words occur, each several times in a row, spread over the
    whole vocabulary.
    """

    WORDS = 32  # different ones
    NOISE = 0.05  # share of words replaced by random ones

    @cached_property
    def line(self) -> np.ndarray:
        """The ids of the words, from the lowest to the highest: int64 [words]."""
        special = (self.pieces.cls, self.pieces.sep, self.pieces.mask, self.pieces.pad)
        words = np.setdiff1d(np.arange(len(self.pieces.words)), special)
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
        noisy = rng.random_sample(count) < self.NOISE
        words = self.line[np.where(noisy, rng.randint(height, size=count), positions)].tolist()
        cut = rng.randint(1, count)
        return TextSample([words[:cut], words[cut:]], target, rng)
