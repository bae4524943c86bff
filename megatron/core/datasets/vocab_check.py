"""Token ids checked against the vocabulary: an embedding has no row for an id outside it.

A published tokenizer may have more ids than the model's word table has rows: that of Gemma 3 270M and 1B has 262,145, since
it is that of the larger models too, which see images, and the tables have 262,144. A text seldom has such an id; one
that has
is refused.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset


def tokenizer_name(tokenizer: Any) -> str:
    """The name of a tokenizer in messages: its type, and its file if it has one."""
    name, path = getattr(tokenizer, "name", type(tokenizer).__name__), getattr(tokenizer, "path", None)
    return f"{name} {path}" if path else name


class WithinTable:
    """A tokenizer as a model with fewer rows than it has ids sees it: `vocab_size` is the number of rows.

    beyond: the tokens of the other ids, for messages.
    """

    def __init__(self, tokenizer: Any, rows: int):
        self.tokenizer, self.vocab_size = tokenizer, rows
        names = getattr(tokenizer, "inv_vocab", {})
        self.beyond = {i: names[i] for i in range(rows, tokenizer.vocab_size) if i in names}

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def beyond_of(tokenizer: Any) -> Mapping[int, str]:
    """The tokens of the ids that the model has no row for."""
    return tokenizer.beyond if isinstance(tokenizer, WithinTable) else {}


def within_table(tokenizer: Any, rows: int) -> Any:
    """The tokenizer, with the ids that a word table of so many rows has."""
    return tokenizer if tokenizer.vocab_size <= rows else WithinTable(tokenizer, rows)


_PLACED = ("eod", "cls", "sep", "mask", "bos", "eos")  # tokens that data sets put into samples


def table_problem(tokenizer: Any, rows: int) -> str | None:
    """Why a model with so many rows cannot be trained with this tokenizer; None if it can.

    Ids without a row may only be added tokens, which a text seldom has, and none that every sample has: a model that
    lacks words
    is another tokenizer's.
    """
    words = tokenizer.vocab_size
    if words <= rows:
        return None
    added, names = set(getattr(tokenizer, "never", ())), getattr(tokenizer, "inv_vocab", {})
    lacking = f"the tokenizer has {words} ids, and --model-vocab-size is {rows}, the rows of the model's word table"
    if ordinary := [i for i in range(rows, words) if i in names and names[i] not in added]:
        some = ", ".join(f"{names[i]!r:.40} ({i})" for i in ordinary[:3])
        return f"{lacking}: it has none for words of texts such as {some}; give the model's own tokenizer"
    if not names:
        return f"{lacking}; give the model's own tokenizer"
    ids = {name: getattr(tokenizer, name, None) for name in _PLACED}
    ids |= {f"sentinel {k}": i for k, i in enumerate(getattr(tokenizer, "additional_special_tokens_ids", None) or ())}
    if placed := [f"{name} ({i})" for name, i in ids.items() if i is not None and i >= rows]:
        return f"{lacking}: it has none for {', '.join(placed[:3])}, which samples have; give the model's own tokenizer"
    return None


def table_note(tokenizer: Any, rows: int) -> str | None:
    """A line about ids without a row; None if each has one."""
    beyond = beyond_of(within_table(tokenizer, rows))
    if not beyond:
        return None
    some = ", ".join(f"{token} ({i})" for i, token in list(beyond.items())[:3])
    ids = tokenizer.vocab_size
    return f"the model's word table has {rows} rows, and the tokenizer {ids} ids: a text with {some} is refused"


def first_unknown(tokens: np.ndarray, vocab_size: float) -> int | None:
    """The position of the first id that is negative or not below `vocab_size`; None if there is none.

    Takes 10 microseconds for 2,048 tokens.
    """
    smallest = 0 if tokens.dtype.kind == "u" else tokens.min(initial=0)
    if smallest >= 0 and tokens.max(initial=0) < vocab_size:
        return None
    return int(np.argmax((tokens < 0) | (tokens >= vocab_size)))


def joined(
    parts: list[np.ndarray],
    places: list[tuple[int, int]],
    indexed: IndexedDataset,
    vocab_size: int,
    tokenizer: str,
    beyond: Mapping[int, str],
) -> np.ndarray:
    """The tokens of `parts` end to end; part k begins at places[k], (sequence, offset) of the file. beyond: the tokenizer's
    tokens that the model has no row for, by id.

    Raises ConfigError for an id that is negative or past the vocabulary, with its place.
    """
    tokens = np.concatenate(parts)
    at = first_unknown(tokens, vocab_size)
    if at is None:
        return tokens
    if tokens[at] < 0:
        reason = "and no id is negative: the file is damaged, or no tokenizer made it; preprocess again"
    elif (token := beyond.get(int(tokens[at]))) is not None:
        reason = (
            f"which is {token} of {tokenizer}, and the model's word table has {vocab_size} rows, none for it: leave {token} "
            "out of the texts, and preprocess again"
        )
    else:
        reason = (
            f"but the tokenizer's vocabulary has {vocab_size} ({tokenizer}): the data were made with another tokenizer; use that "
            "one or preprocess again"
        )
    starts = np.cumsum([0, *map(len, parts)])
    k = int(np.searchsorted(starts, at, side="right")) - 1
    place = f"(sequence {places[k][0]}, offset {places[k][1] + at - starts[k]})"
    raise ConfigError(f"{indexed.data_path} holds token {tokens[at]} {place}, {reason}")
