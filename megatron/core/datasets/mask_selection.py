"""Which words of a sample are hidden, Megatron's choices to the last, and what that needs to know of the tokenizer."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from megatron.core.base.dataclass_flags import FlagConfig, Share, option


@dataclass(frozen=True)
class MaskedDataConfig(FlagConfig):
    """Masked words, for pretrain_bert.py."""

    mask_prob: Annotated[float, "(0, 1)"] = option(0.15, "share of the words of a sample that are masked")
    short_seq_prob: Share = option(0.1, "share of samples shorter than --seq-length")
    bert_binary_head: bool = option(
        True,
        "masked words only: no sentence-order head, and single-sentence documents are used",
        flags=("--bert-no-binary-head",),
    )


@dataclass(frozen=True)
class MaskingRules:
    """How words are hidden. geometric: span lengths as SpanBERT draws them (arXiv:1907.10529), else with weights 1/n."""

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    longer_ngrams: bool = False
    geometric: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1 or self.max_ngram < 1:
            raise ValueError(
                f"--mask-prob ({self.probability}) must be in (0, 1), max_ngram ({self.max_ngram}) positive"
            )
        if self.geometric and self.longer_ngrams:
            raise ValueError("geometric span lengths have no use for longer_ngrams; give one of them")


def choose_spans(
    words: list[list[int]], count: int, target: int, rules: MaskingRules, rng: np.random.RandomState
) -> Iterator[list[int]]:
    """The positions of one hidden span after the other.

    words: the positions of each word's tokens; count: tokens of the sample; target: its target length, which bounds the
    budget too. The generator is shared with the caller, who draws between two spans.
    """
    budget = min(rules.probability * target, max(1, round(count * rules.probability)))
    weights = 1.0 / np.arange(1, rules.max_ngram + 1)
    weights /= weights.sum(keepdims=True)
    weights = weights[::-1] if rules.longer_ngrams else weights
    # The sums of RandomState.choice, which would form them anew at each draw.
    chances = np.cumsum(weights / weights.sum(keepdims=True))
    chances = (chances / chances[-1]).tolist()
    starts = list(range(len(words)))
    rng.shuffle(starts)
    hidden: set[int] = set()
    for start in starts:
        if len(hidden) >= budget:
            return
        if rules.geometric:
            size = min(int(rng.geometric(0.2)), rules.max_ngram)
        else:
            size = 1 + bisect_right(chances, rng.random_sample())
        span = joined_lists(words[start : start + size])
        while len(hidden) + len(span) > budget and size > 1:
            size -= 1
            span = joined_lists(words[start : start + size])
        if len(hidden) + len(span) > budget or hidden.intersection(span):
            continue
        hidden.update(span)
        yield span


@dataclass(frozen=True)
class WordPieces:
    """What the masked data sets know of the tokenizer. words: the text of each token id; tokenizer: its name, for messages.

    pad_is_text: texts hold `pad` too.
    """

    words: tuple[str, ...]
    cls: int
    sep: int
    mask: int
    pad: int
    bos: int = -1
    eos: int = -1
    sentinels: tuple[int, ...] = ()
    tokenizer: str = "the tokenizer of this run"
    pad_is_text: bool = False
    beyond: Mapping[int, str] = field(default_factory=dict, hash=False)  # its tokens that the model has no row for

    def whole_words(self, tokens: list[int], whole: bool) -> list[list[int]]:
        """The positions of each word's tokens, without those of CLS and SEP; whole False: each token is a word."""
        found: list[list[int]] = []
        for position, token in enumerate(tokens):
            if token in (self.cls, self.sep):
                continue
            if whole and found and self.words[token].startswith("##"):
                found[-1].append(position)
            else:
                found.append([position])
        return found


def joined_lists(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))
