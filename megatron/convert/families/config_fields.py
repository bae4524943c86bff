"""Translate keys of another library's config.json to our settings and back, by rows that work in both directions.

No torch. A `Field` names the keys that it understands, reads them into settings of ours (names of `ModelConfig`),
and writes them from settings. A key that no field of a family names is refused: a guessed setting would silently
train another model.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

ModelSettings = dict[str, Any]
_NEEDED = object()  # as a default: the key must be there
_MOST = 1 << 40  # of a number of heads or tokens: above it, sizes overflow
_MOST_LAYERS = 4096  # each is a row in several lists, whatever its tensors say
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_num_layers")


class ConfigReader:
    """A config.json while it is read: checks each value, and records which keys were read."""

    def __init__(self, values: Mapping[str, Any], source: str):
        """source: the file, for errors."""
        self.values = values
        self.source = source
        self.keys_read: set[str] = set()
        # The class's own values of keys, as the fields before have named them: a key has one, whichever field reads it.
        self.class_defaults: dict[str, Any] = {}

    def error(self, key: str, expected: str) -> ConfigError:
        """Return the error for a key's value. expected: what it must be, as the end of a sentence."""
        return ConfigError(f"{self.source}: {key} is {self.values.get(key)!r:.80}; {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value unchecked, for keys that transformers reads so.

        It is the default for a key that is absent or null.
        """
        self.keys_read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: Any = _NEEDED) -> Any:
        """Return an integer from 1 to a limit.

        Without a default it is the class's own value that a field before has named, or the key must be there.
        """
        value = self._checked_null(key, default)
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        if value is not default and (type(value) is not int or not 1 <= value <= most):
            raise self.error(key, f"it must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a finite number, as a float."""
        value = self._checked_null(key, default)
        if value is not default and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self.error(key, "it must be a finite number")
        return float(value) if type(value) is int else value

    def choice(self, key: str, default: Any, allowed: Collection[Any]) -> Any:
        """Return a value that must be one of `allowed`, of the same type: True is not 1."""
        value = self._checked_null(key, default)
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise self.error(key, f"what is read is {' or '.join(map(repr, allowed))}")
        return value

    def _checked_null(self, key: str, default: Any) -> Any:
        """Return the value or the default.

        Raises ConfigError for a needed key that is absent, and for an ambiguous null.
        """
        if default is _NEEDED:
            default = self.class_defaults.get(key, _NEEDED)
        elif default is not None:
            self.class_defaults.setdefault(key, default)
        if key in self.values and self.values[key] is None and default and default is not _NEEDED:
            # transformers 5 refuses it, and 4 computes with null, which is no default: as false, or not at all.
            raise self.error(key, f"null says nothing; leave the key out for {default!r}, or give a value")
        value = self.get(key, default)
        if value is _NEEDED:
            raise ConfigError(f"{self.source}: {key} is missing")
        return value


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype_in(reader: ConfigReader) -> str | None:
    """Return the dtype of the weights: `dtype` (transformers 4.56 and later) or `torch_dtype` (before).

    None without either. Raises ConfigError for a dtype that cannot be trained in, and where the two differ.
    """
    new, old = (reader.choice(key, None, (None, *_DTYPES)) for key in ("dtype", "torch_dtype"))
    if None not in (new, old) and new != old:
        raise reader.error("torch_dtype", f"dtype says {new}; which of them counts?")
    return new or old


class Field(NamedTuple):
    """Some keys of a config.json that describe one property of a model.

    read(reader) -> settings, by names of `ModelConfig`; write(model, a `ModelConfig`) -> keys with their values.
    """

    keys: tuple[str, ...]
    read: Callable[[ConfigReader], ModelSettings]
    write: Callable[[Any], dict[str, Any]]


def count(key: str, setting: str, default: Any = _NEEDED, *, value_from: str = "") -> Field:
    """A positive integer on both sides.

    value_from: the property of a `ModelConfig` with the effective value, for writing.
    """

    def read(reader: ConfigReader) -> ModelSettings:
        return {setting: reader.count(key, default)}

    return Field((key,), read, lambda model: {key: getattr(model, value_from or setting)})


def number(key: str, setting: str, default: float | None) -> Field:
    """A number on both sides; None is written and read as null."""

    def read(reader: ConfigReader) -> ModelSettings:
        return {setting: reader.number(key, default)}

    return Field((key,), read, lambda model: {key: getattr(model, setting)})


def boolean(key: str, setting: str, default: bool, *, opposite: bool = False) -> Field:
    """A boolean on both sides; opposite: our setting is the negation of the key."""

    def read(reader: ConfigReader) -> ModelSettings:
        return {setting: reader.choice(key, default, (False, True)) is not opposite}

    return Field((key,), read, lambda model: {key: getattr(model, setting) is not opposite})


def fixed(key: str, value: Any, *synonyms: Any, default: Any = _NEEDED) -> Field:
    """A key of which one value is supported, and always written.

    synonyms: other values with the same meaning. default: the class's own where the key is absent; without it, `value`.
    """
    default = value if default is _NEEDED else default

    def read(reader: ConfigReader) -> ModelSettings:
        reader.choice(key, default, (value, *synonyms))
        return {}

    return Field((key,), read, lambda model: {key: value})


def fixed_not_written(key: str, value: Any) -> Field:
    """A key of which one value is supported, and which is not written."""
    return fixed(key, value)._replace(write=lambda model: {})


def repeated(synonym: str, key: str, default: Any = None) -> Field:
    """A second name of a key in a class's `attribute_map`: transformers takes its value, so it must be the key's.

    default: the class's own, where `key` is absent.
    """

    def read(reader: ConfigReader) -> ModelSettings:
        value = reader.get(key, default)
        if reader.get(synonym, value) != value:
            raise reader.error(synonym, f"it is another name of {key}, which is {value!r:.80}; which of them counts?")
        return {}

    return Field((synonym,), read, lambda model: {})


def dropout_rate(key: str, setting: str, default: float = 0.0) -> Field:
    """A dropout rate of training. The weights do not depend on it, and whoever trains them further does."""
    return number(key, setting, default)


def ignored_keys(*keys: str) -> Field:
    """Keys that do not change what the weights compute.

    They are the dropout of the weights' training, generation, and the library's version.
    """
    return Field(keys, lambda reader: {}, lambda model: {})


def heads(
    queries: str, groups: str, width: str | None, default_width: int | None = None, default_groups: int | None = None
) -> Field:
    """The keys of query heads, key/value heads, and the width of a head, which is hidden size / heads if it is absent.

    default_width, default_groups: the class's own, where a config.json does not name the key. null means: as
    many as query heads.
    """

    def read(reader: ConfigReader) -> ModelSettings:
        n = reader.count(queries)
        class_default = default_groups if groups not in reader.values else None
        g = reader.count(groups, None) or class_default or n
        if n % g:
            raise reader.error(groups, f"it must divide the {n} heads of {queries}")
        is_grouped = g != n
        return {
            "num_attention_heads": n,
            "group_query_attention": is_grouped,
            "num_query_groups": g if is_grouped else 1,
            "kv_channels": reader.count(width, default_width) if width else None,
        }

    def write(model: Any) -> dict[str, Any]:
        values = {queries: model.num_attention_heads, groups: model.query_groups}
        if width:
            values[width] = model.head_width
        return values

    keys = (queries, groups, width) if width else (queries, groups)
    return Field(keys, read, write)
