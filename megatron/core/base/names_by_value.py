"""Tables of facts as text: a value, and the names that have it."""

import ast
from typing import Any


def names_by_value(table: str) -> dict[str, Any]:
    """name -> value. Each line is `value: name name ...`, with the value as Python writes it; a line without a value goes on
    with the names of the one before."""
    values, value = {}, None
    for line in table.strip().splitlines():
        *starts, names = line.rsplit(": ", 1)
        value = ast.literal_eval(starts[0].strip()) if starts else value
        values |= dict.fromkeys(names.split(), value)
    return values
