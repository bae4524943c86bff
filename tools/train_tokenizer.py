"""Train a tokenizer: a tokenizer.json of byte-level BPE or single characters, or a BERT's vocab.txt (--kind).

A tokenizer.json is for --tokenizer-type HuggingFaceTokenizer, a vocab.txt for BertWordPieceLowerCase.

    python tools/train_tokenizer.py --input corpus/ notes.txt 'more/*.jsonl' --vocab-size 32000 --output tokenizer.json

Files that end in .jsonl or .json are JSON lines, read with --json-key; all others are plain text, split into lines. The
same input gives the same file, byte for byte.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from megatron.core.base.lazy_imports import optional_package
from megatron.core.storage.atomic_file import atomic_file
from megatron.training.monitor.long_task_progress import heartbeat
from tools.errors import missing, run_tool
from tools.preprocessing.encode import line_texts, without_byte_order_mark
from tools.preprocessing.sources import input_files
from tools.waiting import waiting_for_text

EOD = "<|endoftext|>"
UNKNOWN = "<unk>"
_SMALLEST = 257  # 256 bytes and EOD
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_JSON_ENDINGS = (".jsonl", ".json")


@dataclass(frozen=True)
class TrainTokenizerConfig(FlagConfig):
    """Tokenizer training."""

    input: list[str] | None = option(
        None,
        "text files, folders of .jsonl, .json and .txt files, or quoted glob patterns",
        metavar="FILE",
        required=True,
    )
    json_key: str = option("text", "key of the text in JSONL files", metavar="KEY")
    vocab_size: int = option(32_000, f"vocabulary size, including {EOD}; a small text gives fewer ids")
    special_tokens: list[str] = option(
        [], f"special tokens to add besides {EOD}, such as those of --fim-data", metavar="TOKEN"
    )
    kind: Literal["bpe", "char", "wordpiece"] = option(
        "bpe",
        f"bpe: byte-level BPE; char: an id for each character of the text, and {UNKNOWN} for all others; wordpiece: "
        "BERT's WordPiece, in lower case, where --output is a vocab.txt",
    )
    output: str | None = option(None, "tokenizer.json (or vocab.txt) to write", metavar="FILE", required=True)

    def problems(self) -> Iterator[str]:
        yield from missing(self, "input", "output")
        smallest = _SMALLEST + len(self.special_tokens)
        if self.kind == "wordpiece" and self.special_tokens:
            yield "--special-tokens are for --kind bpe; a BERT has its own"
        if self.kind == "bpe" and self.vocab_size < smallest:
            yield f"--vocab-size ({self.vocab_size}) must be at least {smallest}: 256 bytes, {EOD} and --special-tokens"
        if len({EOD, *self.special_tokens}) <= len(self.special_tokens) or "" in self.special_tokens:
            yield f"--special-tokens must be different names, and none of them {EOD}"


class Texts:
    """The training texts, to be iterated over once. Raises a ValueError that names an unreadable line."""

    def __init__(self, files: list[str], json_key: str):
        self.files = files
        self.json_key = json_key
        self.total_bytes = sum(map(os.path.getsize, files))
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            with waiting_for_text(path):
                file = open(path, "rb")  # noqa: SIM115  closed below
            with file:
                for number, line in enumerate(file, 1):
                    try:
                        yield from _texts_of(without_byte_order_mark(line, number), path, self.json_key)
                    except ValueError as error:
                        raise ValueError(f"{path}:{number}: {error}; correct the line") from None
                    self.bytes_read += len(line)

    def progress(self) -> str:
        """Return the share that has been read; then the library trains, which shows no progress."""
        reading = f"read {self.bytes_read / 1e6:.0f} of {self.total_bytes / 1e6:.0f} MB"
        return reading if self.bytes_read < self.total_bytes else f"{reading}, learning from it"


def _texts_of(line: bytes, path: str, json_key: str) -> list[str]:
    """Return the texts of one line of a JSONL or text file. Raises ValueError."""
    if not line.strip():
        return []
    if path.endswith(_JSON_ENDINGS):
        return line_texts(line, [json_key])[0]
    try:
        return [line.decode("utf-8")]
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _library() -> Any:
    return optional_package("tokenizers", "training")


def train(texts: Iterator[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE, which encodes any text. EOD has id 0, then follow the `special_tokens`."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD, *special_tokens],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_checked_not_empty(texts), trainer)
    return tokenizer


def train_characters(texts: Iterator[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Any:
    """Make a tokenizer of characters: EOD, UNKNOWN, the `special_tokens`, the characters of `texts` by code point."""
    library = _library()
    characters = set(itertools.chain.from_iterable(_checked_not_empty(texts)))
    tokens = list(dict.fromkeys([EOD, UNKNOWN, *special_tokens, *sorted(characters)]))
    if len(tokens) > vocab_size:
        raise ValueError(
            f"--vocab-size ({vocab_size}) is too small for {len(characters)} different characters, {EOD}, {UNKNOWN} and "
            f"--special-tokens; give at least {len(tokens)}"
        )
    # BPE without merges looks each character up, and accepts texts of megabytes.
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens([EOD, *special_tokens])
    return tokenizer


def train_word_pieces(texts: list[str], vocab_size: int) -> list[str]:
    """Train a BERT's vocab.txt; return its tokens by id: special ones, letters, pieces of lower-case words."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token=_BERT_SPECIAL[1]))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    letters = sorted(set().union(*map(tokenizer.normalizer.normalize_str, texts)) - set(" "))
    if len(letters) * 2 + len(_BERT_SPECIAL) > vocab_size:
        raise ValueError(f"--vocab-size ({vocab_size}) is too small for {len(letters)} different letters; raise it")
    # Every letter is given as a special token: the library numbers others in hash order, which differs from run to run.
    single = [*_BERT_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    trainer = library.trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=single, show_progress=False)
    tokenizer.train_from_iterator(_checked_not_empty(iter(texts)), trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def _checked_not_empty(texts: Iterator[str]) -> Iterator[str]:
    """Return an iterator over the same texts. Raises ValueError if there is none."""
    first = next(texts, None)
    if first is None:
        raise ValueError("the files of --input hold no text; add files")
    return itertools.chain([first], texts)


def _train_kind(config: TrainTokenizerConfig, texts: Iterator[str]) -> tuple[str, int]:
    """Train a tokenizer of --kind; return (content of the output file, number of ids)."""
    if config.kind == "wordpiece":
        tokens = train_word_pieces(list(texts), config.vocab_size)
        return "".join(f"{token}\n" for token in tokens), len(tokens)
    train_bpe_or_char = train_characters if config.kind == "char" else train
    tokenizer = train_bpe_or_char(texts, config.vocab_size, config.special_tokens)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(config: TrainTokenizerConfig) -> None:
    """Train the tokenizer and write it."""
    texts = Texts(input_files(config.input, (*_JSON_ENDINGS, ".txt")), config.json_key)
    with heartbeat("training the tokenizer", _log, so_far=texts.progress):
        content, num_ids = _train_kind(config, iter(texts))
    Path(config.output).absolute().parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(config.output) as file:
        file.write(content.encode("utf-8"))
    message = f"wrote {config.output}: {num_ids} ids"
    if num_ids < config.vocab_size and config.kind != "char":
        message += f", fewer than --vocab-size {config.vocab_size}: the text is too small for more; give more text"
    _log(message)


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [TrainTokenizerConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
