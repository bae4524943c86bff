"""Parameter groups: weight decay, learning rate and optimizer by name and shape. Pure.

group_of(name, placement) -> ParamGroup        a fork passes its own to pretrain(); parameters of equal groups are
                                               updated together, as segments of the flat buffers
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.sharding.placement import Placement


@dataclass(frozen=True)
class ParamGroup:
    """The update of a parameter, relative to the run's settings."""

    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0
    decoupled: bool = False  # follows --decoupled-lr, if given, instead of --lr
    optimizer: str | None = None  # a name of OPTIMIZERS; None: --optimizer


GroupRule = Callable[[str, Placement], ParamGroup]


def default_group(name: str, placement: Placement) -> ParamGroup:
    """Return the group by Megatron's rule: vectors (biases, also those of stacked experts, norm weights) do not decay.

    Embedding and output layer follow --decoupled-lr.
    """
    return ParamGroup(
        weight_decay_multiplier=1.0 if len(placement.shape) > 1 and not name.endswith(".bias") else 0.0,
        decoupled=name.endswith(("word_embeddings.weight", "output_layer.weight")),
    )


def without_embedding_decay(group_of: GroupRule) -> GroupRule:
    """Return `group_of` with no weight decay for the embeddings of tokens, positions and token types."""

    def rule(name: str, placement: Placement) -> ParamGroup:
        group = group_of(name, placement)
        if name.endswith(_EMBEDDINGS):
            return replace(group, weight_decay_multiplier=0.0)
        return group

    return rule


def non_matrices_to(optimizer: str, group_of: GroupRule) -> GroupRule:
    """Return `group_of` with `optimizer` for every parameter that is neither a layer's matrix nor a stack of experts'.

    These are the embeddings, the output layer, norms and biases.
    """

    def rule(name: str, placement: Placement) -> ParamGroup:
        group = group_of(name, placement)
        has_matrices = len(placement.shape) == 2 or stacks_experts(placement)
        if (has_matrices and not name.endswith(_NOT_OF_LAYERS)) or group.optimizer:
            return group
        return replace(group, optimizer=optimizer)

    return rule


def stacks_experts(placement: Placement) -> bool:
    """Return whether the parameter [E, .., out, in] stacks the matrices [out, in] of experts, which ep divides."""
    leading = len(placement.shape) - 2
    return placement.shard.get("ep", leading) < leading


_EMBEDDINGS = ("embeddings.weight", "relative_pos_emb.weight")
_NOT_OF_LAYERS = (*_EMBEDDINGS, "output_layer.weight", ".bias")
