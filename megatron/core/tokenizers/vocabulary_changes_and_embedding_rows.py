"""Compare two tokenizers: whether an id is the same token in both, and which rows of an embedding can be kept.

No torch. Tokens are spelled as in the files: `Ġthe` of byte-level BPE, `▁the` of sentencepiece, `##ing` of word pieces.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Vocabulary = Mapping[str, int]  # token -> id
_MAX_NAMED = 3  # differences that a message names


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """Return the tokens of a tokenizer; None for one without, such as NullTokenizer, whose texts are ids already."""
    vocab = getattr(tokenizer, "vocab", None)
    return vocab if isinstance(vocab, Mapping) and vocab else None


def in_tokenizer_json(content: Any) -> dict[str, int]:
    """Return the tokens in the content of a tokenizer.json. Raises ValueError."""
    model = content.get("model") if isinstance(content, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: [token, score], in the order of ids
        vocab = {entry[0]: i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    tokens = checked(vocab)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise ValueError("its added_tokens must be a list of objects")
    return tokens | checked({entry.get("content"): entry.get("id") for entry in added}, empty=True)


def checked(vocab: Any, *, empty: bool = False) -> dict[str, int]:
    """Return a vocabulary that was read from a file. Raises ValueError unless it has ids by token. empty: allowed."""
    if not isinstance(vocab, dict) or not (vocab or empty):
        raise ValueError("it holds no vocabulary")
    for token, i in vocab.items():
        if not isinstance(token, str) or type(i) is not int or not 0 <= i < 1 << 31:
            raise ValueError(f"token {token!r:.40} has id {i!r:.40}")
    return vocab


def changed_or_lost_tokens(saved: Vocabulary, current: Vocabulary) -> str:
    """Say which ids are other tokens in `current` than in `saved`; "" if none are.

    Further tokens of `current`, on ids that `saved` does not use, are no difference: no row of the embedding gets
    another meaning.
    """
    # ids that both use, for another token
    saved_tokens = {i: token for token, i in saved.items()}
    moved = []
    for token, i in current.items():
        if i in saved_tokens and saved.get(token) != i:
            moved.append((i, saved_tokens[i], token))
    messages = []
    for i, before, now in sorted(moved)[:_MAX_NAMED]:
        messages.append(f"id {i} is {_quoted(before)} there and {_quoted(now)} here")
    if len(moved) > _MAX_NAMED:
        messages.append(f"and {len(moved) - _MAX_NAMED} more ids mean another token")

    # tokens that are missing, except those named above
    moved_ids = {i for i, _, _ in moved}
    lost = [token for token, i in saved.items() if token not in current and i not in moved_ids]
    if lost:
        more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
        messages.append(f"it lacks {', '.join(map(_quoted, lost[:_MAX_NAMED]))}{more}")
    return "; ".join(messages)


def rule_difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Say which rules cut text in another way; "" if none do. Both are `FastTokenizer.rules`.

    Further merges of `current`, after those of `saved`, are no difference: they make further tokens.
    """
    differing = [f"its {part}" for part in ("normalizer", "pre_tokenizer") if saved[part] != current[part]]
    saved_model = saved["model"]
    current_model = current["model"]
    merges = saved_model.get("merges", [])
    if current_model.get("merges", [])[: len(merges)] != merges:
        differing.append("its merges")
    for name in saved_model | current_model:
        if name != "merges" and saved_model.get(name) != current_model.get(name):
            differing.append(f"{name} of its model")
    if not differing:
        return ""
    return f"the tokens are the same, and text is cut into them otherwise: by {', '.join(differing)}"


def _quoted(token: str) -> str:
    return json.dumps(token[:40], ensure_ascii=False)


class RowRun(NamedTuple):
    """Consecutive rows of an embedding.

    Rows new to new + count of the new one are rows old to old + count of the old one.
    """

    new: int
    old: int
    count: int


def rows_by_token(saved: Vocabulary, current: Vocabulary, saved_rows: int, current_rows: int) -> list[RowRun]:
    """Return the rows of the tokens that both vocabularies have, in the order of the ids of `current`."""
    pairs = []
    for token, new in current.items():
        if token in saved:
            pairs.append((new, saved[token]))
    pairs.sort()
    return list(_runs((new, old) for new, old in pairs if new < current_rows and old < saved_rows))


def rows_by_id(saved_rows: int, current_rows: int) -> list[RowRun]:
    """Return the rows of the ids that both embeddings have."""
    return [RowRun(0, 0, min(saved_rows, current_rows))]


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[RowRun]:
    """Join consecutive pairs (new row, old row) to runs."""
    run: RowRun | None = None
    for new, old in pairs:
        if run is not None and new == run.new + run.count and old == run.old + run.count:
            run = run._replace(count=run.count + 1)
            continue
        if run is not None:
            yield run
        run = RowRun(new, old, 1)
    if run is not None:
        yield run
