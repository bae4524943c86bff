"""Every key of a settings file of another program, answered: works, has no effect (and why), or is refused (and what to do).

A refused key may stand with a value that asks for what happens anyway: false, null, {}, {"enabled": false}, or the value
in the
table. A section that is answered by its own name is not looked into.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

# A reason -> the keys that it is given for: section ("" at the top, "a.b" inside others) -> names, separated by blanks.
Reasons = Mapping[str, Mapping[str, str]]


class WorkingKey(NamedTuple):
    """A key that works: the kind of its value, which is from `lowest` to `highest`, or one of `texts`."""

    kind: type
    text: str
    lowest: float = 0
    highest: float = math.inf
    texts: tuple[str, ...] = ()


class Answer(NamedTuple):
    """What becomes of a key. status: works, no effect or refused."""

    status: str
    text: str
    harmless: tuple[Any, ...] = ()


class AnsweredKeys:
    """The answers of one table. name: of the settings, and page: of its documents, in messages."""

    def __init__(self, working: Mapping[str, WorkingKey], no_effect: Reasons, refused: Reasons, name: str, page: str):
        self.working = working
        self._others = {"no effect": no_effect, "refused": refused}
        self.name = name
        self.page = page

    @cached_property
    def answers(self) -> dict[str, Answer]:
        """Every key, with its sections before it, and what becomes of it."""
        found = {key: Answer("works", working.text) for key, working in self.working.items()}
        for status, reasons in self._others.items():
            for reason, sections in reasons.items():
                for section, words in sections.items():
                    for word in words.split():
                        key, *value = (f"{section}.{word}" if section else word).split("=")
                        assert key not in found, f"{key} is there twice"
                        found[key] = Answer(status, reason, tuple(map(json.loads, value)))
        return found

    @cached_property
    def sections(self) -> set[str]:
        """The sections that are looked into."""
        return {key[:at] for key in self.answers for at, letter in enumerate(key) if letter == "."}

    def check(self, given: Mapping[str, Any]) -> list[str]:
        """Raises ConfigError with every refused, unknown or wrong key. Returns the keys that have no effect, and why."""
        problems: list[str] = []
        notes: list[str] = []
        for key, value in self._leaves(given, ""):
            answer = self.answers.get(key)
            if answer is None:
                problems.append(self._unknown(key))
            elif answer.status == "no effect":
                notes.append(f"{key}: {answer.text}")
            elif answer.status == "works":
                problems += self._problems_of_value(key, value)
            elif not _asks_for_nothing(value, answer.harmless):
                problems.append(f"{key} = {json.dumps(value, default=str)} is not supported: {answer.text}")
        if problems:
            raise ConfigError([f"{self.name}: {problem}" for problem in problems])
        return notes

    def _leaves(self, given: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
        for name, value in given.items():
            key = f"{section}.{name}" if section else str(name)
            if key not in self.sections:
                yield key, value
            elif isinstance(value, Mapping):
                yield from self._leaves(value, key)
            elif value not in (None, False):
                raise ConfigError(f"{self.name}: {key} is {value!r}; it must be a section in braces")

    def _unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key, [*self.answers, *self.sections], 1, 0.75)
        last = key.rpartition(".")[2]
        elsewhere = [other for other in self.answers if other.rpartition(".")[2] == last]
        meant = " or ".join((near or elsewhere)[:2])
        return f"unknown key {key}" + (f"; did you mean {meant}?" if meant else f"; {self.page} lists the known ones")

    def _problems_of_value(self, key: str, value: Any) -> Iterator[str]:
        known = self.working[key]
        fits, names = isinstance(value, known.kind), {bool: "true or false", str: "a text", dict: "a section in braces"}
        must = names.get(known.kind, "a whole number" if known.kind is int else "a number")
        if known.kind in (int, float):
            fits = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and known.lowest <= value <= known.highest
            )
            fits = fits and (known.kind is float or value == int(value))
            must += f" from {known.lowest} " + ("up" if known.highest == math.inf else f"to {known.highest}")
        elif known.texts:
            fits, must = value in known.texts, f"one of {', '.join(known.texts)}"
        if value == "auto":
            yield f'{key} is "auto", which transformers\' Trainer fills in; give a value'
        elif not fits and value is not None:
            yield f"{key} is {value!r}; it must be {must}"


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value in harmless or (value is False and True not in harmless)
