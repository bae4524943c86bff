"""Byte-level BPE at several times the library's speed: cut a text into words and compute each word's ids once.

    text      "The cat, the cat"
    words     The| cat|,| the| cat            cut by the tokenizer's pre-tokenization pattern; no token crosses a word
    memory    {"The": ids, " cat": ids, ...}  as bytes, so that the ids of a text are the ids of its words joined

Python's `re` cuts the words. It has no character classes such as \\p{L}, so they are written out with the characters
that the library itself puts into them: both then use the same version of Unicode.
"""

import array
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.tokenizers import Tokenizer

_REMEMBERED_WORDS = 50_000  # about 10 MB; at 87,000 the dict would double; 150,000 are hardly faster
_LONGEST_REMEMBERED = 64  # characters of a word
_LEARNED = 10_000  # words; a smaller memory learns from every text
_SAMPLE = 16  # number of first words of a text that decide whether most of its words are known
_LONGEST_TEXT = 1 << 20  # characters; a longer text is cut word by word, in constant memory

# Upper ends of the characters that a pattern covers.
_ASCII, _FIRST_PLANE = 0x80, 0x10000
_BEYOND = {past: re.compile(f"[{chr(past)}-\U0010ffff]").search for past in (_FIRST_PLANE, 0x20000)}
# Blocks of characters that all have the same classes, so that only the first is looked up.
_UNIFORM = ((0x3400, 0x4DC0), (0x4E00, 0x9FF0), (0xAC00, 0xD7A4))
_NAMED = re.compile(r"\\p\{\w+\}|\\s")
_CLASS = re.compile(rf"\[(?:{_NAMED.pattern}|\\.|[^\]])*\]|{_NAMED.pattern}|\\S")  # in brackets, or by itself


def packer(tokenizer: Tokenizer, *, are_sentences: bool = False) -> Callable[[list[str]], list[bytes]]:
    """Return the tokenizer's fastest function from texts to their ids, as bytes of native int32.

    are_sentences: the texts are sentences for a BERT or a T5, so no token is added that begins or ends a text.
    """
    if getattr(tokenizer, "word_pattern", None):
        memory = WordMemory(tokenizer.library, tokenizer.word_pattern, tokenizer.added_tokens)

        def encode_words(texts: list[str]) -> list[bytes]:
            with tokenizer.library_errors():
                return list(map(memory.encode, texts))

        return encode_words
    if are_sentences and hasattr(tokenizer, "tokenize_sentences"):
        return lambda texts: list(map(packed, tokenizer.tokenize_sentences(texts)))
    if hasattr(tokenizer, "tokenize_batch"):
        return lambda texts: list(map(packed, tokenizer.tokenize_batch(texts)))
    return lambda texts: [packed(tokenizer.tokenize(text)) for text in texts]


def packed(ids: list[int]) -> bytes:
    """Return `ids` as bytes of native int32, for `numpy.frombuffer`."""
    return array.array("i", ids).tobytes()


class WordMemory:
    """Packed ids of texts, for a tokenizer whose tokens never cross the words of `pattern`.

    tokenizer: of the package `tokenizers`, which itself encodes a text with one of the strings `never`, with a
    character past U+20000, or with many new words.
    """

    def __init__(self, tokenizer: Any, pattern: str, never: Iterable[str] = ()):
        self._tokenizer = tokenizer
        self._never = list(never)
        self._ids = _Ids(tokenizer)
        self._new_texts = 0  # texts with many new words
        self._words = functools.cache(lambda past: re.compile(spelled_out(pattern, past)))

    def encode(self, text: str) -> bytes:
        """Return the packed ids of a text."""
        cut = self._cutter(text)
        if cut is None or any(string in text for string in self._never):
            return _ids_by_library(self._tokenizer, text)
        words = cut(text)
        if len(text) <= _LONGEST_TEXT and self._leave_to_library(words[:_SAMPLE]):
            return _ids_by_library(self._tokenizer, text)
        if len(self._ids) > _REMEMBERED_WORDS:
            self._ids.clear()
        return b"".join(map(self._ids.__getitem__, words))

    def _leave_to_library(self, words: list[str]) -> bool:
        """Whether to leave a text that begins with `words` to the library, because over a quarter of them are new.

        In scripts without spaces words rarely repeat. One such text in four is learned, in case it is the first
        of its language.
        """
        if len(self._ids) < _LEARNED or 4 * sum(map(self._ids.__contains__, words)) >= 3 * len(words):
            return False
        self._new_texts += 1
        return self._new_texts % 4 != 0

    def _cutter(self, text: str) -> Callable[[str], Iterable[str]] | None:
        """Return the fastest function that cuts `text` into words; None if it has a character past U+20000.

        A pattern that spells out fewer characters is faster.
        """
        past = None
        if text.isascii():
            past = _ASCII
        else:
            for bound, search_beyond in _BEYOND.items():
                if not search_beyond(text):
                    past = bound
                    break
        if past is None:
            return None
        pattern = self._words(past)
        if len(text) <= _LONGEST_TEXT:
            return pattern.findall
        return lambda text: (match.group() for match in pattern.finditer(text))


def _ids_by_library(tokenizer: Any, text: str) -> bytes:
    """Return the ids that the library computes, packed.

    It is called with a batch of one, because it lets other threads run during a batch: the text may be a whole file.
    """
    return packed(tokenizer.encode_batch_fast([text])[0].ids)


class _Ids(dict):
    """Word -> packed ids, from the library at first use."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> bytes:
        if len(word) > _LONGEST_REMEMBERED:
            return _ids_by_library(self._tokenizer, word)
        ids = packed(self._tokenizer.encode(word).ids)
        self[word] = ids
        return ids


def spelled_out(pattern: str, past: int) -> str:
    """Replace \\p{..}, \\s and \\S of `pattern` by characters below `past`, for Python's `re`."""

    def spell(match: re.Match) -> str:
        part = match.group()
        if part == r"\S":
            part = r"[^\s]"
        inside = _NAMED.sub(lambda named: _members(named.group(), past), part)
        return inside if part.startswith("[") else f"[{inside}]"

    return _CLASS.sub(spell, pattern)


@functools.cache
def _members(name: str, past: int) -> str:
    """Return the class `name` as the content of brackets: its characters below `past`, by the library's own table."""
    return character_ranges(_ranges_of(name, min(past, _FIRST_PLANE)) + _ranges_of(name, past, _FIRST_PLANE))


@functools.cache
def _ranges_of(name: str, past: int, first: int = 0) -> list[tuple[int, int]]:
    """Return (first, last) of each run of characters of the class from `first` up to `past`. 0.1 s for a plane."""
    from tokenizers import Regex, pre_tokenizers

    # the characters to ask for: the first of each uniform block, and no surrogates, which are no characters
    blocks = {start: stop for start, stop in ((0xD800, 0xE000), *_UNIFORM)}
    codes = []
    code = first
    while code < past:
        if code != 0xD800:
            codes.append(code)
        code = blocks.get(code, code + 1)

    # the library removes the class's characters from a text of all of them: the others are left
    split = pre_tokenizers.Split(Regex(f"{name}+"), "removed")
    others = set().union(*(part for part, _ in split.pre_tokenize_str("".join(map(chr, codes)))))

    ranges: list[tuple[int, int]] = []
    for code in codes:
        if chr(code) in others:
            continue
        last = dict(_UNIFORM).get(code, code + 1) - 1
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((code, last))
    return ranges


def character_ranges(ranges: list[tuple[int, int]]) -> str:
    """Return `ranges` (first, last) in the notation of a pattern's brackets."""
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
