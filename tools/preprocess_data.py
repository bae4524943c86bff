"""JSON-lines text to token files for training: OUTPUT_PREFIX_KEY_document.bin and .idx for each --json-keys KEY.

    python tools/preprocess_data.py --input a.jsonl 'more/*.jsonl.gz' --output-prefix data/books --append-eod --workers 8 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

Each line is an object such as {"text": "..."}; a list of strings is a document of several sequences. The output does not depend
on --workers, and appears when it is complete. After a kill the same command resumes.
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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import Count, FlagConfig, option
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import token_dtype
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools.errors import missing, naming_flag, run_tool
from tools.preprocessing.encode import SHOWN, Encoded, Encoder
from tools.preprocessing.pieces import PieceStore, append_piece, naming, read_summary, settings_text, write_piece
from tools.preprocessing.sentences import nltk_starts, rule_starts, split_text
from tools.preprocessing.sources import ENDINGS, LONGEST_LINE_MB, Piece, input_files, read_pieces, total_size

_FORMAT = 3  # of the pieces; raise it if the same text and settings give other tokens
_PIECES_AHEAD = 2  # pieces of text held for each worker: one at work, one waiting


@dataclass(frozen=True)
class PreprocessConfig(FlagConfig):
    """Text to token files."""

    input: list[str] | None = option(
        None,
        "JSONL files (also .gz, .zst), Parquet files, folders, quoted patterns, or - for standard input, in this order",
        metavar="FILE",
        required=True,
    )
    json_keys: list[str] = option(["text"], "keys to tokenize, each into its own files", metavar="KEY")
    output_prefix: str | None = option(
        None, "output: PREFIX_KEY_document.bin and .idx, or PREFIX_KEY_sentence", metavar="PREFIX", required=True
    )
    append_eod: bool = option(False, "append the end-of-document token to each document")
    split_sentences: bool = option(False, "one sequence per sentence, for BERT and T5")
    sentence_splitter: Literal["rules", "nltk"] = option(
        "rules", "built-in rules for English and similar languages, or the package nltk"
    )
    lang: str = option("english", "language for --sentence-splitter nltk")
    keep_newlines: bool = option(False, "keep white space after sentences")
    workers: Count = option(1, "tokenizing processes")
    partitions: Count = option(1, "accepted without effect: work is divided automatically")
    keep_sequential_samples: bool = option(False, "accepted without effect: the input order is always kept")
    dataset_impl: Literal["mmap"] = option("mmap", "accepted without effect: mmap is the only format")
    chunk_size: int | None = option(None, "accepted without effect: work is divided automatically")
    log_interval: Count = option(10_000, "documents between progress lines")
    on_error: Literal["fail", "skip"] = option("fail", "fail or skip on an unreadable line")
    max_line_mb: Count = option(LONGEST_LINE_MB, "longest line in MB; a worker may need 100 times as much memory")

    def problems(self) -> Iterator[str]:
        yield from missing(self, "input", "output_prefix", "json_keys")
        if separated := [key for key in self.json_keys if "/" in key or "\0" in key]:
            yield f"--json-keys {separated[0]} cannot be part of a file's name, as the output's; rename the key"
        if self.lang != "english" and self.split_sentences and self.sentence_splitter == "rules":
            yield f"--lang {self.lang}: the rules are for English; use --sentence-splitter nltk"

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        of_sentences = {
            "--sentence-splitter": self.sentence_splitter != "rules",
            "--lang": self.lang != "english",
            "--keep-newlines": self.keep_newlines,
        }
        given = [] if self.split_sentences else [flag for flag, is_given in of_sentences.items() if is_given]
        return dict.fromkeys(given, "only --split-sentences looks for sentences")

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
    """The folder of this output's pieces, keyed by all settings that their tokens depend on."""
    names = ("keys", "append_eod", "split_sentences", "sentence_splitter", "lang", "keep_newlines")
    settings = settings_text({name: getattr(config, name) for name in names}, asdict(tokenizer_config))
    return PieceStore(f"{config.output_prefix}.pieces", f"{_FORMAT} {settings}")


class Finished(NamedTuple):
    """A piece on disk; not stored if it has bad lines under --on-error fail."""

    path: str
    summary: Encoded
    position: int | None  # as in Piece
    kept: bool  # done before this run


def finish_piece(piece: Piece, path: str, skip: bool, encoder: Encoder | None = None) -> Finished:
    """Encode a piece and store it, unless it has bad lines and `skip` is False."""
    encoded = (encoder or _encoder).encode(piece.chunks)
    if skip or not encoded.bad:
        write_piece(path, encoded)
    return Finished(path, replace(encoded, columns={}), piece.position, kept=False)


# A worker keeps its encoder here; a tokenizer costs a second to build and cannot always be sent.
_encoder: Encoder | None = None


