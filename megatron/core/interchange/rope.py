"""Rotary positions in a config.json, in the spellings of transformers 4 and 5. No torch.

    4    rope_theta, rope_scaling {type or rope_type, factor, ...} or null, partial_rotary_factor
    5    rope_parameters {rope_type, rope_theta, partial_rotary_factor, factor, ...}

Both are written: transformers 4 reads a file of 5 without a word and computes with a base of 10000 and no scaling. A kind of
scaling that is unknown, or two spellings that disagree, is refused.
"""

import json
from typing import Any

from megatron.core.interchange.fields import Field, Given, ModelSettings

_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_SCALING, _NEW = "rope_scaling", "rope_parameters"
_OLD_NAMES = {"su": "longrope"}


def rope(
    theta: float = 10000.0, *, partial: float = 1.0, base_name: str = _THETA, partial_name: str = _PARTIAL
) -> Field:
    """The rotary positions of all layers. theta, partial: the class's own; the names: those of transformers 4."""

    def read(given: Given) -> ModelSettings:
        new = _object(given, _NEW)
        old = _object(given, _SCALING)
        base = given.number(base_name, new.get(_THETA, theta))
        share = given.number(partial_name, new.get(_PARTIAL, partial))
        for name, value, said in ((_THETA, base, base_name), (_PARTIAL, share, partial_name)):
            if new.get(name, value) != value:
                raise given.wrong(said, f"{_NEW} says {new[name]!r}; which of them counts?")
        scaling = {**new, **old}
        if old and new and _without_base(old) != _without_base(new):
            raise given.wrong(_SCALING, f"{_NEW} says {new!r}; which of them counts?")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        settings = {"rotary_base": float(base), "rotary_percent": float(share)}
        if kind != "default":
            settings["rope_scaling"] = {"rope_type": _OLD_NAMES.get(kind, kind)} | _without_base(scaling)
        return settings

    def write(model: Any) -> dict[str, Any]:
        base, share = model.rotary_base, model.rotary_percent
        scaling = None if model.rope_scaling is None else json.loads(model.rope_scaling)
        parts = {} if share == partial else {_PARTIAL: share}
        new = {"rope_type": "default", _THETA: base} | parts | (scaling or {})
        return {base_name: base, _SCALING: scaling, _NEW: new} | ({partial_name: share} if parts else {})

    return Field((base_name, _SCALING, _NEW, partial_name), read, write)


def _object(given: Given, name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise given.wrong(name, "it must be an object or null")
    return value


def _without_base(scaling: dict[str, Any]) -> dict[str, Any]:
    """The scaling alone, in one spelling."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rest = {k: v for k, v in scaling.items() if k not in (_THETA, _PARTIAL, "type", "rope_type")}
    return {"rope_type": kind} | rest
