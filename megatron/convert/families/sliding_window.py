"""Read and write the sliding windows of a config.json: their width, and which layers have one. No torch.

transformers 5 lists every layer (`layer_types`), transformers 4 has a rule for each family; both are written. The width
in a config.json counts the query's own key, ours only the keys before it.
"""

from collections.abc import Callable
from typing import Any

from megatron.convert.families.config_fields import ConfigReader, Field, ModelSettings

_FULL = "full_attention"
_WINDOW = "sliding_attention"
Rule = Callable[[ConfigReader, int], bool]  # (config, layer from 0) -> whether the layer has a window


def all_layers(reader: ConfigReader, layer: int) -> bool:
    return True


def all_but_each(key: str, default: int) -> Rule:
    """Return the rule that every Nth layer has no window, N being the value of `key`."""
    return lambda reader, layer: (layer + 1) % reader.count(key, default) != 0


def _as_list_setting(flags: list[bool]) -> str:
    """Return a list of 0 and 1 in the spelling of our settings, such as [1,0,1]."""
    return str([int(flag) for flag in flags]).replace(" ", "")


def windows(
    absent: int | None,
    rule: Rule = all_layers,
    *,
    keys: tuple[str, ...] = (),
    switch: str = "",
    lists: bool = True,
    rotates_with: bool = False,
    written: Callable[[list[bool]], dict[str, Any]] = lambda layers: {},
) -> Field:
    """The sliding window of a class.

    absent        the class's own width, for a config.json without sliding_window; None: no window
    rule          which layers have a window, where `layer_types` is absent
    keys          the keys that the rule reads
    switch        a boolean key; while it is false there is no window
    lists         whether the class reads `layer_types`; without, it may say what the class computes
    rotates_with  layers without a window have no rotary positions
    written       returns the rule's keys for a list with one boolean for each layer
    """

    def read(reader: ConfigReader) -> ModelSettings:
        # the width
        layers = reader.count("num_hidden_layers")
        width = reader.count("sliding_window", None)
        if width is None and "sliding_window" not in reader.values:
            width = absent
        if switch and not reader.choice(switch, False, (False, True)):
            types = reader.get("layer_types")
            if width is not None and isinstance(types, list) and _WINDOW in types:
                raise reader.error(switch, "layer_types has layers with a window; which of them counts?")
            width = None

        # the layers that have it
        types = reader.get("layer_types")
        if types is None or not lists:
            has_window = [width is not None and rule(reader, layer) for layer in range(layers)]
            kinds = [_WINDOW if has else _FULL for has in has_window]
            if types is not None and types != kinds:
                raise reader.error(
                    "layer_types", "the class does not read it, and its layers are others; leave the key out"
                )
        else:
            is_list = isinstance(types, list) and len(types) == layers
            if not is_list or not all(kind in (_FULL, _WINDOW) for kind in types):
                raise reader.error("layer_types", f"it must have {_FULL} or {_WINDOW} for each of {layers} layers")
            has_window = [kind == _WINDOW for kind in types]

        # as settings of ours
        settings: ModelSettings = {}
        if width is None or not any(has_window):
            if rotates_with:
                settings["no_rope_freq"] = _as_list_setting([True] * layers)
            return settings
        settings["window_size"] = f"{width - 1},0"
        if not all(has_window):
            settings["window_attn_skip_freq"] = _as_list_setting(has_window)
            if rotates_with:
                settings["no_rope_freq"] = _as_list_setting([not has for has in has_window])
        return settings

    def write(model: Any) -> dict[str, Any]:
        window_left = [model.window_left(layer) for layer in range(model.num_layers)]
        has_window = [count is not None for count in window_left]
        width: int | None = None
        if any(has_window):
            width = next(count for count in window_left if count is not None) + 1
        elif lists and not switch:
            width = absent  # a class with layer_types alone needs a width, although no layer may use it
        values: dict[str, Any] = {"sliding_window": width}
        if switch:
            values[switch] = any(has_window)
        if lists:
            values["layer_types"] = [_WINDOW if has else _FULL for has in has_window]
        return values | written(has_window)

    all_keys = ["sliding_window", *keys]
    all_keys.append("layer_types")
    if switch:
        all_keys.append(switch)
    return Field(tuple(all_keys), read, write)
