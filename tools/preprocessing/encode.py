"""JSON lines to tokens: what each line says, and which lines are bad."""

import codecs
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron.core.datasets.indexed import token_dtype
from megatron.core.tokenizers import Tokenizer, tokenize_packed
from tools.preprocessing.sources import Chunk

_PACKED = np.dtype(np.int32)  # of `tokenize_packed`
SHOWN = 20  # bad lines that are reported one by one


@dataclass
class Column:
    """Tokens end to end, the length of each sequence, the sequences of each document."""

    tokens: np.ndarray
    lengths: np.ndarray  # int32
    counts: np.ndarray  # int64


@dataclass
class Encoded:
    """What a piece became. bad: "file:line: reason" of the first few of `bad_count` bad lines."""

    documents: int = 0
    size: int = 0  # bytes of text read
    bad_count: int = 0
    bad: list[str] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)

    def note_bad(self, path: str, line: int, error: Exception) -> None:
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append(f"{path}:{line}: {error}")


@dataclass(frozen=True)
class Encoder:
    """How documents become tokens. split: a text into the texts of its sequences, each a sequence of its own."""

    tokenizer: Tokenizer
    keys: list[str]
    append_eod: bool
    split: Callable[[str], list[str]] | None = None

    def encode(self, chunks: list[Chunk]) -> Encoded:
        """The documents of neighbouring chunks. Blank lines are passed over; a line bad under one key counts under none."""
        result = Encoded(size=sum(len(chunk.text) for chunk in chunks))
        arrays: dict[str, list[Column]] = {key: [] for key in self.keys}
        for chunk in chunks:
            documents = self._documents(chunk, result)
            result.documents += len(documents)
            for column, key in enumerate(self.keys):
                arrays[key].append(self._column([document[column] for document in documents]))
        result.columns = {key: _join(columns) for key, columns in arrays.items()}
        return result

    def _documents(self, chunk: Chunk, result: Encoded) -> list[list[list[bytes]]]:
        """[line][key][sequence] of the good lines, packed tokens; the others are noted in `result`."""
        rows: list[tuple[int, list[list[str]]]] = []
        for number, line in enumerate(chunk.text.split(b"\n"), chunk.first):
            if line and not line.isspace():
                try:
                    texts = line_texts(without_mark(line, number), self.keys)
                    rows.append((number, [self._split(part) for part in texts]))
                except ValueError as error:
                    result.note_bad(chunk.path, number, error)
        try:
            return self._tokenize([texts for _, texts in rows])
        except ValueError:  # one of the texts; now line by line, to say which
            documents = []
            for number, texts in rows:
                try:
                    documents += self._tokenize([texts])
                except ValueError as error:
                    result.note_bad(chunk.path, number, error)
            return documents

    def _split(self, texts: list[str]) -> list[str]:
        return texts if self.split is None else [part for text in texts for part in self.split(text)]

    def _tokenize(self, rows: list[list[list[str]]]) -> list[list[list[bytes]]]:
        """All texts in one call: [line][key][text] to [line][key][sequence]."""
        packed = iter(tokenize_packed(self.tokenizer, [text for row in rows for texts in row for text in texts]))
        return [[self._document([next(packed) for _ in texts]) for texts in row] for row in rows]

    def _document(self, sequences: list[bytes]) -> list[bytes]:
        """The sequences of a document: those without tokens dropped, the last one ending in eod."""
        sequences = [sequence for sequence in sequences if sequence]
        if self.append_eod and sequences:
            sequences[-1] += self._eod
        return sequences

    @functools.cached_property
    def _eod(self) -> bytes:
        return np.array([self.tokenizer.eod], _PACKED).tobytes()

    def _column(self, documents: list[list[bytes]]) -> Column:
        sequences = [sequence for document in documents for sequence in document]
        lengths = (np.array(list(map(len, sequences)), np.int64) // _PACKED.itemsize).astype("<i4")
        counts = np.array(list(map(len, documents)), "<i8")
        dtype = np.dtype(token_dtype(self.tokenizer.vocab_size)).newbyteorder("<")
        return Column(np.frombuffer(b"".join(sequences), _PACKED).astype(dtype), lengths, counts)


def _join(columns: list[Column]) -> Column:
    return Column(*(np.concatenate([getattr(c, name) for c in columns]) for name in ("tokens", "lengths", "counts")))


def without_mark(line: bytes, number: int) -> bytes:
    """A line, without the byte-order mark that some editors put before the first one of a file."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def line_texts(line: bytes, keys: list[str]) -> list[list[str]]:
    """For each key the texts of one JSON line: one string or a list of them. Raises ValueError with the reason."""
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    columns = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
        texts = record[key] if isinstance(record[key], list) else [record[key]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"the value of {key!r} is neither a string nor a list of strings")
        columns.append([_whole_characters(text) for text in texts])
    return columns


def _whole_characters(text: str) -> str:
    """`text`, if it can be written as UTF-8: JSON may spell half of a surrogate pair."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text
