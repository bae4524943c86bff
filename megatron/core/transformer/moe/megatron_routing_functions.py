"""Megatron's functions of a router, for layers that are written against them; our own router uses `moe_utils`.

    probs, routing_map = topk_routing_with_score_function(logits, topk, score_function="sigmoid", expert_bias=bias)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, "sigmoid")
    loss = switch_load_balancing_loss_func(scores, routing_map.sum(0), len(scores), topk, num_experts, coefficient)

T, E, K: tokens, experts of a layer, experts of a token. Signatures are those of the newer releases, and of the loss the older one
too. Of equal scores the first expert or token is taken, where Megatron's may take any. `fused` makes no difference to the
numbers. Megatron's file: megatron/core/transformer/moe/moe_utils.py.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core.base.unsupported_arguments import CheckedArgument, accepts_defaults_only
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.initialize_model_parallel import axis_of_group
from megatron.core.transformer.moe import moe_utils

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_ANY = CheckedArgument(lambda value, name: None)


def _float32(logits: Tensor, score_function: str) -> Tensor:
    """Return logits in float32 or wider, after a check of what is asked."""
    if score_function not in _SCORES:
        raise ValueError(f"Invalid score_function: {score_function}; give one of {', '.join(_SCORES)}")
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {list(logits.shape)}; give [tokens, experts]")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@accepts_defaults_only("expert_bias", fused=_ANY, router_replay=None)
def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (weights [T, E], 0 of experts that are not chosen; which are chosen: bool [T, E]), in the dtype of logits [T, E].

    expert_bias: [E], added to scores other than softmax for the choice. dense_output: (weights [T, K], experts int64 [T, K]).
    precomputed_indices: experts that have been chosen before, int64 [T, K]. Raises ValueError.
    """
    x = _float32(logits, score_function)
    ids = precomputed_indices
    if ids is None:
        ids = moe_utils.choose_experts(
            x,
            topk,
            function=score_function,
            pre_softmax=use_pre_softmax,
            expert_bias=None if score_function == "softmax" else expert_bias,
            groups=num_groups if group_topk else None,
            group_topk=group_topk or None,
        )
    weights = moe_utils.weights_of(
        x, ids, function=score_function, pre_softmax=use_pre_softmax, scaling=scaling_factor or None
    ).to(logits.dtype)
    if dense_output:
        return weights, ids
    return torch.zeros_like(logits).scatter(1, ids, weights), _map_of(ids, logits)


def _map_of(ids: Tensor, like: Tensor) -> Tensor:
    """Return which experts are chosen: bool [T, E]. ids: int64 [T, K]; like: [T, E]"""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, ids, True)


@accepts_defaults_only("score_function", fused=_ANY)
def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (the K best experts of each token by scores alone: bool [T, E]; scores that sum to 1: [T, E]), of logits [T, E].

    padding_mask: bool [T], True for tokens that are not counted. Raises ValueError.
    """
    x = _float32(logits, score_function)
    scores = moe_utils.probabilities_of(x, score_function)
    routing_map = _map_of(moe_utils.top_k(x, topk), x)
    if padding_mask is not None:
        counted = ~padding_mask.unsqueeze(-1)
        return routing_map & counted, scores * counted
    return routing_map, scores


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    *numbers: Any,
    fused: bool = False,
    padding_mask: Tensor | None = None,
    sequence_partition_group: Any = None,
    **by_name: Any,
) -> Tensor:
    """Return coefficient x E / (K T^2) x the sum over experts of counts x sums of probs: a scalar.

    Two signatures, of newer and older releases:

        (probs [T, E], tokens_per_expert [E], total_num_tokens, topk, num_experts, moe_aux_loss_coeff, fused, padding_mask)
        (probs [T, E], tokens_per_expert [E], topk, moe_aux_loss_coeff, sequence_partition_group)

    padding_mask: bool [T], True for tokens that count, as in Megatron. sequence_partition_group: ranks with the other tokens
    of the unit, each of which must call; sums `tokens_per_expert` over them in place. Raises TypeError.
    """
    newer = ("total_num_tokens", "topk", "num_experts", "moe_aux_loss_coeff", "fused", "padding_mask")
    older = ("topk", "moe_aux_loss_coeff", "sequence_partition_group")
    is_newer = len(numbers) > 3 or not {"total_num_tokens", "num_experts"}.isdisjoint(by_name)
    names = newer if is_newer else older
    given = dict(zip(names, numbers)) | by_name
    needed = {name for name in names if name not in ("fused", "padding_mask", "sequence_partition_group")}
    if len(numbers) > len(names) or not needed <= given.keys() <= {*names} or by_name.keys() & {*names[: len(numbers)]}:
        raise TypeError(
            f"switch_load_balancing_loss_func: {len(numbers)} values after tokens_per_expert and {sorted(by_name)}; give "
            f"{', '.join(newer[:4])}, or as before {', '.join(older[:2])}"
        )
    group = given.get("sequence_partition_group", sequence_partition_group)
    padding_mask = given.get("padding_mask", padding_mask)
    tokens = given.get("total_num_tokens", len(probs))
    if group is not None:
        axis = axis_of_group(group)
        collectives.all_reduce(tokens_per_expert, axis)
        tokens = tokens * axis.size
    if padding_mask is not None:
        probs = probs * padding_mask.unsqueeze(-1)
    loss = moe_utils.balancing_loss(tokens_per_expert, probs.sum(0), tokens, given["topk"])
    return loss * given["moe_aux_loss_coeff"]


def get_updated_expert_bias(
    tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float, tp_dp_cp_group: Any = None
) -> Tensor:
    """Return the bias [E] after a step; sums tokens_per_expert [E] over the ranks, in place. Every rank must call.

    tp_dp_cp_group: default: all ranks of this pipeline stage.
    """
    mesh = get_mesh()
    axes = [mesh["tp"], mesh.tokens] if tp_dp_cp_group is None else [axis_of_group(tp_dp_cp_group)]
    with torch.no_grad():
        for axis in axes:
            collectives.all_reduce(tokens_per_expert, axis)
        return moe_utils.updated_expert_bias(expert_bias, tokens_per_expert, expert_bias_update_rate)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (weights [T, E], which choices the experts take: bool [T, E]) if each takes its share of all T tokens x the factor.

    routing_probs, routing_map: [T, E], of `topk_routing_with_score_function`. drop_policy: probs or position.
    pad_to_capacity: an expert with fewer tokens takes others too, with weight 0. Raises ValueError.
    """
    tokens, experts = routing_probs.shape
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy}; give probs or position")
    capacity = moe_utils.get_capacity(tokens * router_topk, experts, capacity_factor)
    values = routing_probs.detach() if drop_policy == "probs" else routing_map.to(torch.int32)
    order = values.sort(dim=0, descending=True, stable=True).indices[:capacity]
    taken = torch.zeros_like(routing_map, dtype=torch.bool).scatter(0, order, True)
    final_map = taken if pad_to_capacity else routing_map.bool() & taken
    return routing_probs * final_map, final_map
