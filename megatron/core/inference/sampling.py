"""From the scores of the next token to its id: the likeliest one, or a draw from the likelier ones.

A draw is made in four steps, in this order; those that are not asked for are left out:

    temperature   divide the scores by it: below 1 sharper, above 1 flatter
    top-k         keep the k highest scores
    top-p         of those, keep the fewest that have at least probability p together (arXiv:1904.09751)
    softmax       of what is kept, and one draw from it

Scores are a vector [v] over the true vocabulary: whoever calls cuts off the columns of padding. The arithmetic is in
float64 on the CPU, so that a seed means the same draw on every device; beside the forward its cost is small.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from megatron.core.config import Count, FlagConfig, Positive, knob

Choose = Callable[[Tensor], int]  # scores [v] -> id


@dataclass(frozen=True)
class SamplingConfig(FlagConfig):
    """Choice of the next token."""

    greedy: bool = knob(False, "take the most probable token")
    temperature: Positive = knob(1.0, "divide logits by this: below 1 sharper, above 1 flatter; for 0 give --greedy")
    top_k: Count | None = knob(None, "sample from the k most probable tokens", flags=("--top-k", "--top_k"))
    top_p: Annotated[float, "(0, 1]"] | None = knob(
        None, "sample from the smallest set of tokens with at least this probability", flags=("--top-p", "--top_p")
    )

    def problems(self) -> Iterator[str]:
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            yield "--greedy draws nothing; leave out --temperature, --top-k and --top-p, or --greedy"


def chooser(config: SamplingConfig, generator: torch.Generator) -> Choose:
    """The function from scores to an id that `config` describes. It draws from `generator`, on the CPU."""
    return greedy if config.greedy else partial(sample, config=config, generator=generator)


def greedy(scores: Tensor) -> int:
    """The id with the highest score; of equals the smallest."""
    scores = _checked(scores)
    return int((scores == scores.max()).nonzero()[0])  # which of equals argmax takes is not promised


def sample(scores: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """An id drawn with the probabilities of `distribution`."""
    return int(torch.multinomial(distribution(scores, config), 1, generator=generator))


def distribution(scores: Tensor, config: SamplingConfig) -> Tensor:
    """The probability of every id after temperature, top-k and top-p. -> [v], float64"""
    scores = _checked(scores)
    scores = (scores - scores.max()) / config.temperature  # the highest is 0: no temperature can make it overflow
    if config.top_k is not None:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None:
        scores = keep_top_p(scores, config.top_p)
    return scores.softmax(0)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """`scores` with all but the `k` highest set to -inf. Of equals the smaller id stays; a `k` beyond v keeps all."""
    return _only(scores, _falling(scores)[:k])


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """`scores` with all set to -inf but the fewest that have at least probability `p` together; one stays in any case.

    probabilities  0.5  0.3  0.15  0.05
    sum before     0    0.5  0.8   0.95       p = 0.6 keeps those before which it is not reached: the first two
    """
    order = _falling(scores)
    sums = scores[order].softmax(0).cumsum(0)
    before = torch.cat((sums.new_zeros(1), sums[:-1]))
    return _only(scores, order[before < p])


def _falling(scores: Tensor) -> Tensor:
    """The ids from the highest score to the lowest, equals by id."""
    return scores.argsort(descending=True, stable=True)


def _only(scores: Tensor, ids: Tensor) -> Tensor:
    kept = torch.full_like(scores, -math.inf)
    kept[ids] = scores[ids]
    return kept


def _checked(scores: Tensor) -> Tensor:
    """`scores` in float64 on the CPU, if a token can be chosen by them."""
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(
            f"the scores of one token are a vector over the vocabulary, not of shape {tuple(scores.shape)}"
        )
    scores = scores.detach().to("cpu", torch.float64)
    if not math.isfinite(scores.max()):
        raise ValueError(
            f"the highest of {len(scores)} scores is {scores.max().item()}; the model's weights are broken, "
            "perhaps by a training run that diverged: load an earlier iteration"
        )
    return scores
