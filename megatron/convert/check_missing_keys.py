"""The parameters of a model that a folder or a checkpoint does not hold.

of a head that the folder's architecture lacks    no fault: state["absent_heads"] lists them; a run draws their first values
any other                                         refused by name, unless --allow-missing-tensors is given

A bare BertModel has no pretraining heads, a LlamaModel no output layer: the `architectures` of config.json say so.
Without torch.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron.convert.families.family import Family
from megatron.convert.families.registry import FAMILIES
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.transformer.expected_parameter_names import PARAMETER_NAMES
from megatron.core.transformer.model_config import ModelConfig

ABSENT_HEADS = "absent_heads"  # of a checkpoint's state: the names of parameters
ALLOW = "--allow-missing-tensors"
_PREFIX = "model/"
_ORDER_OF_SENTENCES = ("binary_head.", "pooler.")  # what --bert-no-binary-head leaves out


def names_of(model: str, config: ModelConfig) -> list[str] | None:
    """The names of a model's parameters; None for a class that is not known here."""
    return PARAMETER_NAMES[model](config) if model in PARAMETER_NAMES else None


def absent_heads_of(family: Family, config: ModelConfig, architectures: Any, there: Collection[str]) -> list[str]:
    """The parameters of heads that a folder lacks as a whole, as its architectures do. there: names of ours that it has."""
    found = []
    for head in family.heads_lacking(architectures):
        mine = head.of(names_of(family.model, config) or ())
        found += [] if any(name in there for name in mine) else mine
    return found


def without_order_of_sentences(config: ModelConfig) -> list[str]:
    """The parameters that a BERT without the head of sentence order does not have."""
    return [name for name in PARAMETER_NAMES["BertModel"](config) if name.startswith(_ORDER_OF_SENTENCES)]


def absent_from(state: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """The parameters that a checkpoint should hold and does not. tensors: the names of what it holds, as in its manifest."""
    model = state.get("model", "GPTModel")
    config = build(ModelConfig, state["config"]["transformer"])
    lacking = [name for name in names_of(model, config) or () if _PREFIX + name not in tensors]
    if lacking and model == "BertModel" and ABSENT_HEADS not in state:
        # A run's own: its model had the head of sentence order, or had it not.
        optional = without_order_of_sentences(config)
        lacking = [name for name in lacking if name not in optional] if {*optional} <= {*lacking} else lacking
    heads = {*heads_in_state(state)}
    return [name for name in lacking if name not in heads]


def heads_in_state(state: Mapping[str, Any]) -> list[str]:
    """The parameters of heads that the architecture lacks. Raises ConfigError for a state that no run has written."""
    found = state.get(ABSENT_HEADS, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{ABSENT_HEADS} is {found!r:.40}, not a list of names")
    return found


def check_complete(
    state: Mapping[str, Any],
    tensors: Collection[str],
    source: str,
    *,
    allow: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> None:
    """Refuse to write a model that lacks tensors. allow: each is named instead. note: told of them, and of absent heads.

    Raises CheckpointError.
    """
    absent = absent_from(state, tensors)
    if absent and not allow:
        raise CheckpointError(source, [f"lacks {both_names(state, name)}" for name in absent], advice_of(state))
    for name in absent:
        note(f"WARNING: {source} lacks {both_names(state, name)}: what is written lacks it too")
    if heads := heads_in_state(state):
        note(
            f"{source} has no {shown_heads(heads)}, as its architecture: what is written has none; a run draws first values"
        )


def advice_of(state: Mapping[str, Any]) -> str:
    again = "fetch the folder again" if "origin" in state else "take a complete checkpoint"
    return f"{again}; {ALLOW} goes on without them"


def both_names(state: Mapping[str, Any], ours: str) -> str:
    """A parameter of ours, behind the names that the folder's family has for it."""
    origin = state.get("origin")
    kind = origin.get("model_type") if isinstance(origin, dict) else None
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    rows = [] if family is None else _rows_about(family, state, ours)
    return f"{', '.join(rows)} ({ours})" if rows else ours


def _rows_about(family: Family, state: Mapping[str, Any], ours: str) -> list[str]:
    config = build(ModelConfig, state["config"]["transformer"])
    parts = ours.split(".")
    numbers = [part for part in parts if part.isdigit()]
    number = numbers[0] if numbers else ""
    for row in family.rows:
        if row.gated in (None, config.is_gated) and row.ours.format(i=number, j=number) == ours:
            return [name.format(i=number, j=number) for name in row.theirs]
    return []


def shown_heads(names: Collection[str]) -> str:
    """lm_head.dense.weight, lm_head.norm.weight, ...: lm_head, of 4 parameters"""
    heads = dict.fromkeys(name.removeprefix("language_model.").split(".")[0] for name in names)
    return f"{', '.join(heads)} ({len(names)} parameters)"
