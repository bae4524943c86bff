"""JSON-lines text to token files for training: OUTPUT_PREFIX_KEY_document.bin and .idx for each --json-keys KEY.

    python tools/preprocess_data.py --input a.jsonl b.jsonl --output-prefix data/books --append-eod --workers 8 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

Each line is an object such as {"text": "..."}; a list of strings is a document of several sequences. The output does
not depend on --workers, and appears only when it is complete.
"""

import codecs
import collections
import contextlib
import functools
import glob
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import ConfigError, FlagParser, add_flags, build, knob, read_flags
from megatron.core.datasets.indexed import IndexedDatasetWriter, token_dtype
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer

_BATCH_LINES, _BATCH_BYTES = 256, 1 << 20  # lines travel to the workers in batches of at most this
_BATCHES_AHEAD = 4  # batches read ahead for each worker: reading far ahead of the workers would fill the memory
_SHOWN = 20  # skipped lines that are reported one by one


@dataclass(frozen=True)
class PreprocessConfig:
    """Text to token files."""

    input: list[str] | None = knob(
        None, "JSON-lines files, or patterns of them in quotes; read in this order", metavar="FILE", required=True
    )
    json_keys: list[str] = knob(["text"], "keys whose text is tokenized, each to its own files", metavar="KEY")
    output_prefix: str | None = knob(
        None, "output is PREFIX_KEY_document.bin and .idx", metavar="PREFIX", required=True
    )
    append_eod: bool = knob(False, "end each document with the end-of-document token")
    workers: int = knob(1, "processes that tokenize")
    log_interval: int = knob(10_000, "documents between two lines of progress")
    on_error: Literal["fail", "skip"] = knob("fail", "what to do about a line that cannot be read")

    def __post_init__(self) -> None:
        needed = {"--input": self.input, "--output-prefix": self.output_prefix, "--json-keys": self.json_keys}
        problems = [f"{flag} is needed" for flag, value in needed.items() if not value]
        counts = {"--workers": self.workers, "--log-interval": self.log_interval}
        problems += [f"{flag} ({value}) must be at least 1" for flag, value in counts.items() if value < 1]
        if problems:
            raise ConfigError(problems)


class LineBatch(NamedTuple):
    """Neighbouring lines of one file; the first has number `first`, counted from 1."""

    path: str
    first: int
    lines: list[bytes]


@dataclass
class Encoded:
    """What a batch became: for each key its tokens, the length of each sequence, the sequences of each document."""

    size: int  # bytes of text read
    columns: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)  # "file:line: reason"


def input_files(patterns: list[str], endings: tuple[str, ...] = (".jsonl", ".json")) -> list[str]:
    """The files that `patterns` name: files, folders (their files with one of `endings`, at any depth), or globs."""
    files = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            found = sorted(str(path) for path in Path(pattern).rglob("*") if path.suffix in endings and path.is_file())
        else:
            found = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
        if not found:
            raise ValueError(f"--input {pattern}: no such file, or no file in it ends in {' or '.join(endings)}")
        files += found
    return files


def line_texts(line: bytes, keys: list[str]) -> list[list[str]]:
    """For each key the texts of one JSON line: one string or a list of them. Raises ValueError with the reason."""
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
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
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return text


def read_batches(files: list[str]) -> Iterator[LineBatch]:
    """The lines of all files in order; batches never cross files."""
    for path in files:
        batch, size = LineBatch(path, 1, []), 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                batch.lines.append(without_mark(line, number))
                size += len(line)
                if len(batch.lines) == _BATCH_LINES or size >= _BATCH_BYTES:
                    yield batch
                    batch, size = LineBatch(path, number + 1, []), 0
        if batch.lines:
            yield batch


def without_mark(line: bytes, number: int) -> bytes:
    """A line, without the byte-order mark that some editors put before the first one of a file."""
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def encode_batch(batch: LineBatch, tokenizer: Tokenizer, keys: list[str], append_eod: bool) -> Encoded:
    """Tokenize a batch. Blank lines are passed over; a line that is bad under one key counts under none."""
    result = Encoded(size=sum(map(len, batch.lines)))
    documents: list[list[list[list[int]]]] = []  # [line][key][sequence][token]
    for number, line in enumerate(batch.lines, batch.first):
        if not line.strip():
            continue
        try:
            columns = line_texts(line, keys)
            documents.append([encode_document(texts, tokenizer, append_eod) for texts in columns])
        except ValueError as error:
            result.bad.append(f"{batch.path}:{number}: {error}")
    dtype = token_dtype(tokenizer.vocab_size)
    for column, key in enumerate(keys):
        sequences = [sequence for document in documents for sequence in document[column]]
        tokens = np.fromiter((token for sequence in sequences for token in sequence), dtype)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        counts = np.array([len(document[column]) for document in documents], np.int64)
        result.columns[key] = (tokens, lengths, counts)
    return result


