"""What a message must name: flags, values, files. How it says so is prose, which tests leave alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def tells(message: object, facts: str) -> bool:
    """Whether each of the words `facts`, divided by blanks, stands in the message (an error, a text, lines) as a word of its own."""
    text = "\n".join(message) if isinstance(message, list | tuple) else str(message)
    return all(re.search(rf"(?<![\w-]){re.escape(fact)}(?![\w-])", text) for fact in facts.split())


def tells_each(problems: list[str], facts: str) -> bool:
    """Whether there are as many problems as parts of `facts`, divided by |, and each in turn names its part."""
    parts = facts.split("|") if facts else []
    return len(problems) == len(parts) and all(tells(*pair) for pair in zip(problems, parts))


@contextmanager
def raises_telling(kind: type[BaseException], facts: str) -> Iterator[None]:
    """The block raises an error of this kind that tells all of `facts`."""
    with pytest.raises(kind) as error:
        yield
    assert tells(error.value, facts), error.value
