"""Check token ids against the vocabulary: an embedding has no row for an id outside it.

A published tokenizer may have more ids than the model's embedding has rows: that of Gemma 3 270M and 1B has 262,145,
since it is shared with the larger models, which see images, and the embeddings have 262,144. A text seldom has such an
id; one that has is refused.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset


def tokenizer_name(tokenizer: Any) -> str:
    """Return the name of a tokenizer for messages: its type, and its file if it has one."""
    name = getattr(tokenizer, "name", type(tokenizer).__name__)
    path = tokenizer_path(tokenizer)
    return f"{name} {path}" if path else name


def tokenizer_path(tokenizer: Any) -> str | None:
    """Return the file or folder that a tokenizer was read from; None for one without."""
    return getattr(tokenizer, "path", None) or None


class CappedVocabTokenizer:
    """A tokenizer whose `vocab_size` is the number of rows of the embedding, which is smaller than its number of ids.

    without_row: the tokens of the other ids, for messages. All other attributes are those of the tokenizer.
    """

    def __init__(self, tokenizer: Any, rows: int):
        self.tokenizer = tokenizer
        self.vocab_size = rows
        names = getattr(tokenizer, "inv_vocab", {})
        self.without_row = {i: names[i] for i in range(rows, tokenizer.vocab_size) if i in names}

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # asked while a copy is made, before it has any attribute: would recurse without end
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def ids_without_row(tokenizer: Any) -> Mapping[int, str]:
    """Return the tokens, by id, that the model's embedding has no row for."""
    return tokenizer.without_row if isinstance(tokenizer, CappedVocabTokenizer) else {}


def cap_vocab_size(tokenizer: Any, rows: int) -> Any:
    """Return the tokenizer, limited to the ids for which an embedding of so many rows has one."""
    return tokenizer if tokenizer.vocab_size <= rows else CappedVocabTokenizer(tokenizer, rows)


_IN_SAMPLES = ("eod", "cls", "sep", "mask", "bos", "eos")  # tokens that data sets put into samples


def embedding_rows_problem(tokenizer: Any, rows: int) -> str | None:
    """Say why a model with so many embedding rows cannot be trained with this tokenizer; None if it can.

    Ids without a row may only be added tokens, which a text seldom has, and none that every sample has: a model that
    lacks ordinary tokens belongs to another tokenizer.
    """
    num_ids = tokenizer.vocab_size
    if num_ids <= rows:
        return None
    added = set(getattr(tokenizer, "added_tokens", ()))
    names = getattr(tokenizer, "inv_vocab", {})
    lacking = f"the tokenizer has {num_ids} ids, and --model-vocab-size is {rows}, the rows of the model's word table"

    # ordinary tokens without a row
    ordinary = [i for i in range(rows, num_ids) if i in names and names[i] not in added]
    if ordinary:
        examples = ", ".join(f"{names[i]!r:.40} ({i})" for i in ordinary[:3])
        return f"{lacking}: it has none for words of texts such as {examples}; give the model's own tokenizer"
    if not names:
        return f"{lacking}; give the model's own tokenizer"

    # tokens without a row that data sets put into samples
    ids = {name: getattr(tokenizer, name, None) for name in _IN_SAMPLES}
    for k, i in enumerate(getattr(tokenizer, "additional_special_tokens_ids", None) or ()):
        ids[f"sentinel {k}"] = i
    in_samples = [f"{name} ({i})" for name, i in ids.items() if i is not None and i >= rows]
    if in_samples:
        examples = ", ".join(in_samples[:3])
        return f"{lacking}: it has none for {examples}, which samples have; give the model's own tokenizer"
    return None


def ids_without_row_note(tokenizer: Any, rows: int) -> str | None:
    """Return a line about ids without an embedding row; None if each has one."""
    without_row = ids_without_row(cap_vocab_size(tokenizer, rows))
    if not without_row:
        return None
    examples = ", ".join(f"{token} ({i})" for i, token in list(without_row.items())[:3])
    num_ids = tokenizer.vocab_size
    return f"the model's word table has {rows} rows, and the tokenizer {num_ids} ids: a text with {examples} is refused"


def index_of_first_unknown(tokens: np.ndarray, vocab_size: float) -> int | None:
    """Return the position of the first id that is negative or not below `vocab_size`; None if there is none.

    tokens: integers [n]. It takes 10 microseconds for 2,048 tokens.
    """
    smallest = 0 if tokens.dtype.kind == "u" else tokens.min(initial=0)
    if smallest >= 0 and tokens.max(initial=0) < vocab_size:
        return None
    return int(np.argmax((tokens < 0) | (tokens >= vocab_size)))


def concatenate_checked(
    parts: list[np.ndarray],
    places: list[tuple[int, int]],
    indexed: IndexedDataset,
    vocab_size: int,
    tokenizer: str,
    without_row: Mapping[int, str],
) -> np.ndarray:
    """Concatenate `parts` to one array of tokens [n]; part k begins at places[k], (sequence, offset) of the file.

    A part is an integer array [tokens]. without_row: the tokenizer's tokens that the model's embedding has no row for,
    by id. Raises ConfigError for an id that is negative or past the vocabulary, with its place.
    """
    tokens = np.concatenate(parts)
    position = index_of_first_unknown(tokens, vocab_size)
    if position is None:
        return tokens
    token = without_row.get(int(tokens[position]))
    if tokens[position] < 0:
        reason = "and no id is negative: the file is damaged, or no tokenizer made it; preprocess again"
    elif token is not None:
        reason = (
            f"which is {token} of {tokenizer}, and the model's word table has {vocab_size} rows, none for it: leave {token} "
            "out of the texts, and preprocess again"
        )
    else:
        reason = (
            f"but the tokenizer's vocabulary has {vocab_size} ({tokenizer}): the data were made with another tokenizer; use that "
            "one or preprocess again"
        )
    starts = np.cumsum([0, *map(len, parts)])  # of each part in `tokens`
    k = int(np.searchsorted(starts, position, side="right")) - 1
    sequence, offset = places[k]
    place = f"(sequence {sequence}, offset {offset + position - starts[k]})"
    raise ConfigError(f"{indexed.data_path} contains token {tokens[position]} {place}, {reason}")