def encode_document(texts: list[str], tokenizer: Tokenizer, append_eod: bool) -> list[list[int]]:
    """The token sequences of a document: one a text, those without tokens dropped, the last one ending in eod."""
    sequences = [ids for ids in map(tokenizer.tokenize, texts) if ids]
    if append_eod and sequences:
        sequences[-1] = [*sequences[-1], tokenizer.eod]
    return sequences


# A worker process keeps its encoder here; a tokenizer costs a second to build and cannot always be sent.
_encode = None


def _start_worker(tokenizer_config: TokenizerConfig, keys: list[str], append_eod: bool) -> None:
    global _encode
    _encode = make_encoder(build_tokenizer(tokenizer_config), keys, append_eod)


def _encode_in_worker(batch: LineBatch) -> Encoded:
    return _encode(batch)


def make_encoder(tokenizer: Tokenizer, keys: list[str], append_eod: bool) -> Callable[[LineBatch], Encoded]:
    return functools.partial(encode_batch, tokenizer=tokenizer, keys=keys, append_eod=append_eod)


def encode_parallel(batches: Iterator[LineBatch], workers: int, settings: tuple) -> Iterator[Encoded]:
    """The batches encoded by `workers` processes, in order. settings: arguments of `_start_worker`."""
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside the tokenizer library's threads
    pending: collections.deque = collections.deque()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=settings)
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= _BATCHES_AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a worker process died, perhaps for want of memory; use fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """Counts documents and bytes, and says so on stderr every `interval` documents."""

    def __init__(self, total_bytes: int, interval: int):
        self.total_bytes, self.interval = total_bytes, interval
        self.documents = self.bytes = self.skipped = 0
        self.started = time.monotonic()

    def add(self, documents: int, size: int) -> None:
        before = self.documents // self.interval
        self.documents += documents
        self.bytes += size
        if self.documents // self.interval > before:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        left = int(seconds * (self.total_bytes - self.bytes) / max(self.bytes, 1))
        rates = f"{self.documents / seconds:.1f} docs/s, {self.bytes / seconds / 1e6:.2f} MB/s"
        share = 100 * self.bytes / max(self.total_bytes, 1)
        clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        return f"{self.documents} documents, {rates}, {share:.1f}%, {clock} left"

    def skip(self, bad: list[str]) -> None:
        for line in bad[: max(0, _SHOWN - self.skipped)]:
            print(f"skipped {line}", file=sys.stderr)
        self.skipped += len(bad)


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Progress:
    """Write the files of every key. Raises ValueError or OSError without leaving any output."""
    files = input_files(config.input)
    keys = list(dict.fromkeys(config.json_keys))
    tokenizer = build_tokenizer(
        tokenizer_config
    )  # here too: what is wrong with it is then said once, before any worker
    if config.workers == 1:
        encoded = map(make_encoder(tokenizer, keys, config.append_eod), read_batches(files))
    else:
        settings = (tokenizer_config, keys, config.append_eod)
        encoded = encode_parallel(read_batches(files), config.workers, settings)
    progress = Progress(sum(map(os.path.getsize, files)), config.log_interval)
    Path(config.output_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        writers = {}
        for key in keys:
            writer = IndexedDatasetWriter(f"{config.output_prefix}_{key}_document", token_dtype(tokenizer.vocab_size))
            writers[key] = stack.enter_context(writer)
        for result in encoded:
            if result.bad and config.on_error == "fail":
                raise ValueError(f"{result.bad[0]}; mend the line, or pass over such lines with --on-error skip")
            progress.skip(result.bad)
            for key, column in result.columns.items():
                writers[key].add_documents(*column)
            progress.add(len(result.columns[keys[0]][2]), result.size)
        if not progress.documents:
            raise ValueError(f"no document in {', '.join(files)}")
    return progress


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags, 1 anything else the user can mend."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add_flags(parser, PreprocessConfig)
    add_flags(parser, TokenizerConfig)
    try:
        given = read_flags(parser, arguments)
        progress = preprocess(build(PreprocessConfig, given), build(TokenizerConfig, given))
    except (ValueError, OSError, ImportError) as error:
        print(f"preprocess_data: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"done: {progress.line()}, {progress.skipped} lines skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
