"""Tokenizers over the package `tokenizers`: BERT's word pieces, GPT-2's BPE, tokenizer.json, TikToken vocabularies.

Ids are those of Hugging Face transformers for the same files. No text gives the special tokens of BERT, GPT-2 and
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
from megatron.core.base.lfs_pointer import FETCH_LFS, LFS_POINTER, is_lfs_pointer
from megatron.core.tokenizers.hf_special_tokens import read_json_object

# GPT-2's own pattern, by which byte-level BPE cuts text into words.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_GPT2_END = "<|endoftext|>"

TIK_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIK_MAX_IDS = 1 << 17  # of a TikToken file without --vocab-size, as in Megatron
TIK_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@dataclass(eq=False)
class FastTokenizer:
    """A tokenizer of the `tokenizers` library. path: the file that it was read from.

    special: token -> id of special tokens that the library does not know, so that no text gives them. word_pattern: a
    regular expression that cuts text into words which no token crosses; None without one. added_tokens: strings that
    tokens may cross all the same. pad_is_text: `pad` also occurs in texts. additional_special_tokens_ids: a T5's
    sentinels, from <extra_id_0> on. hashed_changes: changes of ids or rules by files beside `path`, which the
    tokenizer's hash includes.
    """

    name: str
    path: str
    library: Any
    eod: int | None
    pad: int | None = None
    special: dict[str, int] = field(default_factory=dict)
    word_pattern: str | None = None
    added_tokens: Sequence[str] = ()
    pad_is_text: bool = False
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    additional_special_tokens_ids: list[int] = field(default_factory=list)
    hashed_changes: list[Any] = field(default_factory=list)

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
        """The rules that cut text into tokens: `normalizer`, `pre_tokenizer` and `model` without its vocabulary.

        They are as the library writes them, with all defaults.
        """
        content = json.loads(self.library.to_str())
        return {
            "normalizer": content["normalizer"],
            "pre_tokenizer": content["pre_tokenizer"],
            "model": {name: value for name, value in content["model"].items() if name != "vocab"},
        }

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, including those that the tokenizer's template adds, such as a first `<s>`."""
        with self.library_errors():
            return self.library.encode(text).ids

    def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, as `tokenize` does; faster, since no positions in the text are recorded."""
        with self.library_errors():
            return [encoding.ids for encoding in self.library.encode_batch_fast(texts)]

    def tokenize_sentences(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text without the template's.

        Data sets put special tokens around their samples themselves.
        """
        with self.library_errors():
            return [encoding.ids for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False)]

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        if not self.special:
            return self.library.decode(list(ids), skip_special_tokens=False)
        return self.library.decoder.decode([self.inv_vocab[int(i)] for i in ids])

    def library_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that turns the library's errors, about a text, into a ValueError that names the file."""
        return library_errors(self.path)


@contextlib.contextmanager
def library_errors(path: str) -> Iterator[None]:
    """Turn an error that the library raises about a text into a ValueError that names the tokenizer's file.

    The library raises bare Exception, for example for an unknown word where the vocabulary has no unknown token, and
    panics, whose class cannot be imported and is no subclass of Exception.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(
                f"{path}: the tokenizer panicked ({error}); perhaps a regular expression takes too much time or memory"
            ) from None
        if type(error) is Exception:
            raise ValueError(f"{path}: the tokenizer cannot encode this: {error}") from None
        raise


class WordPieceTokenizer(FastTokenizer):
    """BERT's word pieces, with [BOS], [EOS] and the <extra_id_...> sentinels after the ids of the file, as in Megatron.

    rows: of the model's embedding, None if it has as many as the tokenizer. A published BERT has a row for each line of
    its file and no more; its tokenizer then has the ids of the file alone, and no token that ends a document.
    """

    def __init__(self, name: str, tokenizer: Any, extra_ids: int, path: str, rows: int | None = None):
        vocab = tokenizer.get_vocab()
        missing = [token for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]") if token not in vocab]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}; is it BERT's vocab.txt?")

        # number the tokens that the file does not have
        sentinels = [f"<extra_id_{i}>" for i in range(extra_ids)]
        first = max(vocab.values()) + 1
        added = [token for token in ("[BOS]", "[EOS]", *sentinels) if token not in vocab]
        if rows is not None and first + len(added) > rows:
            added = [token for token in sentinels if token not in vocab]
        special = {token: first + i for i, token in enumerate(added)}

        ids = vocab | special
        super().__init__(name, path, tokenizer, ids.get("[EOS]"), ids["[PAD]"], special)
        self.cls = ids["[CLS]"]
        self.sep = ids["[SEP]"]
        self.mask = ids["[MASK]"]
        self.bos = ids.get("[BOS]")
        self.eos = ids.get("[EOS]")
        self.additional_special_tokens_ids = [ids[token] for token in sentinels]


def check_exists(path: str, flag: str) -> None:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{flag} {path}: there is no such file")
    with open(path, "rb") as file:
        if is_lfs_pointer(file.read(100)):
            raise ValueError(f"{flag} {path} {LFS_POINTER}; {FETCH_LFS}")


def bert_word_piece_tokenizer(config: Any) -> WordPieceTokenizer:
    """Build the tokenizer of the published BERT models: vocab.txt has one token a line, whose number is its id.

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

    # how text is cut
    lower = config.tokenizer_type == "BertWordPieceLowerCase"
    settings = read_json_object(os.path.dirname(path), "tokenizer_config.json")
    rules = {
        "strip_accents": settings.get("strip_accents"),
        "tokenize_chinese_chars": settings.get("tokenize_chinese_chars", True),
    }
    tokenizer.normalizer = library.normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=rules["strip_accents"],
        handle_chinese_chars=bool(rules["tokenize_chinese_chars"]),
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()

    result = WordPieceTokenizer(
        config.tokenizer_type, tokenizer, config.vocab_extra_ids, config.vocab_file, config.model_vocab_size
    )
    if rules != {"strip_accents": None, "tokenize_chinese_chars": True}:  # only then, so that earlier hashes stay
        result.hashed_changes = [rules]
    return result


