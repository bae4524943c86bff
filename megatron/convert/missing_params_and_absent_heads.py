"""Find the parameters of a model that a folder or a checkpoint does not hold.

parameters of a head that the architecture lacks    no error: state["absent_heads"] lists them; a run initializes them
any other parameter                                 refused by name, unless --allow-missing-tensors is given

A bare BertModel has no pretraining heads, a LlamaModel no output layer: the `architectures` of config.json say so.
Without torch.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.registry import FAMILIES
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.transformer.expected_parameter_names import PARAMETER_NAMES
from megatron.core.transformer.model_config import ModelConfig

ABSENT_HEADS = "absent_heads"  # key of a checkpoint's state: a list of parameter names
ALLOW_FLAG = "--allow-missing-tensors"
_PREFIX = "model/"
_BINARY_HEAD = ("binary_head.", "pooler.")  # what --bert-no-binary-head leaves out


def parameter_names(model: str, config: ModelConfig) -> list[str] | None:
    """Return the names of a model's parameters; None for a class that is not known here."""
    return PARAMETER_NAMES[model](config) if model in PARAMETER_NAMES else None


def absent_head_parameters(
    family: Family, config: ModelConfig, architectures: Any, present: Collection[str]
) -> list[str]:
    """Return the parameters of the heads that a folder's architectures do not have.

    present: our names of the parameters that the folder holds. A head of which it holds any parameter is not absent.
    """
    absent = []
    for head in family.absent_heads(architectures):
        head_params = head.of(parameter_names(family.model, config) or ())
        if not any(name in present for name in head_params):
            absent += head_params
    return absent


def binary_head_parameters(config: ModelConfig) -> list[str]:
    """Return the parameters that a BERT without the binary head (sentence order) does not have."""
    return [name for name in PARAMETER_NAMES["BertModel"](config) if name.startswith(_BINARY_HEAD)]


def missing_parameters(state: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """Return the parameters that a checkpoint should hold and does not. tensors: the names in its manifest."""
    model = state.get("model", "GPTModel")
    config = build(ModelConfig, state["config"]["transformer"])
    missing = [name for name in parameter_names(model, config) or () if _PREFIX + name not in tensors]
    if missing and model == "BertModel" and ABSENT_HEADS not in state:
        # A checkpoint that a run wrote: it has either all of the binary head or none of it.
        optional = binary_head_parameters(config)
        if {*optional} <= {*missing}:
            missing = [name for name in missing if name not in optional]
    absent_heads = {*recorded_absent_head_params(state)}
    return [name for name in missing if name not in absent_heads]


def recorded_absent_head_params(state: Mapping[str, Any]) -> list[str]:
    """Return the parameters of heads that the architecture lacks.

    Raises ConfigError for a state that no run has written.
    """
    names = state.get(ABSENT_HEADS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{ABSENT_HEADS} is {names!r:.40}; it must be a list of names")
    return names


def check_complete(
    state: Mapping[str, Any],
    tensors: Collection[str],
    source: str,
    *,
    allow: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> None:
    """Refuse to write a model that lacks parameters.

    allow: call `note` with a line about each instead. note: also called about heads that the architecture does not
    have. Raises CheckpointError.
    """
    missing = missing_parameters(state, tensors)
    if missing and not allow:
        problems = [f"lacks {with_hf_names(state, name)}" for name in missing]
        raise CheckpointError(source, problems, missing_tensors_advice(state))
    for name in missing:
        note(f"WARNING: {source} lacks {with_hf_names(state, name)}: what is written lacks it too")
    absent_heads = recorded_absent_head_params(state)
    if absent_heads:
        note(
            f"{source} has no {describe_heads(absent_heads)}, as its architecture: what is written has none; a run draws "
            "first values"
        )


def missing_tensors_advice(state: Mapping[str, Any]) -> str:
    """Return what a user can do, as the end of an error message."""
    again = "fetch the folder again" if "origin" in state else "take a complete checkpoint"
    return f"{again}; {ALLOW_FLAG} goes on without them"


def with_hf_names(state: Mapping[str, Any], param: str) -> str:
    """Return a parameter's names in the folder that the model came from, then ours in parentheses.

    If they are unknown it is ours alone.
    """
    origin = state.get("origin")
    kind = origin.get("model_type") if isinstance(origin, dict) else None
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    hf_params = [] if family is None else _hf_params_of(family, state, param)
    return f"{', '.join(hf_params)} ({param})" if hf_params else param


def _hf_params_of(family: Family, state: Mapping[str, Any], param: str) -> list[str]:
    config = build(ModelConfig, state["config"]["transformer"])
    layer = next((part for part in param.split(".") if part.isdigit()), "")
    for mapping in family.mappings:
        if mapping.gated in (None, config.is_gated) and mapping.param.format(i=layer, j=layer) == param:
            return list(mapping.of_layer(int(layer or 0), config.num_experts or 0).hf_params)
    return []


def describe_heads(names: Collection[str]) -> str:
    """Return the heads of these parameters, such as "lm_head (4 parameters)".

    That is for lm_head.dense.weight, lm_head.norm.bias and two more.
    """
    heads = dict.fromkeys(name.removeprefix("language_model.").split(".")[0] for name in names)
    return f"{', '.join(heads)} ({len(names)} parameters)"
