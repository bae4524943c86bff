"""Rotary positions in a config.json, in the spellings of transformers 4 and 5. No torch.

    4    rope_theta, rope_scaling {type or rope_type, factor, ...} or null, partial_rotary_factor
    5    rope_parameters {rope_type, rope_theta, partial_rotary_factor, factor, ...}, or one such object for each layer type

Both are written: transformers 4 reads a file of 5 without a word and computes with a base of 10000 and no scaling. A kind of
scaling that is unknown, or two spellings that disagree, is refused.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.core.interchange.families.fields import Field, Given, ModelSettings
from megatron.core.transformer.position_config import RopeScaling, read_rope_scaling

_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_SCALING, _NEW = "rope_scaling", "rope_parameters"
_OLD_LENGTH = "original_max_position_embeddings"
_FULL, _WINDOWS = "full_attention", "sliding_attention"
_OLD_KINDS = {"su": "longrope"}
_IGNORED = (_THETA, _PARTIAL, "type", "rope_type", "finetuned")


def rope(
    theta: float = 10000.0,
    *,
    partial: float = 1.0,
    theta_key: str = _THETA,
    partial_key: str = _PARTIAL,
    of_windows: tuple[str, float | None] | None = None,
    interleaved: bool = False,
) -> Field:
    """The rotary positions of all layers. theta, partial: the class's own; the keys: those of transformers 4.

    of_windows: layers with a window have unscaled frequencies of a base of their own, (its key in transformers 4, the class's
    own base; None: the base of the other layers).
    """

    def read(given: Given) -> ModelSettings:
        new, windows = _nested(given) if of_windows else (_object(given, _NEW), {})
        old = _object(given, _SCALING)
        base = given.number(theta_key, new.get(_THETA, theta))
        share = given.number(partial_key, new.get(_PARTIAL, partial))
        if new.get(_THETA, base) != base or new.get(_PARTIAL, share) != share:
            raise given.wrong(_NEW, f"{theta_key} and {partial_key} say {base} and {share}; which of them counts?")
        spellings = [_scaling(given, one) for one in (old, new) if one]
        if any(one != spellings[0] for one in spellings):
            raise given.wrong(_SCALING, f"{_NEW} says {new!r:.120}; which of them counts?")
        settings = {"rotary_base": float(base), "rotary_percent": float(share), "rotary_interleaved": interleaved}
        if spellings and spellings[0] is not None:
            settings["rope_scaling"] = spellings[0]
        if of_windows:
            key, own = of_windows
            local = given.number(key, windows.get(_THETA, own)) if key else windows.get(_THETA, own)
            settings["rotary_base_of_windows"] = float(local or base)
        return settings

    def write(model: Any) -> dict[str, Any]:
        scaling = next((one.scaling for one in model.ropes if one.scaling), None)
        said = {} if scaling is None else _without_defaults(scaling)
        parts = {} if model.rotary_percent == partial else {_PARTIAL: model.rotary_percent}
        new = {"rope_type": "default", _THETA: model.rotary_base} | parts | said
        keys = {theta_key: model.rotary_base, _SCALING: said or None, _NEW: new}
        if parts:
            keys[partial_key] = model.rotary_percent
        if scaling is not None and scaling.rope_type == "longrope":  # as transformers 4 wants it
            lists = {name: list(getattr(scaling, name)) for name in ("short_factor", "long_factor")}
            keys |= {_OLD_LENGTH: said[_OLD_LENGTH], _SCALING: {"type": "longrope"} | lists}
        if of_windows:
            local = model.rotary_base_of_windows or model.rotary_base
            keys |= {of_windows[0]: local} if of_windows[0] else {}
            keys[_NEW] = {_FULL: new, _WINDOWS: {"rope_type": "default", _THETA: local}}
        return keys

    keys = (theta_key, partial_key, _SCALING, _NEW, _OLD_LENGTH)
    return Field((*keys, of_windows[0]) if of_windows and of_windows[0] else keys, read, write)


def _object(given: Given, name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise given.wrong(name, "it must be an object or null")
    return value


def _nested(given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of full layers, and of those with a window."""
    found = _object(given, _NEW)
    if found.keys() - {_FULL, _WINDOWS}:
        raise given.wrong(_NEW, f"it must have {_FULL} and {_WINDOWS}")
    parts = [found.get(name) or {} for name in (_FULL, _WINDOWS)]
    if not all(isinstance(part, dict) for part in parts) or _kind(given, parts[1]) != "default":
        raise given.wrong(_NEW, "layers with a window must rotate without a scaling")
    return parts[0], parts[1]


def _kind(given: Given, parameters: Mapping[str, Any]) -> Any:
    """The kind of scaling. Where two names of it differ, transformers 4 takes `type`, and transformers 5 `rope_type`."""
    kinds = [parameters[name] for name in ("rope_type", "type") if parameters.get(name) is not None]
    kinds = [_OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if kinds and kinds[0] != kinds[-1]:
        name = _SCALING if parameters is given.values.get(_SCALING) else _NEW
        raise given.wrong(name, f"rope_type {kinds[0]!r:.40} or type {kinds[1]!r:.40}: which of them counts?")
    return kinds[0] if kinds else "default"


def _scaling(given: Given, parameters: Mapping[str, Any]) -> str | None:
    """The scaling in the one spelling of --rope-scaling, with what config.json leaves to other keys; None if there is none."""
    kind = _kind(given, parameters)
    said = {key: value for key, value in parameters.items() if key not in _IGNORED and value is not None}
    if kind == "default":
        if said:
            raise given.wrong(_NEW, f"rope_type default has no {', '.join(sorted(said))}")
        return None
    if kind == "yarn" and "mrope_section" in said:
        raise given.wrong(_NEW, "positions of images are not built")
    length = given.count("max_position_embeddings", 2048)
    if kind == "dynamic" and said.setdefault(_OLD_LENGTH, length) != length:
        raise given.wrong(_SCALING, f"{_OLD_LENGTH} must be max_position_embeddings, {length}")
    if kind in ("yarn", "longrope"):
        old = said.setdefault(_OLD_LENGTH, given.count(_OLD_LENGTH, length))
        said.setdefault("factor", length / old if type(old) is int and old > 0 else None)
    try:
        return read_rope_scaling(json.dumps({"rope_type": kind} | said))
    except (argparse.ArgumentTypeError, TypeError) as error:
        raise given.wrong(_SCALING if parameters is given.values.get(_SCALING) else _NEW, str(error)) from None


def _without_defaults(scaling: RopeScaling) -> dict[str, Any]:
    said = {f.name: getattr(scaling, f.name) for f in fields(RopeScaling) if getattr(scaling, f.name) != f.default}
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in said.items()}
    if scaling.rope_type == "dynamic":  # which takes it from max_position_embeddings
        del said[_OLD_LENGTH]
    if scaling.rope_type == "llama3":  # which leaves nothing out
        said = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor} | said
    return said
