"""Choose the words of a sample that are hidden: bit for bit Megatron's choices (`create_masked_lm_predictions`).

A word is one token, or with whole-word masking a token and the "##" pieces after it. Words are visited in random order;
at each one a span of 1 to max_ngram words begins, which is hidden if it fits the budget and overlaps no earlier span:

    tokens    the  un ##like ##ly  cat  sat          words   [0] [1 2 3] [4] [5]
    visited   word 1, n = 1: hides 1 2 3             word 3, n = 1: hides 5          budget used up: stop
"""

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
        "train only on masked words: no sentence-order head, and documents of one sentence are used too",
        flags=("--bert-no-binary-head",),
    )


@dataclass(frozen=True)
class MaskingRules:
    """The rules by which words are hidden.

    probability: of a word; max_ngram: words of the longest span. whole_words: "##" pieces are hidden with their word.
    geometric: span lengths are drawn as in SpanBERT (arXiv:1907.10529); else length n has weight 1/n, and with
    longer_ngrams these weights in reverse.
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    longer_ngrams: bool = False
    geometric: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1 or self.max_ngram < 1:
            raise ValueError(
                f"--mask-prob ({self.probability}) must be between 0 and 1, both excluded, and max_ngram "
                f"({self.max_ngram}) positive"
            )
        if self.geometric and self.longer_ngrams:
            raise ValueError("longer_ngrams has no effect with geometric span lengths; give only one of them")


def choose_spans(
    words: list[list[int]], count: int, target: int, rules: MaskingRules, rng: np.random.RandomState
) -> Iterator[list[int]]:
    """Yield the positions of each hidden span.

    words: the positions of each word's tokens; count: tokens of the sample; target: its target length, which bounds the
    budget too. The generator is shared with the caller, who draws between two spans: this is a generator and not a list
    so that all draws come in Megatron's order.
    """
    budget = min(rules.probability * target, max(1, round(count * rules.probability)))

    # the cumulative distribution of span lengths, as RandomState.choice computes it at each draw
    weights = 1.0 / np.arange(1, rules.max_ngram + 1)  # [max_ngram]
    weights /= weights.sum(keepdims=True)
    if rules.longer_ngrams:
        weights = weights[::-1]
    cumulative = np.cumsum(weights / weights.sum(keepdims=True))
    cumulative = (cumulative / cumulative[-1]).tolist()

    first_words = list(range(len(words)))
    rng.shuffle(first_words)
    hidden: set[int] = set()
    for first_word in first_words:
        if len(hidden) >= budget:
            return
        if rules.geometric:
            size = min(int(rng.geometric(0.2)), rules.max_ngram)
        else:
            size = 1 + bisect_right(cumulative, rng.random_sample())
        # shorten the span until it fits the budget
        span = concatenate(words[first_word : first_word + size])
        while len(hidden) + len(span) > budget and size > 1:
            size -= 1
            span = concatenate(words[first_word : first_word + size])
        if len(hidden) + len(span) > budget or hidden.intersection(span):
            continue
        hidden.update(span)
        yield span


@dataclass(frozen=True)
class WordPieces:
    """The tokens that the masked data sets need of a tokenizer.

    words: the text of each token id; tokenizer: its name, for messages. pad_is_text: `pad` also occurs in texts.
    without_row: its tokens that the model's embedding has no row for, by id.
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
    without_row: Mapping[int, str] = field(default_factory=dict, hash=False)

    def whole_words(self, tokens: list[int], whole: bool) -> list[list[int]]:
        """Return the positions of each word's tokens, without CLS and SEP. whole False: each token is a word."""
        positions_of_words: list[list[int]] = []
        for position, token in enumerate(tokens):
            if token in (self.cls, self.sep):
                continue
            continues_word = whole and positions_of_words and self.words[token].startswith("##")
            if continues_word:
                positions_of_words[-1].append(position)
            else:
                positions_of_words.append([position])
        return positions_of_words


def concatenate(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))
