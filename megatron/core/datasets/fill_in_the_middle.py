"""Fill in the middle: a part of each document is moved behind the rest, so that a model learns to write it from both sides.

    document   prefix | middle | suffix            cut at two random characters of its text
    PSM        <prefix> prefix <suffix> suffix <middle> middle
    SPM        <prefix> <suffix> suffix <middle> prefix middle

The two orders are those of arXiv:2207.14255 (SPM in its variant 2), the rules and the order of the random choices
Megatron-LM's. The choices for sample i come from a generator seeded by (seed, i) alone, so that they do not depend on which
samples were read before, by how many workers, or in which layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, Share, flag_of, option
from megatron.core.datasets.vocab_check import beyond_of

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character are read as


@dataclass(frozen=True)
class FimConfig(FlagConfig):
    """Fill in the middle."""

    fim_data: bool = option(False, "fill-in-the-middle: rearrange documents as prefix, suffix, middle")
    fim_rate: Share = option(0.5, "share of documents that are rearranged")
    fim_spm_rate: Share = option(0.5, "share of rearranged documents in suffix-prefix-middle order")
    fim_split_sample: str | None = option(
        None, "token that splits a document into fragments, e.g. the files of a repository", metavar="TOKEN"
    )
    fim_fragment_rate: Share | None = option(None, "share of fragments rearranged; needs --fim-split-sample")
    fim_no_prefix: str | None = option(
        None, "never rearrange documents or fragments that begin with this", metavar="TEXT"
    )
    fim_prefix_token: str = option("<fim_prefix>", "token before the prefix", metavar="TOKEN")
    fim_middle_token: str = option("<fim_middle>", "token before the middle", metavar="TOKEN")
    fim_suffix_token: str = option("<fim_suffix>", "token before the suffix", metavar="TOKEN")
    fim_pad_token: str = option(
        "<fim_pad>", "token that fills shortened samples up; where it does, it is masked from the loss", metavar="TOKEN"
    )
    fim_eod_token: str | None = option(
        None, "token between documents; default: the tokenizer's end-of-document token", metavar="TOKEN"
    )

    def problems(self) -> Iterator[str]:
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            yield "--fim-split-sample and --fim-fragment-rate need each other; give both or none"
        if not self.fim_data:
            alone = [flag_of(f.name) for f in fields(self) if getattr(self, f.name) != f.default]
            yield from (f"{flag} is about documents that --fim-data rearranges; give it too" for flag in alone)


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of one token by its name; where a tokenizer has no names, of a text that is one token. None: there is none."""
    named = getattr(tokenizer, "vocab", {}).get(token)
    if named is not None:
        return named
    try:
        ids = tokenizer.tokenize(token)
    except ValueError:  # a NullTokenizer reads numbers only
        return None
    return ids[0] if len(ids) == 1 else None


class FillInTheMiddle:
    """Rearranges the tokens of samples. Raises ConfigError if the tokenizer lacks a token, or cannot write text as it is.

    tokenizer: an object with `tokenize`, `detokenize`, `eod` and, if its tokens have names, `vocab`.
    """

    def __init__(self, config: FimConfig, tokenizer: Any, seed: int):
        self.config, self.seed = config, seed
        self.tokenizer = tokenizer
        names = [*(f"fim_{kind}_token" for kind in ("prefix", "middle", "suffix", "pad", "eod")), "fim_split_sample"]
        tokens = {name: getattr(config, name) for name in names}
        ids = {name: None if token is None else token_id(tokenizer, token) for name, token in tokens.items()}
        problems = [
            f"{flag_of(name)} {token} is no token of the tokenizer; add it to the vocabulary, or name another"
            for name, token in tokens.items()
            if token is not None and ids[name] is None
        ]
        problems += [
            f"{flag_of(name)} {tokens[name]} is token {i}, and the model's word table has {tokenizer.vocab_size} rows, none for "
            "it; name another"
            for name, i in ids.items()
            if i in beyond_of(tokenizer)
        ]
        self.prefix, self.middle = ids["fim_prefix_token"], ids["fim_middle_token"]
        self.suffix, self.pad = ids["fim_suffix_token"], ids["fim_pad_token"]
        self.eod = tokenizer.eod if ids["fim_eod_token"] is None else ids["fim_eod_token"]
        self.split = ids["fim_split_sample"]
        if self.eod is None:
            problems.append(
                "--fim-data rearranges the documents of a sample, and the tokenizer has no token that ends one; name it by "
                "--fim-eod-token"
            )
        self._first = tokenizer.tokenize("")  # such as the <s> that begins every text
        if tokenizer.tokenize("1")[: len(self._first)] != self._first:
            problems.append("--fim-data cannot be used with a tokenizer that ends every text with a token of its own")
        if problems:
            raise ConfigError(problems)

    def __call__(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """The tokens of sample `number`, each document in them rearranged or not: int64, as many as there were."""
        return self.filled(self.moved(tokens, number), len(tokens))

    def filled(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """`tokens` and, up to `count`, padding."""
        return np.append(tokens, np.full(count - len(tokens), self.pad)).astype(np.int64)

    def moved(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """As a call, but what is too short is not filled.

        A part of no tokens between two documents' ends is left out, and what then is too long is cut off at the end.
        """
        rng = np.random.RandomState([self.seed % (1 << 32), number % (1 << 32), number >> 32])
        parts = [self._document(part, rng) for part in _parts(tokens, self.eod)]
        return np.concatenate(_joined(parts, self.eod))[: len(tokens)]

    def _document(self, tokens: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        if self.split is None or self.split not in tokens:
            return self._rearranged(tokens, self.config.fim_rate, rng)
        if not rng.binomial(1, self.config.fim_rate):
            return tokens
        fragments = _parts(tokens, self.split)
        rate = self.config.fim_fragment_rate
        return np.concatenate(_joined([self._rearranged(part, rate, rng) for part in fragments], self.split))

    def _rearranged(self, tokens: np.ndarray, rate: float, rng: np.random.RandomState) -> np.ndarray:
        """`tokens` with their middle moved to the end, or as they are: by chance, or where they cannot be read as text."""
        if not rng.binomial(1, rate):
            return tokens
        text = self.tokenizer.detokenize(tokens.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        if _UNREADABLE in text:  # a sample may begin or end within a character, and its bytes would be lost
            return tokens
        first, past = sorted(rng.randint(0, len(text) + 1, 2).tolist())
        prefix, suffix = self._ids(text[:first]), self._ids(text[past:])
        middle = self._ids(text[first:past])
        if rng.binomial(1, self.config.fim_spm_rate):
            return np.array([self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle])
        return np.array([self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.tokenize(text)[len(self._first) :]


def _parts(tokens: np.ndarray, border: int) -> list[np.ndarray]:
    """What lies between the tokens `border`, without empty parts; the last part is there even if it is empty."""
    ends = np.flatnonzero(tokens == border)
    parts = [part[part != border] for part in np.split(tokens, ends)]
    return [part for part in parts[:-1] if len(part)] + parts[-1:]


def _joined(parts: list[np.ndarray], border: int) -> list[np.ndarray]:
    """The parts with `border` between each two."""
    between = np.array([border])
    return [piece for part in parts[:-1] for piece in (part, between)] + parts[-1:]
