"""JSON-lines text to token files for training: OUTPUT_PREFIX_KEY_document.bin and .idx for each --json-keys KEY.

    python tools/preprocess_data.py --input a.jsonl 'more/*.jsonl.gz' --output-prefix data/books --append-eod --workers 8 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

Each line is an object such as {"text": "..."}; a list of strings is a document of several sequences. With --sft it is a
conversation, or a prompt with its answer, and the output a pair of files of tokens and one of masks. The output does not depend
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
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mmap_indexed_dataset import token_dtype
from megatron.core.datasets.sft_dataset import make_encoder as make_sft_encoder
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools.errors import missing, naming_flag, run_tool
from tools.preprocessing.encode import SHOWN, Encoded, Encoder
from tools.preprocessing.encode_examples import KEYS, ExampleEncoder
from tools.preprocessing.pieces import PieceStore, append_piece, naming, read_summary, settings_text, write_piece
from tools.preprocessing.sentences import nltk_starts, rule_starts, split_text
from tools.preprocessing.sources import ENDINGS, LONGEST_LINE_MB, Piece, input_files, read_pieces, total_size

_FORMAT = 3  # version of the pieces; raise it if the same text and settings give other tokens
_PIECES_AHEAD = 2  # pieces of text in memory for each worker: one in work, one waiting


@dataclass(frozen=True)
class PreprocessConfig(FlagConfig):
    """Text to token files."""

    input: list[str] | None = option(
        None,
        "JSONL files (also .gz, .zst), Parquet files, folders, quoted glob patterns, or - for standard input; read "
        "in this order",
        metavar="FILE",
        required=True,
    )
    json_keys: list[str] = option(
        ["text"], "JSON keys whose texts to tokenize; each key gets output files of its own", metavar="KEY"
    )
    output_prefix: str | None = option(
        None, "output: PREFIX_KEY_document.bin and .idx, or PREFIX_KEY_sentence", metavar="PREFIX", required=True
    )
    append_eod: bool = option(False, "append the end-of-document token to each document")
    sft: bool = option(
        False,
        "for fine-tuning: lines are conversations, or prompts with answers; writes PREFIX_sft_document and the masks of "
        "their losses, PREFIX_sft_loss_mask_document",
    )
    chat_template: str | None = option(
        None, "with --sft: chat template (Jinja) instead of that of the tokenizer's folder", metavar="FILE"
    )
    sft_split_turns: bool = option(False, "with --sft: make each answer of a conversation an example of its own")
    split_sentences: bool = option(False, "make one sequence per sentence instead of per document, for BERT and T5")
    sentence_splitter: Literal["rules", "nltk"] = option(
        "rules", "rules: built-in rules for English and similar languages; nltk: the package nltk"
    )
    lang: str = option("english", "language for --sentence-splitter nltk")
    keep_newlines: bool = option(False, "keep white space after sentences")
    workers: Count = option(1, "number of tokenizing processes")
    partitions: Count = option(1, "accepted without effect: work is divided automatically")
    keep_sequential_samples: bool = option(False, "accepted without effect: the input order is always kept")
    dataset_impl: Literal["mmap"] = option("mmap", "accepted without effect: mmap is the only format")
    chunk_size: int | None = option(None, "accepted without effect: work is divided automatically")
    log_interval: Count = option(10_000, "documents between progress lines")
    on_error: Literal["fail", "skip"] = option("fail", "what to do at an unreadable line: fail or skip it")
    max_line_mb: Count = option(
        LONGEST_LINE_MB, "longest allowed line in MB; a worker may need 100 times as much memory"
    )

    def problems(self) -> Iterator[str]:
        yield from missing(self, "input", "output_prefix", "json_keys")
        if separated := [key for key in self.json_keys if "/" in key or "\0" in key]:
            yield f"--json-keys {separated[0]} cannot be part of a file's name, as the output's; rename the key"
        if self.sft:
            others = {
                "--json-keys": self.json_keys != ["text"],
                "--append-eod": self.append_eod,
                "--split-sentences": self.split_sentences,
            }
            for flag in (flag for flag, is_given in others.items() if is_given):
                yield f"{flag} is about texts, and --sft reads examples, which end by themselves; leave it out"
            if any(name.endswith(".parquet") for name in self.input or ()):
                yield "--sft reads JSON lines, and a Parquet file was given; write its rows as JSON lines first"
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
        unused = {"--chat-template": self.chat_template is not None, "--sft-split-turns": self.sft_split_turns}
        of_examples = [] if self.sft else [flag for flag, is_given in unused.items() if is_given]
        given = [] if self.split_sentences else [flag for flag, is_given in of_sentences.items() if is_given]
        reasons = dict.fromkeys(given, "only --split-sentences looks for sentences")
        return reasons | dict.fromkeys(of_examples, "only --sft reads examples")

    @property
    def keys(self) -> list[str]:
        """The --json-keys, each once; with --sft those of tokens and masks."""
        if self.sft:
            return list(KEYS)
        return list(dict.fromkeys(self.json_keys))

    @property
    def level(self) -> str:
        """The name of a sequence, sentence or document; part of the output's file names."""
        return "sentence" if self.split_sentences else "document"


