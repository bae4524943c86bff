"""Read and write rotary positions in a config.json, in the spellings of transformers 4 and 5. No torch.

    4    rope_theta, rope_scaling {type or rope_type, factor, ...} or null, partial_rotary_factor
    5    rope_parameters {rope_type, rope_theta, partial_rotary_factor, factor, ...}, or an object for each layer type

Both are written: transformers 4 reads a file of 5 silently, and computes with a base of 10000 and no scaling. An
unknown kind of scaling, or two spellings that disagree, are refused.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.convert.families.config_fields import ConfigReader, Field, ModelSettings
from megatron.core.transformer.position_config import RopeScaling, read_rope_scaling, rope_scaling_of

_THETA = "rope_theta"
_PARTIAL = "partial_rotary_factor"
_SCALING_4 = "rope_scaling"  # the object of transformers 4
_PARAMETERS_5 = "rope_parameters"  # and of 5
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_FULL = "full_attention"
_WINDOWS = "sliding_attention"
_LONG_LISTS = ("short_factor", "long_factor")
_OLD_KINDS = {"su": "longrope"}  # old name of a kind -> its name today
_NOT_OF_THE_SCALING = (_THETA, _PARTIAL, "type", "rope_type", "finetuned")


@dataclass(frozen=True)
class RopeSpelling:
    """The keys and defaults with which a class of transformers describes its rotary positions.

    theta          the class's own base; None: it differs between 4 and 5, so that a config.json must name it
    partial        the class's own share of a head that rotates; None: the class rotates full heads
    theta_key      the name of the base in transformers 4
    partial_key    the name of the share
    type_key       the name of the kind of a scaling
    local_base     layers with a sliding window have unscaled frequencies of a base of their own: (its key in
                   transformers 4, the class's own base; None: the base of the other layers)
    interleaved    neighbouring features rotate as a pair, instead of those of the two halves
    only_longrope  the class has no other scaling than longrope, and takes two older names for it: its own original
                   length
    """

    theta: float | None = 10000.0
    partial: float | None = None
    theta_key: str = _THETA
    partial_key: str = _PARTIAL
    type_key: str = "rope_type"
    local_base: tuple[str, float | None] | None = None
    interleaved: bool = False
    only_longrope: int | None = None

    def keys(self) -> tuple[str, ...]:
        """Return all keys of a config.json that `read` understands."""
        keys = [self.theta_key, self.partial_key, _THETA, _PARTIAL, _SCALING_4, _PARAMETERS_5, _ORIGINAL_LENGTH]
        if self.local_base and self.local_base[0]:
            keys.append(self.local_base[0])
        return tuple(dict.fromkeys(keys))

    def read(self, reader: ConfigReader) -> ModelSettings:
        # transformers 5's object, and that of layers with a sliding window
        if self.local_base:
            parameters, window_parameters = _nested_parameters(reader)
        else:
            parameters = _object(reader, _PARAMETERS_5)
            window_parameters = {}

        # base, and share of a head
        base, share = self._base_and_share(reader, parameters)
        settings = {"rotary_base": base, "rotary_percent": share, "rotary_interleaved": self.interleaved}

        # scaling: one meaning, in one spelling or in both
        spellings = [
            self._scaling_in(reader, spelling) for spelling in (parameters, _object(reader, _SCALING_4)) if spelling
        ]
        if len({_meaning(scaling) for scaling in spellings}) > 1:
            raise reader.error(_SCALING_4, f"{_PARAMETERS_5} says {parameters!r:.120}; which of them counts?")
        if spellings and spellings[0] is not None:
            settings["rope_scaling"] = spellings[0]

        # base of layers with a sliding window
        if self.local_base:
            key, class_default = self.local_base
            local = _number_of_either(reader, key, window_parameters, _THETA, class_default or base)
            if window_parameters.get(_THETA, local) != local:
                raise reader.error(_PARAMETERS_5, f"{key} says {local}; which of them counts?")
            settings["rotary_base_of_windows"] = local
        return settings

    def _base_and_share(self, reader: ConfigReader, parameters: Mapping[str, Any]) -> tuple[float, float]:
        """Return (base, share of a head that rotates). parameters: transformers 5's object."""
        base = _number_of_either(reader, self.theta_key, parameters, _THETA, self.theta)
        share = _number_of_either(reader, self.partial_key, parameters, _PARTIAL, self.partial or 1.0)
        if self.partial is None and share != 1:
            key = self.partial_key if reader.get(self.partial_key) else _PARAMETERS_5
            raise reader.error(key, f"a model of this kind rotates whole heads, not {share} of each")
        # Old files repeat the values under the usual keys, beside keys of the family's own.
        conflict = f"{self.theta_key} and {self.partial_key} say {base} and {share}; which of them counts?"
        for key, value in ((_THETA, base), (_PARTIAL, share)):
            if reader.get(key) not in (None, value):
                raise reader.error(key, conflict)
            if parameters.get(key, value) != value:
                raise reader.error(_PARAMETERS_5, conflict)
        return base, share

    def _scaling_in(self, reader: ConfigReader, parameters: Mapping[str, Any]) -> str | None:
        """Return the scaling that one of the two objects describes, as `_scaling` does."""
        old_kinds = dict(_OLD_KINDS)
        if self.only_longrope:
            old_kinds["yarn"] = "longrope"
        kind = _kind(reader, parameters, old_kinds)
        if self.only_longrope and kind not in ("default", "longrope"):
            key = _SCALING_4 if reader.get(_SCALING_4) else _PARAMETERS_5
            raise reader.error(key, "what is read is default or longrope")
        return _scaling(reader, parameters, kind, self.only_longrope)

    def write(self, model: Any) -> dict[str, Any]:
        scaling = next((rope.scaling for rope in model.ropes if rope.scaling), None)
        scaling_values = {} if scaling is None else _without_defaults(scaling)
        has_share = self.partial is not None and self.partial != model.rotary_percent
        share = {_PARTIAL: model.rotary_percent} if has_share else {}
        parameters = {"rope_type": "default", _THETA: model.rotary_base} | share | scaling_values
        values = {
            self.theta_key: model.rotary_base,
            _SCALING_4: self._scaling_for_4(model, scaling, scaling_values),
            _PARAMETERS_5: parameters,
        }
        if has_share:
            values[self.partial_key] = model.rotary_percent
        if scaling is not None and scaling.rope_type == "longrope":
            values[_ORIGINAL_LENGTH] = scaling_values[_ORIGINAL_LENGTH]
        if self.local_base:
            local_key, _ = self.local_base
            local = model.rotary_base_of_windows or model.rotary_base
            if local_key:
                values[local_key] = local
            values[_PARAMETERS_5] = {_FULL: parameters, _WINDOWS: {"rope_type": "default", _THETA: local}}
        return values

    def _scaling_for_4(
        self, model: Any, scaling: RopeScaling | None, scaling_values: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return rope_scaling for transformers 4, which computes the factor of longrope from the two lengths alone."""
        if scaling is None:
            return None
        values = {self.type_key if key == "rope_type" else key: value for key, value in scaling_values.items()}
        if scaling.rope_type != "longrope":
            return values
        length = model.max_position_embeddings
        if length is None or scaling != replace(
            scaling, factor=length / scaling_values[_ORIGINAL_LENGTH], attention_factor=None
        ):
            values["attention_factor"] = scaling.amplitude
        if self.only_longrope:  # such a class refuses further keys
            needed = {key: values[key] for key in (*_LONG_LISTS, "attention_factor") if key in values}
            return {"type": "longrope"} | needed
        return values


def rope(theta: float | None = 10000.0, **more: Any) -> Field:
    """The rotary positions of all layers; arguments as the fields of `RopeSpelling`."""
    spelling = RopeSpelling(theta, **more)
    return Field(spelling.keys(), spelling.read, spelling.write)


def _number_of_either(
    reader: ConfigReader, key: str, parameters: Mapping[str, Any], parameter: str, default: float | None
) -> float:
    """Return the number of `key`; where it is absent or null, that of transformers 5's object; else the class's own.

    key "": there is none. default None: one of the two must be there.
    """
    is_absent = not key or reader.get(key) is None
    if is_absent and parameter in parameters:
        return ConfigReader(parameters, f"{reader.source}: {_PARAMETERS_5}").number(parameter)
    if not key:
        return default
    return reader.number(key) if default is None else reader.number(key, default)


def _meaning(scaling: str | None) -> RopeScaling | None:
    return None if scaling is None else rope_scaling_of(scaling).as_computed


def _object(reader: ConfigReader, key: str) -> dict[str, Any]:
    value = reader.get(key, {})
    if not isinstance(value, dict):
        raise reader.error(key, "it must be an object or null")
    return value


def _nested_parameters(reader: ConfigReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return transformers 5's objects of (layers with full attention, layers with a sliding window)."""
    by_layer_type = _object(reader, _PARAMETERS_5)
    if by_layer_type.keys() - {_FULL, _WINDOWS}:
        raise reader.error(_PARAMETERS_5, f"it must have {_FULL} and {_WINDOWS}")
    full, window = (by_layer_type.get(name) or {} for name in (_FULL, _WINDOWS))
    are_objects = isinstance(full, dict) and isinstance(window, dict)
    if not are_objects or _kind(reader, window) != "default":
        raise reader.error(_PARAMETERS_5, "layers with a window must rotate without a scaling")
    more = sorted(key for key in window.keys() - {_THETA, "rope_type", "type"} if window[key] is not None)
    if more:
        raise reader.error(_PARAMETERS_5, f"{', '.join(more)} of layers with a window is not supported")
    return full, window


def _kind(reader: ConfigReader, parameters: Mapping[str, Any], old_kinds: Mapping[str, str] = _OLD_KINDS) -> Any:
    """Return the kind of scaling. Two keys name it; transformers 4 takes `type`, 5 `rope_type`, so they must agree."""
    kinds = [parameters[name] for name in ("rope_type", "type") if parameters.get(name) is not None]
    kinds = [old_kinds.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if not kinds:
        return "default"
    if kinds[0] != kinds[-1]:
        raise reader.error(
            _key_of(reader, parameters), f"rope_type {kinds[0]!r:.40} or type {kinds[1]!r:.40}: which of them counts?"
        )
    return kinds[0]


def _key_of(reader: ConfigReader, parameters: Mapping[str, Any]) -> str:
    """Return the key of one of the two objects, for errors."""
    return _SCALING_4 if parameters is reader.values.get(_SCALING_4) else _PARAMETERS_5


def _scaling(
    reader: ConfigReader, parameters: Mapping[str, Any], kind: Any, class_original_length: int | None
) -> str | None:
    """Return the scaling in the spelling of --rope-scaling, completed by other keys of config.json.

    None if there is none.
    """
    values = {key: value for key, value in parameters.items() if key not in _NOT_OF_THE_SCALING and value is not None}
    if kind == "default":
        if values:
            raise reader.error(_PARAMETERS_5, f"rope_type default has no {', '.join(sorted(values))}")
        return None
    if kind == "yarn" and "mrope_section" in values:
        raise reader.error(_PARAMETERS_5, "positions of images are not supported")

    # the original length and the factor, which may follow from other keys
    if kind == "dynamic":
        length = reader.count("max_position_embeddings")
        if values.setdefault(_ORIGINAL_LENGTH, length) != length:
            raise reader.error(_SCALING_4, f"{_ORIGINAL_LENGTH} must be max_position_embeddings, {length}")
    elif kind in ("yarn", "longrope"):
        length = reader.count("max_position_embeddings")
        default_length = reader.count(_ORIGINAL_LENGTH, class_original_length or length)
        original_length = values.setdefault(_ORIGINAL_LENGTH, default_length)
        is_valid = type(original_length) is int and original_length > 0
        values.setdefault("factor", length / original_length if is_valid else None)
    if kind in ("llama3", "yarn", "longrope"):
        original_length = values.get(_ORIGINAL_LENGTH)
        if reader.get(_ORIGINAL_LENGTH) not in (None, original_length):
            raise reader.error(_ORIGINAL_LENGTH, f"the scaling says {original_length!r:.40}; which of them counts?")

    try:
        return read_rope_scaling(json.dumps({"rope_type": kind} | values))
    except (argparse.ArgumentTypeError, TypeError) as error:
        raise reader.error(_key_of(reader, parameters), str(error)) from None


def _without_defaults(scaling: RopeScaling) -> dict[str, Any]:
    """Return the values of a scaling that differ from the defaults, as transformers wants them."""
    values: dict[str, Any] = {}
    for f in fields(RopeScaling):
        value = getattr(scaling, f.name)
        if value != f.default:
            values[f.name] = list(value) if isinstance(value, tuple) else value
    if scaling.rope_type == "dynamic":  # transformers takes it from max_position_embeddings
        del values[_ORIGINAL_LENGTH]
    if scaling.rope_type == "llama3":  # transformers needs all of its values
        required = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        values = required | values
    return values
