"""What the entries of open tables compute that a run uses, compared at a resume.

A script may add to KERNELS, OPTIMIZERS and TOKENIZERS, or replace an entry. The name of an entry says how it is
computed, and by
which flag. What is computed is the entry's `computes`, which a checkpoint keeps under "functions": kernels of one
function may be
exchanged, an entry of one name and another function may not. SCHEDULES and METHODS promise the numbers of one process,
whatever
the entry.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.base.registry import FUNCTIONS
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.config import Config


def functions_of(config: Config) -> dict[str, str]:
    """Setting -> what the entry that it names computes."""
    found = {"attention_backend": _of_attention(config.transformer.attention_backend), **config.optimizer.functions}
    if (kind := config.tokenizer.tokenizer_type) is not None:
        found["tokenizer_type"] = TOKENIZERS.function_of(kind)
    if config.restarts_angles:
        found["reset_position_ids"] = "rotary angles restart"
    return found


def _of_attention(backend: str) -> str:
    return ModelConfig.function_of_attention(backend) or f"{backend} of a script"


def function_before(state: Mapping[str, Any], setting: str) -> str | None:
    """What the checkpoint's run computed by the setting; None if the checkpoint does not say it.

    One that is older than this record has the name of its kernel, which is taken for the kernel of this script, if there
    is one.
    """
    said = state.get(FUNCTIONS, {}).get(setting)
    if said is not None or setting != "attention_backend":
        return said
    named = state["config"]["transformer"].get(setting)
    return None if named is None else _of_attention(named)


def attention_problem(config: Config, state: Mapping[str, Any], given: str) -> str | None:
    """Why a checkpoint's attention is not this run's; None if it is. given: its flag and folder."""
    mine = config.transformer.attention_backend
    before, now = function_before(state, "attention_backend"), _of_attention(mine)
    if before in (None, now):
        return None
    named = state["config"]["transformer"].get("attention_backend")
    return (
        f"{given} holds another model; attention: the checkpoint's --attention-backend {named} computes {before!r}, this run's "
        f"--attention-backend {mine} {now!r}; give --attention-backend {named} with the script that adds it. A kernel that "
        f"computes the same says so: Kernel(..., computes={before!r})"
    )


def tokenizer_problem(config: Config, state: Mapping[str, Any], given: str) -> str | None:
    """Why a checkpoint's type of tokenizer is not this run's of the same name; None if it is."""
    kind = config.tokenizer.tokenizer_type
    before, now = function_before(state, "tokenizer_type"), functions_of(config).get("tokenizer_type")
    if before is None or now in (None, before):
        return None
    return (
        f"{given} holds a model of another tokenizer: --tokenizer-type {kind} was {before!r}, and is {now!r} in this script; "
        "run the script that adds it, or give --allow-tokenizer-change if its ids mean the same or will be learned anew"
    )


def began_to_restart(config: Config, state: Mapping[str, Any]) -> bool:
    """Whether --reset-position-ids restarts rotary angles now and did nothing in the checkpoint's run, of an older
    version."""
    before = state["config"].get("data", {}).get("reset_position_ids")
    return bool(before) and config.restarts_angles and function_before(state, "reset_position_ids") is None


def optimizer_problem(config: Config, state: Mapping[str, Any]) -> str | None:
    """The optimizer of the checkpoint's state, in words, where the one of that name here computes another update."""
    for setting, now in config.optimizer.functions.items():
        before = function_before(state, setting)
        if before not in (None, now):
            name = state["config"]["optimizer"].get(setting)
            return f"the state of --optimizer {name} that computes {before!r}, this run's computes {now!r}"
    return None
