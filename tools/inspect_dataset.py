"""Inspect a token file: print its counts and sizes, print a document as tokens and text, check every token.

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
from megatron.core.datasets.token_ids_without_embedding_row import index_of_first_unknown
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from tools.errors import missing, run_tool
from tools.merge_datasets import prefixes_of

_TOKENS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class InspectConfig(FlagConfig):
    """Token files to look at."""

    input: list[str] | None = option(None, "prefixes of PREFIX.bin and PREFIX.idx, or folders with such files")
    document: list[int] | None = option(None, "documents to print, by number: 0 is the first, -1 the last")
    verify: bool = option(False, "read every token and check it")

    def problems(self) -> list[str]:
        return missing(self, "input")


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens of each document, int64 [documents]."""
    tokens_before = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    return np.diff(tokens_before[dataset.document_indices])


def summary(dataset: IndexedDataset) -> str:
    """Return the counts and sizes of a token file, one a line."""
    lengths = document_lengths(dataset)
    spread = "none"
    if len(lengths):
        median = int(np.median(lengths))
        spread = f"shortest {lengths.min()}, median {median}, mean {lengths.mean():.1f}, longest {lengths.max()}"
    bin_bytes = os.path.getsize(dataset.data_path)
    idx_bytes = os.path.getsize(dataset.index_path)
    return (
        f"{dataset.prefix}\n"
        f"  documents: {len(lengths)}, of which {int((lengths == 0).sum())} empty\n"
        f"  sequences: {len(dataset)}\n"
        f"  tokens: {int(lengths.sum())}, stored as {dataset.dtype}\n"
        f"  tokens a document: {spread}\n"
        f"  bytes: {bin_bytes} (.bin), {idx_bytes} (.idx)"
    )


def show_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> str:
    """Return the sequences of a document as lines: the tokens, and the text if there is a tokenizer."""
    count = dataset.document_count
    if not -count <= number < count:
        raise ValueError(f"--document {number}: {dataset.prefix} has {count} documents, counted from 0")
    number = number % count  # -1 is the last
    first, stop = dataset.document_indices[number : number + 2].tolist()  # its sequences
    lines = [f"document {number}: {stop - first} sequences"]
    for i in range(first, stop):
        tokens = dataset.get(i).tolist()
        lines.append(f"  sequence {i}, {len(tokens)} tokens: {' '.join(map(str, tokens))}")
        if tokenizer is not None:
            unknown = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
            text = f"token {unknown[0]} is not in the vocabulary" if unknown else repr(tokenizer.detokenize(tokens))
            lines.append(f"  text: {text}")
    return "\n".join(lines)


def verify(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> str:
    """Check every token; return the line to print. Raises ValueError that names a token outside the vocabulary.

    Opening `dataset` has checked that its index is consistent and fits the size of the data.
    """
    starts = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])  # [sequences + 1], in tokens
    tokens = np.memmap(dataset.data_path, dataset.dtype, "r") if starts[-1] else np.empty(0, dataset.dtype)
    vocab_size = np.inf if tokenizer is None else tokenizer.vocab_size

    # every token is in the vocabulary
    largest = 0
    for first in range(0, len(tokens), _TOKENS_AT_ONCE):
        block = tokens[first : first + _TOKENS_AT_ONCE]
        largest = max(largest, block.max())
        index = index_of_first_unknown(block, vocab_size)
        if index is not None:
            position = first + index
            token = tokens[position]
            sequence = int(np.searchsorted(starts, position, side="right")) - 1
            document = int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1
            reason = "which is negative" if token < 0 else f"but the vocabulary has {vocab_size}: another tokenizer?"
            raise ValueError(
                f"{dataset.data_path}: token {position - starts[sequence]} of sequence {sequence} (document {document}) "
                f"is {token}, {reason}"
            )
    if tokenizer is None:
        return f"  verified: the index fits the data; largest token {largest} (no tokenizer given to compare with)"
    verdict = f"  verified: the index fits the data; all tokens are below {vocab_size}"
    if tokenizer.eod is None:
        return verdict

    # documents end in the end-of-document token
    is_filled = document_lengths(dataset) > 0
    last_positions = starts[dataset.document_indices[1:]][is_filled] - 1
    num_without = int((tokens[last_positions] != tokenizer.eod).sum())
    if num_without:
        verdict += f"; {num_without} of {len(last_positions)} documents do not end in the end-of-document token"
    return verdict


def run(config: InspectConfig, tokenizer_config: TokenizerConfig) -> None:
    """Print what was asked for of each token file."""
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
