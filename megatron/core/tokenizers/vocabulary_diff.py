"""The ids of the tokens of two tokenizers: whether both mean the same by an id, and which rows of a word table stay.

No torch. Spelling is that of the files: `Ġthe` of byte-level BPE, `▁the` of sentencepiece, `##ing` of word pieces.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Vocabulary = Mapping[str, int]  # token -> id
_SHOWN = 3


def vocabulary_of(tokenizer: Any) -> Vocabulary | None:
    """The tokens of a tokenizer; None for one without, such as NullTokenizer, whose texts are ids already."""
    found = getattr(tokenizer, "vocab", None)
    return found if isinstance(found, Mapping) and found else None


def in_tokenizer_json(held: Any) -> dict[str, int]:
    """The tokens of what a tokenizer.json holds. Raises ValueError."""
    model = held.get("model") if isinstance(held, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: [token, score], in the order of ids
        vocab = {entry[0]: i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    found = checked(vocab)
    added = held.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise ValueError("its added_tokens are no list of objects")
    return found | checked({one.get("content"): one.get("id") for one in added}, empty=True)


def checked(vocab: Any, *, empty: bool = False) -> dict[str, int]:
    """A vocabulary that came from a file. Raises ValueError for what is none."""
    if not isinstance(vocab, dict) or not (vocab or empty):
        raise ValueError("it holds no vocabulary")
    for token, i in vocab.items():
        if not isinstance(token, str) or type(i) is not int or not 0 <= i < 1 << 31:
            raise ValueError(f"token {token!r:.40} has id {i!r:.40}")
    return vocab


def token_difference(theirs: Vocabulary, mine: Vocabulary) -> str:
    """What my ids mean otherwise than theirs, in words; "" if nothing.

    Further tokens of mine, on ids that they do not use, are no difference: no row of theirs gets another meaning.
    """
    names = _by_id(theirs)
    moved = [(i, names[i], token) for token, i in mine.items() if i in names and theirs.get(token) != i]
    said = [f"id {i} is {_quoted(before)} there and {_quoted(now)} here" for i, before, now in sorted(moved)[:_SHOWN]]
    if len(moved) > _SHOWN:
        said.append(f"and {len(moved) - _SHOWN} more ids mean another token")
    replaced = {i for i, _, _ in moved}
    lost = [token for token, i in theirs.items() if token not in mine and i not in replaced]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        said.append(f"it lacks {', '.join(map(_quoted, lost[:_SHOWN]))}{more}")
    return "; ".join(said)


def rule_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Which rules cut text otherwise than theirs, in words; "" if none. Both: a LibraryTokenizer's `rules`.

    Further merges of mine, after theirs, are no difference: they make further tokens.
    """
    said = [f"its {part}" for part in ("normalizer", "pre_tokenizer") if theirs[part] != mine[part]]
    before, now = theirs["model"], mine["model"]
    merges, more = before.get("merges", []), now.get("merges", [])
    said += ["its merges"] if more[: len(merges)] != merges else []
    said += [f"{name} of its model" for name in before | now if name != "merges" and before.get(name) != now.get(name)]
    return f"the tokens are the same, and text is cut into them otherwise: by {', '.join(said)}" if said else ""


def _by_id(vocab: Vocabulary) -> dict[int, str]:
    return {i: token for token, i in vocab.items()}


def _quoted(token: str) -> str:
    return json.dumps(token[:40], ensure_ascii=False)


class RowRun(NamedTuple):
    """Rows of a word table that stand together in both: `count` rows from `new` on are those from `old` on."""

    new: int
    old: int
    count: int


def rows_by_token(theirs: Vocabulary, mine: Vocabulary, rows_there: int, rows_here: int) -> list[RowRun]:
    """The rows of tokens that both have, in the order of my ids."""
    pairs = sorted((i, theirs[token]) for token, i in mine.items() if token in theirs)
    return list(_runs((new, old) for new, old in pairs if new < rows_here and old < rows_there))


def rows_by_id(rows_there: int, rows_here: int) -> list[RowRun]:
    """The rows of ids that both have."""
    return [RowRun(0, 0, min(rows_there, rows_here))]


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[RowRun]:
    run: RowRun | None = None
    for new, old in pairs:
        if run is not None and (new, old) == (run.new + run.count, run.old + run.count):
            run = run._replace(count=run.count + 1)
            continue
        if run is not None:
            yield run
        run = RowRun(new, old, 1)
    if run is not None:
        yield run
