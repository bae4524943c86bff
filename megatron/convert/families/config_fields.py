"""The fields of another library's config.json and our settings: rows that are read in both directions. No torch.

A `Field` names the keys that it understands, reads them into settings of ours (names of `ModelConfig`), and writes them from
settings. A key that no field of a family names is refused: a setting that is guessed trains another model without a word.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

ModelSettings = dict[str, Any]
_NEEDED = object()
_MOST = 1 << 40  # of a number of heads or words: above it, sizes overflow
_MOST_LAYERS = 4096  # each is a row in several lists, whatever its tensors say
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_num_layers")


class Given:
    """A config.json that is being read: each value is checked, and the keys that were asked for are known."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source
        self.asked: set[str] = set()

    def wrong(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.source}: {name} is {self.values.get(name)!r:.80}; {wanted}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; the default for a key that is absent or null. For keys that transformers reads so."""
        self.asked.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: Any = _NEEDED) -> Any:
        """A whole number, from 1 to a limit."""
        value, most = self._needed(name, default), _MOST_LAYERS if name in _LAYERS else _MOST
        if value is not default and (type(value) is not int or not 1 <= value <= most):
            raise self.wrong(name, f"it must be a whole number from 1 to {most}")
        return value

    def number(self, name: str, default: Any = _NEEDED) -> Any:
        """A finite number."""
        value = self._needed(name, default)
        if value is not default and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self.wrong(name, "it must be a finite number")
        return float(value) if type(value) is int else value

    def choice(self, name: str, default: Any, allowed: Collection[Any]) -> Any:
        value = self._needed(name, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(name, f"what is read is {' or '.join(map(repr, allowed))}")
        return value

    def _needed(self, name: str, default: Any) -> Any:
        if name in self.values and self.values[name] is None and default and default is not _NEEDED:
            # transformers 5 refuses it, and 4 computes with null, which is no default: as false, or not at all.
            raise self.wrong(name, f"null says nothing; leave the key out for {default!r}, or give a value")
        if (value := self.get(name, default)) is _NEEDED:
            raise ConfigError(f"{self.source}: {name} is missing")
        return value


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype_in(given: Given) -> str | None:
    """The dtype of the weights, in the spelling of transformers 4.56 and later (dtype) or before (torch_dtype); None
    without.

    Raises ConfigError for one that is not trained in, and where the two differ.
    """
    new, old = (given.choice(name, None, (None, *_DTYPES)) for name in ("dtype", "torch_dtype"))
    if None not in (new, old) and new != old:
        raise given.wrong("torch_dtype", f"dtype says {new}; which of them counts?")
    return new or old


class Field(NamedTuple):
    """Some keys of a config.json that say something of a model of ours.

    read(given) -> settings, by names of `ModelConfig`; write(model, a `ModelConfig`) -> keys with their values.
    """

    keys: tuple[str, ...]
    read: Callable[[Given], ModelSettings]
    write: Callable[[Any], dict[str, Any]]


def count(theirs: str, ours: str, default: Any = _NEEDED, *, said_by: str = "") -> Field:
    """A number that both sides have. said_by: the property of a `ModelConfig` with the value in force."""
    read = lambda given: {ours: given.count(theirs, default)}  # noqa: E731
    return Field((theirs,), read, lambda model: {theirs: getattr(model, said_by or ours)})


def number(theirs: str, ours: str, default: float) -> Field:
    return Field(
        (theirs,), lambda given: {ours: given.number(theirs, default)}, lambda model: {theirs: getattr(model, ours)}
    )


def switch(theirs: str, ours: str, default: bool, *, opposite: bool = False) -> Field:
    """A boolean; `opposite` if ours says the reverse of theirs."""
    read = lambda given: {ours: given.choice(theirs, default, (False, True)) is not opposite}  # noqa: E731
    return Field((theirs,), read, lambda model: {theirs: getattr(model, ours) is not opposite})


def always(theirs: str, value: Any, *more: Any, default: Any = _NEEDED) -> Field:
    """A key with one meaning that is built; `more`: other values with the same meaning. default: the class's own, if
    absent."""
    default = value if default is _NEEDED else default

    def read(given: Given) -> ModelSettings:
        given.choice(theirs, default, (value, *more))
        return {}

    return Field((theirs,), read, lambda model: {theirs: value})


def share(theirs: str, ours: str, default: float = 0.0) -> Field:
    """A dropout of training, which is taken and not written: it says nothing of the weights."""
    return number(theirs, ours, default)._replace(write=lambda model: {})


def only(theirs: str, value: Any) -> Field:
    """A key that is left out of files, and has one meaning that is built."""
    return always(theirs, value)._replace(write=lambda model: {})


def unused(*theirs: str) -> Field:
    """Keys that change nothing of what the weights mean: dropout of their training, generation, the library's version."""
    return Field(theirs, lambda given: {}, lambda model: {})


def heads(
    queries: str, groups: str, width: str | None, default_width: int | None = None, default_groups: int | None = None
) -> Field:
    """Query heads, key/value heads, and the width of a head, which is hidden size / heads if it is not said.

    default_width, default_groups: the class's own, where a config.json does not name the key. null means: as many as heads.
    """

    def read(given: Given) -> ModelSettings:
        n = given.count(queries)
        g = given.count(groups, None) or (default_groups if groups not in given.values else None) or n
        if n % g:
            raise given.wrong(groups, f"it must divide the {n} heads of {queries}")
        grouped = {"group_query_attention": g != n, "num_query_groups": g if g != n else 1}
        d = given.count(width, default_width) if width else None
        return {"num_attention_heads": n, **grouped, "kv_channels": d}

    def write(model: Any) -> dict[str, Any]:
        said = {queries: model.num_attention_heads, groups: model.query_groups}
        return said | ({width: model.head_width} if width else {})

    return Field((queries, groups, *([width] if width else [])), read, write)
