"""JSON-lines text to token files for training: OUTPUT_PREFIX_KEY_document.bin and .idx for each --json-keys KEY.

    python tools/preprocess_data.py --input a.jsonl 'more/*.jsonl.gz' --output-prefix data/books --append-eod --workers 8 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

Each line is an object such as {"text": "..."}; a list of strings is a document of several sequences. The output does
not depend on --workers, and appears only when it is complete. After a kill the same command goes on from what is done.
"""

import collections
import functools
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Count, FlagConfig, knob
from megatron.core.datasets.indexed import token_dtype
from megatron.core.datasets.indexed_writer import IndexedDatasetWriter
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools.errors import missing, run_tool
from tools.preprocessing.encode import SHOWN, Encoded, Encoder
from tools.preprocessing.pieces import PieceStore, append_piece, naming, read_summary, settings_text, write_piece
from tools.preprocessing.sentences import nltk_starts, rule_starts, split_text
from tools.preprocessing.sources import ENDINGS, LONGEST_LINE_MB, Piece, input_files, read_pieces, total_size

_FORMAT = 2  # of the pieces; raise it whenever the same text and settings give other tokens
_PIECES_AHEAD = 2  # pieces of text held for each worker: one at work, one waiting


@dataclass(frozen=True)
class PreprocessConfig(FlagConfig):
    """Text to token files."""

    input: list[str] | None = knob(
        None,
        "JSONL files (also .gz, .zst), Parquet files, folders, quoted patterns, or - for standard input, in this order",
        metavar="FILE",
        required=True,
    )
    json_keys: list[str] = knob(["text"], "keys to tokenize, each into its own files", metavar="KEY")
    output_prefix: str | None = knob(
        None, "output: PREFIX_KEY_document.bin and .idx, or PREFIX_KEY_sentence", metavar="PREFIX", required=True
    )
    append_eod: bool = knob(False, "append the end-of-document token to each document")
    split_sentences: bool = knob(False, "one sequence per sentence, for BERT and T5")
    sentence_splitter: Literal["rules", "nltk"] = knob(
        "rules", "built-in rules for English and similar languages, or the package nltk"
    )
    lang: str = knob("english", "language for --sentence-splitter nltk")
    keep_newlines: bool = knob(False, "keep white space after sentences")
    workers: Count = knob(1, "tokenizing processes")
    partitions: Count = knob(1, "accepted without effect: work is divided automatically")
    keep_sequential_samples: bool = knob(False, "accepted without effect: the input order is always kept")
    dataset_impl: Literal["mmap"] = knob("mmap", "accepted without effect: mmap is the only format")
    chunk_size: int | None = knob(None, "accepted without effect: work is divided automatically")
    log_interval: Count = knob(10_000, "documents between progress lines")
    on_error: Literal["fail", "skip"] = knob("fail", "fail or skip on an unreadable line")
    max_line_mb: Count = knob(LONGEST_LINE_MB, "longest line in MB; a worker may need 100 times as much memory")

    def problems(self) -> Iterator[str]:
        yield from missing(self, "input", "output_prefix", "json_keys")
        if separated := [key for key in self.json_keys if "/" in key or "\0" in key]:
            yield f"--json-keys {separated[0]} cannot be part of a file's name, as the output's; rename the key"
        if self.lang != "english" and self.split_sentences and self.sentence_splitter == "rules":
            yield f"--lang {self.lang}: the rules are for English; use --sentence-splitter nltk"

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(self.json_keys))

    @property
    def level(self) -> str:
        return "sentence" if self.split_sentences else "document"


