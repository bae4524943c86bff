"""Token files as lists of numbers, a tokenizer of masked words, and the flags of one that reads numbers."""

import itertools
import types
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset

Documents = Iterable[list[list[int]]]  # [document][sequence][token]

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]
WORD_PIECES = types.SimpleNamespace(
    name="BertWordPieceLowerCase", vocab_size=100, eod=3, pad=0, cls=2, sep=3, mask=4, inv_vocab=dict(enumerate(WORDS))
)


def write(prefix: Path | str, documents: Documents, dtype: type = np.uint16) -> str:
    """The prefix."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([token for part in document for token in part], [len(part) for part in document])
    return str(prefix)


def write_sentences(
    prefix: Path | str, documents: int, sentences: tuple[int, int], seed: int = 0, word: int | None = None
) -> str:
    """Documents of random sentences, from sentences[0] up to sentences[1] - 1 in each, or of one `word` throughout."""
    rng = np.random.RandomState(seed)

    def document() -> list[list[int]]:
        lengths = rng.randint(1, 8, rng.randint(*sentences)).tolist()
        tokens = iter(rng.randint(5, 100, sum(lengths)).tolist() if word is None else [word] * sum(lengths))
        return [list(itertools.islice(tokens, length)) for length in lengths]

    return write(prefix, (document() for _ in range(documents)))


def contents(prefix: Path | str) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [[part.tolist() for part in dataset[first:past]] for first, past in itertools.pairwise(ends)]