def gpt2_bpe_tokenizer(config: Any) -> FastTokenizer:
    """Build GPT-2's byte-level BPE.

    `<|endoftext|>` within a text is read as the characters it is made of, as in Megatron.
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    check_exists(config.vocab_file, "--vocab-file")
    check_exists(config.merge_file, "--merge-file")
    try:
        model = library.models.BPE.from_file(config.vocab_file, config.merge_file)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{config.vocab_file} and {config.merge_file} do not form a BPE vocabulary: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    eod = tokenizer.token_to_id(_GPT2_END)
    if eod is None:
        raise ValueError(
            f"{config.vocab_file} has no {_GPT2_END}, which must end each document; is it GPT-2's vocab.json?"
        )
    return FastTokenizer("GPT2BPETokenizer", config.vocab_file, tokenizer, eod, word_pattern=GPT2_PATTERN)


def read_json(path: str, kind: str) -> Any:
    """Return the content of a JSON file. Raises ValueError. kind: what the file should be, for the message."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {kind}: {error}") from None


def tik_tokenizer(config: Any) -> FastTokenizer:
    """Build byte-level BPE from a JSON list of {"rank", "token_bytes" (base64), "token_str"} in the order of ranks.

    Ids: --tiktoken-num-special-tokens special ones, then the ranks, up to --vocab-size ids in all.
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    check_exists(config.tokenizer_model, "--tokenizer-model")
    count = config.tiktoken_num_special_tokens
    max_ids = config.vocab_size or TIK_MAX_IDS
    tokens = _ranked_tokens(config.tokenizer_model, max_ids - count)
    if config.vocab_size is not None and len(tokens) + count != config.vocab_size:
        raise ValueError(
            f"{config.tokenizer_model} has {len(tokens)} tokens, which with {count} special tokens makes "
            f"{len(tokens) + count}; that is fewer than --vocab-size ({config.vocab_size}); lower --vocab-size, or "
            "leave it out"
        )

    # the library's BPE works on letters, one for each byte
    letters = byte_letters()
    vocab = {"".join(letters[byte] for byte in token): count + rank for rank, token in enumerate(tokens)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=_merges(vocab), ignore_merges=True))
    word_pattern = TIK_PATTERNS[config.tiktoken_pattern]
    split_words = library.pre_tokenizers.Split(library.Regex(word_pattern), "isolated")
    as_letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split_words, as_letters])
    tokenizer.decoder = library.decoders.ByteLevel()

    # special tokens take the first ids
    names = list(config.tiktoken_special_tokens or TIK_SPECIAL[:count])
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    special = {name: i for i, name in enumerate(names)}
    return FastTokenizer(
        "TikTokenizer",
        config.tokenizer_model,
        tokenizer,
        eod=special["</s>"],
        pad=special.get("<pad>"),
        special=special,
        word_pattern=word_pattern,
    )


def _ranked_tokens(path: str, max_count: int) -> list[bytes]:
    """Read the first `max_count` tokens of a TikToken file, by rank.

    Raises ValueError unless ranks are 0, 1, ... and the first 256 tokens are the single bytes.
    """
    kind = "a list of rank and token_bytes, as TikTokenizer needs it"
    entries = read_json(path, kind)
    try:
        ranks = [entry["rank"] for entry in entries]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    except (ValueError, TypeError, KeyError) as error:  # binascii.Error is a ValueError
        raise ValueError(f"{path} is not {kind}: {error!r}") from None
    if ranks != list(range(len(ranks))) or tokens[:256] != [bytes([i]) for i in range(256)]:
        raise ValueError(
            f'{path}: the "rank" of the tokens must be 0, 1, 2, ..., and the first 256 tokens must be the 256 single '
            "bytes"
        )
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} has a token twice")
    return tokens[:max_count]


@functools.cache
def byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte: [256].

    A printable byte is itself; the others get the letters from U+0100 on. Source: `bytes_to_unicode` of GPT-2's
    encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a third one, in the order of the joined tokens' ranks.

    TikToken joins the two neighbours whose union has the lowest rank, whichever pair it is. The library's BPE follows a
    list of pairs; so all pairs are listed.
    """
    merges = []
    for token in ranks:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((left, right))
    return merges
