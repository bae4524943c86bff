"""Sampling: from the logits of the next token to its id.

Four steps in this order, each optional but the last:

    temperature   divide the logits: below 1 sharper, above 1 flatter
    top-k         keep the k highest logits
    top-p         keep the fewest of them with a total probability of at least p (arXiv:1904.09751)
    softmax       normalize, and draw

Logits are a vector [v] without vocabulary padding. The arithmetic is float64 on the CPU, so that a seed gives the same
draw on every device; its cost is small beside the forward.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.core.inference.sampling_config import SamplingConfig

Choose = Callable[[Tensor], int]  # logits [v] -> id


def chooser(config: SamplingConfig, generator: torch.Generator) -> Choose:
    """Return the sampling function of `config`: logits [v] -> id. It draws from `generator`, on the CPU."""
    return greedy if config.greedy else partial(sample, config=config, generator=generator)


def greedy(logits: Tensor) -> int:
    """Return the id with the highest of the logits [v]; the smallest id in a tie."""
    logits = _checked(logits)
    return int((logits == logits.max()).nonzero()[0])  # argmax does not specify which id it returns in a tie


def sample(logits: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """Draw an id with the probabilities of `distribution`. logits: [v]"""
    return int(torch.multinomial(distribution(logits, config), 1, generator=generator))


def distribution(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return the probability of every id after temperature, top-k and top-p: logits [v] -> [v], float64."""
    logits = _checked(logits)
    logits = (logits - logits.max()) / config.temperature  # the maximum is 0, so no temperature overflows
    if config.top_k is not None:
        logits = keep_top_k(logits, config.top_k)
    if config.top_p is not None:
        logits = keep_top_p(logits, config.top_p)
    return logits.softmax(0)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the `k` highest logits [v] to -inf, in a copy. A tie keeps the smaller id; k > v keeps all."""
    return _only(logits, _falling(logits)[:k])


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest logits [v] with a total probability of at least `p`, at least one.

    The others become -inf, in a copy.

    probabilities  0.5  0.3  0.15  0.05
    sum before     0    0.5  0.8   0.95       p = 0.6 keeps ids whose sum before is below 0.6: the first two
    """
    order = _falling(logits)
    sums = logits[order].softmax(0).cumsum(0)
    before = torch.cat((sums.new_zeros(1), sums[:-1]))
    return _only(logits, order[before < p])


def _falling(logits: Tensor) -> Tensor:
    """Return the ids by descending logit, ties by id."""
    return logits.argsort(descending=True, stable=True)


def _only(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logits with -inf for all ids but these."""
    result = torch.full_like(logits, -math.inf)
    result[ids] = logits[ids]
    return result


def _checked(logits: Tensor) -> Tensor:
    """Return `logits` in float64 on the CPU. Raise ValueError unless they are a vector with a finite maximum."""
    if logits.dim() != 1 or len(logits) == 0:
        raise ValueError(f"the logits must be a vector over the vocabulary, not of shape {tuple(logits.shape)}")
    logits = logits.detach().to("cpu", torch.float64)
    if not math.isfinite(logits.max()):
        raise ValueError(
            f"the highest of {len(logits)} logits is {logits.max().item()}, so the model's weights are broken, "
            "perhaps by a training run that diverged; load an earlier iteration"
        )
    return logits
