"""Fill in the middle moves a part of each document behind the rest, so that a model learns to write it from both sides.

    document   prefix | middle | suffix            cut at two random characters of its text
    PSM        <prefix> prefix <suffix> suffix <middle> middle
    SPM        <prefix> <suffix> suffix <middle> prefix middle

The two orders are those of arXiv:2207.14255 (SPM in its variant 2). The rules and the order of the random choices are
Megatron-LM's. The choices for sample i come from a generator seeded by (seed, i) alone, so that they do not depend on
the samples read before, on the number of workers, or on the layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, Share, flag_of, option
from megatron.core.datasets.token_ids_without_embedding_row import ids_without_row

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # `detokenize` gives it for bytes that are no character


@dataclass(frozen=True)
class FimConfig(FlagConfig):
    """Fill in the middle."""

    fim_data: bool = option(False, "fill-in-the-middle (FIM): reorder documents as prefix, suffix, middle")
    fim_rate: Share = option(0.5, "FIM: share of documents that are reordered")
    fim_spm_rate: Share = option(
        0.5, "FIM: share of the reordered documents that are in the order suffix, prefix, middle"
    )
    fim_split_sample: str | None = option(
        None, "FIM: token at which a document is split into fragments, e.g. the files of a repository", metavar="TOKEN"
    )
    fim_fragment_rate: Share | None = option(
        None, "FIM: share of fragments that are reordered; needs --fim-split-sample"
    )
    fim_no_prefix: str | None = option(
        None, "FIM: leave documents and fragments that begin with this text in their order", metavar="TEXT"
    )
    fim_prefix_token: str = option("<fim_prefix>", "token before the prefix", metavar="TOKEN")
    fim_middle_token: str = option("<fim_middle>", "token before the middle", metavar="TOKEN")
    fim_suffix_token: str = option("<fim_suffix>", "token before the suffix", metavar="TOKEN")
    fim_pad_token: str = option(
        "<fim_pad>", "FIM: token that pads shortened samples; the loss ignores it", metavar="TOKEN"
    )
    fim_eod_token: str | None = option(
        None, "FIM: token between documents; default: the tokenizer's end-of-document token", metavar="TOKEN"
    )

    def problems(self) -> Iterator[str]:
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            yield "--fim-split-sample and --fim-fragment-rate need each other; give both, or leave both out"
        if not self.fim_data:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    yield f"{flag_of(field.name)} needs --fim-data; give both, or leave it out"


def token_id(tokenizer: Any, token: str) -> int | None:
    """Return the id of one token; None if there is none.

    It is found by its name, or where a tokenizer has no names, as a text that gives a single token.
    """
    named = getattr(tokenizer, "vocab", {}).get(token)
    if named is not None:
        return named
    try:
        ids = tokenizer.tokenize(token)
    except ValueError:  # a NullTokenizer reads numbers only
        return None
    return ids[0] if len(ids) == 1 else None


class FillInTheMiddle:
    """Rearranges the tokens of samples.

    Raises ConfigError if the tokenizer lacks a token, or cannot write text as it is.

    tokenizer: an object with `tokenize`, `detokenize`, `eod` and, if its tokens have names, `vocab`.
    """

    def __init__(self, config: FimConfig, tokenizer: Any, seed: int):
        self.config = config
        self.seed = seed
        self.tokenizer = tokenizer

        # the ids of the tokens that the flags name
        tokens = {
            "fim_prefix_token": config.fim_prefix_token,
            "fim_middle_token": config.fim_middle_token,
            "fim_suffix_token": config.fim_suffix_token,
            "fim_pad_token": config.fim_pad_token,
            "fim_eod_token": config.fim_eod_token,
            "fim_split_sample": config.fim_split_sample,
        }
        ids = {name: None if token is None else token_id(tokenizer, token) for name, token in tokens.items()}
        problems = []
        for name, token in tokens.items():
            if token is not None and ids[name] is None:
                problems.append(
                    f"{flag_of(name)} {token} is not a token of the tokenizer; add it to the vocabulary, or give "
                    "another"
                )
        for name, i in ids.items():
            if i in ids_without_row(tokenizer):
                problems.append(
                    f"{flag_of(name)} {tokens[name]} is token {i}, and the model's word table has {tokenizer.vocab_size} "
                    "rows, none for it; name another"
                )
        self.prefix = ids["fim_prefix_token"]
        self.middle = ids["fim_middle_token"]
        self.suffix = ids["fim_suffix_token"]
        self.pad = ids["fim_pad_token"]
        self.eod = tokenizer.eod if ids["fim_eod_token"] is None else ids["fim_eod_token"]
        self.split = ids["fim_split_sample"]
        if self.eod is None:
            problems.append(
                "--fim-data rearranges the documents of a sample, and the tokenizer has no token that ends one; name it by "
                "--fim-eod-token"
            )

        # the tokens that begin every text, such as <s>: parts of a text are encoded without them
        self._first = tokenizer.tokenize("")
        if tokenizer.tokenize("1")[: len(self._first)] != self._first:
            problems.append("--fim-data cannot be used with a tokenizer that ends every text with a token of its own")
        if problems:
            raise ConfigError(problems)

    def __call__(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """Rearrange some of the documents of sample `number`. tokens: int64 [s + 1]; so is the result."""
        return self.pad_to(self.rearrange(tokens, number), len(tokens))

    def pad_to(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Append padding to `tokens` up to `count` tokens: int64 [count]. tokens: integers [at most count]."""
        return np.append(tokens, np.full(count - len(tokens), self.pad)).astype(np.int64)

    def rearrange(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """Rearrange some of the documents of sample `number`, without padding: at most as many tokens as there were.

        tokens: int64 [s + 1] -> integers [at most s + 1]. Encoding a part anew may give another number of tokens. Text
        that becomes too long is cut off at the end. Documents without tokens are left out.
        """
        rng = np.random.RandomState([self.seed % (1 << 32), number % (1 << 32), number >> 32])
        documents = [self._rearrange_document(document, rng) for document in _split_at(tokens, self.eod)]
        return np.concatenate(_join_with(documents, self.eod))[: len(tokens)]

    def _rearrange_document(self, tokens: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Rearrange one document, or with --fim-split-sample each of its fragments, with the rates of the flags."""
        if self.split is None or self.split not in tokens:
            return self._move_middle(tokens, self.config.fim_rate, rng)
        if not rng.binomial(1, self.config.fim_rate):
            return tokens
        rate = self.config.fim_fragment_rate
        fragments = [self._move_middle(fragment, rate, rng) for fragment in _split_at(tokens, self.split)]
        return np.concatenate(_join_with(fragments, self.split))

    def _move_middle(self, tokens: np.ndarray, rate: float, rng: np.random.RandomState) -> np.ndarray:
        """Move the middle of `tokens` to their end with probability `rate`; never where they cannot be read as text."""
        if not rng.binomial(1, rate):
            return tokens
        text = self.tokenizer.detokenize(tokens.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        if _UNREADABLE in text:  # a sample may begin or end within a character, and its bytes would be lost
            return tokens
        first, past = sorted(rng.randint(0, len(text) + 1, 2).tolist())
        prefix = self._encode(text[:first])
        middle = self._encode(text[first:past])
        suffix = self._encode(text[past:])
        if rng.binomial(1, self.config.fim_spm_rate):
            return np.array([self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle])
        return np.array([self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle])

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.tokenize(text)[len(self._first) :]


def _split_at(tokens: np.ndarray, border: int) -> list[np.ndarray]:
    """Return the parts between the tokens `border`, without empty parts; the last part is there even if it is empty."""
    ends = np.flatnonzero(tokens == border)
    parts = [part[part != border] for part in np.split(tokens, ends)]
    return [part for part in parts[:-1] if len(part)] + parts[-1:]


def _join_with(parts: list[np.ndarray], border: int) -> list[np.ndarray]:
    """Return the parts with `border` between each two, to be concatenated."""
    result = []
    for part in parts[:-1]:
        result += [part, np.array([border])]
    return result + parts[-1:]
