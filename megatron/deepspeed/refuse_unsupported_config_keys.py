"""Each key of another program's settings file works, has no effect (with the reason), or is refused (with a remedy).

A refused key may have a value that asks for what happens anyway: false, null, {}, {"enabled": false}, or the value in
the table. The keys of a section that is named itself are not looked at. A section with a key `enabled` that works is off
unless that is true: its other values are then neither read nor checked.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

_MOST = 1 << 63  # of a number: above it, sizes overflow
Reasons = Mapping[str, tuple[str, ...]]  # reason -> the keys that it applies to, with their sections: "a.b.key"


class WorkingKey(NamedTuple):
    """A key that works, the kind of its value, and its limits: from `lowest` to `highest`, or one of `texts`.

    may_be_infinite: infinity is a value too, with the meaning that `text` gives it.
    """

    kind: type
    text: str
    lowest: float = 0
    highest: float = math.inf
    texts: tuple[str, ...] = ()
    may_be_infinite: bool = False


class Answer(NamedTuple):
    """The answer to a key. status: works, no effect or refused. harmless: values of a refused key that are accepted."""

    status: str
    text: str
    harmless: tuple[Any, ...] = ()


class ConfigKeyPolicy:
    """The answers to all keys of one kind of settings file.

    harmless: refused key -> the value with which it is accepted. In messages, name is that of the file, page its
    documentation.
    """

    def __init__(
        self,
        working: Mapping[str, WorkingKey],
        no_effect: Reasons,
        refused: Reasons,
        harmless: Mapping[str, Any],
        *,
        name: str,
        page: str,
    ):
        self.working = working
        self._harmless = harmless
        self._others = {"no effect": no_effect, "refused": refused}
        self.name = name
        self.page = page

    @cached_property
    def answers(self) -> dict[str, Answer]:
        """The answer to every key; a key has its sections before it: "optimizer.params.lr"."""
        answers = {key: Answer("works", working.text) for key, working in self.working.items()}
        for status, reasons in self._others.items():
            for reason, keys in reasons.items():
                for key in keys:
                    assert key not in answers, f"{key} is there twice"
                    harmless = (self._harmless[key],) if key in self._harmless else ()
                    answers[key] = Answer(status, reason, harmless)
        return answers

    @cached_property
    def sections(self) -> set[str]:
        """The sections with answers to keys of their own: of "a.b.c", "a" and "a.b"."""
        sections = set()
        for key in self.answers:
            names = key.split(".")
            for depth in range(1, len(names)):
                sections.add(".".join(names[:depth]))
        return sections

    def check(self, settings: Mapping[str, Any]) -> list[str]:
        """Raise ConfigError with every refused, unknown or wrong key.

        Return the keys that have no effect, with reasons.
        """
        problems: list[str] = []
        notes: list[str] = []
        for key, value, is_read in self._leaves(settings, ""):
            answer = self.answers.get(key)
            if answer is None:
                problems.append(self._unknown(key))
            elif not is_read:
                continue
            elif answer.status == "no effect":
                notes.append(f"{key}: {answer.text}")
            elif answer.status == "works":
                problems += self._problems_of_value(key, value)
            elif not _asks_for_nothing(value, answer.harmless):
                problems.append(f"{key} = {json.dumps(value, default=str)} is not supported: {answer.text}")
        if problems:
            raise ConfigError([f"{self.name}: {problem}" for problem in problems])
        return notes

    def _leaves(self, settings: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any, bool]]:
        """Yield the keys and values of all sections that are looked into, and whether the value is read."""
        switch = f"{section}.enabled"
        is_off = switch in self.working and settings.get("enabled") in (None, False)
        for name, value in settings.items():
            key = f"{section}.{name}" if section else str(name)
            if key not in self.sections:
                yield key, value, key == switch or not is_off
            elif isinstance(value, Mapping):
                yield from self._leaves(value, key)
            elif value not in (None, False):
                raise ConfigError(f"{self.name}: {key} is {value!r}; it must be a section in braces")

    def _unknown(self, key: str) -> str:
        suggestions = difflib.get_close_matches(key, [*self.answers, *self.sections], 1, 0.75)
        if not suggestions:  # the same name in another section
            name = key.rpartition(".")[2]
            suggestions = [other for other in self.answers if other.rpartition(".")[2] == name]
        if suggestions:
            return f"unknown key {key}; did you mean {' or '.join(suggestions[:2])}?"
        return f"unknown key {key}; {self.page} lists the known ones"

    def _problems_of_value(self, key: str, value: Any) -> Iterator[str]:
        """Yield the problem of a value that is not of its key's kind or beyond its limits."""
        if value == "auto":
            yield f'{key} is "auto", which only transformers\' Trainer replaces; give a value'
            return
        if value is None:
            return
        known = self.working[key]
        if known.kind in (int, float):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_infinite = known.may_be_infinite and value == math.inf
            is_valid = is_number and abs(value) < _MOST and known.lowest <= value <= known.highest
            is_valid = is_infinite or (is_valid and (known.kind is float or value == int(value)))
            kind = "a whole number" if known.kind is int else "a number"
            limit = "up" if known.highest == math.inf else f"to {known.highest}"
            expected = f"{kind} from {known.lowest} {limit}"
        elif known.texts:
            is_valid = value in known.texts
            expected = f"one of {', '.join(known.texts)}"
        else:
            is_valid = isinstance(value, known.kind)
            expected = {bool: "true or false", str: "a text", dict: "a section in braces"}.get(known.kind, "a number")
        if not is_valid:
            yield f"{key} is {value!r}; it must be {expected}"


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether a refused key's value asks for what happens anyway."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value in harmless or (value is False and True not in harmless)
