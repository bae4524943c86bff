"""The functions behind the registry entries that a run uses, which are compared when it resumes.

A script may add entries to KERNELS, OPTIMIZERS and TOKENIZERS, or replace one. The name of an entry says which flag
chooses it and how it is computed. The result that it computes is its `computes`, which a checkpoint keeps under
"functions": a kernel may be exchanged for another one of the same function, but not for another function of the same
name. Entries of SCHEDULES and METHODS all promise the numbers of one process.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.config import Config


def functions_of(config: Config) -> dict[str, str]:
    """Return setting -> the function that the entry named by this setting computes."""
    functions = {"attention_backend": _attention_function(config.transformer.attention_backend)}
    functions |= config.optimizer.functions
    kind = config.tokenizer.tokenizer_type
    if kind is not None:
        functions["tokenizer_type"] = TOKENIZERS.function_of(kind)
    if config.restarts_angles:
        functions["reset_position_ids"] = "rotary angles restart"
    return functions


def _attention_function(backend: str) -> str:
    return ModelConfig.function_of_attention(backend) or f"{backend} of a script"


def function_before(state: Mapping[str, Any], setting: str) -> str | None:
    """Return the function that the checkpoint's run computed for this setting; None if the checkpoint does not say.

    Older checkpoints have only the name of their attention kernel: it is taken for the kernel of that name in this
    script.
    """
    function = state.get(FUNCTIONS, {}).get(setting)
    if function is not None or setting != "attention_backend":
        return function
    backend = state["config"]["transformer"].get(setting)
    return None if backend is None else _attention_function(backend)


def attention_problem(config: Config, state: Mapping[str, Any], source: str) -> str | None:
    """Return why a checkpoint's attention is not this run's; None if it is. source: the flag and folder."""
    backend = config.transformer.attention_backend
    before = function_before(state, "attention_backend")
    now = _attention_function(backend)
    if before in (None, now):
        return None
    saved_backend = state["config"]["transformer"].get("attention_backend")
    return (
        f"{source} holds another model; attention: the checkpoint's --attention-backend {saved_backend} computes {before!r}, "
        f"this run's --attention-backend {backend} {now!r}; give --attention-backend {saved_backend} with the script that adds "
        f"it. A kernel that computes the same says so: Kernel(..., computes={before!r})"
    )


def tokenizer_type_problem(config: Config, state: Mapping[str, Any], source: str) -> str | None:
    """Return why a checkpoint's tokenizer type is not this run's type of the same name; None if it is."""
    kind = config.tokenizer.tokenizer_type
    before = function_before(state, "tokenizer_type")
    now = functions_of(config).get("tokenizer_type")
    if before is None or now in (None, before):
        return None
    return (
        f"{source} holds a model of another tokenizer: --tokenizer-type {kind} was {before!r}, and is {now!r} in this script; "
        "run the script that adds it. If each id stands for the same token in both tokenizers, or the run is to learn "
        "the meaning of the ids anew, give --allow-tokenizer-change"
    )


def rotary_restart_began(config: Config, state: Mapping[str, Any]) -> bool:
    """Return whether --reset-position-ids restarts rotary angles now, but did not in the checkpoint's older version."""
    before = state["config"].get("data", {}).get("reset_position_ids")
    return bool(before) and config.restarts_angles and function_before(state, "reset_position_ids") is None


def optimizer_problem(config: Config, state: Mapping[str, Any]) -> str | None:
    """Return the optimizer state of the checkpoint, in words, if it is that of another update.

    That is so if this run's optimizer of that name computes another one.
    """
    for setting, now in config.optimizer.functions.items():
        before = function_before(state, setting)
        if before not in (None, now):
            name = state["config"]["optimizer"].get(setting)
            return f"the state of --optimizer {name} that computes {before!r}, but this run's computes {now!r}"
    return None
