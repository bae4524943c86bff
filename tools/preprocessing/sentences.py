"""Split text into sentences, for BERT and T5 data: by built-in rules, or with nltk's trained splitter.

The rules cut after . ! ? and similar marks before white space and no lower-case letter, at empty lines, and
after Chinese and Japanese full stops. They do not cut after an initial, a word with inner stops, or a known
English abbreviation.
"""

import re
from collections.abc import Callable
from itertools import pairwise

_NLTK_AT_ONCE = 1_000_000  # characters; longer text is cut there first, as in Megatron, since the library is slow on it

# Quotes are written by number: \u2019\u201d\xbb close in Latin script, \u3002\uff01\uff1f are the Chinese full stop, !
# and ?. Possessive (++), with a lookbehind: a run of a million full stops is scanned once.
_END = re.compile(
    "(?<![.!?\u2026])[.!?\u2026]++[\"'\u2019\u201d\xbb)\\]]*+\\s++"  # Latin, Cyrillic, Greek, ...
    "|(?<![\u3002\uff01\uff1f])[\u3002\uff01\uff1f]++[\u2019\u201d\u300d\u300f\uff09]*+\\s*+"
    "|\n[^\\S\n]*+\n\\s*+"  # an empty line
)
_WORD_BEFORE = re.compile("[^\\s(\"'\u201c\u2018\\[]*\\Z")
_LONGEST_WORD = 40

# Followed by a name or a number more often than by a new sentence.
_ABBREVIATIONS = {
    *("adm", "approx", "art", "assn", "ave", "bros", "capt", "cf", "ch", "cmdr", "co", "col", "corp", "dept", "dr"),
    *("ed", "eds", "eq", "esp", "est", "etc", "ex", "fig", "figs", "gen", "gov", "hon", "inc", "jr", "lt", "ltd"),
    *("maj", "messrs", "mr", "mrs", "ms", "mt", "no", "nos", "op", "p", "pp", "prof", "pt", "rep", "rev", "sec"),
    *("sen", "sgt", "sr", "st", "vol", "vols", "vs"),
}


def rule_starts(text: str) -> list[int]:
    """Return the positions where the sentences of `text` begin, by the module's rules."""
    starts = [0]
    for match in _END.finditer(text):
        end = match.end()
        if end < len(text) and _ends_sentence(text, match):
            starts.append(end)
    return starts


def _ends_sentence(text: str, match: re.Match) -> bool:
    """Whether a match of `_END` ends a sentence. Its full stop may belong to an abbreviation instead."""
    mark = match.group()
    if mark[0] in "\u3002\uff01\uff1f\n" or mark.count("\n") > 1:  # a Chinese mark or an empty line
        return True
    if text[match.end()].islower():
        return False
    if not mark.startswith(".") or mark[1:2] == ".":  # not a single full stop
        return True
    word = _WORD_BEFORE.search(text, max(0, match.start() - _LONGEST_WORD), match.start()).group()
    letters = word.split(".")  # an initial, or e.g. and U.S.
    is_initials = all(len(letter) == 1 for letter in letters) and (len(letters) > 1 or word.isupper())
    return not (is_initials or word.lower() in _ABBREVIATIONS)


def nltk_starts(language: str) -> Callable[[str], list[int]]:
    """Return a function like `rule_starts` that uses nltk's Punkt for `language`.

    Raises ImportError or ValueError, which say what to install.
    """
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError:
        raise ImportError("--sentence-splitter nltk needs the package nltk (3.9 or newer): pip install nltk") from None
    try:
        punkt = PunktTokenizer(language)
    except LookupError:
        raise ValueError(
            f"nltk has no sentence model for --lang {language}: python -m nltk.downloader punkt_tab, or use "
            "--sentence-splitter rules"
        ) from None

    def starts(text: str) -> list[int]:
        begins = []
        for first in range(0, len(text), _NLTK_AT_ONCE):
            part = text[first : first + _NLTK_AT_ONCE]
            begins += [first + begin for begin, _ in punkt.span_tokenize(part)]
        return [0, *begins[1:]]  # white space before the first sentence belongs to it

    return starts


def split_text(text: str, starts: Callable[[str], list[int]], keep_newlines: bool) -> list[str]:
    """Split `text` into its sentences.

    keep_newlines: sentences keep the white space after them, so that they join to `text`; otherwise they are stripped,
    and empty ones dropped.
    """
    sentences = [text[start:stop] for start, stop in pairwise([*starts(text), len(text)])]
    if keep_newlines:
        return sentences
    stripped = [sentence.strip() for sentence in sentences]
    return [sentence for sentence in stripped if sentence]
