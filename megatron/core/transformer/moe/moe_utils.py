"""The arithmetic of a mixture of experts, as pure functions: scores, choice, capacity, balancing losses, permutations.

    E, K    experts of a layer, experts of a token
    ..      the dimensions of the tokens
    z       logits [.., E]

Where a choice is made, equal values are decided by the lower index, so that every layout chooses alike.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.lazy_imports import names_of_megatron

_MOST_TURNS = 1000  # of Sinkhorn's iteration; logits of a standard deviation of 20 take about 100
_SMALLEST_SUM = 1e-30  # in it, also in float32
_TINY = 1e-20  # a sum of sigmoids is divided by it plus this, as in Megatron and DeepSeek-V3


# ---------------------------------------------------------------- scores and weights


def score(logits: Tensor, function: str) -> Tensor:
    """Return the scores of logits [.., E] by a score function: softmax, sigmoid or sqrtsoftplus. [.., E]"""
    if function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if function == "sigmoid" else functional.softplus(logits).sqrt()


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest scores [.., E], from the largest: int64 [.., k]. Of equal ones the first."""
    scores = scores.detach()
    if scores.device.type == "cpu" and k < scores.shape[-1]:
        # a third of the time of sorting 128 scores; of equal ones topk takes any, so their order is looked at
        values, ids = scores.topk(k + 1)
        if bool((values[..., 1:] < values[..., :-1]).all()):
            return ids[..., :k]
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def sinkhorn(cost: Tensor, tol: float = 1e-4) -> Tensor:
    """Return scores of T tokens by which, if each takes its best experts, all experts have about equally many: [T, E].

    cost: logits [T, E]. Rows and columns of exp(cost) are scaled in turn until they sum to 1 / T and 1 / E (Sinkhorn's
    iteration), as Megatron does, to its tolerance. Megatron adds 1e-8 to each sum: if tokens like an expert e^10 times less
    than others, that moves all factors in every turn, and the iteration never ends. Here rows are divided by their
    largest entry, which changes only the factor of the row, sums are kept from 0 by less, and a turn that leaves the ratios
    of factors is the last.
    """
    tokens, experts = cost.shape
    matrix = (cost - cost.amax(-1, keepdim=True)).exp()
    of_experts = matrix.new_ones(experts)
    for _ in range(_MOST_TURNS):
        before = of_experts
        of_tokens = 1 / tokens / ((of_experts * matrix).sum(1) + _SMALLEST_SUM)
        of_experts = 1 / experts / ((of_tokens.unsqueeze(1) * matrix).sum(0) + _SMALLEST_SUM)
        ratios = of_experts / before
        is_changing = ((of_experts - before).abs().mean() > tol) & (ratios.max() > ratios.min() * (1 + 1e-5))
        if not is_changing:
            break
    return of_experts * matrix * of_tokens.unsqueeze(1)


