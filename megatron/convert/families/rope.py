"""Rotary positions in a config.json, in the spellings of transformers 4 and 5. No torch.

    4    rope_theta, rope_scaling {type or rope_type, factor, ...} or null, partial_rotary_factor
    5    rope_parameters {rope_type, rope_theta, partial_rotary_factor, factor, ...}, or one such object for each layer type

Both are written: transformers 4 reads a file of 5 without a word and computes with a base of 10000 and no scaling. A kind of
scaling that is unknown, or two spellings that disagree, is refused.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.convert.families.config_fields import Field, Given, ModelSettings
from megatron.core.transformer.position_config import RopeScaling, read_rope_scaling, rope_scaling_of

_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"
_SCALING, _NEW = "rope_scaling", "rope_parameters"
_OLD_LENGTH = "original_max_position_embeddings"
_FULL, _WINDOWS = "full_attention", "sliding_attention"
_LONG_LISTS = ("short_factor", "long_factor")
_OLD_KINDS = {"su": "longrope"}
_IGNORED = (_THETA, _PARTIAL, "type", "rope_type", "finetuned")


@dataclass(frozen=True)
class RopeSpelling:
    """How the configs of a class say the rotary positions of all layers.

    theta, partial: the class's own. theta None: it differs between 4 and 5, so that a config.json must say it. partial
    None: the
    class rotates whole heads. theta_key, partial_key: what transformers 4 calls them; type_key: and the kind of a scaling.
    of_windows: layers with a window have unscaled frequencies of a base of their own, (its key in transformers 4, the
    class's
    own base; None: the base of the other layers). only_longrope: the class has no other scaling, and takes two older
    names for
    it; its own old length.
    """

    theta: float | None = 10000.0
    partial: float | None = None
    theta_key: str = _THETA
    partial_key: str = _PARTIAL
    type_key: str = "rope_type"
    of_windows: tuple[str, float | None] | None = None
    interleaved: bool = False
    only_longrope: int | None = None

    def keys(self) -> tuple[str, ...]:
        local = self.of_windows[0] if self.of_windows else ""
        keys = (self.theta_key, self.partial_key, _THETA, _PARTIAL, _SCALING, _NEW, _OLD_LENGTH)
        return tuple(dict.fromkeys((*keys, local) if local else keys))

    def read(self, given: Given) -> ModelSettings:
        new, windows = _nested(given) if self.of_windows else (_object(given, _NEW), {})
        base, share = self._base_and_share(given, new)
        spellings = [self._scaling_in(given, one) for one in (new, _object(given, _SCALING)) if one]
        if len({_meaning(one) for one in spellings}) > 1:
            raise given.wrong(_SCALING, f"{_NEW} says {new!r:.120}; which of them counts?")
        settings = {"rotary_base": base, "rotary_percent": share, "rotary_interleaved": self.interleaved}
        if spellings and spellings[0] is not None:
            settings["rope_scaling"] = spellings[0]
        if self.of_windows:
            key, own = self.of_windows
            local = _either(given, key, windows, _THETA, own or base)
            if windows.get(_THETA, local) != local:
                raise given.wrong(_NEW, f"{key} says {local}; which of them counts?")
            settings["rotary_base_of_windows"] = local
        return settings

    def _base_and_share(self, given: Given, new: Mapping[str, Any]) -> tuple[float, float]:
        base = _either(given, self.theta_key, new, _THETA, self.theta)
        share = _either(given, self.partial_key, new, _PARTIAL, self.partial or 1.0)
        if self.partial is None and share != 1:
            key = self.partial_key if given.get(self.partial_key) else _NEW
            raise given.wrong(key, f"a model of this kind rotates whole heads, not {share} of each")
        said = f"{self.theta_key} and {self.partial_key} say {base} and {share}; which of them counts?"
        for key, counts in ((_THETA, base), (_PARTIAL, share)):  # in old files beside keys of the family's own
            if given.get(key) not in (None, counts):
                raise given.wrong(key, said)
            if new.get(key, counts) != counts:
                raise given.wrong(_NEW, said)
        return base, share

    def _scaling_in(self, given: Given, parameters: Mapping[str, Any]) -> str | None:
        kind = _kind(given, parameters, _OLD_KINDS | ({"yarn": "longrope"} if self.only_longrope else {}))
        if self.only_longrope and kind not in ("default", "longrope"):
            raise given.wrong(_SCALING if given.get(_SCALING) else _NEW, "what is read is default or longrope")
        return _scaling(given, parameters, kind, self.only_longrope)

    def write(self, model: Any) -> dict[str, Any]:
        scaling = next((one.scaling for one in model.ropes if one.scaling), None)
        said = {} if scaling is None else _without_defaults(scaling)
        parts = {} if self.partial in (None, model.rotary_percent) else {_PARTIAL: model.rotary_percent}
        new = {"rope_type": "default", _THETA: model.rotary_base} | parts | said
        keys = {self.theta_key: model.rotary_base, _SCALING: self._in_4(model, scaling, said), _NEW: new}
        if parts:
            keys[self.partial_key] = model.rotary_percent
        if scaling is not None and scaling.rope_type == "longrope":
            keys[_OLD_LENGTH] = said[_OLD_LENGTH]
        if self.of_windows:
            local = model.rotary_base_of_windows or model.rotary_base
            keys |= {self.of_windows[0]: local} if self.of_windows[0] else {}
            keys[_NEW] = {_FULL: new, _WINDOWS: {"rope_type": "default", _THETA: local}}
        return keys

    def _in_4(self, model: Any, scaling: RopeScaling | None, said: dict[str, Any]) -> dict[str, Any] | None:
        """rope_scaling, as transformers 4 wants it; of longrope it takes the factor from the lengths alone."""
        if scaling is None:
            return None
        old = {self.type_key if key == "rope_type" else key: value for key, value in said.items()}
        if scaling.rope_type != "longrope":
            return old
        length = model.max_position_embeddings
        if length is None or scaling != replace(scaling, factor=length / said[_OLD_LENGTH], attention_factor=None):
            old["attention_factor"] = scaling.amplitude
        if self.only_longrope:  # no more keys than needed
            return {"type": "longrope"} | {key: old[key] for key in (*_LONG_LISTS, "attention_factor") if key in old}
        return old


def rope(theta: float | None = 10000.0, **more: Any) -> Field:
    """The rotary positions of all layers; arguments as the fields of `RopeSpelling`."""
    spelling = RopeSpelling(theta, **more)
    return Field(spelling.keys(), spelling.read, spelling.write)


def _either(given: Given, key: str, new: Mapping[str, Any], name: str, default: float | None) -> float:
    """The number of a key, or of a name in the newer object where the key is absent or null, or the class's own. "":
    no key."""
    if (not key or given.get(key) is None) and name in new:
        return Given(new, f"{given.source}: {_NEW}").number(name)
    return given.number(key, *([] if default is None else [default])) if key else default


def _meaning(scaling: str | None) -> RopeScaling | None:
    return None if scaling is None else rope_scaling_of(scaling).as_computed


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
    if more := sorted(key for key in parts[1].keys() - {_THETA, "rope_type", "type"} if parts[1][key] is not None):
        raise given.wrong(_NEW, f"{', '.join(more)} of layers with a window is not built")
    return parts[0], parts[1]


def _kind(given: Given, parameters: Mapping[str, Any], renamed: Mapping[str, str] = _OLD_KINDS) -> Any:
    """The kind of scaling. Where two names of it differ, transformers 4 takes `type`, and transformers 5 `rope_type`."""
    kinds = [parameters[name] for name in ("rope_type", "type") if parameters.get(name) is not None]
    kinds = [renamed.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if kinds and kinds[0] != kinds[-1]:
        name = _SCALING if parameters is given.values.get(_SCALING) else _NEW
        raise given.wrong(name, f"rope_type {kinds[0]!r:.40} or type {kinds[1]!r:.40}: which of them counts?")
    return kinds[0] if kinds else "default"


def _scaling(given: Given, parameters: Mapping[str, Any], kind: Any, old_length: int | None) -> str | None:
    """The scaling in the one spelling of --rope-scaling, with what config.json leaves to other keys; None if there is
    none."""
    said = {key: value for key, value in parameters.items() if key not in _IGNORED and value is not None}
    if kind == "default":
        if said:
            raise given.wrong(_NEW, f"rope_type default has no {', '.join(sorted(said))}")
        return None
    if kind == "yarn" and "mrope_section" in said:
        raise given.wrong(_NEW, "positions of images are not built")
    if kind in ("dynamic", "yarn", "longrope"):
        length = given.count("max_position_embeddings")
        if kind == "dynamic" and said.setdefault(_OLD_LENGTH, length) != length:
            raise given.wrong(_SCALING, f"{_OLD_LENGTH} must be max_position_embeddings, {length}")
        if kind != "dynamic":
            old = said.setdefault(_OLD_LENGTH, given.count(_OLD_LENGTH, old_length or length))
            said.setdefault("factor", length / old if type(old) is int and old > 0 else None)
    if kind in ("llama3", "yarn", "longrope") and given.get(_OLD_LENGTH) not in (None, said.get(_OLD_LENGTH)):
        raise given.wrong(_OLD_LENGTH, f"the scaling says {said.get(_OLD_LENGTH)!r:.40}; which of them counts?")
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