def _start_worker(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    global _encoder
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _encoder = make_encoder(config, tokenizer_config)


def _die_with_parent() -> None:
    """End this worker when its parent has been killed; it would wait for work forever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


class DeafWorkers(ProcessPoolExecutor):
    """Worker processes that ignore Ctrl-C from their start: the parent receives it and ends them."""

    def submit(self, *work: Any) -> Any:
        # A process that is started here inherits the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


Finish = Callable[[Piece, str], Callable[[], Finished]]  # begins a piece; what it gives waits for the end


def finish_pieces(pieces: Iterator[Piece], store: PieceStore, finish: Finish, ahead: int) -> Iterator[Finished]:
    """All pieces, in order: from the store, or made by `finish`.

    ahead: how many pieces are read before the first of them is done, which bounds the memory.
    """
    pending: collections.deque[Callable[[], Finished]] = collections.deque()
    for piece in pieces:
        path = store.path(piece)
        if os.path.exists(path):
            pending.append(functools.partial(Finished, path, read_summary(path), piece.position, kept=True))
        else:
            pending.append(finish(piece, path))
        if len(pending) >= ahead:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


class Progress:
    """Counts documents and bytes, and prints a line on stderr about every `interval` documents.

    total: bytes of the input files, None if unknown.
    """

    def __init__(self, total: int | None, interval: int):
        self.total, self.interval = total, interval
        self.new, self.kept = collections.Counter(), collections.Counter()  # kept: from an earlier run
        self._position: int | None = 0
        self.started = time.monotonic()

    @property
    def all(self) -> collections.Counter:
        """The documents, pieces, skipped lines and bytes of text (`size`) so far."""
        return self.new + self.kept

    def add(self, done: Finished) -> None:
        before, summary = self.all, done.summary
        tally = self.kept if done.kept else self.new
        tally.update(documents=summary.documents, size=summary.size, pieces=1, skipped=summary.bad_count)
        tally.update(read=(done.position or 0) - (self._position or 0))  # bytes of the input files
        self._position = done.position
        for line in summary.bad[: max(0, SHOWN - before["skipped"])]:
            print(f"skipped {line}", file=sys.stderr)
        if self.all["documents"] // self.interval > before["documents"] // self.interval:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """The share done, and the time left at the speed of this run."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = f"{self.new['documents'] / seconds:.1f} docs/s, {self.new['size'] / seconds / 1e6:.2f} MB/s"
        begin = f"{self.all['documents']} documents, {speed}"
        if self.total is None or self._position is None:
            return f"{begin}, {self.all['size'] / 1e6:.1f} MB so far, unknown time left"
        worked = self.new["read"]
        left = int(seconds * (self.total - self._position) / worked) if worked > 0 else 0
        share = 100 * self._position / max(self.total, 1)
        return f"{begin}, {share:.1f}%, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Progress:
    """Write the files of every key. If it raises ValueError or OSError, only finished pieces remain."""
    files = input_files(config.input)
    encoder = make_encoder(config, tokenizer_config)  # before any worker starts, so that an error is reported once
    folder = os.path.dirname(os.path.abspath(config.output_prefix))
    with naming_flag("--output-prefix", config.output_prefix, f"the folder {folder} cannot be made; choose another"):
        os.makedirs(folder, exist_ok=True)
    store = make_store(config, tokenizer_config)
    with store.claimed(), ExitStack() as stack:
        pool, skip = None, config.on_error == "skip"
        if config.workers > 1:
            context = multiprocessing.get_context("spawn")  # fork is unsafe beside the tokenizer library's threads
            pool = DeafWorkers(config.workers, context, _start_worker, (config, tokenizer_config))
            stack.callback(pool.shutdown, cancel_futures=True)

        def finish(piece: Piece, path: str) -> Callable[[], Finished]:
            if pool is None:
                return functools.partial(finish_piece, piece, path, skip, encoder)
            return pool.submit(finish_piece, piece, path, skip).result

        progress = Progress(total_size(files), config.log_interval)
        names = stack.enter_context(tempfile.TemporaryFile("w+", dir=store.folder))  # of a million pieces, perhaps
        ahead = _PIECES_AHEAD * config.workers if config.workers > 1 else 1
        try:
            for done in finish_pieces(read_pieces(files, config.keys, config.max_line_mb << 20), store, finish, ahead):
                if done.summary.bad and not skip:
                    raise ValueError(f"{done.summary.bad[0]}; {advice_on(done.summary.bad[0])}")
                names.write(f"{os.path.basename(done.path)}\n")
                progress.add(done)
        except BrokenProcessPool:
            raise ValueError("a worker process died, perhaps out of memory; use fewer --workers") from None
        if not progress.all["documents"]:
            raise ValueError(f"no document in {', '.join(files)}")
        names.seek(0)
        paths = (os.path.join(store.folder, name.rstrip("\n")) for name in names)
        merge_pieces(paths, config, token_dtype(encoder.tokenizer.vocab_size))
        store.clear()
    return progress


def advice_on(bad_line: str) -> str:
    """The advice for a bad line "file:line: reason". A file without a JSON ending may be plain text."""
    mend = "correct the line, or skip such lines with --on-error skip"
    match = re.match(r"(.*):\d+: not (?:valid JSON|a JSON object)", bad_line, re.DOTALL)
    if match is None or match[1].endswith(ENDINGS):
        return mend
    return f"convert plain text to JSON lines first (docs/data_preparation.md, step 1); in JSON lines {mend}"


def merge_pieces(paths: Iterable[str], config: PreprocessConfig, dtype: type) -> None:
    """Write the pieces, in order, as one pair of files per key, which appear when all are complete."""
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
    kept, every = progress.kept["pieces"], progress.all
    before = f", {kept} of {every['pieces']} pieces from an earlier run" if kept else ""
    prefixes = " ".join(f"{config.output_prefix}_{key}_{config.level}" for key in config.keys)
    print(
        f"done: {progress.line()}, {every['skipped']} lines skipped{before}; wrote --data-path {prefixes}",
        file=sys.stderr,
    )
    if not (config.append_eod or config.split_sentences):
        note = "no end-of-document tokens: a GPT sees no border between documents; give --append-eod to add them"
        print(note, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers sets the number of cores
    left = "finished pieces stay; the same command resumes"
    return run_tool(__file__, __doc__, [PreprocessConfig, TokenizerConfig], run, arguments, left)


if __name__ == "__main__":
    sys.exit(main())
