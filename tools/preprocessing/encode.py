"""Encode JSON lines to tokens and collect bad lines.

The tokenizer is not trusted: its ids are checked and its time is limited.
"""

import codecs
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import token_dtype
from megatron.core.datasets.token_ids_without_embedding_row import index_of_first_unknown, tokenizer_name
from megatron.core.tokenizers import Tokenizer
from tools.preprocessing.in_time import in_time
from tools.preprocessing.sources import Chunk
from tools.preprocessing.word_memory import packer

_PACKED = np.dtype(np.int32)  # ids as `packer` returns them
SHOWN = 20  # number of bad lines that are reported one by one
_PATIENCE = 60  # seconds that a tokenizer may take for any text, plus
_SLOWEST = 10_000  # characters per second; a busy core does a hundred times as many


class TokenizerError(ValueError):
    """An error of the tokenizer, not of a line; --on-error skip must not hide it."""


@dataclass
class Column:
    """The tokens of one key."""

    tokens: np.ndarray  # of all sequences, end to end
    lengths: np.ndarray  # int32 [sequences], tokens
    counts: np.ndarray  # int64 [documents], sequences


@dataclass
class Encoded:
    """An encoded piece. All fields but `columns` are stored under these names in the piece's file."""

    documents: int = 0
    size: int = 0  # bytes of text read
    bad_count: int = 0  # bad lines
    bad: list[str] = field(default_factory=list)  # "file:line: reason" of the first ones
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
        """Encode the documents of consecutive chunks.

        Blank lines are ignored. A line that is bad under one key is left out of all keys.
        """
        result = Encoded(size=sum(len(chunk.text) for chunk in chunks))
        documents = [document for chunk in chunks for document in self._documents(chunk, result)]
        result.documents = len(documents)
        for k, key in enumerate(self.keys):
            result.columns[key] = self._column([document[k] for document in documents])
        return result

    def _documents(self, chunk: Chunk, result: Encoded) -> list[list[list[bytes]]]:
        """Return the packed tokens [line][key][sequence] of the good lines; record the bad lines in `result`."""
        # read the texts of each line
        lines: list[tuple[int, list[list[str]]]] = []  # (line number, texts [key][text])
        for number, line in enumerate(chunk.text.split(b"\n"), chunk.first):
            if line and not line.isspace():
                try:
                    texts = line_texts(without_byte_order_mark(line, number), self.keys)
                    lines.append((number, [self._split(texts_of_key) for texts_of_key in texts]))
                except ValueError as error:
                    result.note_bad(chunk.path, number, error)

        # tokenize all lines at once, which is fast
        try:
            return self._tokenize([texts for _, texts in lines])
        except ValueError:
            pass

        # one of the texts is bad: tokenize line by line to find it
        documents = []
        for number, texts in lines:
            try:
                documents += self._tokenize([texts])
            except TokenizerError as error:
                raise TokenizerError(f"{chunk.path}:{number}: {error}") from None
            except ValueError as error:
                result.note_bad(chunk.path, number, error)
        return documents

    def _split(self, texts: list[str]) -> list[str]:
        if self.split is None:
            return texts
        return [sentence for text in texts for sentence in self.split(text)]

    def _tokenize(self, lines: list[list[list[str]]]) -> list[list[list[bytes]]]:
        """Tokenize texts [line][key][text] to [line][key][sequence] in one call. Raises ValueError for a bad text."""
        all_texts = [text for line in lines for texts in line for text in texts]
        seconds = _PATIENCE + sum(map(len, all_texts)) / _SLOWEST
        try:
            all_ids = in_time(lambda: self._pack(all_texts), seconds)
        except TimeoutError:
            reason = f"{self._name} runs longer than {seconds:.0f} s on this text, perhaps in a regular expression"
            raise TokenizerError(f"{reason}; correct the tokenizer or remove the text") from None
        except OverflowError:
            raise TokenizerError(f"{self._name} gives an id beyond 2^31; correct the tokenizer") from None
        self._check_ids(all_ids)

        # give the ids the nesting of the texts
        next_ids = iter(all_ids)
        return [[self._document([next(next_ids) for _ in texts]) for texts in line] for line in lines]

    def _check_ids(self, all_ids: list[bytes]) -> None:
        """Raise TokenizerError for an id outside the vocabulary, as of a template: it may overflow the stored dtype."""
        ids = np.frombuffer(b"".join(all_ids), _PACKED)
        index = index_of_first_unknown(ids, self.tokenizer.vocab_size)
        if index is not None:
            raise TokenizerError(
                f"{self._name} gives the id {ids[index]}, which {self._outside}; correct the tokenizer"
            )

    @property
    def _name(self) -> str:
        return tokenizer_name(self.tokenizer)

    @property
    def _outside(self) -> str:
        return f"is outside its vocabulary of {self.tokenizer.vocab_size} ids (0 to {self.tokenizer.vocab_size - 1})"

    def _document(self, sequences: list[bytes]) -> list[bytes]:
        """Return the sequences of a document without the empty ones, with eod appended to the last."""
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
        """Join the sequences of all documents, in the byte order and dtype of token files."""
        sequences = [sequence for document in documents for sequence in document]
        lengths = (np.array(list(map(len, sequences)), np.int64) // _PACKED.itemsize).astype("<i4")
        counts = np.array(list(map(len, documents)), "<i8")
        dtype = np.dtype(token_dtype(self.tokenizer.vocab_size)).newbyteorder("<")
        return Column(np.frombuffer(b"".join(sequences), _PACKED).astype(dtype), lengths, counts)


def without_byte_order_mark(line: bytes, number: int) -> bytes:
    """Return `line` without the byte-order mark that some editors write at the start of a file."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def line_texts(line: bytes, keys: list[str]) -> list[list[str]]:
    """Return the texts of one JSON line for each key, whose value is a string or a list of strings.

    Raises ValueError with the reason if the line is bad.
    """
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
        for text in texts:
            _check_surrogates(text)
        columns.append(texts)
    return columns


def _check_surrogates(text: str) -> None:
    """Raise ValueError if the text cannot be UTF-8: JSON can encode half of a surrogate pair."""
    if text.isascii():  # faster than encoding
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
