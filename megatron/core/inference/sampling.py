"""Sampling: from the logits of the next token to its id.

Four steps in this order, each optional but the last:

    temperature   divide the logits: below 1 sharper, above 1 flatter
    top-k         keep the k highest logits
    top-p         keep the fewest of them with a total probability of at least p (arXiv:1904.09751)
    softmax       normalize, and draw

Logits ("scores") are a vector [v] without vocabulary padding. The arithmetic is float64 on the CPU, so that a seed gives
the same
draw on every device; its cost is small beside the forward.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import Count, FlagConfig, Positive, knob

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
    """The sampling function of `config`: scores -> id. It draws from `generator`, on the CPU."""
    return greedy if config.greedy else partial(sample, config=config, generator=generator)


def greedy(scores: Tensor) -> int:
    """The id with the highest score; the smallest id in a tie."""
    scores = _checked(scores)
    return int((scores == scores.max()).nonzero()[0])  # argmax does not specify which id it returns in a tie


def sample(scores: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """An id drawn with the probabilities of `distribution`."""
    return int(torch.multinomial(distribution(scores, config), 1, generator=generator))


def distribution(scores: Tensor, config: SamplingConfig) -> Tensor:
    """The probability of every id after temperature, top-k and top-p. -> [v], float64"""
    scores = _checked(scores)
    scores = (scores - scores.max()) / config.temperature  # the maximum is 0, so no temperature overflows
    if config.top_k is not None:
        scores = keep_top_k(scores, config.top_k)
    if config.top_p is not None:
        scores = keep_top_p(scores, config.top_p)
    return scores.softmax(0)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """`scores` with all but the `k` highest set to -inf. A tie keeps the smaller id; k > v keeps all."""
    return _only(scores, _falling(scores)[:k])


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """`scores` with all set to -inf but the fewest with a total probability of at least `p`; at least one stays.

    probabilities  0.5  0.3  0.15  0.05
    sum before     0    0.5  0.8   0.95       p = 0.6 keeps ids whose sum before is below 0.6: the first two
    """
    order = _falling(scores)
    sums = scores[order].softmax(0).cumsum(0)
    before = torch.cat((sums.new_zeros(1), sums[:-1]))
    return _only(scores, order[before < p])


def _falling(scores: Tensor) -> Tensor:
    """The ids by descending score, ties by id."""
    return scores.argsort(descending=True, stable=True)


def _only(scores: Tensor, ids: Tensor) -> Tensor:
    kept = torch.full_like(scores, -math.inf)
    kept[ids] = scores[ids]
    return kept


def _checked(scores: Tensor) -> Tensor:
    """`scores` in float64 on the CPU. ValueError unless they are a vector with a finite maximum."""
    if scores.dim() != 1 or len(scores) == 0:
        raise ValueError(f"the scores must be a vector over the vocabulary, not of shape {tuple(scores.shape)}")
    scores = scores.detach().to("cpu", torch.float64)
    if not math.isfinite(scores.max()):
        raise ValueError(
            f"the highest of {len(scores)} scores is {scores.max().item()}; the model's weights are broken, "
            "perhaps by a training run that diverged: load an earlier iteration"
        )
    return scores
