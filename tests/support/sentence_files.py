"""Documents of sentences in a token file, and the vocabulary of their words, for runs of pretrain_bert.py."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megatron.core.datasets import IndexedDatasetWriter

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # the ids 0 to 4; words come after


def write_sentences(
    folder: Path, documents: Iterable[tuple[np.ndarray, list[int]]], *, words: int, pieces: int
) -> list[str]:
    """Flags of `folder`/text and `folder`/vocab.txt, of so many words and ends of words. documents: (ids, lengths of sentences)."""
    vocabulary = [*SPECIAL, *(f"w{i:02}" for i in range(words)), *(f"##{i}" for i in range(pieces))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for ids, lengths in documents:
            writer.add_document(ids, lengths)
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", f"{folder}/vocab.txt"]
    return ["--data-path", f"{folder}/text", *tokenizer]
