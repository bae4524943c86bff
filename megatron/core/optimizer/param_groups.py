"""Parameter groups: weight decay, learning rate and optimizer by name and shape. Pure.

group_of(name, placement) -> ParamGroup        a fork passes its own to pretrain(); parameters of equal groups are
                                               updated together, as segments of the flat buffers
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.core.sharding.placement import Placement


@dataclass(frozen=True)
class ParamGroup:
    """How a parameter is updated, relative to the run's settings."""

    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0
    decoupled: bool = False  # follows --decoupled-lr, if given, instead of --lr
    optimizer: str | None = None  # a name of OPTIMIZERS; None: --optimizer


GroupRule = Callable[[str, Placement], ParamGroup]


def default_group(name: str, placement: Placement) -> ParamGroup:
    """Megatron's rule: vectors (biases, norm weights) do not decay; word table and output layer follow
    --decoupled-lr."""
    return ParamGroup(
        weight_decay_multiplier=1.0 if len(placement.shape) > 1 else 0.0,
        decoupled=name.endswith(("word_embeddings.weight", "output_layer.weight")),
    )


def without_decay_of_tables(group_of: GroupRule) -> GroupRule:
    """`group_of`, with no weight decay for the tables of words, positions and token types."""

    def routed(name: str, placement: Placement) -> ParamGroup:
        group = group_of(name, placement)
        return replace(group, weight_decay_multiplier=0.0) if name.endswith(_TABLES) else group

    return routed


def others_to(optimizer: str, group_of: GroupRule) -> GroupRule:
    """`group_of`, with `optimizer` for all that is no layer's matrix and that `group_of` gives no optimizer: tables of
    words and positions, the output layer, norms, biases."""

    def routed(name: str, placement: Placement) -> ParamGroup:
        group = group_of(name, placement)
        is_matrix = len(placement.shape) == 2 and not name.endswith(_NO_MATRICES)
        return group if is_matrix or group.optimizer else replace(group, optimizer=optimizer)

    return routed


_TABLES = ("embeddings.weight", "relative_pos_emb.weight")
_NO_MATRICES = (*_TABLES, "output_layer.weight")
