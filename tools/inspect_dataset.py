"""Inspect a token file: its counts and sizes, a document as tokens and text, a check of every token.

    python tools/inspect_dataset.py --input data/books_text_document
    python tools/inspect_dataset.py --input data/books_text_document --document 3 --verify \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

With a tokenizer, --document prints text too, and --verify checks every token against the vocabulary.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.vocab_check import first_unknown
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from tools.errors import missing, run_tool
from tools.merge_datasets import prefixes_of

_TOKENS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class InspectConfig(FlagConfig):
    """Token files to look at."""

    input: list[str] | None = option(None, "prefixes of PREFIX.bin and PREFIX.idx, or folders of them")
    document: list[int] | None = option(None, "numbers of documents to print, counted from 0; -1 is the last")
    verify: bool = option(False, "read every token and check it")

    def problems(self) -> list[str]:
        return missing(self, "input")


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document, int64 [documents]."""
    tokens_before = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    return np.diff(tokens_before[dataset.document_indices])


def summary(dataset: IndexedDataset) -> str:
    """Counts and sizes, one a line."""
    lengths = document_lengths(dataset)
    spread = "none"
    if len(lengths):
        spread = f"shortest {lengths.min()}, median {int(np.median(lengths))}, mean {lengths.mean():.1f}, longest {lengths.max()}"
    sizes = [os.path.getsize(path) for path in (dataset.data_path, dataset.index_path)]
    return (
        f"{dataset.prefix}\n"
        f"  documents: {len(lengths)}, of which {int((lengths == 0).sum())} empty\n"
        f"  sequences: {len(dataset)}\n"
        f"  tokens: {int(lengths.sum())}, stored as {dataset.dtype}\n"
        f"  tokens a document: {spread}\n"
        f"  bytes: {sizes[0]} (.bin), {sizes[1]} (.idx)"
    )


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> str:
    """The sequences of a document: their tokens, and their text if there is a tokenizer."""
    count = dataset.document_count
    if not -count <= number < count:
        raise ValueError(f"--document {number}: {dataset.prefix} has {count} documents, counted from 0")
    first, past = dataset.document_indices[number % count : number % count + 2].tolist()
    lines = [f"document {number % count}: {past - first} sequences"]
    for i in range(first, past):
        tokens = dataset.get(i).tolist()
        lines.append(f"  sequence {i}, {len(tokens)} tokens: {' '.join(map(str, tokens))}")
        if tokenizer is not None:
            beyond = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
            text = f"token {beyond[0]} is not in the vocabulary" if beyond else repr(tokenizer.detokenize(tokens))
            lines.append(f"  text: {text}")
    return "\n".join(lines)


def verify(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> str:
    """Check every token. Raises ValueError with the place of a token outside the vocabulary.

    Opening `dataset` has checked the index against itself and the size of the data.
    """
    starts = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    tokens = np.memmap(dataset.data_path, dataset.dtype, "r") if starts[-1] else np.empty(0, dataset.dtype)
    limit, most = np.inf if tokenizer is None else tokenizer.vocab_size, 0
    for first in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens[first : first + _TOKENS_AT_ONCE]
        most = max(most, some.max())
        if (found := first_unknown(some, limit)) is not None:
            at = first + found
            i = int(np.searchsorted(starts, at, side="right")) - 1
            document = int(np.searchsorted(dataset.document_indices, i, side="right")) - 1
            raise ValueError(
                f"{dataset.data_path}: token {at - starts[i]} of sequence {i} (document {document}) is {tokens[at]}, "
                + ("which is negative" if tokens[at] < 0 else f"but the vocabulary has {limit}: another tokenizer?")
            )
    if tokenizer is None:
        return f"  verified: the index fits the data; largest token {most} (no tokenizer given to compare with)"
    if tokenizer.eod is None:
        return f"  verified: the index fits the data; all tokens are below {limit}"
    filled = document_lengths(dataset) > 0
    ends = starts[dataset.document_indices[1:]][filled] - 1
    without = int((tokens[ends] != tokenizer.eod).sum())
    note = f"; {without} of {len(ends)} documents do not end in the end-of-document token" if without else ""
    return f"  verified: the index fits the data; all tokens are below {limit}{note}"


def run(config: InspectConfig, tokenizer_config: TokenizerConfig) -> None:
    tokenizer = build_tokenizer(tokenizer_config) if tokenizer_config.tokenizer_type else None
    for prefix in prefixes_of(config.input):
        dataset = IndexedDataset(prefix)
        print(summary(dataset))
        for number in config.document or []:
            print(show_document(dataset, number, tokenizer))
        if config.verify:
            print(verify(dataset, tokenizer))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [InspectConfig, TokenizerConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