def in_best_groups(scores: Tensor, groups: int, kept: int, k: int) -> Tensor:
    """Return the scores [.., E] with -inf outside of the best `kept` of `groups` groups of consecutive experts.

    A group's score is the sum of its k // kept largest scores (DeepSeek-V3, arXiv:2412.19437: 8 // 4).
    """
    by_group = scores.detach().unflatten(-1, (groups, -1))  # [.., groups, E / groups]
    largest = by_group.sort(dim=-1, descending=True).values[..., : k // kept]
    best = top_k(largest.sum(-1), kept)  # [.., kept]
    is_kept = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, True)
    return by_group.masked_fill(~is_kept.unsqueeze(-1), -math.inf).flatten(-2)


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices) of the topk best experts in each token's best groups: [T, topk] each. Megatron's name.

    scores: [T, E]; num_tokens, num_experts: T, E.
    """
    ids = top_k(in_best_groups(scores, num_groups, group_topk, topk), topk)
    return scores.gather(-1, ids), ids


def choose_experts(
    logits: Tensor,
    k: int,
    *,
    function: str = "softmax",
    pre_softmax: bool = False,
    expert_bias: Tensor | None = None,
    groups: int | None = None,
    group_topk: int | None = None,
) -> Tensor:
    """Return the K experts of each token, from the best: int64 [.., K]. logits: [.., E]; expert_bias: [E].

    A softmax keeps the order of the logits, which are compared; groups are compared by sums of probabilities with
    `pre_softmax`, else of logits, as in Megatron.
    """
    scores = logits.detach() if function == "softmax" else score(logits.detach(), function)
    if expert_bias is not None:
        scores = scores + expert_bias
    if groups is not None and group_topk is not None:
        if pre_softmax and function == "softmax":
            scores = scores.softmax(-1)
        scores = in_best_groups(scores, groups, group_topk, k)
    return top_k(scores, k)


def weights_of(
    logits: Tensor, ids: Tensor, *, function: str = "softmax", pre_softmax: bool = False, scaling: float | None = None
) -> Tensor:
    """Return the weights of the chosen experts [.., K]. logits: [.., E]; ids: [.., K].

    softmax: over the chosen logits, with pre_softmax over all of them. Other scores are divided by their sum, if K > 1.
    """
    if function == "softmax" and not pre_softmax:
        weights = logits.gather(-1, ids).softmax(-1)
    else:
        weights = score(logits, function).gather(-1, ids)
        if function != "softmax" and ids.shape[-1] > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights if scaling is None else weights * scaling


def probabilities_of(logits: Tensor, function: str) -> Tensor:
    """Return the scores of all experts, which sum to 1, for a balancing loss: [.., E] -> [.., E]"""
    scores = score(logits, function)
    return scores if function == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)


def experts_in_turn(tokens: Tensor, k: int, num_experts: int) -> Tensor:
    """Return experts in turn, for --moe-router-force-load-balancing: int64 [.., k], ascending. tokens: their numbers [..]"""
    first = tokens.unsqueeze(-1) * k
    return ((first + torch.arange(k, device=tokens.device)) % num_experts).sort(-1).values


# ---------------------------------------------------------------- counts and losses


def count_tokens(ids: Tensor, num_experts: int, kept: Tensor | None = None) -> Tensor:
    """Return how many tokens of each sample chose each expert: int64 [b, E]. ids: [s, b, K]; kept: bool, of its shape."""
    samples = ids.shape[1]
    places = ids + num_experts * torch.arange(samples, device=ids.device).view(-1, 1)  # [s, b, K], in [b, E]
    ones = torch.ones_like(ids) if kept is None else kept.long()
    return ids.new_zeros(samples * num_experts).index_add_(0, places.flatten(), ones.flatten()).view(samples, -1)


def balancing_loss(counts: Tensor, sums: Tensor, tokens: Any, k: int) -> Tensor:
    """Return E / (K T^2) x the sum over experts of counts x sums of probabilities: [..]. 1 if either is uniform.

    counts, sums: [.., E], over the T tokens of a unit, of which `tokens` is the number. Source: arXiv:2101.03961.
    """
    return counts.shape[-1] / k * (counts * sums).sum(-1) / tokens**2


def z_losses(logits: Tensor) -> Tensor:
    """Return the squared log-sum-exp of each token's logits [.., E]: [..]. Source: arXiv:2202.08906."""
    return logits.logsumexp(-1).square()


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """Return the coefficient times the mean of `z_losses` of logits [.., E]: a scalar. Megatron's name.

    padding_mask: bool [..], True for tokens that are not counted.
    """
    losses = z_losses(logits)
    if padding_mask is None:
        return z_loss_coeff * losses.mean()
    counted = ~padding_mask
    return z_loss_coeff * (losses * counted).sum() / counted.sum().clamp(min=1)


def updated_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Return the bias [E] after a step in which the experts had `counts` tokens, int64 [E]. Source: arXiv:2408.15664."""
    # in integers: E x count against the sum, which no rounding can turn
    return bias + rate * (counts.sum() - counts.numel() * counts).sign().to(bias.dtype)


# ---------------------------------------------------------------- capacity


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return how many choices an expert takes if `num_tokens` of them, K of each token, go to `num_experts`. Megatron's name."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def kept_tokens(ids: Tensor, weights: Tensor, num_experts: int, capacity: int, policy: str) -> Tensor:
    """Return which choices the experts keep of a whole sample: bool [s, b, K]. ids, weights: [s, b, K], in token order.

    policy: probs: those of the largest weights, of equal ones the earlier token; position: those of the first tokens.
    """
    s, b, _ = ids.shape
    of_expert = weights.new_full((s, b, num_experts), -math.inf).scatter_(-1, ids, weights.detach())  # [s, b, E]
    if policy == "position":
        of_expert = torch.where(of_expert == -math.inf, of_expert, 0.0)
    order = of_expert.sort(
        dim=0, descending=True, stable=True
    ).indices  # [s, b, E]: tokens, from the first that is kept
    places = torch.arange(s, device=ids.device).view(s, 1, 1).expand_as(order)
    rank = torch.empty_like(order).scatter_(0, order, places)  # [s, b, E]: the place of each token
    return rank.gather(-1, ids) < capacity


# ---------------------------------------------------------------- permutations


def order_by_expert(ids: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return (order, counts) of rows sorted by expert, and of one expert by token.

    ids: [T, K]; kept: bool [T, K], None: all. order: int64 [T K], the choice (token x K + place among its K) of each row,
    dropped ones last. counts: int64 [E], rows of each expert.
    """
    flat = ids.flatten()
    if kept is not None:
        flat = torch.where(kept.flatten(), flat, num_experts)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1).index_add_(0, flat, torch.ones_like(flat))[:num_experts]
    return order, counts


def place_of_choices(order: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return place int64 [T, K], the row of each choice; the number of rows for one that is dropped.

    order: int64 [rows], the choice of each row. shape: (T, K).
    """
    rows = order.shape[0]
    place = order.new_full((shape[0] * shape[1],), rows)
    return place.scatter_(0, order, torch.arange(rows, device=order.device)).view(shape)


__getattr__ = names_of_megatron(__name__)
