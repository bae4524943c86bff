"""Sliding windows in a config.json: their width, and which layers have one. No torch.

transformers 5 lists every layer (`layer_types`), transformers 4 has a rule of each family; both are written. Their width
counts
the query's own key, ours the keys before it.
"""

from collections.abc import Callable
from typing import Any

from megatron.convert.families.config_fields import Field, Given, ModelSettings

_FULL, _WINDOW = "full_attention", "sliding_attention"
Rule = Callable[[Given, int], bool]  # (config, layer from 0) -> whether it has a window


def all_layers(given: Given, layer: int) -> bool:
    return True


def all_but_each(key: str, default: int) -> Rule:
    """Each Nth layer, N being the value of `key`, has none."""
    return lambda given, layer: (layer + 1) % given.count(key, default) != 0


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
    """absent: the class's own width; None: no window. rule: the layers, where `layer_types` is absent; keys: that it reads.

    switch: the key without which there is no window. lists: whether the class has `layer_types`. rotates_with: layers
    without a
    window do not rotate. written: the rule's keys for a list of layers.
    """

    def read(given: Given) -> ModelSettings:
        layers, width = given.count("num_hidden_layers"), given.count("sliding_window", None)
        if width is None and "sliding_window" not in given.values:
            width = absent
        if switch and not given.choice(switch, False, (False, True)):
            types = given.get("layer_types")
            if width is not None and isinstance(types, list) and _WINDOW in types:
                raise given.wrong(switch, "layer_types has layers with a window; which of them counts?")
            width = None
        if not lists or (types := given.get("layer_types")) is None:
            has = [width is not None and rule(given, layer) for layer in range(layers)]
        else:
            if not isinstance(types, list) or len(types) != layers or not all(one in (_FULL, _WINDOW) for one in types):
                raise given.wrong("layer_types", f"it must have {_FULL} or {_WINDOW} for each of {layers} layers")
            has = [one == _WINDOW for one in types]
        if width is None or not any(has):
            return {"no_rope_freq": str([1] * layers).replace(" ", "")} if rotates_with else {}
        pattern = {} if all(has) else {"window_attn_skip_freq": str([int(one) for one in has]).replace(" ", "")}
        if rotates_with and not all(has):
            pattern["no_rope_freq"] = str([int(not one) for one in has]).replace(" ", "")
        return {"window_size": f"{width - 1},0"} | pattern

    def write(model: Any) -> dict[str, Any]:
        before = [model.window_left(layer) for layer in range(model.num_layers)]
        has, width = [keys is not None for keys in before], next((keys for keys in before if keys is not None), None)
        # A class with layer_types alone wants a width, although no layer may use it.
        said = {"sliding_window": (absent if lists and not switch else None) if width is None else width + 1}
        if switch:
            said[switch] = any(has)
        if lists:
            said["layer_types"] = [_WINDOW if one else _FULL for one in has]
        return said | written(has)

    return Field(
        ("sliding_window", *keys, *([switch] if switch else []), *(["layer_types"] if lists else [])), read, write
    )