def make_encoder(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Encoder:
    split = None
    if config.split_sentences:
        starts = rule_starts if config.sentence_splitter == "rules" else nltk_starts(config.lang)
        split = functools.partial(split_text, starts=starts, keep_newlines=config.keep_newlines)
    return Encoder(build_tokenizer(tokenizer_config), config.keys, config.append_eod, split)


def make_store(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> PieceStore:
    """Where the pieces of this output are, named by all that their tokens depend on."""
    neutral = PreprocessConfig(["-"], output_prefix="-", json_keys=config.keys)  # what tokens do not depend on
    means = ("append_eod", "split_sentences", "sentence_splitter", "lang", "keep_newlines")
    asked = replace(neutral, **{name: getattr(config, name) for name in means})
    return PieceStore(f"{config.output_prefix}.pieces", f"{_FORMAT} {settings_text(asked, tokenizer_config)}")


class Finished(NamedTuple):
    """A piece that is on disk, unless bad lines were not to be skipped."""

    path: str
    summary: Encoded
    size: int  # bytes of text
    position: int | None  # as in Piece
    kept: bool  # done before this run


def finish_piece(piece: Piece, path: str, encoder: Encoder, skip: bool) -> Finished:
    """Encode a piece and store it. With bad lines that may not be skipped it is not stored."""
    encoded = encoder.encode(piece.chunks)
    if skip or not encoded.bad:
        write_piece(path, encoded)
    return Finished(path, replace(encoded, columns={}), encoded.size, piece.position, kept=False)


# A process keeps its encoder here; a tokenizer costs a second to build and cannot always be sent.
_finish: Callable[[Piece, str], Finished] | None = None


def _finish_in_worker(piece: Piece, path: str) -> Finished:
    return _finish(piece, path)


def _use(encoder: Encoder, config: PreprocessConfig) -> None:
    global _finish
    _finish = functools.partial(finish_piece, encoder=encoder, skip=config.on_error == "skip")


def _start_worker(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _use(make_encoder(config, tokenizer_config), config)


def _die_with_parent() -> None:
    """A parent that is killed cannot say so, and its workers would wait for work for ever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


class DeafWorkers(ProcessPoolExecutor):
    """Processes that no Ctrl-C reaches, from their first moment on: the parent hears of it too, and ends them."""

    def submit(self, *work: Any) -> Any:
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # which a process that is started here inherits
        try:
            return super().submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class InProcess(Executor):
    """A pool of no workers: this process does what is submitted, at once."""

    def submit(self, work: Callable, *arguments: Any) -> Future:
        done: Future = Future()
        done.set_result(work(*arguments))
        return done


def finish_pieces(pieces: Iterator[Piece], store: PieceStore, pool: Executor, ahead: int) -> Iterator[Finished]:
    """All pieces, in order; those in the store as they are, the others once the pool has made them. ahead: how many of
    these are read before the first of them is done, which bounds the memory."""
    pending: collections.deque[Callable[[], Finished]] = collections.deque()
    for piece in pieces:
        path, size = store.path(piece), sum(len(chunk.text) for chunk in piece.chunks)
        if os.path.exists(path):
            done = Finished(path, read_summary(path), size, piece.position, kept=True)
            pending.append(lambda done=done: done)
        else:
            pending.append(pool.submit(_finish_in_worker, piece, path).result)
        if len(pending) >= ahead:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


@dataclass
class _Tally:
    """read: bytes of the input files; size: of their text."""

    documents: int = 0
    size: int = 0
    pieces: int = 0
    read: int = 0

    def add(self, done: Finished, read: int) -> None:
        self.documents += done.summary.documents
        self.size += done.size
        self.pieces += 1
        self.read += read


class Progress:
    """Counts documents and bytes, and says so on stderr every `interval` documents or a little later.

    total: bytes of the input files, None if that is not known.
    """

    def __init__(self, total: int | None, interval: int):
        self.total, self.interval = total, interval
        self.all, self.kept = _Tally(), _Tally()  # kept: of these, what an earlier run has done
        self.skipped = 0
        self._position: int | None = 0
        self.started = time.monotonic()

    def add(self, done: Finished) -> None:
        before = self.all.documents // self.interval
        read = (done.position or 0) - (self._position or 0)
        for tally in (self.all, self.kept) if done.kept else (self.all,):
            tally.add(done, read)
        self._position = done.position
        self._skip(done.summary)
        if self.all.documents // self.interval > before:
            print(self.line(), file=sys.stderr, flush=True)

    def _skip(self, summary: Encoded) -> None:
        for line in summary.bad[: max(0, SHOWN - self.skipped)]:
            print(f"skipped {line}", file=sys.stderr)
        self.skipped += summary.bad_count

    def line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        documents, size = self.all.documents - self.kept.documents, self.all.size - self.kept.size
        speed = f"{documents / seconds:.1f} docs/s, {size / seconds / 1e6:.2f} MB/s"
        return f"{self.all.documents} documents, {speed}, {self._left(seconds)}"

    def _left(self, seconds: float) -> str:
        """How much is done and how long the rest will take, at the speed of this run."""
        if self.total is None or self._position is None:
            return f"{self.all.size / 1e6:.1f} MB so far, unknown time left"
        worked = self._position - self.kept.read
        left = int(seconds * (self.total - self._position) / worked) if worked > 0 else 0
        share = 100 * self._position / max(self.total, 1)
        return f"{share:.1f}%, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Progress:
    """Write the files of every key. Raises ValueError or OSError without leaving any output, but for finished pieces."""
    files = input_files(config.input)
    encoder = make_encoder(config, tokenizer_config)  # here too: what is wrong with it is said once, before any worker
    make_folder(config.output_prefix)
    store = make_store(config, tokenizer_config)
    with store.claimed(), ExitStack() as stack:
        pool: Executor = InProcess()
        _use(encoder, config)
        if config.workers > 1:
            context = multiprocessing.get_context("spawn")  # fork is unsafe beside the tokenizer library's threads
            pool = DeafWorkers(config.workers, context, _start_worker, (config, tokenizer_config))
            stack.callback(pool.shutdown, cancel_futures=True)
        progress = Progress(total_size(files), config.log_interval)
        names = stack.enter_context(tempfile.TemporaryFile("w+", dir=store.folder))  # of a million pieces, perhaps
        ahead = _PIECES_AHEAD * config.workers if config.workers > 1 else 1
        try:
            for done in finish_pieces(read_pieces(files, config.keys, config.max_line_mb << 20), store, pool, ahead):
                if done.summary.bad and config.on_error == "fail":
                    raise ValueError(f"{done.summary.bad[0]}; {advice_on(done.summary.bad[0])}")
                names.write(f"{os.path.basename(done.path)}\n")
                progress.add(done)
        except BrokenProcessPool:
            raise ValueError("a worker process died, perhaps for want of memory; use fewer --workers") from None
        if not progress.all.documents:
            raise ValueError(f"no document in {', '.join(files)}")
        names.seek(0)
        paths = (os.path.join(store.folder, name.rstrip("\n")) for name in names)
        merge_pieces(paths, config, token_dtype(encoder.tokenizer.vocab_size))
        store.clear()
    return progress


def advice_on(bad_line: str) -> str:
    """What to do about "file:line: reason". A file that is not called JSON may be plain text."""
    mend = "mend the line, or pass over such lines with --on-error skip"
    match = re.match(r"(.*):\d+: not (?:valid JSON|a JSON object)", bad_line, re.DOTALL)
    if match is None or match[1].endswith(ENDINGS):
        return mend
    return f"of plain text make JSON lines first (docs/data_preparation.md, step 1); of JSON lines {mend}"


def make_folder(output_prefix: str) -> None:
    """The folder of the output. Raises ValueError if it cannot be made."""
    folder = os.path.dirname(os.path.abspath(output_prefix))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        what = "a file is in its way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ValueError(f"--output-prefix {output_prefix}: the folder {folder} cannot be made: {what}") from None


def merge_pieces(paths: Iterable[str], config: PreprocessConfig, dtype: type) -> None:
    """The pieces, in order, as one pair of files for each key; they appear when all of them are complete."""
    with ExitStack() as stack:
        stack.enter_context(naming(f"{config.output_prefix}_..._{config.level}.bin"))
        writers = {}
        for key in config.keys:
            prefix = f"{config.output_prefix}_{key}_{config.level}"
            writers[key] = stack.enter_context(IndexedDatasetWriter(prefix, dtype))
        for path in paths:
            append_piece(path, writers)


def run(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    try:
        progress = preprocess(config, tokenizer_config)
    except MemoryError:
        raise ValueError("there is not enough memory; use fewer --workers, or a smaller --max-line-mb") from None
    kept, pieces = progress.kept.pieces, progress.all.pieces
    before = f", {kept} of {pieces} pieces from an earlier run" if kept else ""
    print(f"done: {progress.line()}, {progress.skipped} lines skipped{before}", file=sys.stderr)
    if not (config.append_eod or config.split_sentences):
        print(
            "no end-of-document tokens: a GPT sees no border between documents; --append-eod puts them there",
            file=sys.stderr,
        )


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers says how many cores are used
    left = "the same command goes on from what is done"
    return run_tool(__file__, __doc__, [PreprocessConfig, TokenizerConfig], run, arguments, left)


if __name__ == "__main__":
    sys.exit(main())
