"""Tables of facts are written as text: a value, and the names that have it."""

import ast
from typing import Any


def names_by_value(table: str) -> dict[str, Any]:
    """Return name -> value.

    Each line is `value: name name ...`, with the value as Python writes it; a line without a value lists further names
    of the value before.
    """
    values: dict[str, Any] = {}
    value = None
    for line in table.strip().splitlines():
        *starts, names = line.rsplit(": ", 1)
        if starts:
            value = ast.literal_eval(starts[0].strip())
        for name in names.split():
            values[name] = value
    return values
