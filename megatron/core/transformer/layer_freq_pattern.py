"""Settings that differ from layer to layer, as Megatron-LM reads them. Pure.

They are N, or a list with a 1 or a 0 for each layer.
"""

import argparse
import ast
from functools import cache

LONGEST = 10_000  # the most layers in a list


def is_exception(pattern: str | None, layer: int, *, marked: int) -> bool:
    """Return whether a pattern makes this layer an exception. layer: from 0, over the whole model.

    pattern: as `read_pattern` returns it. With N, layers N - 1, 2 N - 1, ... are exceptions; with a list, those whose
    entry is `marked`; with None, no layer.
    """
    if pattern is None:
        return False
    parsed = _parsed(str(pattern))  # a script may give a list
    if isinstance(parsed, int):
        return layer % parsed == parsed - 1
    return parsed[layer] == marked


def read_pattern(text: str) -> str:
    """Return a pattern in one spelling: "4", or "[1,1,0,1,1,0]" also for "[1,1,0]*2" and "([1]*2+[0])*2"."""
    try:
        value = layer_pattern(text)
    except (SyntaxError, ValueError, RecursionError):
        value = 0  # refused below
    is_number = isinstance(value, int) and value >= 1
    is_list = isinstance(value, list) and bool(value) and {*value} <= {0, 1}
    if not (is_number or is_list):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be N, a whole number of at least 1 (every Nth layer differs from the others), or a list "
            "with one entry, 1 or 0, for each layer, such as [1,1,0]*4"
        )
    return str(value).replace(" ", "")


def layer_pattern(skip_freq: str | int | list[int]) -> int | list[int]:
    """Return N or a list from any of its spellings, or from itself. Raises ValueError or SyntaxError for others."""
    text = str(skip_freq).strip()
    if "[" in text:
        return _list(ast.parse(text, mode="eval").body)
    return int(text)


def _list(node: ast.expr) -> list[int]:
    """Evaluate lists, their sums, and products of a list and a number."""
    match node:
        case ast.List(elts=parts):
            return [_number(part) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, factor = (right, left) if isinstance(left, ast.Constant) else (left, right)
            entries = _list(repeated)
            if entries and len(entries) * _number(factor) <= LONGEST:
                return entries * _number(factor)
    raise ValueError(ast.dump(node))


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(ast.dump(node))


_parsed = cache(layer_pattern)  # each layer calls it