def make_encoder(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Encoder | ExampleEncoder:
    """Build the tokenizer and the sentence splitter, or the chat template, of these settings."""
    if config.sft:
        data = DataConfig(chat_template=config.chat_template, sft_split_turns=config.sft_split_turns)
        return ExampleEncoder(make_sft_encoder(data, build_tokenizer(tokenizer_config)))
    split = None
    if config.split_sentences:
        starts = rule_starts if config.sentence_splitter == "rules" else nltk_starts(config.lang)
        split = functools.partial(split_text, starts=starts, keep_newlines=config.keep_newlines)
    return Encoder(build_tokenizer(tokenizer_config), config.keys, config.append_eod, split)


def make_store(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> PieceStore:
    """Return the store of this output's pieces, keyed by all settings that their tokens depend on."""
    names = ("keys", "append_eod", "split_sentences", "sentence_splitter", "lang", "keep_newlines")
    values = {name: getattr(config, name) for name in names}
    if config.sft:  # without it the names of earlier pieces stay
        values |= {"chat_template": config.chat_template, "sft_split_turns": config.sft_split_turns}
    settings = settings_text(values, asdict(tokenizer_config))
    return PieceStore(f"{config.output_prefix}.pieces", f"{_FORMAT} {settings}")


class Finished(NamedTuple):
    """An encoded piece. It is on disk, unless it has bad lines and --on-error is fail."""

    path: str
    summary: Encoded  # without columns
    position: int | None  # as in Piece
    is_reused: bool  # stored by an earlier run


def finish_piece(piece: Piece, path: str, skip: bool, encoder: Encoder | ExampleEncoder | None = None) -> Finished:
    """Encode a piece and store it, unless it has bad lines and `skip` is False. encoder: default: this worker's."""
    encoder = encoder or _encoder
    encoded = encoder.encode(piece.chunks)
    if skip or not encoded.bad:
        write_piece(path, encoded)
    return Finished(path, replace(encoded, columns={}), piece.position, is_reused=False)


# The encoder of a worker process. A tokenizer takes a second to build and cannot always be pickled, so each worker
# builds one at its start.
_encoder: Encoder | ExampleEncoder | None = None


def _start_worker(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    global _encoder
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _encoder = make_encoder(config, tokenizer_config)


def _die_with_parent() -> None:
    """End this worker when its parent has been killed: otherwise it would wait for work forever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


class InterruptBlockingPool(ProcessPoolExecutor):
    """Worker processes that block SIGINT from their start: the parent receives Ctrl-C and ends them."""

    def submit(self, *work: Any) -> Any:
        # `submit` may start a process, which inherits the signal mask of this thread.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


StartPiece = Callable[
    [Piece, str], Callable[[], Finished]
]  # starts a piece; returns a function that waits for its result


def finish_pieces(
    pieces: Iterator[Piece], store: PieceStore, start: StartPiece, max_pending: int
) -> Iterator[Finished]:
    """Yield all pieces in order: those of the store, and those that `start` begins.

    max_pending: pieces that are in memory at once, which bounds the memory.
    """
    pending: collections.deque[Callable[[], Finished]] = collections.deque()
    for piece in pieces:
        path = store.path(piece)
        if os.path.exists(path):
            summary = read_summary(path)
            pending.append(functools.partial(Finished, path, summary, piece.position, is_reused=True))
        else:
            pending.append(start(piece, path))
        if len(pending) >= max_pending:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


class Progress:
    """Counts documents and bytes, and prints a line on stderr about every `interval` documents.

    total: bytes of the input files, None if unknown. The counters have: documents, pieces, skipped (lines), size (bytes
    of text), read (bytes of the input files, which may be compressed).
    """

    def __init__(self, total: int | None, interval: int):
        self.total = total
        self.interval = interval
        self.new = collections.Counter()
        self.reused = collections.Counter()  # pieces of an earlier run
        self._position: int | None = 0  # in the input files
        self.started = time.monotonic()

    @property
    def all(self) -> collections.Counter:
        """The counts of this run and of the pieces of an earlier one."""
        return self.new + self.reused

    def add(self, piece: Finished) -> None:
        """Count a piece; print its bad lines, and the progress if it is time."""
        before = self.all
        summary = piece.summary
        counter = self.reused if piece.is_reused else self.new
        counter.update(documents=summary.documents, size=summary.size, pieces=1, skipped=summary.bad_count)
        counter.update(read=(piece.position or 0) - (self._position or 0))
        self._position = piece.position
        for line in summary.bad[: max(0, SHOWN - before["skipped"])]:
            print(f"skipped {line}", file=sys.stderr)
        if self.all["documents"] // self.interval > before["documents"] // self.interval:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the share that is done, and the time left at the speed of this run."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = f"{self.new['documents'] / seconds:.1f} docs/s, {self.new['size'] / seconds / 1e6:.2f} MB/s"
        counts = f"{self.all['documents']} documents, {speed}"
        if self.total is None or self._position is None:
            return f"{counts}, {self.all['size'] / 1e6:.1f} MB so far, unknown time left"
        share = 100 * self._position / max(self.total, 1)
        bytes_read = self.new["read"]
        left = int(seconds * (self.total - self._position) / bytes_read) if bytes_read > 0 else 0
        return f"{counts}, {share:.1f}%, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Progress:
    """Tokenize the input and write the files of every key. After a ValueError or OSError finished pieces remain."""
    # check the input, the tokenizer and the output folder before any worker starts, so that an error is reported once
    files = input_files(config.input)
    encoder = make_encoder(config, tokenizer_config)
    folder = os.path.dirname(os.path.abspath(config.output_prefix))
    with naming_flag("--output-prefix", config.output_prefix, f"the folder {folder} cannot be made; choose another"):
        os.makedirs(folder, exist_ok=True)
    store = make_store(config, tokenizer_config)
    skip = config.on_error == "skip"
    with store.claimed(), ExitStack() as stack:
        # start the workers
        pool = None
        if config.workers > 1:
            context = multiprocessing.get_context("spawn")  # fork is unsafe beside the tokenizer library's threads
            pool = InterruptBlockingPool(config.workers, context, _start_worker, (config, tokenizer_config))
            stack.callback(pool.shutdown, cancel_futures=True)

        def start(piece: Piece, path: str) -> Callable[[], Finished]:
            if pool is None:
                return functools.partial(finish_piece, piece, path, skip, encoder)
            return pool.submit(finish_piece, piece, path, skip).result

        # encode and store all pieces; their names go to a file, since there may be a million
        progress = Progress(total_size(files), config.log_interval)
        names = stack.enter_context(tempfile.TemporaryFile("w+", dir=store.folder))
        pieces = read_pieces(files, config.keys, config.max_line_mb << 20)
        max_pending = _PIECES_AHEAD * config.workers if config.workers > 1 else 1
        try:
            for piece in finish_pieces(pieces, store, start, max_pending):
                if piece.summary.bad and not skip:
                    bad_line = piece.summary.bad[0]
                    raise ValueError(f"{bad_line}; {advice_on(bad_line)}")
                names.write(f"{os.path.basename(piece.path)}\n")
                progress.add(piece)
        except BrokenProcessPool:
            raise ValueError("a worker process died, perhaps out of memory; use fewer --workers") from None
        if not progress.all["documents"]:
            raise ValueError(f"no document in {', '.join(files)}")

        # join them in order
        names.seek(0)
        paths = (os.path.join(store.folder, name.rstrip("\n")) for name in names)
        merge_pieces(paths, config, token_dtype(encoder.tokenizer.vocab_size))
        store.clear()
    return progress


def advice_on(bad_line: str) -> str:
    """Return the advice for a bad line "file:line: reason". A file without a JSON ending may be plain text."""
    correct = "correct the line, or skip such lines with --on-error skip"
    match = re.match(r"(.*):\d+: not (?:valid JSON|a JSON object)", bad_line, re.DOTALL)
    if match is None or match[1].endswith(ENDINGS):
        return correct
    return f"convert plain text to JSON lines first (docs/data_preparation.md, step 1); in JSON lines {correct}"


def merge_pieces(paths: Iterable[str], config: PreprocessConfig, dtype: type) -> None:
    """Join the pieces in order into one pair of files per key. They get their names when all of them are complete."""
    with ExitStack() as stack:
        stack.enter_context(naming(f"{config.output_prefix}_..._{config.level}.bin"))
        writers = {}
        for key in config.keys:
            prefix = f"{config.output_prefix}_{key}_{config.level}"
            writers[key] = stack.enter_context(IndexedDatasetWriter(prefix, dtype))
        for path in paths:
            append_piece(path, writers)


def run(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Preprocess and print what was written."""
    try:
        progress = preprocess(config, tokenizer_config)
    except MemoryError:
        raise ValueError("there is not enough memory; use fewer --workers, or a smaller --max-line-mb") from None
    counts = progress.all
    num_reused = progress.reused["pieces"]
    reused = f", {num_reused} of {counts['pieces']} pieces from an earlier run" if num_reused else ""
    keys = config.keys[:1] if config.sft else config.keys  # masks are found by the name of their tokens
    prefixes = " ".join(f"{config.output_prefix}_{key}_{config.level}" for key in keys)
    print(
        f"done: {progress.line()}, {counts['skipped']} lines skipped{reused}; wrote --data-path {prefixes}",
        file=sys.stderr,
    )
    if not (config.append_eod or config.split_sentences or config.sft):
        note = "no end-of-document tokens: a GPT sees no border between documents; give --append-eod to add them"
        print(note, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers sets the number of cores
    interrupted = "finished pieces stay; the same command resumes"
    return run_tool(__file__, __doc__, [PreprocessConfig, TokenizerConfig], run, arguments, interrupted)


if __name__ == "__main__":
    sys.exit(main())
