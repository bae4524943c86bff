"""Options of attention's softmax: soft caps (Gemma 2, arXiv:2408.00118), sinks (arXiv:2309.17453), a bias."""

from typing import NamedTuple

import torch
from torch import Tensor


class SoftmaxOptions(NamedTuple):
    """Changes to a plain softmax of the scores.

    cap: soft cap of scores, before the mask. sinks: [n], one more score of each head, which takes probability and has no
    value. bias: [n, queries, keys], added to scores after the cap.
    """

    cap: float | None
    sinks: Tensor | None
    bias: Tensor | None = None

    def softcap(self, scores: Tensor) -> Tensor:
        """Return cap tanh(scores / cap); the scores themselves without a cap."""
        return scores if self.cap is None else (scores / self.cap).tanh() * self.cap

    def slope(self, scores: Tensor) -> Tensor | float:
        """Return the derivative of `softcap`."""
        return 1.0 if self.cap is None else 1 - (scores / self.cap).tanh().square()

    @staticmethod
    def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the probabilities of the keys. scores: [.., queries, keys]; sinks expand to [.., queries, 1]"""
        return with_sinks(scores, sinks).softmax(dim=-1)[..., : scores.shape[-1]]


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Append the sinks as a last key: [.., queries, keys] -> [.., queries, keys + 1], unchanged without sinks."""
    if sinks is None:
        return scores
    last_key = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, last_key), dim=-1)
