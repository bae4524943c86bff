"""Encode JSON lines to tokens and collect bad lines. The tokenizer is not trusted: its ids are checked, its time is limited."""

import codecs
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import token_dtype
from megatron.core.datasets.vocab_check import first_unknown, tokenizer_name
from megatron.core.tokenizers import Tokenizer
from tools.preprocessing.in_time import in_time
from tools.preprocessing.sources import Chunk
from tools.preprocessing.word_memory import packer

_PACKED = np.dtype(np.int32)  # of `packer`
SHOWN = 20  # bad lines that are reported one by one
_PATIENCE = 60  # seconds that a tokenizer may take for any text, plus
_SLOWEST = 10_000  # characters per second; a busy core does a hundred times as many


class TokenizerError(ValueError):
    """An error of the tokenizer, not of a line; --on-error skip must not hide it."""


@dataclass
class Column:
    """Tokens end to end, the length of each sequence, the sequences of each document."""

    tokens: np.ndarray
    lengths: np.ndarray  # int32
    counts: np.ndarray  # int64


@dataclass
class Encoded:
    """An encoded piece. bad: "file:line: reason" of the first few of `bad_count` bad lines."""

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
    """Encodes documents. split: cuts a text into its sequences; None: a text is one sequence."""

    tokenizer: Tokenizer
    keys: list[str]
    append_eod: bool
    split: Callable[[str], list[str]] | None = None

    def __post_init__(self) -> None:
        if self.append_eod and self.tokenizer.eod is None:
            raise ValueError(
                f"--append-eod: {self._name} has no token that ends a document; drop --append-eod, or use a tokenizer that has "
                "one (for a tokenizer.json: eos_token in the tokenizer_config.json beside it)"
            )
        if self.append_eod and not 0 <= self.tokenizer.eod < self.tokenizer.vocab_size:
            raise ValueError(
                f"{self._name}: the end-of-document id {self.tokenizer.eod} {self._outside}; drop --append-eod"
            )

    def encode(self, chunks: list[Chunk]) -> Encoded:
        """The documents of consecutive chunks. Blank lines are ignored; a line that is bad under one key is left out of all."""
        result = Encoded(size=sum(len(chunk.text) for chunk in chunks))
        documents = [document for chunk in chunks for document in self._documents(chunk, result)]
        result.documents = len(documents)
        result.columns = {key: self._column([columns[k] for columns in documents]) for k, key in enumerate(self.keys)}
        return result

    def _documents(self, chunk: Chunk, result: Encoded) -> list[list[list[bytes]]]:
        """[line][key][sequence] packed tokens of the good lines; bad lines are noted in `result`."""
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
        except ValueError:  # one of the texts; repeat line by line to find it
            documents = []
            for number, texts in rows:
                try:
                    documents += self._tokenize([texts])
                except TokenizerError as error:
                    raise TokenizerError(f"{chunk.path}:{number}: {error}") from None
                except ValueError as error:
                    result.note_bad(chunk.path, number, error)
            return documents

    def _split(self, texts: list[str]) -> list[str]:
        return texts if self.split is None else [part for text in texts for part in self.split(text)]

    def _tokenize(self, rows: list[list[list[str]]]) -> list[list[list[bytes]]]:
        """All texts in one call: [line][key][text] to [line][key][sequence]. Raises ValueError for a text that gives no ids."""
        texts = [text for row in rows for texts in row for text in texts]
        seconds = _PATIENCE + sum(map(len, texts)) / _SLOWEST
        try:
            of_texts = in_time(lambda: self._pack(texts), seconds)
        except TimeoutError:
            reason = f"{self._name} runs longer than {seconds:.0f} s on this text, perhaps in a regular expression"
            raise TokenizerError(f"{reason}; correct the tokenizer or remove the text") from None
        except OverflowError:
            raise TokenizerError(f"{self._name} gives an id beyond 2^31; correct the tokenizer") from None
        self._check_ids(of_texts)
        packed = iter(of_texts)
        return [[self._document([next(packed) for _ in texts]) for texts in row] for row in rows]

    def _check_ids(self, of_texts: list[bytes]) -> None:
        """Raise TokenizerError for an id outside the vocabulary, for example of a template: it may overflow the stored dtype."""
        ids = np.frombuffer(b"".join(of_texts), _PACKED)
        if (at := first_unknown(ids, self.tokenizer.vocab_size)) is not None:
            raise TokenizerError(f"{self._name} gives the id {ids[at]}, which {self._outside}; correct the tokenizer")

    @property
    def _name(self) -> str:
        return tokenizer_name(self.tokenizer)

    @property
    def _outside(self) -> str:
        return f"is outside its vocabulary of {self.tokenizer.vocab_size} ids (0 to {self.tokenizer.vocab_size - 1})"

    def _document(self, sequences: list[bytes]) -> list[bytes]:
        """The sequences of a document: empty ones dropped, eod appended to the last."""
        sequences = [sequence for sequence in sequences if sequence]
        if self.append_eod and sequences:
            sequences[-1] += self._eod
        return sequences

    @functools.cached_property
    def _pack(self) -> Callable[[list[str]], list[bytes]]:
        return packer(self.tokenizer, are_sentences=self.split is not None)

    @functools.cached_property
    def _eod(self) -> bytes:
        return np.array([self.tokenizer.eod], _PACKED).tobytes()

    def _column(self, documents: list[list[bytes]]) -> Column:
        sequences = [sequence for document in documents for sequence in document]
        lengths = (np.array(list(map(len, sequences)), np.int64) // _PACKED.itemsize).astype("<i4")
        counts = np.array(list(map(len, documents)), "<i8")
        dtype = np.dtype(token_dtype(self.tokenizer.vocab_size)).newbyteorder("<")
        return Column(np.frombuffer(b"".join(sequences), _PACKED).astype(dtype), lengths, counts)


def without_mark(line: bytes, number: int) -> bytes:
    """`line` without the byte-order mark that some editors write at the start of a file."""
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
        raise ValueError("JSON nested too deeply") from None
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
    """`text`. Raises ValueError if it is not UTF-8: JSON can encode half of a surrogate pair."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text
