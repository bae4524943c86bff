"""Tokenizers that the package `tokenizers` runs: BERT's word pieces, GPT-2's BPE, tokenizer.json, TikToken vocabularies.

Ids are those of Hugging Face transformers for the same files. Text never gives the special tokens of BERT, GPT-2 and
TikToken files: "[SEP]" or "<|endoftext|>" in a document is read as the characters it is made of.
"""

import base64
import contextlib
import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.hf_special_tokens import object_in

# How byte-level BPE cuts text into words: GPT-2's own pattern.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_GPT2_END = "<|endoftext|>"

TIK_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIK_LARGEST = 1 << 17  # ids of a TikToken file without --vocab-size, which is as many as Megatron takes
TIK_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@dataclass(eq=False)
class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. path: the file that it was read from.

    special: token -> id of special tokens that the library does not know, so that no text gives them. words: a pattern
    that cuts
    text into words which no token crosses, None without such a pattern; never: strings that tokens may cross all the same.
    pad_is_text: texts hold `pad` too.
    """

    name: str
    path: str
    library: Any
    eod: int | None
    pad: int | None = None
    special: dict[str, int] = field(default_factory=dict)
    words: str | None = None
    never: Sequence[str] = ()
    pad_is_text: bool = False
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    additional_special_tokens_ids: list[int] = field(default_factory=list)  # a T5's sentinels, from <extra_id_0> on
    beside: list[Any] = field(default_factory=list)  # what files beside `path` change of its ids, for a hash

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; there may be gaps."""
        return max(self.vocab.values()) + 1

    @functools.cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self.library.get_vocab(with_added_tokens=True) | self.special

    @functools.cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id -> token."""
        return {i: token for token, i in self.vocab.items()}

    @property
    def rules(self) -> dict[str, Any]:
        """How text is cut into tokens, beside the tokens themselves: `normalizer`, `pre_tokenizer` and `model`.

        They are as the library writes them, with all defaults."""
        held = json.loads(self.library.to_str())
        return {
            "normalizer": held["normalizer"],
            "pre_tokenizer": held["pre_tokenizer"],
            "model": {name: value for name, value in held["model"].items() if name != "vocab"},
        }

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, including those that the tokenizer's template adds, such as a first `<s>`."""
        with self.naming_panics():
            return self.library.encode(text).ids

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        """`tokenize` of each text; faster, since no positions in the text are recorded."""
        with self.naming_panics():
            return [encoding.ids for encoding in self.library.encode_batch_fast(texts)]

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text without those that the template adds: parts of a sample, around which data sets put tokens."""
        with self.naming_panics():
            return [encoding.ids for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False)]

    def detokenize(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included."""
        if not self.special:
            return self.library.decode(list(ids), skip_special_tokens=False)
        return self.library.decoder.decode([self.inv_vocab[int(i)] for i in ids])

    @contextlib.contextmanager
    def naming_panics(self) -> Iterator[None]:
        """Turn a panic of the library into a ValueError. Its class cannot be imported and is no subclass of Exception."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"{self.path}: the tokenizer panics ({error}); a regular expression may run away"
            ) from None


class WordPieceTokenizer(LibraryTokenizer):
    """BERT's word pieces, with [BOS], [EOS] and the <extra_id_...> sentinels after the ids of the file, as in Megatron.

    rows: words of the model, None if it has as many as the tokenizer. A published BERT has a row for each line of its
    file and
    no more; its tokenizer then has the ids of the file alone, and no token that ends a document.
    """

    def __init__(self, name: str, tokenizer: Any, extra_ids: int, path: str, rows: int | None = None):
        vocab = tokenizer.get_vocab()
        missing = [token for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]") if token not in vocab]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}; is it BERT's vocab.txt?")
        sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        first = max(vocab.values()) + 1
        added = [token for token in ("[BOS]", "[EOS]", *sentinels) if token not in vocab]
        if rows is not None and first + len(added) > rows:
            added = [token for token in sentinels if token not in vocab]
        special = {token: first + i for i, token in enumerate(added)}
        ids = vocab | special
        super().__init__(name, path, tokenizer, ids.get("[EOS]"), ids["[PAD]"], special)
        self.cls, self.sep = ids["[CLS]"], ids["[SEP]"]
        self.mask = ids["[MASK]"]
        self.bos, self.eos = ids.get("[BOS]"), ids.get("[EOS]")
        self.additional_special_tokens_ids = [ids[token] for token in sentinels]


def check_exists(path: str, flag: str) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{flag} {path}: there is no such file")


def bert_word_piece_tokenizer(config: Any) -> WordPieceTokenizer:
    """The tokenizer of the published BERT models: vocab.txt has one token a line, its id being the line's number.

    A tokenizer_config.json beside it says whether accents are stripped and Chinese characters are words of their own.
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    path = config.vocab_file
    check_exists(path, "--vocab-file")
    with open(path, encoding="utf-8", newline="\n") as file:
        try:
            vocab = {line.rstrip("\r\n"): i for i, line in enumerate(file)}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 at byte {error.start}; is it BERT's vocab.txt?") from None
    if "[UNK]" not in vocab:
        raise ValueError(f"{path} has no [UNK]; is it BERT's vocab.txt?")
    tokenizer = library.Tokenizer(library.models.WordPiece(vocab, unk_token="[UNK]"))
    lower = config.tokenizer_type == "BertWordPieceLowerCase"
    said = object_in(os.path.dirname(path), "tokenizer_config.json")
    told = {
        "strip_accents": said.get("strip_accents"),
        "tokenize_chinese_chars": said.get("tokenize_chinese_chars", True),
    }
    tokenizer.normalizer = library.normalizers.BertNormalizer(
        lowercase=lower, strip_accents=told["strip_accents"], handle_chinese_chars=bool(told["tokenize_chinese_chars"])
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    extra_ids, rows = config.vocab_extra_ids, config.model_vocab_size
    made = WordPieceTokenizer(config.tokenizer_type, tokenizer, extra_ids, config.vocab_file, rows)
    made.beside = [] if told == {"strip_accents": None, "tokenize_chinese_chars": True} else [told]
    return made


def gpt2_bpe_tokenizer(config: Any) -> LibraryTokenizer:
    """GPT-2's byte-level BPE. `<|endoftext|>` within a text is read as the characters it is made of, as in Megatron."""
    library = optional_package("tokenizers", config.tokenizer_type)
    check_exists(config.vocab_file, "--vocab-file")
    check_exists(config.merge_file, "--merge-file")
    try:
        model = library.models.BPE.from_file(config.vocab_file, config.merge_file)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{config.vocab_file} and {config.merge_file} make no BPE: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    eod = tokenizer.token_to_id(_GPT2_END)
    if eod is None:
        raise ValueError(f"{config.vocab_file} has no {_GPT2_END}, which ends documents; is it GPT-2's vocab.json?")
    return LibraryTokenizer("GPT2BPETokenizer", config.vocab_file, tokenizer, eod, None, words=GPT2_PATTERN)


def json_of(path: str, kind: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {kind}: {error}") from None


def tik_tokenizer(config: Any) -> LibraryTokenizer:
    """Byte-level BPE from a JSON list of {"rank", "token_bytes" (base64), "token_str"} in the order of ranks.

    Ids: --tiktoken-num-special-tokens special ones, then the ranks, up to --vocab-size ids in all.
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    check_exists(config.tokenizer_model, "--tokenizer-model")
    count = config.tiktoken_num_special_tokens
    tokens = _ranked_tokens(config.tokenizer_model, (config.vocab_size or TIK_LARGEST) - count)
    if config.vocab_size is not None and len(tokens) + count != config.vocab_size:
        raise ValueError(
            f"{config.tokenizer_model} has {len(tokens)} tokens, with {count} special ones {len(tokens) + count}: fewer "
            f"than --vocab-size ({config.vocab_size}); lower it, or leave it out"
        )
    letters = byte_letters()
    spelled = {"".join(letters[byte] for byte in token): count + rank for rank, token in enumerate(tokens)}
    model = library.models.BPE(vocab=spelled, merges=_merges(spelled), ignore_merges=True)
    tokenizer = library.Tokenizer(model)
    words = TIK_PATTERNS[config.tiktoken_pattern]
    cut = library.pre_tokenizers.Split(library.Regex(words), "isolated")
    as_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([cut, as_bytes])
    tokenizer.decoder = library.decoders.ByteLevel()
    names = list(config.tiktoken_special_tokens or TIK_SPECIAL[:count])
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    special = {name: i for i, name in enumerate(names)}
    end, pad = special["</s>"], special.get("<pad>")
    return LibraryTokenizer("TikTokenizer", config.tokenizer_model, tokenizer, end, pad, special, words)


def _ranked_tokens(path: str, largest: int) -> list[bytes]:
    """The first `largest` tokens of a TikToken file. Raises ValueError unless ranks are 0, 1, ... and bytes come first."""
    kind = "a list of rank and token_bytes, as TikTokenizer needs it"
    entries = json_of(path, kind)
    try:
        ranks = [entry["rank"] for entry in entries]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    except (ValueError, TypeError, KeyError) as error:  # binascii.Error is a ValueError
        raise ValueError(f"{path} is not {kind}: {error!r}") from None
    if ranks != list(range(len(ranks))) or tokens[:256] != [bytes([i]) for i in range(256)]:
        raise ValueError(f"{path}: ranks must be 0, 1, 2, ..., and the first 256 tokens the 256 bytes")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} has a token twice")
    return tokens[:largest]


@functools.cache
def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where it is printable, else the next one from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, in the order of the tokens' ranks.

    BPE over ranks joins the neighbours whose union ranks lowest, however it is cut; so all cuts are listed.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
