"""Attention's scores beyond a plain softmax: soft caps (arXiv:2408.00118) and sinks (arXiv:2309.17453)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Scoring(NamedTuple):
    """cap: of scores, before the mask. sinks: [n], a further score of each head, which takes probability and has no value.
    bias: [n, queries, keys], added to scores after the cap."""

    cap: float | None
    sinks: Tensor | None
    bias: Tensor | None = None

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.cap is None else (scores / self.cap).tanh() * self.cap

    def slope(self, scores: Tensor) -> Tensor | float:
        """Of `capped`."""
        return 1.0 if self.cap is None else 1 - (scores / self.cap).tanh().square()

    @staticmethod
    def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Of scores [.., queries, keys] and the sinks, which expand to [.., queries, 1]: the probabilities of the keys."""
        return with_sinks(scores, sinks).softmax(dim=-1)[..., : scores.shape[-1]]


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores
    return torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
